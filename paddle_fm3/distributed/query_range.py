# SPDX-License-Identifier: Apache-2.0
"""Which query rows see any key of a step: the others need not be visited, written or merged."""

from __future__ import annotations

import numpy as np

from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask


def seen_query_rows(mask: ColumnMask) -> tuple[int, int]:
    """The shortest [q_begin, q_end) outside of which every row is hidden from every key; (0, 0) if none sees one.

    With a block_mask, which is not looked at, the range keeps whole tiles.

    Raises:
        ValueError: the mask has the causal rule (localised masks have none).
    """
    if mask.is_causal:
        raise ValueError("seen_query_rows: the mask has the causal rule; localise it first")
    lower, upper = (mask.lt_begin, mask.lt_end), (mask.ut_begin, mask.ut_end)  # [b, h_mask, s_k] each
    both = np.maximum(lower[0], upper[0]), np.minimum(lower[1], upper[1])
    # Keys that a row is hidden from, summed over batch entries and mask heads: the two intervals, less what they share.
    num_hidden = sum(sign * _coverage(*part, mask.s_q) for sign, part in ((1, lower), (1, upper), (-1, both)))
    seen = np.flatnonzero(num_hidden < mask.lt_begin.size)
    if not seen.size:
        return 0, 0
    begin, end = int(seen[0]), int(seen[-1]) + 1
    if mask.block_mask is not None:
        begin, end = begin // BLOCK_MASK_TILE * BLOCK_MASK_TILE, -(-end // BLOCK_MASK_TILE) * BLOCK_MASK_TILE
    return begin, min(end, mask.s_q)


def _coverage(begin: np.ndarray, end: np.ndarray, s_q: int) -> np.ndarray:
    """How many of the intervals hold each row, int64 [s_q]."""
    is_real = begin < end
    opened = np.bincount(begin[is_real], minlength=s_q + 1)
    return np.cumsum(opened - np.bincount(end[is_real], minlength=s_q + 1))[:s_q]


def select_query_rows(mask: ColumnMask, q_begin: int, q_end: int) -> ColumnMask:
    """The mask of rows [q_begin, q_end) of a mask without a causal rule.

    Raises:
        ValueError: the causal rule is on, or the cut divides a tile of the block_mask.
    """
    if mask.is_causal:
        raise ValueError("select_query_rows: the mask has the causal rule; localise it first")
    if (q_begin, q_end) == (0, mask.s_q):
        return mask
    block_mask = mask.block_mask
    if block_mask is not None:
        if q_begin % BLOCK_MASK_TILE or (q_end % BLOCK_MASK_TILE and q_end != mask.s_q):
            raise ValueError(f"select_query_rows: [{q_begin}, {q_end}) divides a tile of the block_mask")
        block_mask = block_mask[:, :, q_begin // BLOCK_MASK_TILE : -(-q_end // BLOCK_MASK_TILE)]
    bounds = (getattr(mask, name) - q_begin for name in ("lt_begin", "lt_end", "ut_begin", "ut_end"))
    # An interval that ends before q_begin is clipped to an empty one, as is one that begins after q_end.
    return ColumnMask(*bounds, s_q=q_end - q_begin, is_causal=False, block_mask=block_mask)
