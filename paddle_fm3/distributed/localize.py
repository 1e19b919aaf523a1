# SPDX-License-Identifier: Apache-2.0
"""Rewrites a mask of the whole sequence for the query rows that one rank owns (FlashMask-3, section 3.2).

Only the query axis is rewritten; key columns keep their global order. A rank that needs a subset of the
columns takes them from the result, column by column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.partition import Partition
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask, Int32Array

Interval = tuple[Int32Array, Int32Array]  # begin, end, each [b, h_mask, s_k]; empty iff begin >= end


def localize_mask(mask_global: ColumnMask, partition: Partition, rank: int) -> ColumnMask:
    """The mask that the rank's rows, numbered locally, see over all key columns.

    Args:
        mask_global: mask over ``partition.s`` query rows and any number of key columns.
        partition: who owns which rows.
        rank: the rank whose rows become the query axis.

    Returns:
        A ``ColumnMask`` with ``s_q = partition.num_rows(rank)``, key columns in global order, and
        ``is_causal=False``: the causal rule became part of the second interval, because the distance
        between a local row and a key is no longer constant.

    Raises:
        ValueError: the mask's s_q is not the partition's s; the rank does not exist; a block_mask whose
            tiles a chunk boundary cuts; or the causal rule plus two intervals that cannot be written as two
            (names the first such column).
    """
    if mask_global.s_q != partition.s:
        raise ValueError(
            f"localize_mask: mask has s_q={mask_global.s_q} query rows; the partition cuts {partition.s} rows"
        )
    if not 0 <= rank < partition.num_ranks:
        raise ValueError(f"localize_mask: rank={rank} is not in [0, {partition.num_ranks})")

    rows_before = local_rows_before(partition, rank)  # [s_q + 1]
    # Claim:      {l : rows_before[begin] <= l < rows_before[end]} is exactly the set of local rows whose global
    #             index lies in [begin, end), so one global interval stays one local interval.
    # Because:    rows_before counts owned rows, so it is monotone and steps by one at each owned row; local
    #             order is ascending global order (Theorem 1).
    # Breaks if:  a rank's chunks are not in ascending order (Partition rules that out).
    # Tested by:  test/unit/test_localize.py::test_matches_dense_rows
    lower = (rows_before[mask_global.lt_begin], rows_before[mask_global.lt_end])
    upper = (rows_before[mask_global.ut_begin], rows_before[mask_global.ut_end])
    if mask_global.is_causal:
        causal_ends_global = np.arange(mask_global.s_k) - (mask_global.s_k - mask_global.s_q)
        causal_ends = rows_before[np.clip(causal_ends_global, 0, mask_global.s_q)]  # [s_k]
        lower, upper = _fold_prefix(lower, upper, np.broadcast_to(causal_ends, lower[0].shape))
    return ColumnMask(
        *lower,
        *upper,
        s_q=partition.num_rows(rank),
        is_causal=False,
        block_mask=_local_block_mask(mask_global, partition, rank),
    )


def local_rows_before(partition: Partition, rank: int) -> NDArray[np.int32]:
    """``loc``: for each global row r in [0, s], how many of the rank's rows come before it. int32 [s + 1]."""
    is_owned = np.zeros(partition.s, np.int32)  # [s]
    for begin_global, end_global in partition.chunks_of(rank):
        is_owned[begin_global:end_global] = 1
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(is_owned, dtype=np.int32)])


def _fold_prefix(lower: Interval, upper: Interval, prefix_end: Int32Array) -> tuple[Interval, Interval]:
    """Two intervals equal to ``lower | upper | [0, prefix_end)``; the prefix ends up in the second."""
    prefix_end = prefix_end.copy()
    # Twice: swallowing the second interval may make the first one touch.
    for _ in range(2):
        for begin, end in (lower, upper):
            is_touching = (begin < end) & (begin <= prefix_end)
            np.maximum(prefix_end, np.where(is_touching, end, 0), out=prefix_end)
    lower_begin = np.where(lower[0] <= prefix_end, np.maximum(lower[0], prefix_end), lower[0])
    upper_begin = np.maximum(upper[0], prefix_end)
    lower_rest = _emptied(lower_begin, lower[1])
    upper_rest = _emptied(upper_begin, upper[1])
    is_upper_left = upper_rest[0] < upper_rest[1]
    is_lower_left = lower_rest[0] < lower_rest[1]
    # Both remain beside a non-empty prefix: representable only where they overlap or touch each other.
    is_three = is_upper_left & is_lower_left & (prefix_end > 0)
    is_joined = (lower_rest[0] <= upper_rest[1]) & (upper_rest[0] <= lower_rest[1])
    if (is_three & ~is_joined).any():
        b_idx, h_idx, k_idx = (int(axis[0]) for axis in np.nonzero(is_three & ~is_joined))
        at = (b_idx, h_idx, k_idx)
        raise ValueError(
            f"localize_mask: column k={k_idx} (batch {b_idx}, mask head {h_idx}) hides local rows "
            f"[0, {prefix_end[at]}) by the causal rule and [{lower_rest[0][at]}, {lower_rest[1][at]}) and "
            f"[{upper_rest[0][at]}, {upper_rest[1][at]}); a column holds at most two intervals"
        )
    joined_begin = np.minimum(lower_rest[0], upper_rest[0])
    joined_end = np.maximum(lower_rest[1], upper_rest[1])
    only_upper = is_upper_left & ~is_lower_left
    first_begin = np.where(is_three, joined_begin, np.where(only_upper, upper_rest[0], lower_rest[0]))
    first_end = np.where(is_three, joined_end, np.where(only_upper, upper_rest[1], lower_rest[1]))
    # Without a prefix both intervals stay as they are.
    is_kept = is_upper_left & is_lower_left & (prefix_end == 0)
    second_begin = np.where(is_kept, upper_rest[0], 0)
    second_end = np.where(is_kept, upper_rest[1], prefix_end)
    return (
        (first_begin.astype(np.int32), first_end.astype(np.int32)),
        (second_begin.astype(np.int32), second_end.astype(np.int32)),
    )


def _emptied(begin: Int32Array, end: Int32Array) -> Interval:
    """The interval with every empty column written as [end, end)."""
    return np.minimum(begin, end), end


def _local_block_mask(mask_global: ColumnMask, partition: Partition, rank: int) -> Int32Array | None:
    if mask_global.block_mask is None:
        return None
    tile_idx = []
    for begin_global, end_global in partition.chunks_of(rank):
        if begin_global % BLOCK_MASK_TILE or (end_global % BLOCK_MASK_TILE and end_global != partition.s):
            raise ValueError(
                f"localize_mask: chunk [{begin_global}, {end_global}) cuts a block_mask tile; chunk boundaries "
                f"must be multiples of {BLOCK_MASK_TILE} when a block_mask is given"
            )
        tile_idx.extend(range(begin_global // BLOCK_MASK_TILE, -(-end_global // BLOCK_MASK_TILE)))
    return mask_global.block_mask[:, :, tile_idx, :]
