# SPDX-License-Identifier: Apache-2.0
"""Imbalance and bytes over the slow and the fast link of every strategy, for the masks of table 5."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench_planner_parts.samples import MASKS, sample_mask
from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.planner import build_plan
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.schedule import build_schedule

COLUMNS = (
    "mask",
    "cp",
    "nodes",
    "strategy",
    "imbalance",
    "slow_vs_allgather",
    "slow_bytes",
    "fast_bytes",
    "peak_kv_rows",
    "refcheck",
)
DEGREES = (4, 8, 16, 32)
ROWS_A_RANK, RANKS_PER_NODE = 8192, 8
COST = CostModel(h_q=8, h_kv=1)  # table 5: query to key heads 8 : 1


def run(*, is_quick: bool) -> Iterator[dict[str, Any]]:
    num_samples = 1 if is_quick else 5
    for cp in DEGREES:
        topology = Topology.uniform(cp, RANKS_PER_NODE)
        # K and V of every row to every other node once: no all-gather moves less over the slow link.
        allgather_rows = (topology.num_nodes - 1) * cp * ROWS_A_RANK
        for kind in MASKS:
            masks = [sample_mask(kind, cp * ROWS_A_RANK, seed) for seed in range(num_samples)]
            num_tiles = [int(build_schedule(mask).num_visible_tiles.sum()) for mask in masks]
            for name in STRATEGIES:
                plans = [build_plan(mask, cp, topology=topology, strategy=name, cost=COST) for mask in masks]
                slow = np.array([plan.slow_rows for plan in plans])
                is_fine = all(
                    plan.chunk_tiles[:, 0].sum() == count for plan, count in zip(plans, num_tiles, strict=True)
                )  # fmt: skip
                if plans[0].strategy.is_hierarchical:
                    is_fine &= bool((slow <= allgather_rows).all())
                yield {
                    "mask": kind, "cp": cp, "s": cp * ROWS_A_RANK, "nodes": topology.num_nodes, "strategy": name,
                    "samples": num_samples, "imbalance": float(np.mean([plan.imbalance for plan in plans])),
                    "imbalance_max": float(max(plan.imbalance for plan in plans)),
                    "gap_to_bound": float(np.mean([plan.gap for plan in plans])),
                    "slow_bytes": int(slow.mean() * COST.row_bytes),
                    "fast_bytes": int(np.mean([plan.fast_rows for plan in plans]) * COST.row_bytes),
                    "slow_vs_allgather": float(slow.mean() / allgather_rows) if allgather_rows else None,
                    "slow_vs_allgather_max": float(slow.max() / allgather_rows) if allgather_rows else None,
                    "peak_kv_rows": int(max(plan.peak_k_rows for plan in plans)), "refcheck": bool(is_fine),
                }  # fmt: skip
