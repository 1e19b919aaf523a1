# SPDX-License-Identifier: Apache-2.0
"""Which rank computes which chunk (section 3.3), with a certificate: the gap to a bound that nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.workload import MaskScan


@dataclass(frozen=True)
class Balance:
    """An assignment of chunks to ranks.

    Attributes:
        chunk_ranks: owner of each chunk.
        finish: when the last rank is done: max over ranks of load / speed.
        lower_bound: no assignment within the capacities finishes earlier.
    """

    chunk_ranks: tuple[int, ...]
    finish: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """finish / lower_bound - 1; 0 proves the assignment optimal."""
        return self.finish / self.lower_bound - 1 if self.lower_bound > 0 else 0.0


@dataclass(frozen=True)
class SearchEffort:
    """How long the search goes on; counted in steps, not in time, so that every rank gets the same answer.

    Attributes:
        target_gap: stop at this gap.
        max_triples: exact splits of three ranks tried in all.
        max_kicks: restarts from a disturbed assignment.
        max_group_steps: budget of the node grouping.
    """

    target_gap: float = 0.0
    max_triples: int = 200
    max_kicks: int = 0
    max_group_steps: int = 1_000_000


# For a plan per batch: 0.6 % is below what kernels deviate from the cost model, and triples buy little there.
PLAN_EFFORT = SearchEffort(target_gap=0.006, max_triples=0)
THOROUGH = SearchEffort(max_triples=20_000, max_kicks=200, max_group_steps=20_000_000)


def even_capacities(num_chunks: int, num_ranks: int) -> tuple[int, ...]:
    """The same number of chunks a rank, rounded up."""
    return (-(-num_chunks // num_ranks),) * num_ranks


def balance_chunks(
    weights: Sequence[int] | NDArray[np.int64],
    num_ranks: int,
    *,
    capacities: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    block: int = 1,
    effort: SearchEffort = THOROUGH,
) -> Balance:
    """Assigns chunks so that the latest rank finishes early: longest first, then lexicographic descent over exact
    splits of two and three ranks. Deterministic.

    Args:
        weights: cost of each chunk, integers >= 0.
        capacities: most chunks of each rank; default equal, rounded up.
        speeds: relative speed of each rank; default 1.
        block: this many neighbouring chunks are dealt together first; then single chunks are swapped to even ranks
            out. Faster for many chunks, and leaves neighbours together; 1 deals single chunks.

    Raises:
        ValueError: negative weights, capacities that do not cover the chunks, or speeds <= 0.
    """
    arrays = _problem(weights, num_ranks, capacities, speeds)
    ranks, finish, bound = planner().balance(*arrays, effort.target_gap, effort.max_triples, effort.max_kicks, block)
    return Balance(tuple(ranks.tolist()), finish, bound)


def balance_lpt(
    weights: Sequence[int] | NDArray[np.int64],
    num_ranks: int,
    *,
    capacities: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> Balance:
    """Longest processing time first (the paper's phase 1)."""
    arrays = _problem(weights, num_ranks, capacities, speeds)
    ranks = planner().balance_lpt(*arrays)
    loads = np.bincount(ranks, arrays[0], minlength=num_ranks)
    return Balance(tuple(ranks.tolist()), float((loads / arrays[2]).max()), planner().lower_bound(*arrays))


def balance_by_node(
    scan: MaskScan,
    weights: NDArray[np.int64],
    topology: Topology,
    cost: CostModel,
    *,
    capacities: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    block: int = 1,
    effort: SearchEffort = PLAN_EFFORT,
) -> Balance:
    """Chunks to nodes first (even compute against few rows over the slow link), then to the ranks of each node.

    The returned lower bound is that of the whole problem, so the gap includes what was traded for traffic.
    """
    num_ranks = topology.num_ranks
    arrays = _problem(weights, num_ranks, capacities, speeds)
    if topology.num_nodes == 1:
        return balance_chunks(weights, num_ranks, capacities=capacities, speeds=speeds, block=block, effort=effort)
    # Weights are nanoseconds of forward and backward; rows travel forward (K, V), again in backward, and back
    # (dK, dV).
    ranks, finish, bound = scan.native.balance_by_node(
        *arrays,
        topology.as_array(),
        1e-3,
        3 * cost.slow.us_per_row(cost.row_bytes),
        effort.target_gap,
        effort.max_triples,
        effort.max_kicks,
        effort.max_group_steps,
        block,
    )
    return Balance(tuple(ranks.tolist()), finish, bound)


def _problem(
    weights: Sequence[int] | NDArray[np.int64],
    num_ranks: int,
    capacities: Sequence[int] | None,
    speeds: Sequence[float] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
    weights = np.ascontiguousarray(weights, np.int64)
    if num_ranks < 1:
        raise ValueError(f"balance: num_ranks={num_ranks} must be >= 1")
    if weights.ndim != 1 or (weights < 0).any():
        raise ValueError(f"balance: weights must be a vector of integers >= 0, got {weights}")
    capacity = np.asarray(capacities or even_capacities(len(weights), num_ranks), np.int32)
    speed = np.ones(num_ranks) if speeds is None else np.asarray(speeds, np.float64)
    if capacity.shape != (num_ranks,) or (capacity < 0).any() or capacity.sum() < len(weights):
        raise ValueError(
            f"balance: capacities {capacity.tolist()} must be {num_ranks} counts >= 0 that add up to "
            f"{len(weights)} chunks"
        )
    if speed.shape != (num_ranks,) or not (speed > 0).all():
        raise ValueError(f"balance: speeds {speed.tolist()} must be {num_ranks} numbers > 0")
    return weights, capacity, speed
