# SPDX-License-Identifier: Apache-2.0
"""Dense float64 attention: the oracle every kernel is compared with, and its low-precision rival.

Written from the definition of the mask format on the raw integers, one (batch, head) plane at a time. It
shares no code with `paddle_fm3.mask`, `paddle_fm3.schedule` or the kernels, on purpose: two derivations of
one meaning must agree.

Contract it fixes (every backend must match):

* A hidden pair contributes nothing, whatever its numbers: NaN and Inf in a key, value, query or output
  gradient never pass through a hidden pair (selection, not addition of a large negative number).
* A row with no visible key has out 0, lse -inf, dq 0, and adds nothing to dk and dv, even if its dout or
  dlse is not finite.
* lse is the natural logarithm of the sum of exp(scale * q.k) over visible keys, `[b, h_q, s_q]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class AttentionResult:
    """Outputs and gradients of one attention call; gradients are None if no dout was given."""

    out: Array  # [b, s_q, h_q, d_v]
    lse: Array  # [b, h_q, s_q]
    dq: Array | None = None  # [b, s_q, h_q, d_qk]
    dk: Array | None = None  # [b, s_k, h_kv, d_qk]
    dv: Array | None = None  # [b, s_k, h_kv, d_v]


def visible_plane(
    bounds: NDArray[np.integer] | None,
    is_causal: bool,
    s_q: int,
    s_k: int,
    block_mask: NDArray[np.integer] | None = None,
) -> NDArray[np.bool_]:
    """Dense ``[s_q, s_k]`` table of visible pairs from one plane ``[s_k, n]`` of startend_row_indices.

    Args:
        bounds: ``[s_k, n]`` or None (nothing hidden but by the causal rule).
        is_causal: key k is visible to row q only if ``k - q <= s_k - s_q``.
        block_mask: ``[ceil(s_q/128), ceil(s_k/128)]``, 0 hides the 128 x 128 tile.
    """
    row = np.arange(s_q, dtype=np.int64)[:, None]  # [s_q, 1]
    key = np.arange(s_k, dtype=np.int64)[None, :]  # [1, s_k]
    visible = np.ones((s_q, s_k), bool)
    if is_causal:
        visible &= key - row <= s_k - s_q
    if bounds is not None:
        bound = [bounds[None, :, n].astype(np.int64) for n in range(bounds.shape[1])]  # each [1, s_k]
        if is_causal and len(bound) == 1:
            visible &= row < bound[0]
        elif is_causal and len(bound) == 2:
            visible &= (row < bound[0]) | (row >= bound[1])
        elif not is_causal and len(bound) == 2:
            visible &= (row < bound[0]) & (row >= bound[1])
        elif not is_causal and len(bound) == 4:
            visible &= (row < bound[0]) | (row >= bound[1])
            visible &= (row < bound[2]) | (row >= bound[3])
        else:
            raise ValueError(f"reference: no mask form with causal={is_causal} and n={len(bound)} bounds")
    if block_mask is not None:
        kept = np.repeat(np.repeat(block_mask != 0, 128, axis=0), 128, axis=1)  # [>= s_q, >= s_k]
        visible &= kept[:s_q, :s_k]
    return visible


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    startend_row_indices: NDArray[np.int32] | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block_mask: NDArray[np.int32] | None = None,
    dout: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
) -> AttentionResult:
    """Exact (float64) attention and, given ``dout``, its gradients.

    Args:
        q: ``[b, s_q, h_q, d_qk]``, any float dtype (the given values are taken as exact).
        k: ``[b, s_k, h_kv, d_qk]`` with h_q a multiple of h_kv.
        v: ``[b, s_k, h_kv, d_v]``.
        startend_row_indices: int32 ``[b, h_mask, s_k, n]`` or None; h_mask divides h_q.
        causal: bottom-right aligned causal rule on top.
        softmax_scale: default ``d_qk ** -0.5``.
        block_mask: int32 ``[b, h_mask, ceil(s_q/128), ceil(s_k/128)]`` or None.
        dout: gradient of out, ``[b, s_q, h_q, d_v]``.
        dlse: gradient of lse, ``[b, h_q, s_q]``; needs dout.
    """
    with np.errstate(all="ignore"):
        return _attention(q, k, v, startend_row_indices, causal, softmax_scale, block_mask, dout, dlse, None)


def low_precision_attention(
    dtype: DTypeLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    startend_row_indices: NDArray[np.int32] | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block_mask: NDArray[np.int32] | None = None,
    dout: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
) -> AttentionResult:
    """The same formula as a framework's unfused operators would evaluate it in ``dtype``.

    Each matrix product accumulates in float32 and is rounded to ``dtype``, as is each elementwise result;
    softmax works in float32 inside and rounds its result. Its error against `attention` is the yardstick
    for kernels. ``dtype`` is float32, float16 or ml_dtypes.bfloat16; results hold values of that dtype
    stored as float64 (lse: float32).
    """
    with np.errstate(all="ignore"):
        return _attention(q, k, v, startend_row_indices, causal, softmax_scale, block_mask, dout, dlse, np.dtype(dtype))


def _attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    startend_row_indices: NDArray[np.int32] | None,
    causal: bool,
    softmax_scale: float | None,
    block_mask: NDArray[np.int32] | None,
    dout: ArrayLike | None,
    dlse: ArrayLike | None,
    dtype: np.dtype | None,
) -> AttentionResult:
    arithmetic = _Arithmetic(dtype)
    q, k, v = (arithmetic.load(tensor) for tensor in (q, k, v))
    b, s_q, h_q, d_qk = q.shape
    s_k, h_kv, d_v = k.shape[1], k.shape[2], v.shape[3]
    if k.shape != (b, s_k, h_kv, d_qk) or v.shape != (b, s_k, h_kv, d_v) or (h_kv and h_q % h_kv):
        raise ValueError(f"reference: q {q.shape}, k {k.shape}, v {v.shape} do not fit together")
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale

    out = np.zeros((b, s_q, h_q, d_v))
    lse = np.full((b, h_q, s_q), -np.inf)
    has_grad = dout is not None
    if has_grad:
        dout = arithmetic.load(dout)  # [b, s_q, h_q, d_v]
        dlse = np.zeros(lse.shape) if dlse is None else np.asarray(dlse, np.float64)  # [b, h_q, s_q]
        dq = np.zeros(q.shape)
        dk, dv = np.zeros(k.shape), np.zeros(v.shape)

    for b_idx, h_idx, visible in _planes(b, h_q, startend_row_indices, causal, s_q, s_k, block_mask):
        h_kv_idx = h_idx // (h_q // h_kv)
        q_plane, k_plane, v_plane = q[b_idx, :, h_idx], k[b_idx, :, h_kv_idx], v[b_idx, :, h_kv_idx]
        score = arithmetic.round(arithmetic.matmul(q_plane, k_plane.T))  # [s_q, s_k]
        score = arithmetic.round(score * arithmetic.dtype.type(scale))
        prob, row_lse = arithmetic.softmax(score, visible)  # [s_q, s_k], [s_q]
        out[b_idx, :, h_idx] = arithmetic.round(arithmetic.selected_matmul(prob, v_plane, visible))
        lse[b_idx, h_idx] = row_lse
        if not has_grad:
            continue
        dout_plane = dout[b_idx, :, h_idx]  # [s_q, d_v]
        dprob = arithmetic.round(arithmetic.matmul(dout_plane, v_plane.T))  # [s_q, s_k]
        dprob = np.where(visible, dprob, 0)
        row_dot = np.where(visible, prob * dprob, 0).sum(axis=1, keepdims=True)  # [s_q, 1]
        dscore = prob * (dprob - row_dot + dlse[b_idx, h_idx][:, None].astype(prob.dtype))
        dscore = arithmetic.round(np.where(visible, dscore, 0))
        dscore = arithmetic.round(dscore * arithmetic.dtype.type(scale))
        dq[b_idx, :, h_idx] = arithmetic.round(arithmetic.selected_matmul(dscore, k_plane, visible))
        dk[b_idx, :, h_kv_idx] += arithmetic.round(arithmetic.selected_matmul(dscore.T, q_plane, visible.T))
        dv[b_idx, :, h_kv_idx] += arithmetic.round(arithmetic.selected_matmul(prob.T, dout_plane, visible.T))
    if not has_grad:
        return AttentionResult(out, lse)
    return AttentionResult(out, lse, dq, *(arithmetic.round(grad) for grad in (dk, dv)))


def _planes(
    b: int,
    h_q: int,
    startend_row_indices: NDArray[np.int32] | None,
    causal: bool,
    s_q: int,
    s_k: int,
    block_mask: NDArray[np.int32] | None,
) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Yields ``(b_idx, h_idx, visible [s_q, s_k])``; the table is rebuilt only when it changes."""
    source = startend_row_indices if startend_row_indices is not None else block_mask
    h_mask = 1 if source is None else source.shape[1]
    for b_idx in range(b):
        last_mask_head, visible = -1, np.empty((0, 0), bool)
        for h_idx in range(h_q):
            h_mask_idx = h_idx // (h_q // h_mask)
            if h_mask_idx != last_mask_head:
                bounds = None if startend_row_indices is None else startend_row_indices[b_idx, h_mask_idx]
                tiles = None if block_mask is None else block_mask[b_idx, h_mask_idx]
                visible = visible_plane(bounds, causal, s_q, s_k, tiles)
                last_mask_head = h_mask_idx
            yield b_idx, h_idx, visible


