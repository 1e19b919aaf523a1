#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every compiled Hopper kernel, forward and backward, on small hostile masks under compute-sanitizer.

    tools/sanitize.py                            memcheck, racecheck, synccheck of every kernel
    tools/sanitize.py --tool memcheck --kernel d128_bf16 --direction fwd
    tools/sanitize.py --jobs 4                   processes at a time

    tools/sanitize.py --control                  whether racecheck understands what the kernels synchronise with

It does not where one lane arrives at an mbarrier for its warp. For racecheck build the library with
-DCMAKE_CUDA_FLAGS=-DFM3_ALL_LANES_ARRIVE (ops/cuda/ptx.cuh), into a folder that FM3_LIB_DIR names. Masks as small
as these have tiles that begin at documents, in both directions, if -DFM3_CUT_ALL_SIZES is there, for CUDA and C++.

Needs a Hopper GPU, libfm3_sm90.so, NumPy, ml_dtypes and compute-sanitizer; no framework. Outputs are compared with
the fp64 oracle too. The exit status is 1 if a tool found something, a result was wrong or a run did not end.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck")
DIRECTIONS = ("fwd", "bwd")
HEADS = {
    "d64": (64, 64),
    "d96": (96, 96),
    "d128": (128, 128),
    "d192_128": (192, 128),
    "d192": (192, 192),
    "d256": (256, 256),
}
KERNELS = tuple(f"{head}_{dtype}" for head in HEADS for dtype in ("bf16", "fp16"))
NO_BACKWARD = ("d96_bf16", "d96_fp16")  # the backward serves 96 by its 128 kernel
# Partial and full steps, short key tiles, hidden rows, grouped queries, s_q != s_k, block_mask, warps that rescale at
# different steps.
CASES = (
    "documents_mixed", "documents_short_tile", "causal_more_keys", "random_nc4_385x257_h4_2_hm2_d128_block_mask",
    "rows_split_by_keys",
)  # fmt: skip


