# SPDX-License-Identifier: Apache-2.0
"""The GPU half of tools/bench_attention.py: forward and backward of every implementation of a case, in turns.

A power-limited chip is slower hot than cold, and faster right after work that needs little power. So, after half a
second of heating with the first implementation, each one's forward and then its backward run alone for a while,
untimed until the chip is as hot as that work makes it, then timed by CUDA events between calls that are
enqueued ahead of the device; all implementations take two turns, the second in the opposite order. A total is forward
plus backward. Clock and power are sampled meanwhile. Before that every output is compared with fp32: all rows and keys
of the first and the last key/value head and their query heads (with grouped queries of the first one only).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paddle_fm3._native import sm90_library
from paddle_fm3.testing import gpu_peers
from paddle_fm3.testing.bench import BenchOptions, Record, RunIdentity, TimingStats, attention_record, record
from paddle_fm3.testing.cases import ANCHOR_KINDS, LENGTHS, OTHER_KINDS, AttentionCase, benchmark_case, benchmark_names
from paddle_fm3.testing.gpu_call import GpuMask, Sm90
from paddle_fm3.testing.gpu_peers import Attention, Problem
from paddle_fm3.testing.gpu_power import PowerLog
from paddle_fm3.testing.gpu_reference import reference_head, relative_error

IMPLS = gpu_peers.IMPLS
CASES = (
    *benchmark_names(kinds=ANCHOR_KINDS),
    *benchmark_names(kinds=OTHER_KINDS),
    *(f"{length}_{kind}_gqa4" for length in LENGTHS for kind in ("causal", "causal_document")),
    *(f"{length}_{kind}_gqa8" for length in LENGTHS for kind in ("causal", "causal_document")),
    *(f"8k_{kind}_{variant}" for variant in ("d64", "d256", "d192v128") for kind in ("full", "causal", "document")),
)
COLUMNS = {
    "attention": ("case", "impl", "phase", "dtype", "ms_median", "ms_p10", "ms_p90", "repeats", "tflops_exact",
                  "tflops_block", "refcheck"),
    "schedule": ("case", "us_scan_median", "us_lists_median", "us_median", "us_p10", "us_p90", "us_cold_median",
                 "schedule_bytes", "refcheck"),
}  # fmt: skip
HEATING_S = 0.5
TURNS, WARM_S, TIMED_S = 2, 0.06, 0.08  # of each implementation and phase
LONG_S, LONG_TIMED_S = 0.1, 0.7  # forward and backward together: longer calls warm the chip themselves
MIN_CALLS, MAX_CALLS = 3, 40  # timed in a turn; long calls may be fewer
MAX_RELATIVE_ERROR = 5e-3  # in the Frobenius norm, against fp32; rounding P, dS and the result to bf16 gives 2.4e-3
_WAIT_CYCLES = 2_000_000  # about a millisecond: longer than the host takes to enqueue a call
_FLUSH_BYTES = 256 << 20  # several times the L2

Call = Callable[[], Any]


def run(bench: str, options: BenchOptions) -> Iterator[Record]:
    """Records of bench "attention" (phases "fwd", "bwd", "total") or "schedule".

    A case may name its implementations: "8k_full:fm3,fa4". One that has no such mask, or is not installed, has no line.

    Raises:
        ValueError: another bench was asked for.
    """
    if bench not in COLUMNS:
        raise ValueError(f"bench_gpu: bench {bench!r} is not measured on a GPU; legal: {', '.join(COLUMNS)}")
    identity = RunIdentity.of_this_process(torch.cuda.get_device_name(), options.commit)
    if bench == "schedule":
        for name in options.cases or benchmark_names():
            yield schedule_record(identity, benchmark_case(name), sm90_library())
        return
    matmul_tflops = measure_matmul()
    with PowerLog(str(torch.cuda.get_device_properties(0).uuid)) as power:
        for text in options.cases or CASES:
            name, _, own_impls = text.partition(":")
            impls = tuple(own_impls.split(",")) if own_impls else options.impls or IMPLS
            for dtype in options.dtypes or ("bfloat16",):
                yield from run_case(
                    identity, name, dtype, impls, matmul_tflops=matmul_tflops, repeats=options.repeats, power=power
                )


def run_case(
    identity: RunIdentity,
    name: str,
    dtype: str,
    impls: tuple[str, ...],
    *,
    matmul_tflops: float,
    repeats: int | None = None,
    library: Any = None,
    power: PowerLog | None = None,
) -> Iterator[Record]:
    """Checks and times every implementation that serves the case.

    Args:
        library: default `sm90_library()`.
        power: an open log; forward and backward lines then have `sm_mhz` and `watts`.
    """
    torch.cuda.empty_cache()  # the case before may have had tensors of other sizes
    problem = Problem.of(benchmark_case(name), dtype)
    attentions, errors = make_and_check(problem, impls, library or sm90_library())
    times, draws = time_in_turns(attentions, repeats, power)
    for impl, by_phase in times.items():
        is_deterministic = impl == "fm3_deterministic"
        for phase, stats in by_phase.items():
            if is_deterministic and phase == "fwd":
                continue  # the forward is the same in both modes
            measured = {key: value for key, value in errors[impl].items() if phase == "total" or _PHASE[key] == phase}
            extra: Record = {"errors": measured, **draws.get((impl, phase), {})}
            if impl.startswith("fm3"):
                extra["workspace_bytes"] = attentions[impl].workspace_bytes[phase]  # type: ignore[attr-defined]
            yield attention_record(
                identity, impl.removesuffix("_deterministic"), problem.case, phase, dtype, stats,
                refcheck=all(error <= MAX_RELATIVE_ERROR for error in measured.values()),
                deterministic=is_deterministic or phase == "fwd", matmul_tflops=matmul_tflops, **extra,
            )  # fmt: skip


_PHASE = {"out": "fwd", "dq": "bwd", "dk": "bwd", "dv": "bwd"}


def make_and_check(
    problem: Problem, impls: tuple[str, ...], library: Any
) -> tuple[dict[str, Attention], dict[str, dict[str, float]]]:
    """The implementations that serve the case, and impl -> output -> largest relative error over the compared heads.

    A peer that fails is named and left out.
    """
    case = problem.case
    group = case.h_q // case.h_kv
    heads = [(0, 0)] if group > 1 else sorted({(0, 0), (case.b - 1, case.h_kv - 1)})
    wanted = {
        head: reference_head(problem.q, problem.k, problem.v, problem.dout, problem.mask, *head) for head in heads
    }

    def errors_of(attention: Attention) -> dict[str, float]:
        out = attention.forward()
        dq, dk, dv = attention.backward()
        worst: dict[str, float] = dict.fromkeys(_PHASE, 0.0)
        for (b_idx, h_kv_idx), reference in wanted.items():
            rows = (b_idx, slice(None), slice(h_kv_idx * group, (h_kv_idx + 1) * group))
            keys = (b_idx, slice(None), h_kv_idx)
            for key, actual in {"out": out[rows], "dq": dq[rows], "dk": dk[keys], "dv": dv[keys]}.items():
                worst[key] = max(worst[key], relative_error(actual, getattr(reference, key)))
        return {key: float(f"{error:.3g}") for key, error in worst.items()}

    attentions: dict[str, Attention] = {}
    errors: dict[str, dict[str, float]] = {}
    for impl in impls:
        try:
            attention = gpu_peers.make(impl, problem, library)
            if attention is not None:
                errors[impl] = errors_of(attention)
                attentions[impl] = attention
        except Exception as error:  # peers raise what they like
            if impl.startswith("fm3"):
                raise
            print(f"{case.name}: {impl} does not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return attentions, errors


def _both(attention: Attention) -> None:
    attention.forward()
    attention.backward()


def heat(call: Call, seconds: float) -> float:
    """Calls for about `seconds`, at least once; returns how long one call took, in seconds."""
    torch.cuda.synchronize()
    begin, num_calls = time.perf_counter(), 0
    while num_calls == 0 or time.perf_counter() < begin + seconds:
        call()
        torch.cuda.synchronize()
        num_calls += 1
    return (time.perf_counter() - begin) / num_calls


def time_in_turns(
    attentions: dict[str, Attention], repeats: int | None = None, power: PowerLog | None = None
) -> tuple[dict[str, dict[str, TimingStats]], dict[tuple[str, str], Record]]:
    """impl -> phase -> milliseconds of a call, and (impl, "fwd" or "bwd") -> what the chip drew meanwhile.

    `repeats`: timed calls in a turn, by default what fits in TIMED_S.
    """
    duration_s = heat(lambda: _both(next(iter(attentions.values()))), HEATING_S)
    num_long = None if duration_s < LONG_S else min(max(1, round(LONG_TIMED_S / duration_s)), MIN_CALLS)
    times: dict[str, dict[str, list[float]]] = {impl: {"fwd": [], "bwd": []} for impl in attentions}
    draws: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(TURNS):
        for impl, attention in list(attentions.items())[:: -1 if turn % 2 else 1]:
            for phase, call in (("fwd", attention.forward), ("bwd", attention.backward)):
                times_ms, begin_s = time_block(call, repeats, num_long)
                times[impl][phase] += times_ms
                draw = power and power.between(begin_s, time.perf_counter())
                if draw:
                    draws.setdefault((impl, phase), []).append(draw)
    stats = {
        impl: {phase: TimingStats.from_ms(times_ms) for phase, times_ms in by_phase.items()}
        for impl, by_phase in times.items()
    }
    for by_phase in stats.values():
        fwd, bwd = by_phase["fwd"], by_phase["bwd"]
        by_phase["total"] = TimingStats(
            fwd.ms_median + bwd.ms_median, fwd.ms_p10 + bwd.ms_p10, fwd.ms_p90 + bwd.ms_p90,
            min(fwd.repeats, bwd.repeats),
        )  # fmt: skip
    means = {key: [sum(column) / len(column) for column in zip(*values, strict=True)] for key, values in draws.items()}
    return stats, {key: {"sm_mhz": round(mhz), "watts": round(watts)} for key, (mhz, watts) in means.items()}


def time_block(call: Call, repeats: int | None, num_long: int | None) -> tuple[list[float], float]:
    """Milliseconds of calls that follow each other without a gap, and when they began (perf_counter).

    `num_long`: how many of calls that need no warming.
    """
    if num_long is None:
        num_calls = repeats or min(max(MIN_CALLS, int(TIMED_S / heat(call, WARM_S))), MAX_CALLS)
    else:
        num_calls = repeats or num_long
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    begin_s = time.perf_counter()
    torch.cuda._sleep(_WAIT_CYCLES)
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(events, events[1:])], begin_s  # noqa: B905


def time_call(call: Call, seconds: float, repeats: int | None) -> list[float]:
    """Milliseconds of single calls by CUDA events: `repeats` of them, or at least 3 over `seconds`."""
    call()
    times_ms: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_ms) < (repeats or 3) or (repeats is None and time.perf_counter() < end):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        times_ms.append(begin_event.elapsed_time(end_event))
    return times_ms


def measure_matmul(size: int = 8192, repeats: int = 100) -> float:
    """TFLOP/s of a bf16 size^3 product after heating with it: median of `repeats`."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    heat(lambda: a @ b, HEATING_S)
    times_ms = time_call(lambda: a @ b, 0.0, repeats)
    return float(f"{2 * size**3 / TimingStats.from_ms(times_ms).ms_median * 1e-9:.5g}")


