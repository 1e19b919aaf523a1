# SPDX-License-Identifier: Apache-2.0
"""build_plan: from a mask to a CpPlan. Reads as the algorithm: scan, weigh, balance, find needs, route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed import balance_paper, route
from paddle_fm3.distributed.balance import PLAN_EFFORT, SearchEffort, balance_by_node
from paddle_fm3.distributed.cost import DEFAULT_COST, CostModel
from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.partition import Partition, contiguous_partition, dual_chunk_partition
from paddle_fm3.distributed.plan import CpPlan, mask_digest
from paddle_fm3.distributed.strategy import FM3, Strategy, resolve_strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.workload import scan_mask
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask, check_is_mask

MAX_CHUNK_ROWS = 2048
MIN_CHUNKS_PER_RANK = 4  # fewer leave the balance little to choose from
# The balance deals blocks of a default chunk's rows, then swaps these parts of them to even ranks out. More parts are
# more even and cost plan time, and messages: with several nodes halves suffice for 1 %.
PARTS_ON_ONE_NODE, PARTS = 4, 2


@dataclass(frozen=True)
class PlanOptions:
    """What a caller may set; the defaults serve.

    Attributes:
        chunk_rows: rows of every chunk; None lets the planner choose: blocks of `default_chunk_rows`, parts of which
            are swapped between ranks until these are even. Neighbouring rows of one rank are one chunk then.
        capacities: most chunks of each rank; None gives all the same.
        speeds: relative speed of each rank: a slow device gets less work. None gives all 1.
        num_stages: gather stages; None lets the cost model choose.
        coalesce_rows: holes shorter than this between needed rows are transferred along.
        piece_rows: see `route.route_needs`.
        effort: how long the balance searches.
    """

    chunk_rows: int | None = None
    capacities: tuple[int, ...] | None = None
    speeds: tuple[float, ...] | None = None
    num_stages: int | None = None
    coalesce_rows: int = 64
    piece_rows: int = 1024
    effort: SearchEffort = PLAN_EFFORT


DEFAULT_OPTIONS = PlanOptions()


def default_chunk_rows(s: int, num_ranks: int) -> int:
    """2048 as in the paper, or less so that a rank gets at least four chunks; a multiple of 128 if possible."""
    rows = min(MAX_CHUNK_ROWS, s // (MIN_CHUNKS_PER_RANK * num_ranks))
    return max(1, rows // BLOCK_MASK_TILE * BLOCK_MASK_TILE or min(BLOCK_MASK_TILE, -(-s // num_ranks)))


def build_plan(
    mask: ColumnMask,
    num_ranks: int,
    *,
    topology: Topology | None = None,
    strategy: Strategy | str = FM3,
    cost: CostModel = DEFAULT_COST,
    options: PlanOptions = DEFAULT_OPTIONS,
    partition: Partition | None = None,
    digest: str | None = None,
) -> CpPlan:
    """The plan of one attention over ``num_ranks`` ranks. Pure and deterministic: no GPU, no process group.

    Args:
        mask: over the whole sequence, s_q = s_k.
        topology: which ranks share a node; default nodes of 8.
        strategy: a name of `strategy.STRATEGIES` or a Strategy.
        partition: who owns what, if that is settled already; only the transfers are planned then.
        digest: `mask_digest(mask)`, if the caller has it already.

    Raises:
        ValueError: s_q != s_k, an empty sequence, unknown strategy, settings or a partition that do not fit
            num_ranks, or a block_mask whose tiles would be cut.
        TypeError: `mask` is no ColumnMask.
    """
    check_is_mask("build_plan", mask)
    strategy = resolve_strategy(strategy)
    topology = topology or Topology.uniform(num_ranks)
    _check(mask, num_ranks, topology, options)
    if partition is not None:
        if (partition.s, partition.num_ranks) != (mask.s_q, num_ranks):
            raise ValueError(
                f"build_plan: the partition cuts s={partition.s} for {partition.num_ranks} ranks; the mask has "
                f"s={mask.s_q}, num_ranks={num_ranks}"
            )
    elif strategy.layout == "contiguous":
        partition = contiguous_partition(mask.s_q, num_ranks)
    elif strategy.layout == "dual_chunk":
        partition = dual_chunk_partition(mask.s_q, num_ranks)
    block = 1
    if partition is None:
        chunk_rows, block = _chunking(mask, topology, strategy, options)
        begins = np.append(np.arange(0, mask.s_q, chunk_rows, np.int32), np.int32(mask.s_q))
    else:
        begins = np.asarray(partition.chunk_begins_global, np.int32)
    scan = scan_mask(mask, begins)
    tiles = scan.chunk_tiles()
    weights = scan.chunk_weights(cost, tiles)

    if partition is None:
        if strategy.layout == "paper":
            result = balance_paper.hcc_ipo(scan, weights, topology)
        else:
            result = balance_by_node(
                scan, weights, topology, cost,
                capacities=options.capacities, speeds=options.speeds, block=block, effort=options.effort,
            )  # fmt: skip
        ranks = np.asarray(result.chunk_ranks, np.int32)
        if block > 1:
            # Neighbours on one rank become one chunk.
            firsts = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1]))
            begins, ranks = np.append(begins[firsts], begins[-1]), ranks[firsts]
            tiles, weights = np.add.reduceat(tiles, firsts), np.add.reduceat(weights, firsts)
        partition = Partition(tuple(begins.tolist()), tuple(ranks.tolist()), num_ranks)
        lower_bound = result.lower_bound
    else:
        lower_bound = _lower_bound(weights, num_ranks, options.speeds)

    if strategy.move == "ring":
        routed = route.route_ring(partition, topology)
    else:
        if strategy.is_pruned:
            needs = route.needs_of_mask(scan, partition, coalesce_rows=options.coalesce_rows)
        else:
            needs = route.needs_of_all(partition)
        num_stages = options.num_stages
        if not strategy.is_overlapped:
            num_stages = 1
        elif num_stages is None:
            loads = np.bincount(partition.chunk_ranks, weights, minlength=num_ranks).astype(np.float64)
            num_stages = route.choose_num_stages(
                needs, partition, topology, loads, cost, is_hierarchical=strategy.is_hierarchical
            )
        routed = route.route_needs(
            needs,
            partition,
            topology,
            is_hierarchical=strategy.is_hierarchical,
            is_overlapped=strategy.is_overlapped,
            num_stages=num_stages,
            piece_rows=options.piece_rows,
        )
    return CpPlan(
        partition=partition,
        topology=topology,
        strategy=strategy,
        num_stages=routed.num_stages,
        range_begins=routed.range_begins,
        key_ranges=routed.key_ranges,
        stage_rows=routed.stage_rows,
        gather=routed.gather,
        reduce=routed.reduce,
        chunk_tiles=tiles,
        chunk_weights=weights,
        lower_bound=lower_bound,
        speeds=options.speeds,
        mask_digest=digest or mask_digest(mask),
    )


def _lower_bound(weights: NDArray[np.int64], num_ranks: int, speeds: Sequence[float] | None) -> float:
    """Of a fixed layout's chunks, were they free to move."""
    capacity = np.full(num_ranks, -(-len(weights) // num_ranks), np.int32)
    speed = np.ones(num_ranks) if speeds is None else np.asarray(speeds, np.float64)
    return planner().lower_bound(weights, capacity, speed)


def _chunking(mask: ColumnMask, topology: Topology, strategy: Strategy, options: PlanOptions) -> tuple[int, int]:
    """Rows of a chunk, and how many chunks make the block that the balance starts from."""
    if options.chunk_rows is not None:
        return options.chunk_rows, 1
    rows = default_chunk_rows(mask.s_q, topology.num_ranks)
    if mask.block_mask is not None:
        rows = max(BLOCK_MASK_TILE, rows // BLOCK_MASK_TILE * BLOCK_MASK_TILE)
    if strategy.layout == "paper" or options.capacities is not None:
        return rows, 1
    parts = PARTS_ON_ONE_NODE if topology.num_nodes == 1 else PARTS
    # Whole tiles of 128 rows: then what chunks cost adds up.
    while parts > 1 and rows % (parts * BLOCK_MASK_TILE) != 0:
        parts //= 2
    return rows // parts, parts


def _check(mask: ColumnMask, num_ranks: int, topology: Topology, options: PlanOptions) -> None:
    if mask.s_q != mask.s_k or mask.s_q < 1:
        raise ValueError(
            f"build_plan: mask has s_q={mask.s_q}, s_k={mask.s_k}; context parallelism needs s_q = s_k >= 1"
        )
    if topology.num_ranks != num_ranks:
        raise ValueError(f"build_plan: topology has {topology.num_ranks} ranks; num_ranks={num_ranks}")
    for name in ("capacities", "speeds"):
        values = getattr(options, name)
        if values is not None and len(values) != num_ranks:
            raise ValueError(f"build_plan: {name} has {len(values)} entries; num_ranks={num_ranks}")
    for name in ("chunk_rows", "num_stages"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"build_plan: {name}={value} must be >= 1")
    if mask.block_mask is not None and mask.s_q % BLOCK_MASK_TILE:
        raise ValueError(
            f"build_plan: with a block_mask s={mask.s_q} must be a multiple of {BLOCK_MASK_TILE}; pad the sequence"
        )
