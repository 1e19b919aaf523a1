# SPDX-License-Identifier: Apache-2.0
"""The checks of `doctor` that one process can make: versions, libraries, the operator against the oracle."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_fm3 import _native, env
from paddle_fm3.commands._progress import Progress
from paddle_fm3.testing import cases
from paddle_fm3.testing.compare import assert_close_to_oracle
from paddle_fm3.testing.condition import rounding_floor
from paddle_fm3.testing.reference import attention, low_precision_attention

REPORT_BEGIN, REPORT_END = "--- paddle_fm3 doctor report ---", "--- end of report ---"
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
# What this package is tested with: (distributions that provide it, version, whether it must be there).
PINS = {
    "Paddle": (("paddlepaddle", "paddlepaddle-gpu"), "3.3.1", True),
    "PaddleNLP": (("paddlenlp",), "3.0.0b4", False),
    "NumPy": (("numpy",), "1.26.4", True),
}
LIBRARIES = {"fm3_cpu": True, "fm3_op": True, "fm3_sm90": False}  # name -> must be built


@dataclass(frozen=True)
class Check:
    """verdict: "ok", "note" (differs from what is tested, or is absent and optional) or "fail"."""

    name: str
    verdict: str
    detail: str


def num_launched_ranks() -> int:
    """Processes that Paddle's launcher says there are; 1 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def version_checks() -> list[Check]:
    version = platform.python_version_tuple()
    is_tested = (3, 10) <= (int(version[0]), int(version[1])) <= (3, 12)
    found = [Check("Python", "ok" if is_tested else "note", f"{platform.python_version()} (tested: 3.10 to 3.12)")]
    for name, (distributions, pinned, is_needed) in PINS.items():
        installed = next((v for v in map(_installed, distributions) if v), None)
        if installed is None:
            found.append(Check(name, "fail" if is_needed else "note", f"not installed (tested: {pinned})"))
        else:
            found.append(Check(name, "ok" if installed == pinned else "note", f"{installed} (tested: {pinned})"))
    return found


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_checks() -> list[Check]:
    found = []
    for name, is_needed in LIBRARIES.items():
        if not _native.is_built(name):
            found.append(Check(name, "fail" if is_needed else "note", f"not built: no {_native.library_path(name)}"))
            continue
        load = {"fm3_cpu": _native.cpu_library, "fm3_op": _native.load_op, "fm3_sm90": _native.sm90_library}[name]
        try:
            load()
        except _native.NativeLibraryError as error:
            found.append(Check(name, "fail" if is_needed else "note", str(error)))
        else:
            found.append(Check(name, "ok", "built, loads"))
    try:
        from paddle_fm3.distributed.native import planner

        planner()
    except ImportError as error:
        found.append(Check("planner", "fail", str(error)))
    else:
        found.append(Check("planner", "ok", "built, loads"))
    try:
        target = _native.cpu_library().fm3_cpu_simd_target().decode()
        threads = env.num_threads() or f"every core ({len(os.sched_getaffinity(0))})"
        found.append(Check("CPU kernels", "ok", f"SIMD target {target}, threads: {threads}"))
    except (_native.NativeLibraryError, ValueError) as error:
        found.append(Check("CPU kernels", "fail", str(error)))
    return found


def operator_checks(seconds: float, device: str | None) -> list[Check]:
    """Hostile cases through `flashmask_attention`, forward and backward, until `seconds` have passed."""
    try:
        import paddle

        from paddle_fm3.attention import flashmask_attention
    except ImportError as error:
        return [Check("operator", "fail", f"cannot be imported: {error}")]
    device = device or paddle.device.get_device().partition(":")[0]
    dtype = "float32" if device == "cpu" else "bfloat16"
    if device != "cpu":
        try:
            paddle.device.set_device(device)
        except (ValueError, RuntimeError, OSError) as error:  # this Paddle is built for CPUs only, or finds no GPU
            return [Check(f"operator on {device}", "fail", " ".join(str(error).split())[:300])]
    chosen = [
        case for case in cases.HOSTILE_CASES if device == "cpu" or (case.d_qk, case.d_v) in ((64, 64), (128, 128))
    ]
    return [operator_check(chosen, dtype, device, seconds, flashmask_attention)]


def operator_check(
    chosen: list[cases.AttentionCase], dtype: str, device: str, seconds: float, attention_fn: Callable[..., Any]
) -> Check:
    name = f"operator on {device}, {dtype}"
    begin_s = time.monotonic()
    worst, num_done = (0.0, "none"), 0
    with Progress("operator self-check", len(chosen)) as progress:
        for case in chosen:
            if num_done and time.monotonic() - begin_s > seconds:
                break
            progress.step(case.name)
            try:
                used = worst_allowance(case, dtype, attention_fn)
            except Exception as error:
                return Check(name, "fail", f"case {case.name}: {' '.join(str(error).split())[:300]}")
            worst = max(worst, (used, case.name))
            num_done += 1
    took_s = time.monotonic() - begin_s
    detail = f"{num_done} of {len(chosen)} hostile cases agree with the float64 oracle in {took_s:.1f} s"
    return Check(name, "ok", f"{detail}; largest error {worst[0]:.0%} of its allowance ({worst[1]})")


def worst_allowance(case: cases.AttentionCase, dtype: str, attention_fn: Callable[..., Any]) -> float:
    """Largest error among out, lse, dq, dk, dv as a fraction of what arithmetic in `dtype` allows.

    Raises:
        AssertionError: an output is beyond its allowance; names output, index and values.
    """
    import ml_dtypes
    import paddle

    numpy_dtype = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    inputs = cases.make_inputs(case, numpy_dtype)
    q, k, v = (paddle.to_tensor(np.asarray(x, np.float32)).astype(dtype) for x in (inputs.q, inputs.k, inputs.v))
    for tensor in (q, k, v):
        tensor.stop_gradient = False
    arguments = case.call_arguments()
    on_device = {name: paddle.to_tensor(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    out, lse = attention_fn(q, k, v, **on_device, return_softmax_lse=True)
    dout = paddle.to_tensor(np.asarray(inputs.dout, np.float32)).astype(dtype)
    paddle.autograd.backward([out, lse], [dout, paddle.to_tensor(inputs.dlse)])

    gradients = {"dout": inputs.dout, "dlse": inputs.dlse}
    oracle = attention(inputs.q, inputs.k, inputs.v, **arguments, **gradients)  # type: ignore[arg-type]
    naive = low_precision_attention(numpy_dtype, inputs.q, inputs.k, inputs.v, **arguments, **gradients)  # type: ignore[arg-type]
    floors = rounding_floor(case, inputs, oracle) if dtype == "float32" else dict.fromkeys(OUTPUTS, 0.0)
    actual = dict(zip(OUTPUTS, (out, lse, q.grad, k.grad, v.grad), strict=True))
    used = 0.0
    for name, tensor in actual.items():
        exact, low = getattr(oracle, name), getattr(naive, name)
        with np.errstate(invalid="ignore"):  # inf - inf
            error = np.abs(low - exact)
        if error[np.isfinite(error)].max(initial=0.0) < floors[name]:
            low = exact + floors[name]  # exact by luck; no fused kernel can be
        array = tensor.detach().astype("float32").numpy()
        rounded_to = np.float32 if name == "lse" else numpy_dtype
        used = max(used, assert_close_to_oracle(array, exact, low, name, case, dtype=rounded_to))
    return used
