# SPDX-License-Identifier: Apache-2.0
"""How many backward calls a plan is worth on a GPU: each further one hides more of the transfers, and costs a pass.

A single call hides its sums on their way to other ranks where its kernel says, while it runs, that the received keys
are done: at head dims up to 128.
"""

from __future__ import annotations

import numpy as np

from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.exchange import DST, ROWS, SRC
from paddle_fm3.distributed.plan import CpPlan

# In passes over device memory of the size of dQ in the kernel's dtype. Before a call reads keys: O and dO, for delta.
# What a further call costs: these, a dQ part written and read again, and work that is spread less evenly; 490 to 720 us
# at 64/8 heads, 210 to 400 us at 32/4 (8K rows on each of two H200s, three masks). And launches.
PASSES_BEFORE_KEYS = 2
PASSES_A_CALL = 13
MEMORY_GB_PER_S = 3300.0
CALL_OVERHEAD_US = 25.0
MAX_WAITING_DIM = 128  # of kernels that wait for keys and say when they are done with them (BwdParams::remote_begin)


def transfer_us(plan: CpPlan, cost: CostModel) -> float:
    """Longest time that a rank receives K and V, or sends dK and dV back, one message after another."""
    nodes = plan.topology.as_array()
    table = plan.gather
    is_slow = nodes[table[:, SRC]] != nodes[table[:, DST]]
    row_us = np.where(is_slow, cost.slow.us_per_row(cost.row_bytes), cost.fast.us_per_row(cost.row_bytes))
    return float(np.bincount(table[:, DST], table[:, ROWS] * row_us, minlength=plan.num_ranks).max())


def call_us(plan: CpPlan, cost: CostModel) -> float:
    """What a further backward call costs the rank with the most rows."""
    return CALL_OVERHEAD_US + PASSES_A_CALL * _pass_us(plan, cost)


def _pass_us(plan: CpPlan, cost: CostModel) -> float:
    num_rows = int(plan.stage_rows[:, 1].max())
    return num_rows * cost.h_q * cost.d * cost.bytes_per_element / (MEMORY_GB_PER_S * 1e3)


def choose_bwd_style(plan: CpPlan, cost: CostModel) -> str:
    """The `bwd_style` of `DeviceWork.of` with the least estimated time: "plan", "two" or "one". The same on every rank.

    Args:
        cost: with the heads and the links of the run.
    """
    num_calls = len(plan.bwd_steps(0))
    if num_calls == 1 or plan.strategy.move == "ring":  # a ring passes sums on step by step
        return "plan"
    moved, called = transfer_us(plan, cost), call_us(plan, cost)
    late = max(0.0, moved - PASSES_BEFORE_KEYS * _pass_us(plan, cost))  # keys that come after a call's first passes
    shown = {"plan": (num_calls - 1) * called, "two": called + late}
    shown["one"] = late if cost.d <= MAX_WAITING_DIM else late + moved
    return min(shown, key=lambda style: shown[style])
