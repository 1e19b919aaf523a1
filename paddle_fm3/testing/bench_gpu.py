# SPDX-License-Identifier: Apache-2.0
"""The GPU half of tools/bench_attention.py: the forward through the C ABI beside its peers, with torch.

Every impl of a case is timed in the same process, in turns, after 0.5 s of heating with the first of them:
a power-limited chip is slower hot than cold. Peers: `cudnn` (full and causal), `flex` (FlexAttention, mask
from the dense definition), `fa4` (flash-attn-4, full and causal) if it can be imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paddle_fm3._native import sm90_library
from paddle_fm3.testing import gpu_call
from paddle_fm3.testing.bench import BenchOptions, Record, RunIdentity, TimingStats, attention_record
from paddle_fm3.testing.cases import ANCHOR_KINDS, LENGTHS, OTHER_KINDS, VARIANTS, AttentionCase, benchmark_case

IMPLS = ("fm3", "cudnn", "fa4", "flex")
CASES = tuple(
    [f"{length}_{kind}" for kind_set in (ANCHOR_KINDS, OTHER_KINDS) for length in LENGTHS for kind in kind_set]
    + [f"{length}_{kind}_gqa4" for length in LENGTHS for kind in ("causal", "causal_document")]
    + [f"8k_{kind}_{variant}" for variant in ("d64", "d256") for kind in ("full", "causal")]
)
COLUMNS = ("case", "impl", "phase", "ms_median", "ms_p10", "ms_p90", "tflops_exact", "tflops_block", "refcheck")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HEATING_S, TIMING_S = 0.5, 0.25
MAX_RELATIVE_ERROR = 5e-3  # of a block of rows against fp32; bf16 rounding of P and O gives 2.4e-3

Call = Callable[[], torch.Tensor]


def run(bench: str, options: BenchOptions) -> Iterator[Record]:
    """Records of bench "attention", phase "fwd". A case that a peer cannot run has no line of that peer.

    Raises:
        ValueError: another bench than "attention" was asked for.
    """
    if bench != "attention":
        raise ValueError(f"bench_gpu: bench {bench!r} is not measured on a GPU; only 'attention'")
    identity = RunIdentity.of_this_process(torch.cuda.get_device_name())
    matmul_tflops = measure_matmul()
    for name in options.cases or CASES:
        for dtype in options.dtypes or ("bfloat16",):
            yield from run_case(identity, name, dtype, options.impls or IMPLS, matmul_tflops, options.repeats)


def run_case(
    identity: RunIdentity,
    name: str,
    dtype: str,
    impls: tuple[str, ...],
    matmul_tflops: float,
    repeats: int | None = None,
    library: Any = None,
) -> Iterator[Record]:
    """Times every impl that can run the case, in two turns each. `library`: default `sm90_library()`."""
    case = benchmark_case(name)
    inputs = make_inputs(case, DTYPES[dtype])
    mask = gpu_call.GpuMask.of(case)

    def fm3(*given: Any) -> Call:
        return _fm3(library or sm90_library(), *given)

    makers = {"fm3": fm3, "cudnn": _cudnn, "fa4": _fa4, "flex": _flex}
    calls: dict[str, Call] = {}
    for impl in impls:
        call = makers[impl](case, inputs, mask)
        if call is not None:
            calls[impl] = call
    passes = {impl: is_right(case, inputs, mask, call()) for impl, call in calls.items()}
    heat(next(iter(calls.values())), HEATING_S)
    times: dict[str, list[float]] = {impl: [] for impl in calls}
    for _ in range(2):
        for impl, call in calls.items():
            times[impl] += time_call(call, TIMING_S / 2, None if repeats is None else (repeats + 1) // 2)
    for impl in calls:
        yield attention_record(
            identity,
            impl,
            case,
            "fwd",
            dtype,
            TimingStats.from_ms(times[impl]),
            refcheck=passes[impl],
            deterministic=True,
            matmul_tflops=matmul_tflops,
        )


def make_inputs(case: AttentionCase, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard normal q [b, s_q, h_q, d_qk], k [b, s_k, h_kv, d_qk], v [b, s_k, h_kv, d_v]."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    return (
        normal(case.b, case.s_q, case.h_q, case.d_qk),
        normal(case.b, case.s_k, case.h_kv, case.d_qk),
        normal(case.b, case.s_k, case.h_kv, case.d_v),
    )


def is_right(case: AttentionCase, inputs: tuple, mask: gpu_call.GpuMask, out: torch.Tensor, rows: int = 64) -> bool:
    """Compares three blocks of rows of two heads with fp32."""
    for b_idx, h_idx in ((0, 0), (case.b - 1, case.h_q - 1)):
        for q_begin in (0, case.s_q // 3, case.s_q - rows):
            wanted, _ = gpu_call.reference_rows(*inputs, mask, b_idx, h_idx, q_begin, q_begin + rows)
            error = out[b_idx, q_begin : q_begin + rows, h_idx].float() - wanted
            if not error.norm() <= MAX_RELATIVE_ERROR * wanted.norm():
                return False
    return True


def heat(call: Call, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(3):
            call()
        torch.cuda.synchronize()


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


# --- impls: (case, inputs, mask) -> a call giving out [b, s_q, h_q, d_v], or None -------------------------


def _fm3(library: Any, case: AttentionCase, inputs: tuple, mask: gpu_call.GpuMask) -> Call:
    """With a prepared schedule, as every layer but a mask's first runs it."""
    sm90 = gpu_call.Sm90(library)
    q = inputs[0]
    out = torch.empty((case.b, case.s_q, case.h_q, case.d_v), dtype=q.dtype, device="cuda")
    lse = torch.empty((case.b, case.h_q, case.s_q), device="cuda")
    schedule = sm90.build_schedule(mask)
    params = sm90.forward_params(*inputs, mask, out, lse, schedule=schedule)
    workspace = sm90.prepare(params)

    def call(keep: tuple = (out, lse, schedule, workspace)) -> torch.Tensor:
        sm90.run(params)
        return keep[0]

    return call