def run_kernel(kernel: str, direction: str, case_names: tuple[str, ...]) -> None:
    """The child: calls and comparisons with the oracle.

    Raises:
        AssertionError: a result is wrong.
    """
    import ml_dtypes
    import numpy as np

    from paddle_fm3._native import sm90_library
    from paddle_fm3.testing import native_call, reference
    from paddle_fm3.testing.cases import make_inputs
    from paddle_fm3.testing.compare import assert_close_to_oracle
    from paddle_fm3.testing.cuda_arrays import DeviceArray, synchronize
    from paddle_fm3.testing.hostile_cases import hostile_case

    library = sm90_library()

    def call(name: str, params: ctypes.Structure) -> None:
        num_bytes = getattr(library, f"fm3_sm90_{name}_workspace_bytes")(ctypes.byref(params))
        workspace = DeviceArray((max(num_bytes, 1),), np.uint8)
        params.workspace, params.workspace_bytes = workspace.ctypes.data, num_bytes
        status = getattr(library, f"fm3_sm90_{name}")(ctypes.byref(params), None)
        assert status == 0, library.fm3_sm90_last_error().decode()
        synchronize()

    head, _, dtype_name = kernel.rpartition("_")
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype_name == "bf16" else np.float16)
    for case_name in case_names:
        d_qk, d_v = HEADS[head]
        case = replace(hostile_case(case_name), d_qk=d_qk, d_v=d_v)
        inputs, arguments, raw = make_inputs(case, dtype), case.call_arguments(), case.build_mask()
        gradient = {"dout": inputs.dout, "dlse": inputs.dlse} if direction == "bwd" else {}
        exact = reference.attention(inputs.q, inputs.k, inputs.v, **arguments, **gradient)
        low = reference.low_precision_attention(dtype, inputs.q, inputs.k, inputs.v, **arguments, **gradient)
        bounds, tiles = (None if x is None else DeviceArray.of(x) for x in (raw.startend_row_indices, raw.block_mask))
        h_mask = 1 if bounds is None else bounds.shape[1]
        mask = native_call.NativeMask(bounds, raw.causal, case.b, h_mask, case.s_q, case.s_k, tiles)  # type: ignore
        q, k, v, dout = (DeviceArray.of(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        scale = d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale
        if direction == "fwd":
            got = {"out": DeviceArray(exact.out.shape, dtype), "lse": DeviceArray(exact.lse.shape, np.float32)}
            call("fwd", native_call.forward_params(q, k, v, mask, scale, *got.values()))
        else:
            out, lse = DeviceArray.of(exact.out.astype(dtype)), DeviceArray.of(exact.lse.astype(np.float32))
            dlse = DeviceArray.of(inputs.dlse)
            got = {name: DeviceArray(x.shape, dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
            params = native_call.backward_params(q, k, v, mask, scale, out, lse, dout, dlse, *got.values())
            for params.is_deterministic in (1, 0):
                call("bwd", params)
        for name, array in got.items():
            assert_close_to_oracle(array.numpy(), getattr(exact, name), getattr(low, name), name, case)
    print(f"ran {kernel} {direction} on {', '.join(case_names)}", flush=True)


def sanitize(tool: str, kernel: str, direction: str, case_names: list[str], limit_s: float) -> tuple[bool, str]:
    """Whether the run was clean, and what to print of it."""
    child = [sys.executable, str(Path(__file__)), "--child", "--kernel", kernel, "--direction", direction,
             *(word for name in case_names for word in ("--case", name))]  # fmt: skip
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5", *child]
    begin = time.perf_counter()
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    try:
        output, _ = run.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # the checked process too, which may spin on the device
        output, _ = run.communicate()
        return False, f"{tool} {kernel} {direction}: not done after {limit_s:.0f} s\n{output[-2000:]}"
    summary = f"{tool} {kernel} {direction} ({time.perf_counter() - begin:.0f} s)"
    if run.returncode == 0:
        return True, f"{summary}: clean"
    text = "\n".join(output.splitlines()[:60])
    return False, f"{summary}: exit status {run.returncode}\n{text}"


def run_control() -> int:
    """Runs racecheck_control.cu under racecheck: 0 if it reports the race and nothing else, else 1."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "racecheck_control"
        source = Path(__file__).with_name("racecheck_control.cu")
        subprocess.run(["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-o", program, source], check=True)
        is_reported = {}
        for mode in ("all", "elected", "none"):
            done = subprocess.run(
                ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9", program, mode],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            is_reported[mode] = done.returncode == 9
            print(f"control, {mode}: {'reported' if is_reported[mode] else 'clean'}\n{done.stdout[-400:]}", flush=True)
    return 0 if is_reported == {"all": False, "elected": False, "none": True} else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated (default: all)")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="may be repeated (default: all)")
    parser.add_argument("--direction", action="append", choices=DIRECTIONS, help="default: both")
    parser.add_argument("--case", action="append", help=f"hostile case (default: {', '.join(CASES)})")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one process")
    parser.add_argument("--control", action="store_true", help="run tools/racecheck_control.cu only; needs nvcc")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cases = options.case or list(CASES)
    if options.child:
        run_kernel(options.kernel[0], options.direction[0], tuple(cases))
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: no compute-sanitizer in PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    if options.control:
        return run_control()
    jobs = [
        (tool, kernel, direction)
        for tool in options.tool or TOOLS
        for kernel in options.kernel or KERNELS
        for direction in options.direction or DIRECTIONS
        if direction == "fwd" or kernel not in NO_BACKWARD
    ]
    num_failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(sanitize, *job, cases, options.limit) for job in jobs]
        for run in as_completed(runs):  # at once: the whole may be cut short
            is_clean, text = run.result()
            print(text, flush=True)
            num_failed += not is_clean
    print(f"{len(jobs) - num_failed} of {len(jobs)} runs clean")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
