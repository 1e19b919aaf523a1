# SPDX-License-Identifier: Apache-2.0
"""Calls the CPU backend's C ABI on NumPy arrays, without any framework: for tests and benchmarks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3._c_api import BoundForm, BwdParams, DType, FwdParams, MaskView, Shape, Strides
from paddle_fm3._native import cpu_library

DTYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}
_FORMS = {(True, 1): BoundForm.LOWER1, (True, 2): BoundForm.LOWER2, (False, 2): BoundForm.OUTER2}


class NativeError(RuntimeError):
    """A C ABI call returned a status other than 0; the text is the library's own message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


def check(status: int) -> None:
    """Raises NativeError with the library's message unless `status` is 0."""
    if status != 0:
        raise NativeError(status, cpu_library().fm3_cpu_last_error().decode())


@dataclass(frozen=True, eq=False)
class NativeMask:
    """A mask as the C ABI takes it; keeps the arrays alive that `view` points to."""

    bounds: NDArray[np.int32] | None  # [b, h_mask, s_k, n]
    is_causal: bool
    b: int
    h_mask: int
    s_q: int
    s_k: int
    block_mask: NDArray[np.int32] | None = None  # [b, h_mask, ceil(s_q/128), ceil(s_k/128)]

    @classmethod
    def from_bounds(
        cls,
        bounds: NDArray[np.int32],
        is_causal: bool,
        s_q: int,
        block_mask: NDArray[np.int32] | None = None,
    ) -> NativeMask:
        """`bounds`: int32 [b, h_mask, s_k, n] as in paddle.nn.functional.flashmask_attention."""
        bounds = np.ascontiguousarray(bounds, np.int32)
        if block_mask is not None:
            block_mask = np.ascontiguousarray(block_mask, np.int32)
        b, h_mask, s_k, _ = bounds.shape
        return cls(bounds, is_causal, b, h_mask, s_q, s_k, block_mask)

    @classmethod
    def without_bounds(cls, is_causal: bool, b: int, s_q: int, s_k: int) -> NativeMask:
        """Only the causal rule (or nothing) hides."""
        return cls(None, is_causal, b, 1, s_q, s_k)

    @property
    def view(self) -> MaskView:
        return mask_view(self, _address(self.bounds), _address(self.block_mask))


def mask_view(mask: Any, bounds: int | None, block_mask: int | None) -> MaskView:
    """A NativeMask's or GpuMask's fields with the addresses of its two arrays."""
    form = BoundForm.NONE
    if mask.bounds is not None:
        form = _FORMS.get((mask.is_causal, mask.bounds.shape[3]), BoundForm.BOTH4)
    return MaskView(
        bounds=bounds,
        block_mask=block_mask,
        form=form,
        is_causal=int(mask.is_causal),
        b=mask.b,
        h_mask=mask.h_mask,
        s_q=mask.s_q,
        s_k=mask.s_k,
    )


def _address(array: NDArray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _strides(array: NDArray) -> Strides:
    """Element strides of a [b, s, h, d] array whose last axis is contiguous."""
    if array.shape[3] > 1 and array.size > 0 and array.strides[3] != array.itemsize:
        raise ValueError(f"last axis of a {array.shape} array has stride {array.strides[3]} bytes")
    return Strides(*(array.strides[axis] // array.itemsize for axis in range(3)))


def _shape(q: NDArray, k: NDArray, v: NDArray) -> Shape:
    b, s_q, h_q, d_qk = q.shape
    return Shape(b, s_q, k.shape[1], h_q, k.shape[2], d_qk, v.shape[3])


def forward_params(q, k, v, mask: NativeMask, softmax_scale: float, out, lse) -> FwdParams:
    """FwdParams that point at the given arrays, which the caller keeps alive."""
    return FwdParams(
        shape=_shape(q, k, v),
        dtype=DTYPES[q.dtype.name],
        softmax_scale=softmax_scale,
        mask=mask.view,
        q=_address(q),
        k=_address(k),
        v=_address(v),
        out=_address(out),
        lse=_address(lse),
        stride_q=_strides(q),
        stride_k=_strides(k),
        stride_v=_strides(v),
        stride_out=_strides(out),
    )


def backward_params(q, k, v, mask: NativeMask, softmax_scale: float, out, lse, dout, dlse, dq, dk, dv) -> BwdParams:
    """BwdParams that point at the given arrays, which the caller keeps alive."""
    return BwdParams(
        shape=_shape(q, k, v),
        dtype=DTYPES[q.dtype.name],
        softmax_scale=softmax_scale,
        mask=mask.view,
        q=_address(q),
        k=_address(k),
        v=_address(v),
        out=_address(out),
        lse=_address(lse),
        dout=_address(dout),
        dlse=_address(dlse),
        dq=_address(dq),
        dk=_address(dk),
        dv=_address(dv),
        stride_q=_strides(q),
        stride_k=_strides(k),
        stride_v=_strides(v),
        stride_out=_strides(out),
        stride_dout=_strides(dout),
        stride_dq=_strides(dq),
        stride_dk=_strides(dk),
        stride_dv=_strides(dv),
    )


def forward(q, k, v, mask: NativeMask, softmax_scale: float | None = None, out=None):
    """out [b, s_q, h_q, d_v] and lse float32 [b, h_q, s_q] of q, k, v [b, s, h, d].

    Raises:
        NativeError: the library refused the call.
    """
    b, s_q, h_q, d_qk = q.shape
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    if out is None:
        out = np.empty((b, s_q, h_q, v.shape[3]), q.dtype)  # [b, s_q, h_q, d_v]
    lse = np.empty((b, h_q, s_q), np.float32)  # [b, h_q, s_q]
    params = forward_params(q, k, v, mask, scale, out, lse)
    check(cpu_library().fm3_cpu_fwd(ctypes.byref(params)))
    return out, lse


def backward(q, k, v, mask: NativeMask, out, lse, dout, dlse=None, softmax_scale=None, grads=None):
    """dq, dk, dv, each like its input; `grads` gives arrays to write them to.

    Raises:
        NativeError: the library refused the call.
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    dq, dk, dv = grads if grads is not None else (np.empty(x.shape, x.dtype) for x in (q, k, v))
    params = backward_params(q, k, v, mask, scale, out, lse, dout, dlse, dq, dk, dv)
    check(cpu_library().fm3_cpu_bwd(ctypes.byref(params)))
    return dq, dk, dv
