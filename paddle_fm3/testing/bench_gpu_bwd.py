# SPDX-License-Identifier: Apache-2.0
"""The backward's part of the GPU benchmark: fm3 through the C ABI, CUDA events, records of phase "bwd".

    python -m paddle_fm3.testing.bench_gpu_bwd --cases 8k_causal_document,32k_full [--deterministic] [--output LINES]

Every timed case is checked first: two key/value heads against the textbook formulas in fp32.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import numpy as np
import torch

from paddle_fm3 import _native
from paddle_fm3.testing.bench import (
    Record,
    RunIdentity,
    TimingStats,
    append_records,
    attention_record,
    format_table,
)
from paddle_fm3.testing.bench_gpu import MAX_RELATIVE_ERROR, heat, time_call
from paddle_fm3.testing.cases import ANCHOR_KINDS, AttentionCase, benchmark_case, benchmark_names
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, visible_rows
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Gradients, Sm90Backward
from paddle_fm3.testing.gpu_peers import DTYPES

HEATING_S, TIMING_S = 0.5, 0.7
COLUMNS = ("case", "deterministic", "ms_median", "ms_p10", "ms_p90", "tflops_exact", "refcheck", "workspace_bytes")


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


def make_inputs(case: AttentionCase, dtype: torch.dtype, mask: GpuMask, forward: Sm90) -> BackwardInputs:
    """Standard normal inputs and dout, with out and lse of the forward kernel."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    q = normal(case.b, case.s_q, case.h_q, case.d_qk)
    k = normal(case.b, case.s_k, case.h_kv, case.d_qk)
    v = normal(case.b, case.s_k, case.h_kv, case.d_v)
    out, lse = forward.forward(q, k, v, mask)
    return BackwardInputs(q, k, v, out, lse, normal(*out.shape))


def backward_record(
    identity: RunIdentity,
    name: str,
    library: ctypes.CDLL,
    *,
    dtype: str = "bfloat16",
    is_deterministic: bool = False,
    has_check: bool = True,
    heating_s: float = HEATING_S,
    timing_s: float = TIMING_S,
) -> Record:
    """Checks and times one case. Without the check `refcheck` says "none" and `errors` is empty."""
    case = benchmark_case(name)
    mask = GpuMask.of(case)
    backend = Sm90Backward(library)
    inputs = make_inputs(case, DTYPES[dtype], mask, Sm90(library))
    errors: dict[str, float] = {}
    if has_check:
        torch.backends.cuda.matmul.allow_tf32 = False
        errors = check_heads(inputs, mask, backend.backward(inputs, mask, is_deterministic=is_deterministic))
    grads = backend.empty_gradients(inputs)
    params = backend.params(inputs, mask, grads, is_deterministic=is_deterministic)
    workspace = backend.prepare(params)

    def call() -> torch.Tensor:
        backend.run(params)
        return grads.dq

    heat(call, heating_s)
    stats = TimingStats.from_ms(time_call(call, timing_s, None))
    line = attention_record(
        identity, "fm3", case, "bwd", dtype, stats,
        refcheck=all(error <= MAX_RELATIVE_ERROR for error in errors.values()), deterministic=is_deterministic,
        workspace_bytes=workspace.numel(), errors={key: float(f"{value:.3g}") for key, value in errors.items()},
    )  # fmt: skip
    return line if has_check else line | {"refcheck": "none"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(benchmark_names(kinds=ANCHOR_KINDS)), help="names, comma-separated")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="do not compare with fp32 (it takes seconds at 128K)")
    parser.add_argument("--heating", type=float, default=HEATING_S, help="seconds")
    parser.add_argument("--timing", type=float, default=TIMING_S, help="seconds")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    arguments = parser.parse_args()
    identity = RunIdentity.of_this_process(torch.cuda.get_device_name())
    records = []
    for name in arguments.cases.split(","):
        one = backward_record(
            identity, name, _native.sm90_library(), dtype=arguments.dtype, is_deterministic=arguments.deterministic,
            has_check=not arguments.no_check, heating_s=arguments.heating, timing_s=arguments.timing,
        )  # fmt: skip
        records.append(one)
        print(format_table([one], COLUMNS).splitlines()[-1], flush=True)
        if arguments.output:
            append_records(arguments.output, [one])
        torch.cuda.empty_cache()
    print(format_table(records, COLUMNS))


if __name__ == "__main__":
    main()
