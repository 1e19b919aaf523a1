# SPDX-License-Identifier: Apache-2.0
"""Times the Hopper backward: CUDA events, medians, TFLOP/s by the exact number of visible pairs.

    python -m paddle_fm3.testing.bench_gpu_bwd --cases 8k_causal_document,32k_full [--deterministic] [--json OUT]

Every timed call is checked first: two key/value heads against the textbook formulas in fp32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from paddle_fm3 import _native
from paddle_fm3.testing.cases import ANCHOR_KINDS, AttentionCase, benchmark_case, benchmark_names
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, visible_rows
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Gradients, Sm90Backward

HEATING_MS = 500.0
MEASURING_MS = 700.0


@dataclass(frozen=True)
class BackwardTiming:
    """One line of the table; times in milliseconds."""

    case: str
    is_deterministic: bool
    ms_median: float
    ms_p10: float
    ms_p90: float
    repeats: int
    tflops_exact: float
    tflops_block: float
    workspace_bytes: int
    errors: dict[str, float]  # relative, of the checked heads


def time_cuda(call: Callable[[], None], *, heating_ms: float = HEATING_MS, measuring_ms: float = MEASURING_MS) -> list[float]:  # fmt: skip
    """Milliseconds of single calls, after `heating_ms` of the same call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    call()
    end.record()
    end.synchronize()
    estimate = max(begin.elapsed_time(end), 1e-3)
    for _ in range(int(heating_ms / estimate) + 1):
        call()
    repeats = min(max(int(measuring_ms / estimate), 5), 200)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in events:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in events]


def reference_head(inputs: BackwardInputs, mask: GpuMask, b_idx: int, h_kv_idx: int) -> Gradients:
    """Gradients of one key/value head in fp32, rows in chunks so that 128K keys fit."""
    q, k, v = inputs.q, inputs.k, inputs.v
    scale, group = q.shape[3] ** -0.5, q.shape[2] // k.shape[2]
    k32, v32 = k[b_idx, :, h_kv_idx].float(), v[b_idx, :, h_kv_idx].float()
    dk, dv = torch.zeros_like(k32), torch.zeros_like(v32)
    dq = torch.zeros((q.shape[1], group, q.shape[3]), device=q.device)
    rows = max(1, min(q.shape[1], 2**28 // k.shape[1]))
    for g_idx in range(group):
        h_idx = h_kv_idx * group + g_idx
        for begin in range(0, q.shape[1], rows):
            end = min(begin + rows, q.shape[1])
            q32, do32 = q[b_idx, begin:end, h_idx].float(), inputs.dout[b_idx, begin:end, h_idx].float()
            shown = visible_rows(mask, b_idx, h_idx // (q.shape[2] // mask.h_mask), begin, end)
            lse = inputs.lse[b_idx, h_idx, begin:end]
            p = torch.exp(q32 @ k32.T * scale - lse.masked_fill(lse.isinf(), 0)[:, None]).masked_fill_(~shown, 0)
            delta = (do32 * inputs.out[b_idx, begin:end, h_idx].float()).sum(1)
            dv += p.T @ do32
            ds = p.mul_(do32 @ v32.T - delta[:, None])
            dq[begin:end, g_idx] = scale * (ds @ k32)
            dk += scale * (ds.T @ q32)
    return Gradients(dq, dk, dv)


def check_heads(inputs: BackwardInputs, mask: GpuMask, got: Gradients) -> dict[str, float]:
    """Largest relative error of each gradient over the first and the last key/value head."""
    b, _, h_kv, _ = inputs.k.shape
    group = inputs.q.shape[2] // h_kv
    errors = {name: 0.0 for name, _ in got.items()}
    for b_idx, h_kv_idx in {(0, 0), (b - 1, h_kv - 1)}:
        wanted = reference_head(inputs, mask, b_idx, h_kv_idx)
        heads = slice(h_kv_idx * group, (h_kv_idx + 1) * group)
        pairs = {
            "dq": (got.dq[b_idx, :, heads].float(), wanted.dq),
            "dk": (got.dk[b_idx, :, h_kv_idx].float(), wanted.dk),
            "dv": (got.dv[b_idx, :, h_kv_idx].float(), wanted.dv),
        }
        for name, (x, ref) in pairs.items():
            error = float((x - ref).norm() / ref.norm())
            errors[name] = max(errors[name], error if np.isfinite(error) else float("inf"))
    return errors


def make_inputs(case: AttentionCase, mask: GpuMask, forward: Sm90) -> BackwardInputs:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q = normal(case.b, case.s_q, case.h_q, case.d_qk)
    k = normal(case.b, case.s_k, case.h_kv, case.d_qk)
    v = normal(case.b, case.s_k, case.h_kv, case.d_v)
    out, lse = forward.forward(q, k, v, mask)
    return BackwardInputs(q, k, v, out, lse, normal(*out.shape))


def measure(name: str, library: object, *, is_deterministic: bool = False, has_check: bool = True,
            measuring_ms: float = MEASURING_MS, heating_ms: float = HEATING_MS) -> BackwardTiming:  # fmt: skip
    case = benchmark_case(name)
    mask = GpuMask.of(case)
    backend = Sm90Backward(library)
    inputs = make_inputs(case, mask, Sm90(library))
    errors = {}
    if has_check:
        torch.backends.cuda.matmul.allow_tf32 = False
        errors = check_heads(inputs, mask, backend.backward(inputs, mask, is_deterministic=is_deterministic))
    grads = backend.empty_gradients(inputs)
    params = backend.params(inputs, mask, grads, is_deterministic=is_deterministic)
    workspace = backend.prepare(params)
    times = time_cuda(lambda: backend.run(params), heating_ms=heating_ms, measuring_ms=measuring_ms)
    p10, median, p90 = (float(x) for x in np.percentile(times, [10, 50, 90]))
    return BackwardTiming(
        name, is_deterministic, median, p10, p90, len(times), case.flops("bwd") / median / 1e9,
        case.flops("bwd", is_block=True) / median / 1e9, workspace.numel(), errors,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(benchmark_names(kinds=ANCHOR_KINDS)))
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--heating-ms", type=float, default=HEATING_MS)
    parser.add_argument("--measuring-ms", type=float, default=MEASURING_MS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = []
    for name in arguments.cases.split(","):
        timing = measure(
            name, _native.sm90_library(), is_deterministic=arguments.deterministic, has_check=not arguments.no_check,
            heating_ms=arguments.heating_ms, measuring_ms=arguments.measuring_ms,
        )  # fmt: skip
        lines.append(json.dumps(asdict(timing) | {"device": torch.cuda.get_device_name()}))
        errors = " ".join(f"{key} {value:.1e}" for key, value in timing.errors.items())
        print(f"{name:26s} {timing.ms_median:8.3f} ms {timing.tflops_exact:6.1f} TFLOP/s  {errors}", flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
