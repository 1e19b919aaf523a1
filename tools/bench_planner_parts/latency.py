# SPDX-License-Identifier: Apache-2.0
"""Table 8: time of a whole plan on one core: workload, balance, needs, routes, and one rank's localised mask.

`ms_*` is the planning thread's CPU time, which other processes on the machine do not add to; `wall_ms_median` is
what a clock on the wall said in the same repetitions. The baseline is timed alike. The plan cache finds a mask by the
digest of its bounds and hands it to the planner: hashing is a part of its own, `parts_ms["digest"]`, not in `ms_*`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from reproduce_parts import paper

from bench_planner_parts.samples import MASKS, sample_mask
from paddle_fm3.distributed import route
from paddle_fm3.distributed.balance import balance_by_node
from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.localize import localize_mask
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import mask_digest
from paddle_fm3.distributed.planner import PARTS, build_plan, default_chunk_rows
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.workload import scan_mask
from paddle_fm3.testing.paper_planner import plan_in_numpy

COLUMNS = (
    "mask",
    "p",
    "s",
    "ms_median",
    "ms_p90",
    "wall_ms_median",
    "baseline_ms_median",
    "paper_ms",
    "parts_ms",
    "refcheck",
)
RANKS_PER_NODE, RANK = 8, 5
SIZES = ((32, 262144), (256, 2097152))


def times_ms(call: Callable[[], object], repeats: int) -> tuple[list[float], list[float]]:
    """CPU milliseconds of this thread, and wall milliseconds, of each repetition."""
    cpu, wall = [], []
    for _ in range(repeats):
        begin_cpu, begin_wall = time.thread_time(), time.perf_counter()
        call()
        cpu.append((time.thread_time() - begin_cpu) * 1e3)
        wall.append((time.perf_counter() - begin_wall) * 1e3)
    return cpu, wall


def parts(mask: Any, topology: Topology, cost: CostModel, repeats: int) -> dict[str, float]:
    """Median of each part alone, on the state that the parts before it leave."""
    chunk_rows = default_chunk_rows(mask.s_q, topology.num_ranks) // PARTS
    begins = np.arange(0, mask.s_q + 1, chunk_rows, dtype=np.int32)
    state: dict[str, Any] = {}

    def workload() -> None:
        state["scan"] = scan_mask(mask, begins)
        state["weights"] = state["scan"].chunk_weights(cost)

    def balance() -> None:
        state["balance"] = balance_by_node(state["scan"], state["weights"], topology, cost, block=PARTS)

    def needs() -> None:
        partition = state["partition"] = Partition(
            tuple(begins.tolist()), state["balance"].chunk_ranks, topology.num_ranks
        )
        state["needs"] = route.needs_of_mask(state["scan"], partition)

    def routing() -> None:
        state["route"] = route.route_needs(
            state["needs"], state["partition"], topology, is_hierarchical=True, is_overlapped=True, num_stages=2
        )

    def localisation() -> None:
        build_rank()

    plan = build_plan(mask, topology.num_ranks, topology=topology, cost=cost)

    def build_rank() -> None:
        plan.rank_plan(RANK, mask)

    def digest() -> None:
        mask_digest(mask)

    found = {}
    for part in (workload, balance, needs, routing, localisation, digest):
        found[part.__name__] = round(float(np.median(times_ms(part, repeats)[0])), 3)
    return found


def run(*, is_quick: bool) -> Iterator[dict[str, Any]]:
    cost = CostModel()
    num_samples, repeats = (1, 5) if is_quick else (5, 15)
    for num_ranks, s in SIZES:
        chunk_rows = default_chunk_rows(s, num_ranks)
        topology = Topology.uniform(num_ranks, RANKS_PER_NODE)
        for kind in MASKS:
            times, wall_times, baseline_times, baseline_wall, shares, is_fine = [], [], [], [], [], True
            for seed in range(num_samples):
                mask = sample_mask(kind, s, seed)

                known_digest = mask_digest(mask)

                def build(mask: Any = mask, topology: Topology = topology, digest: str = known_digest) -> None:
                    plan = build_plan(mask, topology.num_ranks, topology=topology, cost=cost, digest=digest)
                    plan.rank_plan(RANK, mask)

                build()
                cpu, wall = times_ms(build, repeats)
                times.extend(cpu)
                wall_times.extend(wall)
                shares.append(parts(mask, topology, cost, repeats))
                if num_ranks == SIZES[0][0]:  # the NumPy version takes a table of all tiles: too large at 2M tokens
                    cpu, wall = times_ms(lambda: plan_in_numpy(mask, topology, rank=RANK), 3)  # noqa: B023
                    baseline_times.extend(cpu)
                    baseline_wall.extend(wall)
                    is_fine &= agrees(mask, topology)
            yield {
                "mask": kind, "p": num_ranks, "s": s, "chunk": chunk_rows,
                "least_chunk": chunk_rows // PARTS, "strategy": "fm3", "threads": 1,
                "ms_median": float(np.median(times)), "ms_p10": float(np.percentile(times, 10)),
                "ms_p90": float(np.percentile(times, 90)), "repeats": len(times),
                "wall_ms_median": float(np.median(wall_times)),
                "parts_ms": {name: round(float(np.median([share[name] for share in shares])), 3) for name in shares[0]},
                "baseline_ms_median": float(np.median(baseline_times)) if baseline_times else None,
                "baseline_wall_ms_median": float(np.median(baseline_wall)) if baseline_wall else None,
                "paper_ms": paper.TABLE_8[kind][1] if baseline_times else None, "refcheck": is_fine,
            }  # fmt: skip


def agrees(mask: Any, topology: Topology) -> bool:
    """Both planners count the same tiles and localise alike, for the NumPy planner's partition."""
    found = plan_in_numpy(mask, topology, rank=RANK)
    local = localize_mask(mask, found.partition, RANK)
    begins = np.asarray(found.partition.chunk_begins_global, np.int32)
    ours = route.needs_of_mask(scan_mask(mask, begins), found.partition, coalesce_rows=1)
    works = np.zeros_like(found.is_sent)
    for rank in range(topology.num_ranks):
        works[rank, np.unique(ours.rows_of(rank) // 512)] = True
    upper_end, lower_begin = (
        np.maximum(local.ut_end, 0),
        np.where(local.lt_begin < local.lt_end, local.lt_begin, local.s_q),
    )
    theirs_end, theirs_begin = found.local_bounds[3], found.local_bounds[0]
    # Columns that hide everything have more than one way to say so.
    is_all = upper_end >= lower_begin
    return (
        np.array_equal(is_all, theirs_end >= theirs_begin)
        and np.array_equal(np.where(is_all, 0, lower_begin), np.where(is_all, 0, theirs_begin))
        and np.array_equal(np.where(is_all, 0, upper_end), np.where(is_all, 0, theirs_end))
        and not (works & ~found.is_sent).any()  # by whole blocks the paper's rule can only send more
    )
