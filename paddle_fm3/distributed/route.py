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
TRAFFIC_SKEW = 3.0  # busiest link over the mean, as seen for documents over 2 to 32 nodes


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
        ValueError: coalesce_rows < 1, or a chunk of the partition is no union of the scan's chunks.
    """
    if coalesce_rows < 1:
        raise ValueError(f"needs_of_mask: coalesce_rows={coalesce_rows} must be >= 1")
    begins = np.asarray(partition.chunk_begins_global, np.int32)
    firsts = np.searchsorted(scan.chunk_begins_global, begins)
    if partition.s != scan.mask.s_q or (scan.chunk_begins_global[firsts] != begins).any():
        raise ValueError("needs_of_mask: the scan was made for other chunks than the partition's")
    align_rows = 1 if scan.mask.block_mask is None else BLOCK_MASK_TILE
    owners = np.repeat(np.asarray(partition.chunk_ranks, np.int32), np.diff(firsts))
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
    if len(needs.begins) != partition.num_ranks + 1 or topology.num_ranks != partition.num_ranks:
        raise ValueError(
            f"route_needs: needs of {len(needs.begins) - 1} ranks, a topology of {topology.num_ranks}, a partition of "
            f"{partition.num_ranks}"
        )
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
    needs: RankNeeds,
    partition: Partition,
    topology: Topology,
    rank_loads: NDArray[np.float64],
    cost: CostModel,
    *,
    is_hierarchical: bool = True,
) -> int:
    """The number of stages with the least estimated time, forward and backward, of the slowest rank.

    Args:
        rank_loads: nanoseconds of forward and backward of each rank.
    """
    nodes = topology.as_array()
    fast_rows, slow_rows, node_rows = planner().foreign_rows(
        np.asarray(partition.chunk_begins_global, np.int32),
        np.asarray(partition.chunk_ranks, np.int32),
        nodes,
        needs.begins,
        needs.runs,
    )
    remote = fast_rows + slow_rows
    total = np.maximum(needs.num_rows(), 1)
    if is_hierarchical:
        # Every member takes its part of the node's slow rows and gets the others over the fast link.
        slow_part = node_rows[nodes] / np.bincount(nodes)[nodes]
        fast_us = (fast_rows + slow_rows) * cost.fast.us_per_row(cost.row_bytes)
    else:
        slow_part = slow_rows
        fast_us = fast_rows * cost.fast.us_per_row(cost.row_bytes)
    # A relayed row takes both links. Traffic is not even: rows that one member needs come through that member.
    transfer_us = TRAFFIC_SKEW * (slow_part * cost.slow.us_per_row(cost.row_bytes) + fast_us)
    latency_us = np.where(slow_rows > 0, cost.slow.latency_us, 0) + np.where(remote > 0, cost.fast.latency_us, 0)
    fwd_us = rank_loads * 1e-3 * cost.fwd_tile_us / (cost.fwd_tile_us + cost.bwd_tile_us)
    bwd_us = rank_loads * 1e-3 - fwd_us
    remote_share = remote / np.maximum(total, remote)
    stages = np.array(STAGE_CHOICES)[:, None]  # [choices, 1]; all below [choices, num_ranks]
    # Arrivals are evenly spaced, so a finish is set by the start, the first or the last arrival alone.
    first_us, overhead_us = transfer_us / stages + latency_us, cost.step_overhead_us
    fwd_remote_us, bwd_remote_us = fwd_us * remote_share, bwd_us * remote_share
    fwd_finish = np.maximum(
        np.maximum(fwd_us - fwd_remote_us, first_us) + fwd_remote_us + stages * overhead_us,
        transfer_us + latency_us + fwd_remote_us / stages + overhead_us,
    )
    # Backward: half of the own rows hide the first arrival, the other half the last reduction.
    half_us = (bwd_us - bwd_remote_us) / 2
    bwd_finish = np.maximum(
        np.maximum(half_us, first_us) + bwd_remote_us,
        transfer_us + latency_us + bwd_remote_us / stages,
    ) + np.maximum(half_us, first_us) + (stages + 1) * overhead_us  # fmt: skip
    return STAGE_CHOICES[int(np.argmin((fwd_finish + bwd_finish).max(axis=1)))]