class _Arithmetic:
    """Float64 when `dtype` is None; else float32 with rounding to `dtype` after each operation."""

    def __init__(self, dtype: np.dtype | None) -> None:
        self.result_dtype = dtype
        self.dtype = np.dtype(np.float64 if dtype is None else np.float32)

    def load(self, tensor: ArrayLike) -> Array:
        tensor = np.asarray(tensor)
        if self.result_dtype is not None:
            tensor = tensor.astype(self.result_dtype)
        return tensor.astype(self.dtype)

    def round(self, value: Array) -> Array:
        """`value` as the low-precision framework would have stored it, back in the working dtype."""
        if self.result_dtype is None:
            return value
        return value.astype(self.result_dtype).astype(self.dtype)

    def matmul(self, left: Array, right: Array) -> Array:
        return np.matmul(left, right)

    def selected_matmul(self, weight: Array, value: Array, visible: NDArray[np.bool_]) -> Array:
        """Sum over visible c of weight[r, c] * value[c]; a hidden pair is left out, not multiplied by 0."""
        is_finite = np.isfinite(value).all(axis=1)  # [columns]
        weight = np.where(visible, weight, 0)
        total = self.matmul(weight, np.where(is_finite[:, None], value, 0))
        for column in np.flatnonzero(~is_finite):
            rows = visible[:, column]
            total[rows] += weight[rows, column, None] * value[column]
        return total

    def softmax(self, score: Array, visible: NDArray[np.bool_]) -> tuple[Array, Array]:
        """Rows' probabilities ``[s_q, s_k]`` and lse ``[s_q]``; 0 and -inf where nothing is visible."""
        score = np.where(visible, score, -np.inf)
        row_max = score.max(axis=1, keepdims=True, initial=-np.inf)  # [s_q, 1]
        is_row_visible = visible.any(axis=1, keepdims=True)
        exponent = np.exp(score - np.where(is_row_visible, row_max, 0))
        row_sum = exponent.sum(axis=1, keepdims=True)
        prob = np.where(visible, exponent / np.where(is_row_visible, row_sum, 1), 0)
        lse = np.where(is_row_visible, row_max + np.log(np.where(is_row_visible, row_sum, 1)), -np.inf)
        return self.round(prob.astype(self.dtype)), lse[:, 0]
