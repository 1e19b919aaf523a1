# SPDX-License-Identifier: Apache-2.0
"""Which key rows each rank needs, and the transfers that bring them (section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.workload import MaskScan
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE

Int32Array = NDArray[np.int32]
STAGE_CHOICES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, eq=False)
class RankNeeds:
    """Key rows that each rank computes with, own rows included where it needs them.

    Attributes:
        begins: int32 ``[num_ranks + 1]`` into runs.
        runs: int32 ``[n, 2]`` (k_begin_global, k_end_global), ascending and disjoint within a rank.
    """

    begins: Int32Array
    runs: Int32Array

    def rows_of(self, rank: int) -> NDArray[np.int64]:
        """Global indices of the rank's needed rows."""
        runs = self.runs[self.begins[rank] : self.begins[rank + 1]].tolist()
        return np.concatenate([np.arange(begin, end) for begin, end in runs] or [np.empty(0, np.int64)])

    def num_rows(self) -> NDArray[np.int64]:
        """Rows that each rank needs. ``[num_ranks]``."""
        totals = np.concatenate([[0], np.cumsum(self.runs[:, 1].astype(np.int64) - self.runs[:, 0])])
        return totals[self.begins[1:]] - totals[self.begins[:-1]]


@dataclass(frozen=True, eq=False)
class Route:
    """The arrays of a CpPlan that routing decides; see plan.py for what they mean."""

    num_stages: int
    range_begins: Int32Array
    key_ranges: Int32Array
    stage_rows: Int32Array
    gather: Int32Array
    reduce: Int32Array


def needs_of_mask(scan: MaskScan, partition: Partition, *, coalesce_rows: int = 64) -> RankNeeds:
    """What the mask asks for and no other row, from all bounds; holes shorter than ``coalesce_rows`` are filled
    (1 fills none). With a block_mask, whole tiles of 128 rows.

    Raises:
        ValueError: coalesce_rows < 1.
    """
    if coalesce_rows < 1:
        raise ValueError(f"needs_of_mask: coalesce_rows={coalesce_rows} must be >= 1")
    align_rows = 1 if scan.mask.block_mask is None else BLOCK_MASK_TILE
    owners = np.asarray(partition.chunk_ranks, np.int32)
    return RankNeeds(*scan.native.rank_needs(owners, partition.num_ranks, coalesce_rows, align_rows))


def needs_of_all(partition: Partition) -> RankNeeds:
    """Every rank needs every row."""
    num_ranks = partition.num_ranks
    runs = np.tile(np.array([[0, partition.s]], np.int32), (num_ranks, 1))
    return RankNeeds(np.arange(num_ranks + 1, dtype=np.int32), runs)


def route_needs(
    needs: RankNeeds,
    partition: Partition,
    topology: Topology,
    *,
    is_hierarchical: bool,
    is_overlapped: bool,
    num_stages: int,
    piece_rows: int = 1024,
) -> Route:
    """The transfers for ``needs``. Hierarchical: each needed row crosses to a node once, to the member with the
    least traffic so far, and spreads inside; gradients are summed inside the node first.

    Args:
        piece_rows: rows shared by several ranks of a node are fetched in pieces of about this many, by different
            members.
    """
    if num_stages < 1 or piece_rows < 1:
        raise ValueError(f"route_needs: num_stages={num_stages} and piece_rows={piece_rows} must be >= 1")
    # Pieces keep whole tiles where ranges do: a block_mask must not be cut.
    piece_rows = -(-piece_rows // BLOCK_MASK_TILE) * BLOCK_MASK_TILE
    arrays = planner().route(
        np.asarray(partition.chunk_begins_global, np.int32),
        np.asarray(partition.chunk_ranks, np.int32),
        topology.as_array(),
        needs.begins,
        needs.runs,
        is_hierarchical,
        num_stages,
        not is_overlapped,
        piece_rows,
    )
    return Route(num_stages, *arrays)


def route_ring(partition: Partition, topology: Topology) -> Route:
    """Every rank's rows pass all ranks, one neighbour a stage; gradients travel along."""
    arrays = planner().route_ring(
        np.asarray(partition.chunk_begins_global, np.int32),
        np.asarray(partition.chunk_ranks, np.int32),
        topology.as_array(),
    )
    return Route(max(1, partition.num_ranks - 1), *arrays)


def choose_num_stages(
    needs: RankNeeds, partition: Partition, topology: Topology, rank_loads: NDArray[np.float64], cost: CostModel
) -> int:
    """The number of stages with the least estimated forward time of the slowest rank.

    Args:
        rank_loads: nanoseconds of forward and backward of each rank.
    """
    own = np.bincount(
        partition.chunk_ranks, np.diff(partition.chunk_begins_global), minlength=partition.num_ranks
    ).astype(np.float64)
    total = np.maximum(needs.num_rows(), 1)
    remote = np.maximum(total - own, 0)  # all needs but the own rows, of which few are not needed
    link = cost.slow if topology.num_nodes > 1 else cost.fast
    transfer_us = remote * link.us_per_row(cost.row_bytes)
    fwd_share = cost.fwd_tile_us / (cost.fwd_tile_us + cost.bwd_tile_us)
    compute_us = rank_loads * 1e-3 * fwd_share
    remote_us = compute_us * remote / np.maximum(total, own + remote)
    best = (np.inf, 1)
    for num_stages in STAGE_CHOICES:
        # Arrivals are evenly spaced, so the finish is set by the start, the first or the last arrival alone.
        per_stage = remote_us / num_stages + cost.step_overhead_us
        first_arrival = transfer_us / num_stages + link.latency_us
        finish = np.maximum(
            np.maximum(compute_us - remote_us, first_arrival) + num_stages * per_stage,
            transfer_us + link.latency_us + per_stage,
        )
        best = min(best, (float(finish.max()), num_stages))
    return best[1]
