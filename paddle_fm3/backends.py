# SPDX-License-Identifier: Apache-2.0
"""Which backend serves a call, and why another does not: one question, one answer a backend.

The op itself decides by the device of the tensors alone (ops/binding/backend.cc) and never falls back to
another device in silence; this module only explains.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from paddle_fm3 import _c_api, _native

DTYPES = {
    "float32": _c_api.DType.FLOAT32,
    "bfloat16": _c_api.DType.BFLOAT16,
    "float16": _c_api.DType.FLOAT16,
}
DEVICES = {"cpu": "cpu", "sm90": "gpu"}  # backend -> the device whose tensors it takes
DIRECTIONS = ("forward", "backward")
_GPU_OP = "build it for a GPU Paddle: `make build CUDA=ON PADDLE=<its paddle folder>`"


@dataclass(frozen=True)
class AttentionCall:
    """The part of a call that decides which kernels can serve it."""

    device: str = "cpu"  # "cpu" or "gpu"
    dtype: str = "bfloat16"
    d_qk: int = 128
    d_v: int = 128
    h_q: int = 32
    h_kv: int = 32
    s_q: int = 4096
    s_k: int = 4096
    num_bounds: int = 1  # 0, 1, 2 or 4 bounds a key column
    is_causal: bool = True
    is_deterministic: bool = False
    direction: str = "backward"  # a call that trains needs the backward too

    def __post_init__(self) -> None:
        if self.device not in DEVICES.values():
            raise ValueError(f"AttentionCall: device={self.device!r}; expected one of {list(DEVICES.values())}")
        if self.direction not in DIRECTIONS:
            raise ValueError(f"AttentionCall: direction={self.direction!r}; expected one of {list(DIRECTIONS)}")
        for name in ("d_qk", "d_v", "h_q", "h_kv", "s_q", "s_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"AttentionCall: {name}={getattr(self, name)} must be >= 1")
        if self.h_q % self.h_kv:
            raise ValueError(f"AttentionCall: h_kv={self.h_kv} must divide h_q={self.h_q}")
        if (self.is_causal, self.num_bounds) not in _FORMS:
            raise ValueError(
                f"AttentionCall: {self.num_bounds} bounds with is_causal={self.is_causal}; expected 0, 1 or 2 "
                "when causal and 0, 2 or 4 when not"
            )


@dataclass(frozen=True)
class Verdict:
    """Whether one backend serves a call; ``reason`` says why not, or with what it does."""

    backend: str
    serves: bool
    reason: str


_FORMS = {
    (True, 0): _c_api.BoundForm.NONE,
    (False, 0): _c_api.BoundForm.NONE,
    (True, 1): _c_api.BoundForm.LOWER1,
    (True, 2): _c_api.BoundForm.LOWER2,
    (False, 2): _c_api.BoundForm.OUTER2,
    (False, 4): _c_api.BoundForm.BOTH4,
}


def explain(call: AttentionCall) -> list[Verdict]:
    """One verdict a backend; at most one of them serves the call."""
    return [_verdict(backend, call) for backend in DEVICES]


def _verdict(backend: str, call: AttentionCall) -> Verdict:
    def refused(reason: str) -> Verdict:
        return Verdict(backend, False, reason)

    if call.device != DEVICES[backend]:
        return refused(f"takes {DEVICES[backend]} tensors; these are on {call.device}")
    if call.dtype not in DTYPES:
        return refused(f"dtype {call.dtype} is none of {', '.join(DTYPES)}")
    try:
        library = _native.cpu_library() if backend == "cpu" else _native.sm90_library()
    except _native.NativeLibraryError as error:
        return refused(str(error))
    if backend == "sm90" and _native.is_built("fm3_op") and _native.build_info().get("paddle_with_cuda") != "ON":
        built_for = _native.build_info().get("paddle_version")
        return refused(f"libfm3_op.so was built for Paddle {built_for} without GPU; {_GPU_OP}")
    directions = DIRECTIONS if call.direction == "backward" else DIRECTIONS[:1]
    for direction in directions:
        problem = _problem(library, backend, call, direction)
        if problem:
            return refused(f"{direction}: {problem}")
    with_what = f", SIMD target {library.fm3_cpu_simd_target().decode()}" if backend == "cpu" else ""
    return Verdict(backend, True, f"{' and '.join(directions)}{with_what}")


def _problem(library: ctypes.CDLL, backend: str, call: AttentionCall, direction: str) -> str | None:
    """Asks the library itself; a negative workspace size means that it refuses these parameters."""
    params = _c_api.FwdParams() if direction == "forward" else _c_api.BwdParams()
    params.shape = _c_api.Shape(1, call.s_q, call.s_k, call.h_q, call.h_kv, call.d_qk, call.d_v)
    params.dtype = DTYPES[call.dtype]
    params.softmax_scale = call.d_qk**-0.5
    # The size query reads no data: any address stands for bounds that are there.
    placeholder = ctypes.create_string_buffer(16)
    bounds = ctypes.addressof(placeholder) if call.num_bounds else None
    form = _FORMS[call.is_causal, call.num_bounds]
    params.mask = _c_api.MaskView(bounds, None, form, call.is_causal, 1, 1, call.s_q, call.s_k)
    function_name = "fwd" if direction == "forward" else "bwd"
    if direction == "backward":
        params.is_deterministic = call.is_deterministic
    num_bytes = getattr(library, f"fm3_{backend}_{function_name}_workspace_bytes")(ctypes.byref(params))
    return None if num_bytes >= 0 else getattr(library, f"fm3_{backend}_last_error")().decode()
