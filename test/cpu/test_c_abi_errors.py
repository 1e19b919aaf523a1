# SPDX-License-Identifier: Apache-2.0
"""Parameters that break the contract are refused with a sentence that names the value and the rule."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from paddle_fm3._c_api import BwdParams, FwdParams
from paddle_fm3._native import cpu_library
from paddle_fm3.testing import native_call
from paddle_fm3.testing.native_call import NativeError, NativeMask

INVALID, UNSUPPORTED = 1, 2


def _arrays():
    q = np.zeros((2, 5, 4, 8), np.float32)
    k, v = np.zeros((2, 7, 2, 8), np.float32), np.zeros((2, 7, 2, 6), np.float32)
    out, lse = np.zeros((2, 5, 4, 6), np.float32), np.zeros((2, 4, 5), np.float32)
    return q, k, v, out, lse


def _forward_params():
    arrays = _arrays()
    bounds = np.zeros((2, 1, 7, 2), np.int32)
    mask = NativeMask.from_bounds(bounds, True, 5)
    params = native_call.forward_params(*arrays[:3], mask, 0.5, *arrays[3:])
    return params, (arrays, mask)


def _backward_params():
    q, k, v, out, lse = arrays = _arrays()
    grads = tuple(np.zeros_like(x) for x in (q, k, v))
    mask = NativeMask.without_bounds(False, 2, 5, 7)
    params = native_call.backward_params(q, k, v, mask, 0.5, out, lse, out, None, *grads)
    return params, (arrays, grads, mask)


BAD_VALUES = [
    ("shape.h_kv", 3, "h_q=4, h_kv=3; h_kv must divide h_q"),
    ("shape.h_kv", 0, "h_q=4, h_kv=0; h_kv must divide h_q"),
    ("shape.s_k", -1, "s_k=-1; a size must be >= 0"),
    ("shape.s_q", 2**31 - 1, "s_q=2147483647, s_k=7; a length must be <= 2147483519"),
    ("shape.d_v", 2**20 + 1, "d_qk=8, d_v=1048577; a head dimension must be <= 1048576"),
    ("shape.d_v", -6, "d_v=-6; a size must be >= 0"),
    ("dtype", 3, "dtype=3; must be 0 (float32), 1 (bfloat16) or 2 (float16)"),
    ("softmax_scale", float("nan"), "softmax_scale=nan; must be finite"),
    ("mask.b", 1, "mask.b=1; the tensors have b=2"),
    ("mask.s_q", 6, "mask.s_q=6; q has s_q=5"),
    ("mask.s_k", 8, "mask.s_k=8; k has s_k=7"),
    ("mask.h_mask", 3, "mask.h_mask=3; must be 1, h_kv=2 or h_q=4"),
    ("mask.form", 9, "mask.form=9; must be 0 (none) to 4 (both intervals)"),
    ("mask.is_causal", 2, "mask.is_causal=2; must be 0 or 1"),
    ("q", None, "q is nullptr but has 2x5x4x8 elements"),
    ("v", None, "v is nullptr but has 2x7x2x6 elements"),
    ("lse", None, "lse is nullptr; it must hold [b, h_q, s_q]=[2, 4, 5] float32"),
    ("workspace_bytes", -1, "workspace_bytes=-1; must be >= 0"),
]
NO_WAY_TO_GIVE_UP = "ready_rows is set with ready_timeout_us=0 and ready_status=nullptr"
FORWARD_ONLY = [
    ("ready_rows", 64, f"{NO_WAY_TO_GIVE_UP}; it needs a positive time and a ready_status word"),
    ("mask.bounds", None, "mask.bounds is nullptr; mask.form=2 needs 2 bounds a key column"),
    ("out", None, "out is nullptr but has 2x5x4x6 elements"),
    ("stride_out.s", 5, "stride_out.s=5 elements; an output's rows of 6 elements would overlap"),
]
BACKWARD_ONLY = [
    ("dout", None, "dout is nullptr but has 2x5x4x6 elements"),
    ("dq", None, "dq is nullptr but has 2x5x4x8 elements"),
    ("stride_dk.h", 0, "stride_dk.h=0 elements; an output's rows of 8 elements would overlap"),
    ("mask.bounds", 64, "mask.bounds is set but mask.form=0 (none) reads no bounds"),
    ("sent_word", 64, "sent_word is set; the cpu backend sets none: its gradients are written on return"),
    ("ready_rows", 64, f"{NO_WAY_TO_GIVE_UP}; it needs a positive time and a ready_status word"),
]


def _set(params, path: str, value) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        params = getattr(params, parent)
    setattr(params, name, value)


@pytest.mark.parametrize(("path", "value", "message"), BAD_VALUES + FORWARD_ONLY)
def test_forward_refuses(path, value, message):
    params, keep_alive = _forward_params()
    native_call.check(cpu_library().fm3_cpu_fwd(ctypes.byref(params)))
    _set(params, path, value)
    with pytest.raises(NativeError) as caught:
        native_call.check(cpu_library().fm3_cpu_fwd(ctypes.byref(params)))
    assert caught.value.status == INVALID
    assert caught.value.message == f"fm3_cpu_fwd: {message}"
    del keep_alive


@pytest.mark.parametrize(("path", "value", "message"), BAD_VALUES + BACKWARD_ONLY)
def test_backward_refuses(path, value, message):
    params, keep_alive = _backward_params()
    native_call.check(cpu_library().fm3_cpu_bwd(ctypes.byref(params)))
    _set(params, path, value)
    with pytest.raises(NativeError) as caught:
        native_call.check(cpu_library().fm3_cpu_bwd(ctypes.byref(params)))
    assert caught.value.status == INVALID
    assert caught.value.message == f"fm3_cpu_bwd: {message}"
    del keep_alive


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_keys_on_their_way_are_refused(direction):
    params, keep_alive = _forward_params() if direction == "fwd" else _backward_params()
    params.ready_rows, params.ready_status, params.ready_timeout_us = 64, 64, 1
    with pytest.raises(NativeError) as caught:
        native_call.check(getattr(cpu_library(), f"fm3_cpu_{direction}")(ctypes.byref(params)))
    assert caught.value.message == f"fm3_cpu_{direction}: ready_rows is set; the cpu backend takes keys that are all in"
    del keep_alive


def test_null_parameters_are_refused():
    library = cpu_library()
    assert library.fm3_cpu_fwd(None) == INVALID
    assert library.fm3_cpu_last_error() == b"fm3_cpu_fwd: params is nullptr"
    assert library.fm3_cpu_bwd(None) == INVALID
    assert library.fm3_cpu_build_schedule(None, 128, None) == INVALID


def test_schedule_arguments_are_checked():
    library = cpu_library()
    mask = NativeMask.without_bounds(True, 1, 4, 4)
    view = mask.view
    assert library.fm3_cpu_build_schedule(ctypes.byref(view), 0, 64) == INVALID
    assert library.fm3_cpu_last_error() == b"fm3_cpu_build_schedule: block_k=0; must be >= 1"
    assert library.fm3_cpu_build_schedule(ctypes.byref(view), 128, None) == INVALID
    assert library.fm3_cpu_last_error() == b"fm3_cpu_build_schedule: summaries is nullptr"


def test_unknown_simd_target_is_named():
    library = cpu_library()
    before = library.fm3_cpu_simd_target()
    assert library.fm3_cpu_set_simd_target(b"avx1024") == UNSUPPORTED
    assert b'target="avx1024"' in library.fm3_cpu_last_error()
    assert library.fm3_cpu_simd_target() == before


def test_out_of_memory_is_a_status_not_a_crash():
    """A legal head dimension whose scratch does not fit into what the process may have; tensors stay untouched."""
    params, keep_alive = _forward_params()
    params.shape.d_qk = params.stride_q.s = params.stride_k.s = 2**20
    library = cpu_library()
    pid = os.fork()
    if pid == 0:
        is_right = False
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = pages * resource.getpagesize() + 2**28
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            status = library.fm3_cpu_fwd(ctypes.byref(params))
            is_right = status == 3 and library.fm3_cpu_last_error() == b"fm3_cpu_fwd: out of memory for scratch space"
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    del keep_alive


def test_no_workspace_is_needed():
    for params_type, name in ((FwdParams, "fwd"), (BwdParams, "bwd")):
        assert getattr(cpu_library(), f"fm3_cpu_{name}_workspace_bytes")(ctypes.byref(params_type())) == 0
