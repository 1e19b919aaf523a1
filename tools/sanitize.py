#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every compiled Hopper forward kernel on small hostile masks under compute-sanitizer.

    tools/sanitize.py                       memcheck, racecheck, synccheck
    tools/sanitize.py --tool memcheck       one of them
    tools/sanitize.py --kernel d128_bf16    one kernel

Needs a Hopper GPU, torch, libfm3_sm90.so and compute-sanitizer. The exit status is the number of tools that
found something.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck")
HEADS = {
    "d64": (64, 64),
    "d96": (96, 96),
    "d128": (128, 128),
    "d192_128": (192, 128),
    "d192": (192, 192),
    "d256": (256, 256),
}
KERNELS = tuple(f"{head}_{dtype}" for head in HEADS for dtype in ("bf16", "fp16"))
# Partial and full steps, several query tiles a CTA, hidden rows, block_mask, s_q != s_k.
CASES = ("documents_mixed", "rows_hidden_middle", "causal_more_keys", "random_nc4_385x257_h4_2_hm2_d128_block_mask")


def run_kernels(kernels: tuple[str, ...]) -> None:
    """The child: plain calls, nothing compared (test/gpu does that)."""
    import torch

    from paddle_fm3._native import sm90_library
    from paddle_fm3.testing.gpu_call import GpuMask, Sm90
    from paddle_fm3.testing.hostile_cases import hostile_case

    sm90 = Sm90(sm90_library())
    for kernel in kernels:
        head, _, dtype_name = kernel.rpartition("_")
        dtype = torch.bfloat16 if dtype_name == "bf16" else torch.float16
        for name in CASES:
            d_qk, d_v = HEADS[head]
            case = replace(hostile_case(name), d_qk=d_qk, d_v=d_v)
            q = torch.randn(case.b, case.s_q, case.h_q, d_qk, device="cuda", dtype=dtype)
            k = torch.randn(case.b, case.s_k, case.h_kv, d_qk, device="cuda", dtype=dtype)
            v = torch.randn(case.b, case.s_k, case.h_kv, d_v, device="cuda", dtype=dtype)
            sm90.forward(q, k, v, GpuMask.of(case))
        torch.cuda.synchronize()
        print(f"ran {kernel}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated (default: all)")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="may be repeated (default: all)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    kernels = tuple(options.kernel or KERNELS)
    if options.child:
        run_kernels(kernels)
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("sanitize: no compute-sanitizer in PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    child = [sys.executable, str(Path(__file__)), "--child", *(word for name in kernels for word in ("--kernel", name))]
    num_failed = 0
    for tool in options.tool or TOOLS:
        only_ours = ["--kernel-regex", "kns=fwd_kernel"] if tool != "memcheck" else []
        done = subprocess.run([sanitizer, "--tool", tool, "--error-exitcode", "9", *only_ours, *child])
        print(f"{tool}: {'clean' if done.returncode == 0 else f'exit status {done.returncode}'}", flush=True)
        num_failed += done.returncode != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
