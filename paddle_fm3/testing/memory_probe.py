# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one CPU attention call above its inputs and outputs, measured in a process of its own.

`python -m paddle_fm3.testing.memory_probe fwd float32 65536 64 4096` prints the number of bytes.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]


def peak_extra_bytes(phase: str, dtype: str, *, s: int, d: int, window: int) -> int:
    """Peak resident bytes of "fwd" or "bwd" (b = h = 1, causal window) minus those before the call.

    Inputs and outputs are resident before the call, so what is left is scratch space, thread stacks and the
    schedule. Runs in a fresh process: the peak of a process never falls.
    """
    command = [sys.executable, "-m", "paddle_fm3.testing.memory_probe", phase, dtype, str(s), str(d), str(window)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; memory_probe needs Linux")


def _measure(phase: str, dtype: str, s: int, d: int, window: int) -> int:
    import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy

    from paddle_fm3.testing import native_call

    q, k, v, dout, out, dq, dk, dv = (np.ones((1, s, 1, d), np.float32).astype(dtype) for _ in range(8))
    lse = np.ones((1, 1, s), np.float32)  # written, as zeros would not be resident yet
    lower = np.minimum(np.arange(s) + window, s).astype(np.int32)  # row q sees keys (q - window, q]
    mask = native_call.NativeMask.from_bounds(lower[None, None, :, None], True, s)
    forward = native_call.forward_params(q, k, v, mask, d**-0.5, out, lse)
    backward = native_call.backward_params(q, k, v, mask, d**-0.5, out, lse, dout, lse, dq, dk, dv)
    library = native_call.cpu_library()
    # Pages that earlier temporaries left in the allocator would hide as much scratch space from the count.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status_bytes("VmRSS")
    if phase == "fwd":
        native_call.check(library.fm3_cpu_fwd(forward))
    else:
        native_call.check(library.fm3_cpu_bwd(backward))
    return max(0, _status_bytes("VmHWM") - before)


if __name__ == "__main__":
    print(_measure(sys.argv[1], sys.argv[2], *(int(text) for text in sys.argv[3:6])))
