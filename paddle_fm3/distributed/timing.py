# SPDX-License-Identifier: Apache-2.0
"""When would each rank do what? Plays a CpPlan on alpha-beta links and kernel rates; draws each rank's timeline.

The model: a rank has one sender and one receiver on the fast link and on the slow link; each is busy for a
message's rows, and the message arrives a latency later. A relay starts when all of the stage's rows have reached the
relaying rank, so one stage's slow and fast hops do not overlap (those of different stages do). A compute step runs at
the cost model's rate for the tiles that its own local mask visits. Compute that overlaps transfers is slowed by
`overlap_slowdown`, for what the transfers take from it. Nothing else of a training step is in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.cost import DEFAULT_COST, CostModel
from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.rank_plan import Step
from paddle_fm3.distributed.workload import native_mask
from paddle_fm3.mask.column_mask import ColumnMask

Message = tuple[int, int, int, int, int, float, float]  # stage, hop, src, dst, rows, begin_us, end_us


@dataclass(frozen=True, eq=False)
class Phase:
    """Forward or backward of all ranks; times from the phase's start.

    Attributes:
        step_begin_us, step_end_us: ``[num_ranks, num_steps]``.
        finish_us: ``[num_ranks]``.
        gather, reduce: messages; empty unless asked for.
    """

    step_begin_us: NDArray[np.float64]
    step_end_us: NDArray[np.float64]
    finish_us: NDArray[np.float64]
    gather: list[Message]
    reduce: list[Message]

    @property
    def us(self) -> float:
        """Until the last rank is done."""
        return float(self.finish_us.max())

    @property
    def compute_us(self) -> NDArray[np.float64]:
        """Compute alone, ``[num_ranks]``."""
        return (self.step_end_us - self.step_begin_us).sum(axis=1)


@dataclass(frozen=True, eq=False)
class PlanTimeline:
    """One attention layer under a plan."""

    plan: CpPlan
    fwd: Phase
    bwd: Phase

    @property
    def total_us(self) -> float:
        return self.fwd.us + self.bwd.us

    @property
    def exposed_us(self) -> float:
        """Time that the last rank spends on nothing but waiting, and imbalance: total minus the mean compute."""
        return self.total_us - float(self.fwd.compute_us.mean() + self.bwd.compute_us.mean())

    def to_json(self) -> str:
        """Per rank: steps and finish of both phases."""
        ranks = []
        for rank in range(self.plan.num_ranks):
            row: dict[str, Any] = {"rank": rank, "node": self.plan.topology.node_of_rank[rank]}
            for name, phase in (("fwd", self.fwd), ("bwd", self.bwd)):
                row[name] = {
                    "steps_us": np.stack([phase.step_begin_us[rank], phase.step_end_us[rank]], -1).round(3).tolist(),
                    "finish_us": round(float(phase.finish_us[rank]), 3),
                }
            ranks.append(row)
        return json.dumps({"plan_hash": self.plan.plan_hash, "total_us": round(self.total_us, 3), "ranks": ranks})

    def to_chrome_trace(self) -> str:
        """For chrome://tracing or Perfetto: a process a rank; rows for compute, arrivals, and gradients sent."""
        events: list[dict[str, Any]] = []

        def add(name: str, rank: int, row: str, begin_us: float, end_us: float, **args: Any) -> None:
            if end_us > begin_us:
                event = {"name": name, "ph": "X", "pid": rank, "tid": row, "ts": begin_us, "dur": end_us - begin_us}
                events.append(event | {"args": args})

        offset = 0.0
        for name, phase in (("fwd", self.fwd), ("bwd", self.bwd)):
            for rank, (begins, ends) in enumerate(zip(phase.step_begin_us, phase.step_end_us, strict=True)):
                for step, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
                    add(f"{name} step {step}", rank, "compute", offset + begin, offset + end)
            for stage, hop, src, dst, rows, begin, end in phase.gather:
                add(f"K/V from {src}", dst, "receive", offset + begin, offset + end, stage=stage, hop=hop, rows=rows)
            for stage, hop, src, dst, rows, begin, end in phase.reduce:
                add(
                    f"dK/dV to {dst}",
                    src,
                    "send gradients",
                    offset + begin,
                    offset + end,
                    stage=stage,
                    hop=hop,
                    rows=rows,
                )
            offset += phase.us
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def step_tiles(plan: CpPlan, mask: ColumnMask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tiles that each rank's steps visit, counted on its local masks. Forward and backward,
    each ``[num_ranks, num_steps, 2]`` (visited, of these full)."""
    fwd: list[list[list[int]]] = []
    bwd: list[list[list[int]]] = []
    for rank in range(plan.num_ranks):
        rank_plan = plan.rank_plan(rank, mask)
        counts: dict[Step, list[int]] = {}
        for steps, out in ((rank_plan.fwd_steps, fwd), (rank_plan.bwd_steps, bwd)):
            row = []
            for step in steps:
                key = Step(0, step.k_begin, step.k_end)
                if key not in counts:
                    counts[key] = _tiles(rank_plan.step_mask(step))
                row.append(counts[key])
            out.append(row)
    return np.asarray(fwd, np.int64), np.asarray(bwd, np.int64)


def _tiles(mask: ColumnMask) -> list[int]:
    if mask.s_q == 0 or mask.s_k == 0:
        return [0, 0]
    scan = planner().Scan(native_mask(mask), np.array([0, mask.s_q], np.int32))
    return scan.chunk_tiles()[0].tolist()


def simulate_time(
    plan: CpPlan,
    mask: ColumnMask,
    cost: CostModel = DEFAULT_COST,
    *,
    keeps_gathered: bool = False,
    reduce_row_factor: float = 1.0,
    overlap_slowdown: float = 1.03,
    with_messages: bool = False,
) -> PlanTimeline:
    """Plays forward and backward of one attention layer.

    Args:
        keeps_gathered: backward uses the buffers that forward filled instead of gathering again.
        reduce_row_factor: size of a row of dK/dV relative to K/V (2 for fp32 sums of bf16).
        overlap_slowdown: factor on compute while transfers run beside it.
        with_messages: keep every message (for traces).
    """
    tiles = step_tiles(plan, mask)
    phases = []
    for is_forward, counts, steps in (
        (True, tiles[0], plan.fwd_steps(0)),
        (False, tiles[1], plan.bwd_steps(0)),
    ):
        step_us = cost.tiles_us(
            counts[..., 0] - counts[..., 1], counts[..., 1], mask.h_mask, is_forward=is_forward
        )  # fmt: skip
        has_work = counts[..., 0] > 0
        slowdown = overlap_slowdown if plan.strategy.is_overlapped and plan.num_ranks > 1 else 1.0
        step_us = np.where(has_work, step_us * slowdown + cost.step_overhead_us, 0.0)
        gather = plan.gather if is_forward or not keeps_gathered else plan.gather[:0]
        order = range(1, plan.num_stages + 1) if is_forward else plan.bwd_stages()
        place = np.zeros(plan.num_stages + 1, np.int32)
        place[list(order)] = np.arange(1, plan.num_stages + 1)
        begin, end, finish, gathered, reduced = planner().timeline(
            gather,
            None if is_forward else plan.reduce,
            plan.topology.as_array(),
            plan.stage_rows,
            place,
            np.array([step.stage for step in steps], np.int32),
            np.ascontiguousarray(step_us, np.float64),
            (cost.fast.latency_us, cost.fast.us_per_row(cost.row_bytes)),
            (cost.slow.latency_us, cost.slow.us_per_row(cost.row_bytes)),
            reduce_row_factor,
            with_messages,
        )
        phases.append(Phase(begin, end, finish, gathered, reduced))
    return PlanTimeline(plan, *phases)
