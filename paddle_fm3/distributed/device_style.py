# SPDX-License-Identifier: Apache-2.0
"""How many backward calls a plan is worth on a GPU: each further one hides more of the transfers, and costs a pass."""

from __future__ import annotations

import numpy as np

from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.exchange import DST, ROWS, SRC
from paddle_fm3.distributed.plan import CpPlan

# What one further call moves through device memory, in sizes of dQ in the kernel's dtype: O and dO for delta, the
# float32 ring that is cleared, the dQ part written and read again. And launches, and the tail of a kernel.
PASSES_A_CALL = 6
MEMORY_GB_PER_S = 3300.0
CALL_OVERHEAD_US = 25.0


def transfer_us(plan: CpPlan, cost: CostModel) -> float:
    """Longest time that a rank receives K and V, or sends dK and dV back, one message after another."""
    nodes = plan.topology.as_array()
    table = plan.gather
    is_slow = nodes[table[:, SRC]] != nodes[table[:, DST]]
    row_us = np.where(is_slow, cost.slow.us_per_row(cost.row_bytes), cost.fast.us_per_row(cost.row_bytes))
    return float(np.bincount(table[:, DST], table[:, ROWS] * row_us, minlength=plan.num_ranks).max())


def call_us(plan: CpPlan, cost: CostModel) -> float:
    """What a further backward call costs the rank with the most rows."""
    num_rows = int(plan.stage_rows[:, 1].max())
    dq_bytes = num_rows * cost.h_q * cost.d * cost.bytes_per_element
    return CALL_OVERHEAD_US + PASSES_A_CALL * dq_bytes / (MEMORY_GB_PER_S * 1e3)


def choose_bwd_style(plan: CpPlan, cost: CostModel, is_causal: bool) -> str:
    """The `bwd_style` of `DeviceWork.of` with the least estimated time: "plan", "two" or "one". The same on every rank.

    Under a causal rule the calls of a plan are not joined to one. On two H200s a backward in two calls took 20 and 23 %
    less than in one with 8K rows a rank, 3 and 18 % less with 32K: the Hopper backward took key tiles in their order,
    as if later ones were cheaper, but received ones come last and are seen by nearly all rows. Since then it starts
    with the longest where items are few (`goes_by_key`, ops/cuda/sm90_bwd/plan.h); one call was not timed again.

    Args:
        cost: with the heads and the links of the run.
        is_causal: of the mask.
    """
    num_calls = len(plan.bwd_steps(0))
    if num_calls == 1 or plan.strategy.move == "ring":  # a ring passes sums on step by step
        return "plan"
    moved, called = transfer_us(plan, cost), call_us(plan, cost)
    shown = {"plan": (num_calls - 1) * called, "two": called + moved}
    if not is_causal:
        shown["one"] = 2 * moved
    return min(shown, key=lambda style: shown[style])