def time_in_a_row(call: Call, calls: int = 50, replays: int = 9) -> TimingStats:
    """Microseconds (in the fields of milliseconds) of a call: a CUDA graph of `calls` in a row, by their number."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return TimingStats.from_ms([1e3 * ms / calls for ms in time_call(graph.replay, 0.0, replays)])


def time_cold(call: Call, repeats: int = 15) -> TimingStats:
    """Microseconds (in the fields of milliseconds) of single calls, enqueued ahead, after the L2 was overwritten."""
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    call()
    times_us = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.fill_(1)
        torch.cuda._sleep(_WAIT_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times_us.append(1e3 * begin.elapsed_time(end))
    return TimingStats.from_ms(times_us)


def schedule_record(identity: RunIdentity, case: AttentionCase, library: Any) -> Record:
    """Microseconds to prepare a mask's schedule: builds in a row (`us_median`), scans of its bounds in a row, what is
    left for the lists, and a single build whose bounds, code and schedule are not in the L2 (`us_cold_median`).

    `refcheck`: the forward with this schedule gives, bit for bit, what it gives when it prepares its own.
    """
    sm90, mask = Sm90(library), GpuMask.of(case)
    schedule = sm90.build_schedule(mask)
    whole = time_in_a_row(lambda: sm90.fill_schedule(mask, schedule))
    scan = time_in_a_row(lambda: sm90.scan_bounds(mask, schedule))
    cold = time_cold(lambda: sm90.fill_schedule(mask, schedule))
    q, k, v = (torch.randn(case.b, s, 1, 64, device="cuda").bfloat16() for s in (case.s_q, case.s_k, case.s_k))
    given, own = sm90.forward(q, k, v, mask, schedule=schedule), sm90.forward(q, k, v, mask)
    is_same = all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(given, own, strict=True))
    return record(
        identity, "schedule", "fm3", refcheck=is_same, case=case.name, b=case.b, h_mask=mask.h_mask, s_q=case.s_q,
        s_k=case.s_k, us_median=round(whole.ms_median, 3), us_p10=round(whole.ms_p10, 3),
        us_p90=round(whole.ms_p90, 3), repeats=whole.repeats, us_scan_median=round(scan.ms_median, 3),
        us_lists_median=round(whole.ms_median - scan.ms_median, 3), us_cold_median=round(cold.ms_median, 3),
        us_cold_p90=round(cold.ms_p90, 3), schedule_bytes=schedule.numel(),
    )  # fmt: skip
