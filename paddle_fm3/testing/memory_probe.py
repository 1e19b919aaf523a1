# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one CPU attention call above its inputs and outputs, measured in a process of its own.

`python -m paddle_fm3.testing.memory_probe fwd float32 65536 64 4096` prints the number of bytes and a verdict.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]


def probe(phase: str, dtype: str, *, s: int, d: int, window: int) -> tuple[int, bool]:
    """(peak resident bytes of "fwd" or "bwd" above those before the call, whether its result is right).

    b = h = 1, causal window. Inputs and outputs are resident before the call, so what is left is scratch space,
    thread stacks and the schedule. Runs in a fresh process: the peak of a process never falls.
    """
    command = [sys.executable, "-m", "paddle_fm3.testing.memory_probe", phase, dtype, str(s), str(d), str(window)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    peak, verdict = done.stdout.split()[-2:]
    return int(peak), verdict == "right"


def peak_extra_bytes(phase: str, dtype: str, *, s: int, d: int, window: int) -> int:
    """The first part of `probe`.

    Raises:
        RuntimeError: the call's result is wrong, so its memory means nothing.
    """
    peak, is_right = probe(phase, dtype, s=s, d=d, window=window)
    if not is_right:
        raise RuntimeError(f"memory_probe: {phase} {dtype} s={s} d={d} window={window} gave a wrong result")
    return peak


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; memory_probe needs Linux")


def _measure(phase: str, dtype: str, s: int, d: int, window: int) -> tuple[int, bool]:
    import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy

    from paddle_fm3.testing import native_call

    # Every tensor is ones: out is ones, lse is log(visible keys) + sqrt(d), dq and dk are 0, dv sums to s.
    q, k, v, dout, out, dq, dk, dv = (np.ones((1, s, 1, d), np.float32).astype(dtype) for _ in range(8))
    exact_lse = np.log(np.minimum(np.arange(s) + 1, window)) + d**0.5
    lse = np.ones((1, 1, s), np.float32) * exact_lse.astype(np.float32)
    lower = np.minimum(np.arange(s) + window, s).astype(np.int32)  # row q sees keys (q - window, q]
    mask = native_call.NativeMask.from_bounds(lower[None, None, :, None], True, s)
    forward = native_call.forward_params(q, k, v, mask, d**-0.5, out, lse)
    backward = native_call.backward_params(q, k, v, mask, d**-0.5, out, lse, dout, None, dq, dk, dv)
    if phase == "fwd":
        out[...], lse[...] = 7, 7
    library = native_call.cpu_library()
    # Pages that earlier temporaries left in the allocator would hide as much scratch space from the count.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status_bytes("VmRSS")
    if phase == "fwd":
        native_call.check(library.fm3_cpu_fwd(forward))
    else:
        native_call.check(library.fm3_cpu_bwd(backward))
    peak = max(0, _status_bytes("VmHWM") - before)
    if phase == "fwd":
        largest = np.abs(out.astype(np.float32) - 1).max() + np.abs(lse[0, 0] - exact_lse).max()
    else:
        grads = (x.astype(np.float32) for x in (dq, dk))
        largest = max(np.abs(x).max() for x in grads) + np.abs(dv.astype(np.float64).mean() - 1)
    return peak, bool(largest < 1e-2)


if __name__ == "__main__":
    peak_bytes, is_result_right = _measure(sys.argv[1], sys.argv[2], *(int(text) for text in sys.argv[3:6]))
    print(peak_bytes, "right" if is_result_right else "wrong")
