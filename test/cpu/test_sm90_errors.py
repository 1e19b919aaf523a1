# SPDX-License-Identifier: Apache-2.0
"""What the Hopper library says without a GPU: sizes, refusals, and which rule a call broke."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from paddle_fm3 import _native
from paddle_fm3._c_api import BoundForm, BwdParams, DType, FwdParams, MaskView, Shape, Strides

pytestmark = pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so (-DFM3_CUDA=ON)")
OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2
SOMEWHERE = 1 << 20  # an address that no call here reaches


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return _native.sm90_library()


def make_params(**changes: object) -> FwdParams:
    """A legal call of b=1, s=256, h=2, d=128; `changes` overwrite fields of the shape or of the call."""
    shape = Shape(1, 256, 256, 2, 2, 128, 128)
    for name in [name for name in changes if hasattr(shape, name)]:
        setattr(shape, name, changes.pop(name))
    mask = MaskView(None, None, BoundForm.NONE, 1, shape.b, 1, shape.s_q, shape.s_k)
    params = FwdParams(
        shape=shape, dtype=DType.BFLOAT16, softmax_scale=0.1, mask=mask, q=SOMEWHERE, k=SOMEWHERE, v=SOMEWHERE,
        out=SOMEWHERE, lse=SOMEWHERE,
        stride_q=Strides.contiguous(shape.s_q, shape.h_q, shape.d_qk),
        stride_k=Strides.contiguous(shape.s_k, shape.h_kv, shape.d_qk),
        stride_v=Strides.contiguous(shape.s_k, shape.h_kv, shape.d_v),
        stride_out=Strides.contiguous(shape.s_q, shape.h_q, shape.d_v),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(params, name, value)
    return params


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"dtype": DType.FLOAT32}, UNSUPPORTED, "dtype=float32; sm90 serves bfloat16 and float16; the cpu backend"),
        ({"d_qk": 12}, UNSUPPORTED, "d_qk=12, d_v=128; sm90 serves positive multiples of 8"),
        ({"d_v": 264}, UNSUPPORTED, "d_v=264; sm90 serves head dims up to 256"),
        ({"h_kv": 3}, INVALID_ARGUMENT, "h_q=2, h_kv=3; h_kv must divide h_q"),
        ({"q": None}, INVALID_ARGUMENT, "q is nullptr"),
        ({"softmax_scale": float("nan")}, INVALID_ARGUMENT, "softmax_scale"),
        ({"workspace_bytes": -1}, INVALID_ARGUMENT, "workspace_bytes=-1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_name_the_rule(library: ctypes.CDLL, changes: dict, status: int, message: str) -> None:
    params = make_params(**changes)
    assert library.fm3_sm90_fwd(ctypes.byref(params), None) == status
    text = library.fm3_sm90_last_error().decode()
    assert text.startswith("fm3_sm90_fwd: ") and message in text, text


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_without_a_gpu_the_call_says_so(library: ctypes.CDLL) -> None:
    params = make_params()
    assert library.fm3_sm90_fwd(ctypes.byref(params), None) == UNSUPPORTED
    assert "no usable CUDA device" in library.fm3_sm90_last_error().decode()


def test_nothing_to_do_needs_no_gpu(library: ctypes.CDLL) -> None:
    assert library.fm3_sm90_fwd(ctypes.byref(make_params(s_q=0)), None) == OK


def test_a_prepared_schedule_saves_its_bytes_of_workspace(library: ctypes.CDLL) -> None:
    bare, prepared = make_params(), make_params(schedule=SOMEWHERE)
    schedule_bytes = library.fm3_sm90_schedule_bytes(ctypes.byref(bare.mask))
    assert schedule_bytes > 0
    assert library.fm3_sm90_fwd_workspace_bytes(ctypes.byref(bare)) == (
        library.fm3_sm90_fwd_workspace_bytes(ctypes.byref(prepared)) + schedule_bytes
    )


def test_schedule_bytes_stay_small(library: ctypes.CDLL) -> None:
    """One mask head of 128K tokens: 5 MB, whatever the mask: 3.4 for lists of query tiles, 1.7 for lists of pairs."""
    mask = MaskView(None, None, BoundForm.NONE, 1, 1, 1, 131072, 131072)
    assert library.fm3_sm90_schedule_bytes(ctypes.byref(mask)) < 21 << 18  # 5.25 MiB


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_workspace_of_an_unserved_call_is_minus_one(library: ctypes.CDLL, direction: str) -> None:
    params = make_params(d_qk=12)
    if direction == "bwd":
        params = BwdParams(shape=params.shape, dtype=params.dtype, softmax_scale=0.1, mask=params.mask)
    assert getattr(library, f"fm3_sm90_{direction}_workspace_bytes")(ctypes.byref(params)) == -1
    assert "d_qk=12" in library.fm3_sm90_last_error().decode()
