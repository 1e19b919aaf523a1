# SPDX-License-Identifier: Apache-2.0
"""The paper's planning in NumPy, as it publishes its latency for (table 8): the yardstick of tools/bench_planner.py.

Own code from the paper's description: tile tables from block extremes, HCC-IPO, transfers skipped by whole 512-row
works, and clip, shift and merge a chunk. Its IPO is the compiled one, which only makes this baseline faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.balance_paper import ipo, swap_machines
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask.column_mask import ColumnMask

TILE = 128
WORK_ROWS = 512  # rows that are transferred or skipped together


@dataclass(frozen=True, eq=False)
class PaperPlan:
    """Attributes:
    partition: who owns what.
    is_sent: bool ``[num_ranks, num_works]``: works of 512 key rows that a rank fetches or owns.
    local_bounds: int32 ``[4, b, h_mask, s]`` of one rank, key columns in global order.
    """

    partition: Partition
    is_sent: NDArray[np.bool_]
    local_bounds: NDArray[np.int32]


def plan_in_numpy(
    mask: ColumnMask, topology: Topology, *, chunk_rows: int = 2048, rank: int = 0, eps: float = 0.3
) -> PaperPlan:
    """Everything the paper decides about one mask, with the mask of one rank.

    Raises:
        ValueError: lengths that the paper's planner does not take.
    """
    s, num_ranks = mask.s_q, topology.num_ranks
    if mask.s_k != s or s % (chunk_rows * num_ranks) or chunk_rows % WORK_ROWS:
        raise ValueError(f"plan_in_numpy: s={s} must be a multiple of chunk_rows x ranks = {chunk_rows * num_ranks}")
    num_chunks = s // chunk_rows
    is_visible = visible_tiles(mask)  # [num_q_tiles, num_k_tiles]
    by_chunk = is_visible.reshape(num_chunks, chunk_rows // TILE, -1)
    weights = by_chunk.sum(axis=(1, 2)).astype(np.int64)
    is_needed = by_chunk.any(axis=1)  # [num_chunks, num_k_tiles]

    ranks = np.array(ipo(weights, num_ranks)[0])
    nodes_of_rank = topology.as_array()
    if topology.num_nodes > 1:
        owner_chunk = np.arange(s // TILE) // (chunk_rows // TILE)
        swap_machines(ranks, weights, nodes_of_rank, is_needed, owner_chunk, eps)
        for node in range(topology.num_nodes):
            members = np.nonzero(nodes_of_rank == node)[0]
            chunks = np.nonzero(nodes_of_rank[ranks] == node)[0]
            ranks[chunks] = members[ipo(weights[chunks], len(members))[0]]
    partition = Partition(tuple(range(0, s + 1, chunk_rows)), tuple(ranks.tolist()), num_ranks)

    works = is_needed.reshape(num_chunks, -1, WORK_ROWS // TILE).any(axis=2)  # [num_chunks, num_works]
    is_sent = np.stack([works[ranks == one].any(axis=0) for one in range(num_ranks)])
    return PaperPlan(partition, is_sent, localize_by_chunk(mask, partition, rank))


def visible_tiles(mask: ColumnMask) -> NDArray[np.bool_]:
    """Tiles that the extremes of a block's bounds do not prove hidden, summed over nothing: any batch and head."""
    num_tiles = mask.s_q // TILE
    first_row = np.arange(num_tiles)[:, None] * TILE  # [num_q_tiles, 1]
    last_row = first_row + TILE

    def extreme(bound: NDArray[np.int32], function: np.ufunc) -> NDArray[np.int32]:
        blocks = bound.reshape(-1, mask.s_k // TILE, TILE)
        return function.reduce(blocks, axis=2)  # [planes, num_k_tiles]

    lt = (extreme(mask.lt_begin, np.maximum), extreme(mask.lt_end, np.minimum))
    ut = (extreme(mask.ut_begin, np.maximum), extreme(mask.ut_end, np.minimum))
    is_visible = np.zeros((num_tiles, mask.s_k // TILE), bool)
    for plane in range(lt[0].shape[0]):
        is_hidden = (first_row >= lt[0][plane]) & (last_row <= lt[1][plane])
        is_hidden |= (first_row >= ut[0][plane]) & (last_row <= ut[1][plane])
        if mask.is_causal:
            is_hidden |= last_row <= np.arange(mask.s_k // TILE)[None, :] * TILE
        is_visible |= ~is_hidden
    return is_visible


def localize_by_chunk(mask: ColumnMask, partition: Partition, rank: int) -> NDArray[np.int32]:
    """Definition 2 of the paper: clip to each chunk, shift behind the chunks before it, merge by maximum."""
    upper_end = mask.ut_end
    if mask.is_causal:
        upper_end = np.maximum(upper_end, np.arange(mask.s_k, dtype=np.int32))
    bounds = np.stack([mask.lt_begin, mask.lt_end, mask.ut_begin, upper_end])  # [4, b, h_mask, s]
    local = np.zeros_like(bounds)
    rows_before = 0
    for begin, end in partition.chunks_of(rank):
        part = np.clip(bounds - begin, 0, end - begin) + np.where(bounds > begin, rows_before, 0)
        np.maximum(local, part, out=local)
        rows_before += end - begin
    return local
