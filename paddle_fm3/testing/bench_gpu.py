# SPDX-License-Identifier: Apache-2.0
"""The GPU half of tools/bench_attention.py: forward and backward of every implementation of a case.

Each block of timed calls follows half a second of the same calls (gpu_timing.py), and a call has several blocks, in
rounds whose order turns (gpu_rounds.py). A total is forward plus backward. The clock at which the calls ran, and so
their cycles, and the power are kept beside their time. Before that every output is compared with fp32:
all rows and keys of the first and the last key/value head and their query heads (with grouped queries of the first one
only), and the deterministic backward is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from paddle_fm3._native import sm90_library
from paddle_fm3.testing import gpu_peers
from paddle_fm3.testing.bench import BenchOptions, Record, RunIdentity, TimingStats, attention_record, record
from paddle_fm3.testing.cases import ANCHOR_KINDS, LENGTHS, OTHER_KINDS, AttentionCase, benchmark_case, benchmark_names
from paddle_fm3.testing.gpu_call import GpuMask, Sm90
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, PreparedLists, Sm90Backward
from paddle_fm3.testing.gpu_peers import Attention, Problem
from paddle_fm3.testing.gpu_power import PowerLog
from paddle_fm3.testing.gpu_reference import reference_head, relative_error
from paddle_fm3.testing.gpu_rounds import PAUSE_HEATING_S, ROUNDS, Block, Call, Rounds, time_in_rounds
from paddle_fm3.testing.gpu_timing import heat, measure_matmul, time_block, time_cold, time_in_a_row

IMPLS = gpu_peers.IMPLS
CONTEXT = ("cudnn", "flex")  # peers far from the bar: one round
CASES = (
    *benchmark_names(kinds=ANCHOR_KINDS),
    *benchmark_names(kinds=OTHER_KINDS),
    *(f"{length}_{kind}_gqa4" for length in LENGTHS for kind in ("causal", "causal_document")),
    *(f"{length}_{kind}_gqa8" for length in LENGTHS for kind in ("causal", "causal_document")),
    *(f"8k_{kind}_{variant}" for variant in ("d64", "d256", "d192v128") for kind in ("full", "causal", "document")),
)
COLUMNS = {
    "attention": ("case", "impl", "phase", "dtype", "ms_median", "ms_p10", "ms_p90", "repeats", "ms_rounds",
                  "tflops_exact", "tflops_block", "sm_mhz", "mcycles", "watts", "refcheck"),
    "schedule": ("case", "impl", "us_scan_median", "us_lists_median", "us_median", "us_p10", "us_p90", "us_cold_median",
                 "schedule_bytes", "refcheck"),
}  # fmt: skip
REPEATS, REPEATS_S = 3, 0.3  # of the deterministic backward, compared bit for bit: so many, or for so long
MAX_RELATIVE_ERROR = 5e-3  # in the Frobenius norm, against fp32; rounding P, dS and the result to bf16 gives 2.4e-3


def run(bench: str, options: BenchOptions) -> Iterator[Record]:
    """Records of bench "attention" (phases "fwd", "bwd", "total") or "schedule".

    A case may name its implementations, and its dtype: "8k_full:fm3,fa4", "8k_full:fm3:float16". One that has no such
    mask, or is not installed, has no line.

    Raises:
        ValueError: another bench was asked for.
    """
    if bench not in COLUMNS:
        raise ValueError(f"bench_gpu: bench {bench!r} is not measured on a GPU; legal: {', '.join(COLUMNS)}")
    identity = RunIdentity.of_this_process(torch.cuda.get_device_name(), options.commit)
    if bench == "schedule":
        for name in options.cases or benchmark_names():
            yield from schedule_records(identity, benchmark_case(name), sm90_library())
        return
    matmul_tflops = measure_matmul()
    with PowerLog(str(torch.cuda.get_device_properties(0).uuid)) as power:
        for idx, text in enumerate(options.cases or CASES):
            name, own_impls, own_dtype, *_ = [*text.split(":"), "", ""]
            impls = tuple(own_impls.split(",")) if own_impls else options.impls or IMPLS
            for dtype in (own_dtype,) if own_dtype else options.dtypes or ("bfloat16",):
                yield from run_case(
                    identity, name, dtype, impls, matmul_tflops=matmul_tflops, repeats=options.repeats,
                    rounds=ROUNDS if options.rounds is None else options.rounds, power=power, is_reversed=idx % 2 == 1,
                )  # fmt: skip


def run_case(
    identity: RunIdentity,
    name: str,
    dtype: str,
    impls: tuple[str, ...],
    *,
    matmul_tflops: float,
    repeats: int | None = None,
    rounds: int = ROUNDS,
    library: Any = None,
    power: PowerLog | None = None,
    is_reversed: bool = False,
) -> Iterator[Record]:
    """Checks and times every implementation that serves the case.

    Args:
        library: default `sm90_library()`.
        power: an open log; forward and backward lines then have `watts`.
        repeats: timed calls of a round.
        rounds: of every implementation but those of CONTEXT, which have one.
        is_reversed: the last of `impls` is timed first.
    """
    torch.cuda.empty_cache()  # the case before may have had tensors of other sizes
    problem = Problem.of(benchmark_case(name), dtype)
    attentions, errors = make_and_check(problem, impls, library or sm90_library())
    measured = time_all(attentions, repeats, rounds, power, is_reversed=is_reversed)
    for impl in errors:
        is_deterministic = impl == "fm3_deterministic"
        fwd, bwd = measured.get((impl, "fwd")) or measured["fm3", "fwd"], measured[impl, "bwd"]
        stats = {"fwd": fwd.stats, "bwd": bwd.stats, "total": _sum(fwd.stats, bwd.stats)}
        fields: dict[str, Record] = {"fwd": fwd.fields(), "bwd": bwd.fields(), "total": {}}
        for phase in ("bwd", "total") if is_deterministic else ("fwd", "bwd", "total"):
            checked = {key: value for key, value in errors[impl].items() if phase in ("total", _PHASE_OF_CHECK[key])}
            extra: Record = {"errors": checked, **fields[phase]}
            if impl.startswith("fm3"):
                extra["workspace_bytes"] = attentions[impl].workspace_bytes[phase]  # type: ignore[attr-defined]
            yield attention_record(
                identity, impl.removesuffix("_deterministic"), problem.case, phase, dtype, stats[phase],
                refcheck=all(error <= MAX_RELATIVE_ERROR for error in checked.values()),
                deterministic=is_deterministic or phase == "fwd", matmul_tflops=matmul_tflops, **extra,
            )  # fmt: skip


_PHASE = {"out": "fwd", "dq": "bwd", "dk": "bwd", "dv": "bwd"}
_PHASE_OF_CHECK = {**_PHASE, "unequal_repeats": "bwd"}


def make_and_check(
    problem: Problem, impls: tuple[str, ...], library: Any
) -> tuple[dict[str, Attention], dict[str, dict[str, float]]]:
    """The implementations that serve the case, and impl -> output -> largest relative error over the compared heads;
    for the deterministic mode also how many repeats differ.

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
                if impl == "fm3_deterministic":
                    errors[impl]["unequal_repeats"] = count_unequal_repeats(attention)
                attentions[impl] = attention
        except Exception as error:  # peers raise what they like
            if impl.startswith("fm3"):
                raise
            print(f"{case.name}: {impl} does not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return attentions, errors


def count_unequal_repeats(attention: Attention) -> int:
    """Of a few more calls of the backward, those with another bit somewhere: none may be in the deterministic mode."""
    first = [gradient.clone() for gradient in attention.backward()]
    num_unequal, begin = 0, time.perf_counter()
    for _ in range(REPEATS):
        num_unequal += not all(torch.equal(x, y) for x, y in zip(first, attention.backward(), strict=True))
        if time.perf_counter() > begin + REPEATS_S:
            break
    return num_unequal


def time_all(
    attentions: dict[str, Attention], repeats: int | None, rounds: int, power: PowerLog | None, *, is_reversed: bool
) -> dict[tuple[str, str], Rounds]:
    """(impl, "fwd" or "bwd") -> its blocks. The deterministic mode has no forward of its own beside the free one."""
    calls = {
        (impl, phase): call
        for impl, attention in attentions.items()
        for phase, call in (("fwd", attention.forward), ("bwd", attention.backward))
        if (impl, phase) != ("fm3_deterministic", "fwd") or "fm3" not in attentions
    }

    def timed(call: Call, first: Block | None) -> Block:
        return time_block(call, first, repeats=repeats, power=power)

    if calls:
        heat(list(calls.values())[-1 if is_reversed else 0], PAUSE_HEATING_S)
    return time_in_rounds(calls, timed, lambda key: 1 if key[0] in CONTEXT else rounds, is_reversed=is_reversed)


def _sum(fwd: TimingStats, bwd: TimingStats) -> TimingStats:
    return TimingStats(
        fwd.ms_median + bwd.ms_median, fwd.ms_p10 + bwd.ms_p10, fwd.ms_p90 + bwd.ms_p90, min(fwd.repeats, bwd.repeats)
    )


def schedule_records(identity: RunIdentity, case: AttentionCase, library: Any) -> Iterator[Record]:
    """Microseconds to prepare a mask, for the forward ("fm3") and for the backward ("fm3_backward"): builds in a row
    (`us_median`), scans of its bounds in a row (the backward has none), what is left for the lists, and a single build
    whose bounds, code and schedule are not in the L2 (`us_cold_median`).

    `refcheck`: forward and deterministic backward with these schedules give, bit for bit, what they give when they
    prepare their own.
    """
    sm90, backend, mask = Sm90(library), Sm90Backward(library), GpuMask.of(case)
    schedule = sm90.build_schedule(mask)
    lists = backend.build_schedule(mask)
    q, k, v = (torch.randn(case.b, s, 1, 64, device="cuda").bfloat16() for s in (case.s_q, case.s_k, case.s_k))

    def backward(out: torch.Tensor, lse: torch.Tensor, lists: PreparedLists | None) -> tuple[torch.Tensor, ...]:
        grads = backend.backward(BackwardInputs(q, k, v, out, lse, out), mask, is_deterministic=True, lists=lists)
        return grads.dq, grads.dk, grads.dv

    given, own = sm90.forward(q, k, v, mask, schedule=schedule), sm90.forward(q, k, v, mask)
    grads = backward(*own, lists), backward(*own, None)
    scan = time_in_a_row(lambda: sm90.scan_bounds(mask, schedule))  # it clears the totals: the schedule is made again
    builds = {
        "fm3": (lambda: sm90.fill_schedule(mask, schedule), scan.ms_median, schedule, given, own),
        "fm3_backward": (lambda: backend.fill_schedule(lists), 0.0, lists.memory, *grads),
    }
    for impl, (build, us_scan, memory, *results) in builds.items():
        whole, cold = time_in_a_row(build), time_cold(build)
        is_same = all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(*results, strict=True))
        yield record(
            identity, "schedule", impl, refcheck=is_same, case=case.name, b=case.b, h_mask=mask.h_mask, s_q=case.s_q,
            s_k=case.s_k, us_median=round(whole.ms_median, 3), us_p10=round(whole.ms_p10, 3),
            us_p90=round(whole.ms_p90, 3), repeats=whole.repeats, us_scan_median=round(us_scan, 3),
            us_lists_median=round(whole.ms_median - us_scan, 3), us_cold_median=round(cold.ms_median, 3),
            us_cold_p90=round(cold.ms_p90, 3), schedule_bytes=memory.numel(),
        )  # fmt: skip
