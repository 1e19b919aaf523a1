# SPDX-License-Identifier: Apache-2.0
"""ColumnMasks from what a training program already has: lengths, position ids, padding, dense tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paddle_fm3.mask import builders
from paddle_fm3.mask.algebra import hidden_runs
from paddle_fm3.mask.column_mask import ColumnMask, holds_integers
from paddle_fm3.mask.encoding import encode_hidden

_MAX_PREDICATE_CALLS = 2**22


def from_document_lengths(documents: builders.Documents, *, is_causal: bool = True, s: int | None = None) -> ColumnMask:
    """Documents packed one after another; see `builders.causal_document` and `builders.document`."""
    builder = builders.causal_document if is_causal else builders.document
    return builder(documents, s=s)


def from_cu_seqlens(
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    is_causal: bool = True,
    s_q: int | None = None,
    s_k: int | None = None,
) -> ColumnMask:
    """The packed ("varlen") format of FlashAttention, b = 1.

    Sequence i owns rows [cu_seqlens_q[i], cu_seqlens_q[i + 1]) and keys likewise (default: the same edges);
    causal is bottom-right aligned inside each. Rows and keys past the last sequence (up to s_q, s_k) see, and
    are seen by, nothing.

    Raises:
        ValueError: not one-dimensional, not ascending from 0, unequal counts, or past s_q / s_k.
    """
    q_edges = _checked_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    k_edges = q_edges if cu_seqlens_k is None else _checked_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    if len(q_edges) != len(k_edges):
        raise ValueError(
            f"from_cu_seqlens: cu_seqlens_q has {len(q_edges)} entries, cu_seqlens_k {len(k_edges)}; they must match"
        )
    s_q = int(q_edges[-1]) if s_q is None else s_q
    s_k = int(k_edges[-1]) if s_k is None else s_k
    for name, edges, s in (("cu_seqlens_q", q_edges, s_q), ("cu_seqlens_k", k_edges, s_k)):
        if edges[-1] > s:
            raise ValueError(f"from_cu_seqlens: {name} ends at {edges[-1]}, past the length {s}")
    num_keys = np.diff(k_edges)
    lt_begin, ut_end = (
        np.zeros(s_k, np.int64),
        np.zeros(s_k, np.int64),
    )  # past the last sequence: hidden from every row
    packed = int(k_edges[-1])
    row_begin, row_end = np.repeat(q_edges[:-1], num_keys), np.repeat(q_edges[1:], num_keys)
    lt_begin[:packed], ut_end[:packed] = row_end, row_begin
    if is_causal:
        key_in_sequence = np.arange(packed) - np.repeat(k_edges[:-1], num_keys)
        first_row = row_begin + key_in_sequence - np.repeat(num_keys - np.diff(q_edges), num_keys)
        ut_end[:packed] = np.clip(first_row, row_begin, row_end)
    bounds = np.stack([lt_begin, ut_end], axis=-1).astype(np.int32)[None, None]
    return _compact(ColumnMask.from_bounds(bounds, is_causal=False, s_q=s_q))


def from_position_ids(position_ids: ArrayLike, *, is_causal: bool = True) -> ColumnMask:
    """Documents from position ids ``[b, s]`` that restart: one begins wherever the position does not grow.

    Raises:
        ValueError: not an integer ``[b, s]``, or a position that jumps ahead by more than one (neither the
            same document nor a restart); the message names the place.
    """
    position = np.asarray(position_ids)
    if position.ndim != 2 or not np.issubdtype(position.dtype, np.integer):
        raise ValueError(
            f"from_position_ids: position_ids is {position.dtype} {position.shape}; expected integers [b, s]"
        )
    step = np.diff(position.astype(np.int64), axis=1)  # [b, s - 1]
    if (step > 1).any():
        b_idx, k_idx = (int(i) for i in np.argwhere(step > 1)[0])
        raise ValueError(
            f"from_position_ids: position_ids[{b_idx}] goes from {position[b_idx, k_idx]} to "
            f"{position[b_idx, k_idx + 1]} at token {k_idx + 1}; a document counts up by one, a new one "
            "restarts lower"
        )
    documents = []
    for b_idx in range(position.shape[0]):
        edges = np.concatenate([[0], np.flatnonzero(step[b_idx] != 1) + 1, [position.shape[1]]])
        documents.append(np.diff(edges).tolist())
    return from_document_lengths(documents, is_causal=is_causal)


def from_padding(
    valid_lengths: Sequence[int],
    s: int,
    *,
    side: str = "right",
    is_causal: bool = True,
    hides_rows: bool = False,
) -> ColumnMask:
    """Sequences of ``valid_lengths[b]`` tokens padded to ``s`` on the "right" or the "left".

    Padded keys are hidden from every row. Padded rows see the valid keys that the causal rule allows (their
    outputs are not used) unless ``hides_rows``, which makes them fully hidden rows: out 0 and no work.
    """
    if side not in ("right", "left"):
        raise ValueError(f"from_padding: side={side!r} must be 'right' or 'left'")
    lengths = np.asarray(valid_lengths).reshape(-1, 1)  # [b, 1]
    if not holds_integers(lengths):
        raise ValueError(f"from_padding: valid_lengths={lengths.ravel().tolist()} must be integers")
    lengths = lengths.astype(np.int64)
    if (lengths < 0).any() or (lengths > s).any():
        raise ValueError(f"from_padding: valid_lengths={lengths.ravel().tolist()} must each be in [0, {s}]")
    begin = np.zeros_like(lengths) if side == "right" else s - lengths
    return _from_valid_range(begin, begin + lengths, s, is_causal=is_causal, hides_rows=hides_rows)


def from_padding_mask(is_valid: ArrayLike, *, is_causal: bool = True, hides_rows: bool = False) -> ColumnMask:
    """A tokenizer's ``attention_mask [b, s]`` (nonzero = a real token); ``hides_rows`` as in `from_padding`.

    Raises:
        ValueError: not two-dimensional; or ``hides_rows`` with real tokens that are not contiguous.
    """
    valid = np.asarray(is_valid) != 0
    if valid.ndim != 2:
        raise ValueError(f"from_padding_mask: shape is {valid.shape}; expected [b, s]")
    s = valid.shape[1]
    if not hides_rows:
        return builders.key_padding(valid, is_causal=is_causal)
    count = valid.sum(axis=1, keepdims=True)  # [b, 1]
    begin = np.where(count > 0, valid.argmax(axis=1, keepdims=True) if s else 0, 0)
    token = np.arange(s)
    is_contiguous = (((token >= begin) & (token < begin + count)) == valid).all(axis=1)  # [b]
    if not is_contiguous.all():
        b_idx = int(np.flatnonzero(~is_contiguous)[0])
        raise ValueError(
            f"from_padding_mask: the real tokens of sample {b_idx} are not contiguous; "
            "pass hides_rows=False, or a dense table to from_dense"
        )
    return _from_valid_range(begin, begin + count, s, is_causal=is_causal, hides_rows=True)


def from_dense(visible: ArrayLike) -> ColumnMask:
    """Exact ColumnMask of a boolean table, True = visible: ``[b, h_mask, s_q, s_k]`` or ``[s_q, s_k]``.

    The causal rule is used when it saves an interval.

    Raises:
        ValueError: not boolean, wrong rank, or a column with more than two hidden intervals; the message
            names the first such column and shows its intervals.
    """
    visible = np.asarray(visible)
    if visible.dtype != np.bool_:
        raise ValueError(
            f"from_dense: dtype is {visible.dtype}; expected bool (True = visible); additive masks: x == 0"
        )
    if visible.ndim == 2:
        visible = visible[None, None]
    if visible.ndim != 4:
        raise ValueError(f"from_dense: shape is {visible.shape}; expected [b, h_mask, s_q, s_k] or [s_q, s_k]")
    s_q = visible.shape[2]
    hidden = hidden_runs(np.moveaxis(~visible, 2, 0))  # [runs, b, h_mask, s_k] each
    bounds, is_causal = encode_hidden(hidden, s_q, prefers_causal=False, who="from_dense")
    return ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q)


def from_predicate(
    predicate: Callable[[int, int, int, int], bool],
    s_q: int,
    s_k: int | None = None,
    *,
    b: int = 1,
    h_mask: int = 1,
) -> ColumnMask:
    """Exact ColumnMask of ``predicate(b_idx, h_idx, q_idx, k_idx) -> visible``, for small sizes.

    The argument order is that of FlexAttention's mask_mod.

    Raises:
        ValueError: more than 2**22 calls would be needed, or the mask is not representable (as `from_dense`).
    """
    s_k = s_q if s_k is None else s_k
    shape = (b, h_mask, s_q, s_k)
    size = int(np.prod(shape, dtype=np.int64))
    if size > _MAX_PREDICATE_CALLS:
        raise ValueError(
            f"from_predicate: {shape} needs {size} calls; the limit is {_MAX_PREDICATE_CALLS}, use a builder"
        )
    table = np.fromiter((bool(predicate(*index)) for index in np.ndindex(shape)), bool, size)
    return from_dense(table.reshape(shape))


def from_block_mask(block_mask: ArrayLike, s_q: int, s_k: int, *, is_causal: bool = False) -> ColumnMask:
    """Full (or causal) attention inside the 128 x 128 tiles that ``block_mask [b, h_mask, q, k]`` keeps."""
    tiles = np.asarray(block_mask)
    if tiles.ndim != 4:
        raise ValueError(f"from_block_mask: shape is {tiles.shape}; expected [b, h_mask, ceil(s_q/128), ceil(s_k/128)]")
    b, h_mask = tiles.shape[:2]
    bounds = np.full((b, h_mask, s_k, 1), s_q, np.int32)
    if not is_causal:
        bounds = np.concatenate([bounds, np.zeros_like(bounds)], axis=-1)
    return ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q, block_mask=tiles)


# --- parts ---------------------------------------------------------------------------------------


def _checked_cu_seqlens(name: str, cu_seqlens: ArrayLike) -> NDArray[np.int64]:
    edges = np.asarray(cu_seqlens)
    if edges.ndim != 1 or len(edges) < 1 or not np.issubdtype(edges.dtype, np.integer):
        raise ValueError(
            f"from_cu_seqlens: {name} is {edges.dtype} {edges.shape}; expected integers [num_sequences + 1]"
        )
    edges = edges.astype(np.int64)
    if edges[0] != 0 or (np.diff(edges) < 0).any():
        raise ValueError(f"from_cu_seqlens: {name}={edges.tolist()} must ascend from 0")
    return edges


def _from_valid_range(
    begin: NDArray[np.int64], end: NDArray[np.int64], s: int, *, is_causal: bool, hides_rows: bool
) -> ColumnMask:
    """begin, end ``[b, 1]``: keys outside are hidden; with `hides_rows`, so are rows outside."""
    token = np.arange(s)
    is_valid = (token >= begin) & (token < end)  # [b, s]
    lt_begin = np.where(is_valid, end if hides_rows else s, 0)
    ut_end = np.where(is_valid & hides_rows, begin, 0)
    if is_causal:
        ut_end = np.where(is_valid, token, 0)
    bounds = np.stack([lt_begin, ut_end], axis=-1).astype(np.int32)[:, None]
    return _compact(ColumnMask.from_bounds(bounds, is_causal=False, s_q=s))


def _compact(mask: ColumnMask) -> ColumnMask:
    """The same mask with the causal rule taken out where that saves a bound."""
    bounds, is_causal = mask.to_bounds()
    return ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=mask.s_q)
