# SPDX-License-Identifier: Apache-2.0
"""ctypes mirror of ops/include/fm3/{mask,params,schedule}.h and the C ABI of ops/include/fm3/c_api.h.

Used where no framework is wanted: planning, simulation, benchmarks, and machines that have a GPU but no
Paddle. Pointers are plain integers (`array.ctypes.data`, `tensor.data_ptr()`).
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

MAX_RUNS = 4  # fm3::kMaxRuns


class BoundForm(IntEnum):
    NONE = 0
    LOWER1 = 1
    LOWER2 = 2
    OUTER2 = 3
    BOTH4 = 4


class DType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class _Struct(ctypes.Structure):
    """A C struct whose fields default to zero and can be printed."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name, _ in self._fields_)
        return f"{type(self).__name__}({fields})"


class MaskView(_Struct):
    _fields_ = [
        ("bounds", ctypes.c_void_p),  # int32 [b, h_mask, s_k, num_bounds(form)]
        ("block_mask", ctypes.c_void_p),  # int32 [b, h_mask, ceil(s_q/128), ceil(s_k/128)] or None
        ("form", ctypes.c_int32),
        ("is_causal", ctypes.c_int32),
        ("b", ctypes.c_int32),
        ("h_mask", ctypes.c_int32),
        ("s_q", ctypes.c_int32),
        ("s_k", ctypes.c_int32),
    ]


class Strides(_Struct):
    _fields_ = [("b", ctypes.c_int64), ("s", ctypes.c_int64), ("h", ctypes.c_int64)]

    @classmethod
    def contiguous(cls, s: int, h: int, d: int) -> Strides:
        """Element strides of a contiguous [b, s, h, d] tensor."""
        return cls(s * h * d, h * d, d)


class Shape(_Struct):
    _fields_ = [(name, ctypes.c_int32) for name in ("b", "s_q", "s_k", "h_q", "h_kv", "d_qk", "d_v")]


