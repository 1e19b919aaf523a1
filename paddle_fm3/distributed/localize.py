# SPDX-License-Identifier: Apache-2.0
"""Rewrites a mask of the whole sequence for the query rows that one rank owns (FlashMask-3, section 3.2).

Only the query axis is rewritten; `localize_mask` keeps all key columns in global order, `localize_columns` takes
a selection of them in the order of a key buffer. Both run the compiled `distributed/localize.cc`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.workload import native_mask
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask, Int32Array


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
    return localize_columns(mask_global, partition, rank, np.array([[0, mask_global.s_k]], np.int32))


def localize_columns(
    mask_global: ColumnMask, partition: Partition, rank: int, key_ranges: NDArray[np.int32]
) -> ColumnMask:
    """`localize_mask` over a selection of key columns: O(selected columns), no communication.

    Args:
        key_ranges: int32 ``[n, 2]`` (k_begin_global, num_columns); the result's columns are these, in this order.
            With a block_mask each range must consist of whole tiles (the last tile of s_k may be short if it
            comes last).

    Raises:
        ValueError: as `localize_mask`, or a range that leaves the mask.
    """
    if mask_global.s_q != partition.s:
        raise ValueError(
            f"localize_mask: mask has s_q={mask_global.s_q} query rows; the partition cuts {partition.s} rows"
        )
    if not 0 <= rank < partition.num_ranks:
        raise ValueError(f"localize_mask: rank={rank} is not in [0, {partition.num_ranks})")
    bounds = planner().localize(
        native_mask(mask_global),
        np.asarray(partition.chunk_begins_global, np.int32),
        np.asarray(partition.chunk_ranks, np.int32),
        rank,
        np.ascontiguousarray(key_ranges, np.int32),
    )
    return _trusted_mask(bounds, partition.num_rows(rank), _local_block_mask(mask_global, partition, rank, key_ranges))


def _trusted_mask(bounds: tuple[Int32Array, ...], s_q: int, block_mask: Int32Array | None) -> ColumnMask:
    """A ColumnMask of bounds that are int32 and inside [0, s_q] by construction.

    DEVIATION: skips ColumnMask's constructor, which would read and copy all bounds once more.
    Reason: that takes longer than the localisation itself. Recovery: call the constructor.
    """
    mask = object.__new__(ColumnMask)
    for name, bound in zip(("lt_begin", "lt_end", "ut_begin", "ut_end"), bounds, strict=True):
        bound.setflags(write=False)
        object.__setattr__(mask, name, bound)
    object.__setattr__(mask, "s_q", s_q)
    object.__setattr__(mask, "is_causal", False)
    object.__setattr__(mask, "block_mask", block_mask)
    return mask


def compact_bounds(local: ColumnMask) -> Int32Array:
    """int32 [b, h_mask, s_k, n] for causal=False: n = 2 if all intervals reach the ends of the rows, else 4.

    `ColumnMask.to_bounds` finds more, but costs 0.14 s at 128K columns; this is paid once a batch.
    """
    is_lower_empty = local.lt_begin >= local.lt_end
    is_upper_empty = local.ut_begin >= local.ut_end
    if (is_lower_empty | (local.lt_end == local.s_q)).all() and (is_upper_empty | (local.ut_begin == 0)).all():
        lower = np.where(is_lower_empty, local.s_q, local.lt_begin)
        upper = np.where(is_upper_empty, 0, local.ut_end)
        return np.stack([lower, upper], axis=-1).astype(np.int32)
    return np.stack([local.lt_begin, local.lt_end, local.ut_begin, local.ut_end], axis=-1)


def local_rows_before(partition: Partition, rank: int) -> NDArray[np.int32]:
    """``loc``: for each global row r in [0, s], how many of the rank's rows come before it. int32 [s + 1].

    Theorem 1 in this form: a global interval [begin, end) becomes [loc(begin), loc(end)); the proof is at
    LocalRows in distributed/localize.cc.
    """
    is_owned = np.zeros(partition.s, np.int32)  # [s]
    for begin_global, end_global in partition.chunks_of(rank):
        is_owned[begin_global:end_global] = 1
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(is_owned, dtype=np.int32)])


def _local_block_mask(
    mask_global: ColumnMask, partition: Partition, rank: int, key_ranges: NDArray[np.int32]
) -> Int32Array | None:
    if mask_global.block_mask is None:
        return None
    begins = partition.chunk_begins_global
    _whole_tiles(list(zip(begins, begins[1:], strict=False)), partition.s, "chunk")  # of all ranks: all refuse, or none
    q_tiles = _whole_tiles(partition.chunks_of(rank), partition.s, "chunk")
    ranges = [(begin, begin + columns) for begin, columns in np.asarray(key_ranges).tolist()]
    k_tiles = _whole_tiles(ranges, mask_global.s_k, "key range")
    local = mask_global.block_mask[:, :, q_tiles, :][:, :, :, k_tiles]
    local.setflags(write=False)
    return local


def _whole_tiles(ranges: list[tuple[int, int]], s: int, what: str) -> list[int]:
    """Indices of the tiles that the ranges consist of."""
    tiles: list[int] = []
    for at, (begin, end) in enumerate(ranges):
        is_short_end = end == s and at == len(ranges) - 1  # only there a short tile shifts nothing behind it
        if begin % BLOCK_MASK_TILE or (end % BLOCK_MASK_TILE and not is_short_end):
            raise ValueError(
                f"localize_mask: {what} [{begin}, {end}) cuts a block_mask tile; its boundaries must be multiples "
                f"of {BLOCK_MASK_TILE} when a block_mask is given"
            )
        tiles.extend(range(begin // BLOCK_MASK_TILE, -(-end // BLOCK_MASK_TILE)))
    return tiles
