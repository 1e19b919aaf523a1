# SPDX-License-Identifier: Apache-2.0
"""One attention call over some rows of a key buffer, on CPU memory: kernels through the C ABI, merges in float32.

16-bit floats: float16 arrays are NumPy's; bfloat16, which NumPy lacks, is carried as uint16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_fm3._c_api import BoundForm, BwdParams, DType, FwdParams, MaskView, Shape, Strides
from paddle_fm3._native import cpu_library
from paddle_fm3.mask.column_mask import ColumnMask

Array = NDArray[Any]
Float32Array = NDArray[np.float32]
# name of a dtype -> (of the kernels, of the arrays that carry it)
_DTYPES = {
    "float32": (DType.FLOAT32, np.float32),
    "bfloat16": (DType.BFLOAT16, np.uint16),
    "float16": (DType.FLOAT16, np.float16),
}
_KERNEL_DTYPES = {np.dtype(carrier): dtype for dtype, carrier in _DTYPES.values()}


def carrier_of(dtype: str) -> np.dtype:
    """The NumPy dtype that carries "float32", "bfloat16" or "float16"."""
    return np.dtype(_DTYPES[dtype][1])


def view_of(x: paddle.Tensor) -> Array:
    """The memory of a dense CPU tensor, not a copy; the tensor must outlive it."""
    carrier = np.float32 if x.dtype == paddle.float32 else carrier_of(str(x.dtype).removeprefix("paddle."))
    if x.size == 0:
        return np.empty(x.shape, carrier)
    raw = (ctypes.c_uint8 * (x.size * np.dtype(carrier).itemsize)).from_address(x.data_ptr())
    return np.frombuffer(raw, carrier).reshape(x.shape)


def to_float32(x: Array) -> Float32Array:
    """x itself if it is float32."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def from_float32(x: Float32Array, carrier: np.dtype) -> Array:
    """Rounded to nearest, ties to even."""
    if carrier != np.uint16:
        return x.astype(carrier, copy=False)
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


class StepMask:
    """The mask of one step as the C ABI takes it; keeps alive what `view` points to."""

    def __init__(self, mask: ColumnMask) -> None:
        bounds = [mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end]
        self._bounds = np.ascontiguousarray(np.stack(bounds, axis=-1), np.int32)  # [b, h_mask, s_k, 4]
        self._block_mask = None if mask.block_mask is None else np.ascontiguousarray(mask.block_mask, np.int32)
        b, h_mask, s_k, _ = self._bounds.shape
        self.view = MaskView(
            bounds=self._bounds.ctypes.data,
            block_mask=None if self._block_mask is None else self._block_mask.ctypes.data,
            form=BoundForm.BOTH4,
            is_causal=0,
            b=b,
            h_mask=h_mask,
            s_q=mask.s_q,
            s_k=s_k,
        )


def forward(q: Array, k: Array, v: Array, mask: StepMask, scale: float) -> tuple[Array, Float32Array]:
    """out [b, s_q, h_q, d_v] and lse [b, h_q, s_q] over the step's keys.

    Raises:
        RuntimeError: the kernel refused the call; its own message.
    """
    b, s_q, h_q, _ = q.shape
    out = np.empty((b, s_q, h_q, v.shape[3]), q.dtype)  # [b, s_q, h_q, d_v]
    lse = np.empty((b, h_q, s_q), np.float32)  # [b, h_q, s_q]
    params = FwdParams(
        shape=_shape(q, k, v), dtype=_KERNEL_DTYPES[q.dtype], softmax_scale=scale, mask=mask.view,
        lse=lse.ctypes.data, **_pointers(q=q, k=k, v=v, out=out),
    )  # fmt: skip
    _check(cpu_library().fm3_cpu_fwd(ctypes.byref(params)))
    return out, lse


def backward(
    q: Array, k: Array, v: Array, mask: StepMask, scale: float, out: Array, lse: Float32Array, dout: Array,
    dlse: Float32Array, dk: Array, dv: Array,
) -> Array:  # fmt: skip
    """The step's part of dq; writes dk and dv of its keys. out and lse are those over all keys.

    Raises:
        RuntimeError: the kernel refused the call; its own message.
    """
    dq = np.empty(q.shape, q.dtype)  # [b, s_q, h_q, d_qk]
    params = BwdParams(
        shape=_shape(q, k, v), dtype=_KERNEL_DTYPES[q.dtype], softmax_scale=scale, is_deterministic=1, mask=mask.view,
        lse=lse.ctypes.data, dlse=dlse.ctypes.data,
        **_pointers(q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv),
    )  # fmt: skip
    _check(cpu_library().fm3_cpu_bwd(ctypes.byref(params)))
    return dq


def merge(out: Float32Array, lse: Float32Array, part: Float32Array, part_lse: Float32Array) -> None:
    """out [b, s, h, d] and lse [b, h, s] become those of both sets of keys together, in place."""
    top = np.maximum(lse, part_lse)  # [b, h, s]
    safe = np.where(np.isneginf(top), np.float32(0), top)  # both empty: exp(-inf - 0) = 0, never exp(-inf + inf)
    weight, part_weight = np.exp(lse - safe), np.exp(part_lse - safe)
    total = weight + part_weight
    divisor = np.where(total > 0, total, np.float32(1))
    out *= (weight / divisor).swapaxes(1, 2)[..., None]  # [b, s, h, 1]
    out += part * (part_weight / divisor).swapaxes(1, 2)[..., None]
    with np.errstate(divide="ignore"):
        lse[...] = safe + np.log(total)


def _shape(q: Array, k: Array, v: Array) -> Shape:
    b, s_q, h_q, d_qk = q.shape
    return Shape(b, s_q, k.shape[1], h_q, k.shape[2], d_qk, v.shape[3])


def _pointers(**arrays: Array) -> dict[str, Any]:
    """Address and strides of [b, s, h, d] arrays, as the parameter structs name them."""
    fields: dict[str, Any] = {name: array.ctypes.data for name, array in arrays.items()}
    for name, array in arrays.items():
        fields[f"stride_{name}"] = Strides(*(array.strides[axis] // array.itemsize for axis in range(3)))
    return fields


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"flashmask_cp_attention: {cpu_library().fm3_cpu_last_error().decode()}")
