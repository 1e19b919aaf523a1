# SPDX-License-Identifier: Apache-2.0
"""Masks made from masks. Exact, or an error that names the column which two intervals cannot carry."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask import intervals
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask
from paddle_fm3.mask.encoding import encode_hidden


def intersect(*masks: ColumnMask) -> ColumnMask:
    """Visible where every mask is: for example a document mask and a window, or a mask and key padding.

    b of 1 is repeated; so are mask heads, if the smaller h_mask divides the larger. block_masks are combined
    tile by tile and stay a block_mask (see `without_block_mask`).

    Raises:
        ValueError: no mask, unequal sizes, or a column that would need more than two intervals (or the causal
            rule and more than one); the message names the column and the rows it hides.
    """
    if not masks:
        raise ValueError("intersect: needs at least one mask")
    s_q, s_k = masks[0].s_q, masks[0].s_k
    for mask in masks[1:]:
        if (mask.s_q, mask.s_k) != (s_q, s_k):
            raise ValueError(f"intersect: {mask!r} and {masks[0]!r} differ in s_q or s_k")
    b = _common("b", [mask.b for mask in masks], divides=False)
    h_mask = _common("h_mask", [mask.h_mask for mask in masks], divides=True)
    expanded = [expand(mask, b=b, h_mask=h_mask) for mask in masks]
    hidden = [mask.hidden_intervals() for mask in expanded]
    family = np.concatenate([begin for begin, _ in hidden]), np.concatenate([end for _, end in hidden])
    prefers_causal = any(mask.is_causal for mask in masks)
    bounds, is_causal = encode_hidden(family, s_q, prefers_causal=prefers_causal, who="intersect")
    tables = [mask.block_mask for mask in expanded if mask.block_mask is not None]
    block_mask = np.minimum.reduce(tables) if tables else None
    return ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q, block_mask=block_mask)


def expand(mask: ColumnMask, *, b: int | None = None, h_mask: int | None = None) -> ColumnMask:
    """The mask repeated to ``b`` batch entries (from 1) and ``h_mask`` heads (a multiple of its own)."""
    b = mask.b if b is None else b
    h_mask = mask.h_mask if h_mask is None else h_mask
    if mask.b not in (1, b):
        raise ValueError(f"expand: b={mask.b} cannot become {b}; only 1 is repeated")
    if mask.h_mask == 0 or h_mask % mask.h_mask:
        raise ValueError(f"expand: h_mask={mask.h_mask} must divide {h_mask}")
    if (b, h_mask) == (mask.b, mask.h_mask):
        return mask

    def repeated(stored: NDArray[np.int32]) -> NDArray[np.int32]:
        stored = np.repeat(stored, h_mask // mask.h_mask, axis=1)
        return np.broadcast_to(stored, (b, *stored.shape[1:]))

    return mask.mapped(repeated)


def without_block_mask(mask: ColumnMask) -> ColumnMask:
    """The same pairs with the block_mask written into the intervals, for code that takes no block_mask.

    Raises:
        ValueError: a column would need more than two intervals; the message names it.
    """
    if mask.block_mask is None:
        return mask
    hidden = mask.hidden_intervals()  # [3, b, h_mask, s_k] each
    runs = hidden_runs(np.moveaxis(mask.block_mask == 0, 2, 0))  # [runs, b, h_mask, k entries], in entries
    column_entry = np.arange(mask.s_k) // BLOCK_MASK_TILE
    begin, end = (
        np.minimum(x.astype(np.int64) * BLOCK_MASK_TILE, mask.s_q).astype(np.int32)[..., column_entry] for x in runs
    )
    family = np.concatenate([hidden[0], begin]), np.concatenate([hidden[1], end])
    bounds, is_causal = encode_hidden(family, mask.s_q, prefers_causal=mask.is_causal, who="without_block_mask")
    return ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=mask.s_q)


def hidden_runs(is_hidden: NDArray[np.bool_]) -> intervals.Family:
    """Runs of True along axis 0 of ``[s_q, ...]``; as many slots as the busiest column needs (>= 2)."""
    edge = np.zeros((1, *is_hidden.shape[1:]), bool)
    padded = np.concatenate([edge, is_hidden, edge])
    begins, ends = padded[1:] & ~padded[:-1], ~padded[1:] & padded[:-1]  # [s_q + 1, ...]
    slots = max(2, int(begins.sum(axis=0).max(initial=0)))
    family = []
    for marks in (begins, ends):
        rows = np.zeros((slots, *is_hidden.shape[1:]), np.int32)
        position = np.nonzero(marks)
        slot = (marks.cumsum(axis=0, dtype=np.int32) - 1)[position]
        rows[(slot, *position[1:])] = position[0]
        family.append(rows)
    return family[0], family[1]


def _common(axis: str, sizes: list[int], *, divides: bool) -> int:
    largest = max(sizes)
    for size in sizes:
        is_fine = size in (1, largest) or (divides and size and largest % size == 0)
        if not is_fine or (size != largest and 0 in sizes):
            rule = "must be 1, equal, or divide the largest" if divides else "must be 1 or equal"
            raise ValueError(f"intersect: {axis} of the masks is {sizes}; they {rule}")
    return largest
