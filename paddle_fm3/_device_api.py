# SPDX-License-Identifier: Apache-2.0
"""ctypes mirror of ops/include/fm3/{rows,device_api}.h: what context parallelism on GPUs calls in libfm3_sm90.so."""

from __future__ import annotations

import ctypes

from paddle_fm3._c_api import MaskView, Strides, _Struct

MAX_PARTS = 48  # fm3::kMaxParts
MOST_BEGIN_WORDS, MOST_READY_WORDS = 3, 8  # fm3::kMostBeginWords, kMostReadyWords
MOST_KEY_ENDS = 8  # fm3::kMostKeyEnds
IPC_HANDLE_BYTES = 64  # fm3::kIpcHandleBytes
MAX_CHECKED_OUTPUTS = 3  # fm3::kMaxCheckedOutputs
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class SumPartsParams(_Struct):
    _fields_ = [
        ("dtype", _INT32),
        ("num_parts", _INT32),
        ("num_elems", _INT64),
        ("parts", _POINTER * MAX_PARTS),
        ("out", _POINTER),
    ]


class SumRowsParams(_Struct):
    _fields_ = [
        ("dtype", _INT32),
        ("is_out_float32", _INT32),
        ("b", _INT32),
        ("num_rows", _INT32),
        ("row_elems", _INT32),
        ("rows", _POINTER),  # int32 [num_rows, 4]: out, part, entry_begin, entry_end
        ("entries", _POINTER),  # int32
        ("part", _POINTER),
        ("narrow", _POINTER),
        ("wide", _POINTER),
        ("out", _POINTER),
        ("part_stride_b", _INT64),
        ("narrow_stride_b", _INT64),
        ("wide_stride_b", _INT64),
        ("out_stride_b", _INT64),
    ]


class PackParams(_Struct):
    _fields_ = [
        ("b", _INT32),
        ("s", _INT32),
        ("h", _INT32),
        ("d", _INT32),
        ("from_", _POINTER),  # `from` in C
        ("stride_from", Strides),
        ("to", _POINTER),
        ("to_stride_b", _INT64),
    ]


class PackWords(_Struct):
    _fields_ = [
        ("begins", _POINTER * MOST_BEGIN_WORDS),  # uint32 words, or None
        ("begin_values", ctypes.c_uint32 * MOST_BEGIN_WORDS),
        ("num_ready", _INT32),
        ("ready_value", ctypes.c_uint32),
        ("ready", _POINTER * MOST_READY_WORDS),
        ("num_done", _POINTER),
    ]


class LocalFirst(_Struct):
    _fields_ = [
        ("num_ends", _INT32),
        ("num_cols", _INT32),
        ("k_ends", _INT32 * MOST_KEY_ENDS),
    ]


class MergeParams(_Struct):
    _fields_ = [
        ("dtype", _INT32),
        ("num_parts", _INT32),
        ("b", _INT32),
        ("s_q", _INT32),
        ("h_q", _INT32),
        ("d_v", _INT32),
        ("parts", _POINTER * MAX_PARTS),
        ("lses", _POINTER * MAX_PARTS),
        ("out", _POINTER),
        ("stride_out", Strides),
        ("lse", _POINTER),
    ]


class CheckSameParams(_Struct):
    _fields_ = [
        ("sizes", _INT32 * 4),
        ("num_outputs", _INT32),
        ("given", _POINTER),
        ("stride_given", _INT64 * 4),
        ("kept", _POINTER),
        ("failed", _POINTER),
        ("claim", _POINTER),
        ("word", _POINTER),
        ("number", ctypes.c_uint32),
        ("outputs", _POINTER * MAX_CHECKED_OUTPUTS),
        ("output_bytes", _INT64 * MAX_CHECKED_OUTPUTS),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    SumPartsParams, SumRowsParams, PackParams, PackWords, LocalFirst, MergeParams, CheckSameParams,
)  # fmt: skip
_OUT = ctypes.POINTER(ctypes.c_void_p)
SIGNATURES: dict[str, list[type]] = {
    "sum_parts": [ctypes.POINTER(SumPartsParams), _POINTER],
    "sum_rows": [ctypes.POINTER(SumRowsParams), _INT32, _POINTER],
    "pack": [ctypes.POINTER(PackParams), _INT32, ctypes.POINTER(PackWords), _POINTER],
    "merge": [ctypes.POINTER(MergeParams), _POINTER],
    "check_same": [ctypes.POINTER(CheckSameParams), _POINTER],
    "order_local_first": [ctypes.POINTER(MaskView), _POINTER, ctypes.POINTER(LocalFirst), _POINTER],
    "reserve_sms": [_INT32],
    "device_name": [ctypes.c_char_p, _INT64],
    "malloc": [_INT64, _OUT],
    "free": [_POINTER],
    "host_register": [_POINTER, _INT64, _OUT],
    "host_unregister": [_POINTER],
    "ipc_export": [_POINTER, _POINTER],
    "ipc_open": [_POINTER, _OUT],
    "ipc_close": [_POINTER],
    "stream_create": [_OUT],
    "stream_destroy": [_POINTER],
    "stream_is_done": [_POINTER, ctypes.POINTER(_INT32)],
    "event_create": [_INT32, _OUT],
    "event_destroy": [_POINTER],
    "event_record": [_POINTER, _POINTER],
    "event_wait": [_POINTER, _POINTER],
    "event_elapsed": [_POINTER, _POINTER, ctypes.POINTER(ctypes.c_float)],
    "copy": [_POINTER, _POINTER, _POINTER, _INT64, _POINTER],
    "write_word": [_POINTER, _POINTER, ctypes.c_uint32],
    "wait_word": [_POINTER, _POINTER, ctypes.c_uint32],
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Sets argument and result types of the functions of device_api.h; all return fm3::Status."""
    for name, arguments in SIGNATURES.items():
        function = getattr(library, f"fm3_sm90_{name}")
        function.restype, function.argtypes = _INT32, arguments
    return library