class FwdParams(_Struct):
    _fields_ = [
        ("shape", Shape),
        ("dtype", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("mask", MaskView),
        ("schedule", ctypes.c_void_p),
        ("q", ctypes.c_void_p),  # [b, s_q, h_q, d_qk]
        ("k", ctypes.c_void_p),  # [b, s_k, h_kv, d_qk]
        ("v", ctypes.c_void_p),  # [b, s_k, h_kv, d_v]
        ("out", ctypes.c_void_p),  # [b, s_q, h_q, d_v]
        ("lse", ctypes.c_void_p),  # float32 [b, h_q, s_q]
        ("stride_q", Strides),
        ("stride_k", Strides),
        ("stride_v", Strides),
        ("stride_out", Strides),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("ready_rows", ctypes.c_void_p),  # uint32 word, or None
        ("ready_status", ctypes.c_void_p),  # uint32 word
        ("ready_timeout_us", ctypes.c_int64),
        ("tile_counter", ctypes.c_void_p),  # sm90: int32 word that is 0 when the kernel starts, or None
    ]


class BwdSchedule(_Struct):
    """What the sm90 backward needs to know of a mask, prepared once: device memory that `build_bwd_schedule` fills, and
    the mask it is for. Calls point to it, so it must outlive them."""

    _fields_ = [("mask", MaskView), ("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class BwdParams(_Struct):
    _fields_ = [
        ("shape", Shape),
        ("dtype", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("is_deterministic", ctypes.c_int32),
        ("mask", MaskView),
        ("schedule", ctypes.c_void_p),
        ("q", ctypes.c_void_p),  # [b, s_q, h_q, d_qk]
        ("k", ctypes.c_void_p),  # [b, s_k, h_kv, d_qk]
        ("v", ctypes.c_void_p),  # [b, s_k, h_kv, d_v]
        ("out", ctypes.c_void_p),  # [b, s_q, h_q, d_v]
        ("lse", ctypes.c_void_p),  # float32 [b, h_q, s_q]
        ("dout", ctypes.c_void_p),  # [b, s_q, h_q, d_v]
        ("dlse", ctypes.c_void_p),  # float32 [b, h_q, s_q] or None
        ("dq", ctypes.c_void_p),  # [b, s_q, h_q, d_qk]
        ("dk", ctypes.c_void_p),  # [b, s_k, h_kv, d_qk]
        ("dv", ctypes.c_void_p),  # [b, s_k, h_kv, d_v]
        ("stride_q", Strides),
        ("stride_k", Strides),
        ("stride_v", Strides),
        ("stride_out", Strides),
        ("stride_dout", Strides),
        ("stride_dq", Strides),
        ("stride_dk", Strides),
        ("stride_dv", Strides),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("keys_ready", ctypes.c_void_p),  # sm90: event before which k and v are not read, or None
        ("bwd_schedule", ctypes.c_void_p),  # sm90: address of a BwdSchedule prepared for `mask`, or None
        # sm90: rows [remote_begin, s_k) of k and v are in as *ready_rows says (None: all are), and those of dk and dv
        # are written once *sent_word is sent_value (None: nobody asks)
        ("remote_begin", ctypes.c_int32),
        ("sent_value", ctypes.c_uint32),
        ("ready_rows", ctypes.c_void_p),
        ("ready_status", ctypes.c_void_p),
        ("ready_timeout_us", ctypes.c_int64),
        ("sent_word", ctypes.c_void_p),
        ("sent_lead_us", ctypes.c_int64),
        ("zero_sums", ctypes.c_int32),  # sm90: of the workspace; 0: cleared, 1: and left as zeros, 2: zeros already
    ]


class RowRun(_Struct):
    _fields_ = [("begin", ctypes.c_int32), ("end", ctypes.c_int32)]


class KeyTileSummary(_Struct):
    _fields_ = [("hidden_runs", RowRun * MAX_RUNS), ("clear_runs", RowRun * MAX_RUNS)]


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    MaskView, Strides, Shape, FwdParams, BwdParams, BwdSchedule, RowRun, KeyTileSummary,
)  # fmt: skip


def misfits(library: ctypes.CDLL, prefix: str, structs: tuple[type[ctypes.Structure], ...]) -> str:
    """How the library's structs differ from these; "" if they do not. `prefix` is "fm3_cpu", "fm3_sm90" or "fm3_op"."""
    ask = getattr(library, f"{prefix}_struct_bytes", None)
    if ask is None:
        return f"it has no {prefix}_struct_bytes, which every build of this version has"
    ask.restype, ask.argtypes = ctypes.c_int64, [ctypes.c_char_p]
    sizes = [(struct.__name__, ask(struct.__name__.encode()), ctypes.sizeof(struct)) for struct in structs]
    return ", ".join(
        f"{name} has {'no' if there < 0 else there} bytes there and {here} here" for name, there, here in sizes
        if there != here
    )  # fmt: skip


def declare(library: ctypes.CDLL, backend: str) -> ctypes.CDLL:
    """Sets argument and result types of the backend's functions. `backend` is "cpu" or "sm90"."""
    pointer = ctypes.c_void_p
    stream = [] if backend == "cpu" else [pointer]
    signatures = {
        "fwd": (ctypes.c_int32, [ctypes.POINTER(FwdParams), *stream]),
        "bwd": (ctypes.c_int32, [ctypes.POINTER(BwdParams), *stream]),
        "fwd_workspace_bytes": (ctypes.c_int64, [ctypes.POINTER(FwdParams)]),
        "bwd_workspace_bytes": (ctypes.c_int64, [ctypes.POINTER(BwdParams)]),
        "last_error": (ctypes.c_char_p, []),
    }
    if backend == "cpu":
        signatures["build_schedule"] = (ctypes.c_int32, [ctypes.POINTER(MaskView), ctypes.c_int32, pointer])
        signatures["set_num_threads"] = (None, [ctypes.c_int32])
        signatures["simd_target"] = (ctypes.c_char_p, [])
        signatures["set_simd_target"] = (ctypes.c_int32, [ctypes.c_char_p])
    else:
        signatures["schedule_bytes"] = (ctypes.c_int64, [ctypes.POINTER(MaskView)])
        signatures["build_schedule"] = (ctypes.c_int32, [ctypes.POINTER(MaskView), pointer, pointer])
        signatures["bwd_schedule_bytes"] = (ctypes.c_int64, [ctypes.POINTER(MaskView)])
        signatures["build_bwd_schedule"] = (ctypes.c_int32, [ctypes.POINTER(BwdSchedule), pointer])
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"fm3_{backend}_{name}")
        function.restype, function.argtypes = result, arguments
    return library