def _is_plain(case: AttentionCase) -> bool:
    """Full or causal, the two masks that every peer knows by name."""
    kind = case.name.partition("_")[2]
    for variant in VARIANTS:
        kind = kind.removesuffix(f"_{variant}") if variant else kind
    return kind in ("full", "causal")


def _cudnn(case: AttentionCase, inputs: tuple, mask: gpu_call.GpuMask) -> Call | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not _is_plain(case) or case.d_qk > 128:
        return None
    q, k, v = (x.transpose(1, 2) for x in inputs)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal="causal" in case.name, enable_gqa=case.h_q != case.h_kv
            )
        return out.transpose(1, 2)

    return call


def _fa4(case: AttentionCase, inputs: tuple, mask: gpu_call.GpuMask) -> Call | None:
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    if not _is_plain(case):
        return None
    return lambda: flash_attn_func(*inputs, causal="causal" in case.name)[0]


def _flex(case: AttentionCase, inputs: tuple, mask: gpu_call.GpuMask) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    bounds, causal = mask.bounds, mask.is_causal

    def visible(b_idx: Any, h_idx: Any, q_idx: Any, k_idx: Any) -> Any:
        shown = k_idx <= q_idx if causal else q_idx >= 0
        if bounds is None:
            return shown
        bound = [bounds[b_idx, 0, k_idx, n] for n in range(bounds.shape[3])]
        if len(bound) == 1:
            return shown & (q_idx < bound[0])
        if len(bound) == 2 and not causal:
            return shown & (q_idx < bound[0]) & (q_idx >= bound[1])
        for n in range(0, len(bound), 2):
            shown = shown & ((q_idx < bound[n]) | (q_idx >= bound[n + 1]))
        return shown

    block_mask = create_block_mask(visible, case.b, None, case.s_q, case.s_k, device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return lambda: attend(q, k, v, block_mask=block_mask, enable_gqa=case.h_q != case.h_kv).transpose(1, 2)
