# SPDX-License-Identifier: Apache-2.0
"""The number of backward calls follows what transfers and calls cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paddle_fm3.distributed.cost import CostModel, Link
from paddle_fm3.distributed.device_style import call_us, choose_bwd_style, transfer_us
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask import builders

COST = CostModel(h_q=32, h_kv=4, d=128)
MASK = builders.causal_document([9000, 3000, 12768, 8000])


def with_links(fast: float, slow: float) -> CostModel:
    return replace(COST, fast=Link(fast, 5.0), slow=Link(slow, 15.0))


def test_transfers_and_calls_are_added_up() -> None:
    plan = build_plan(MASK, 4, topology=Topology.uniform(4, 2), strategy="dual_chunk_allgather", cost=COST)
    rows = plan.gather[:, 5]
    is_slow = plan.topology.as_array()[plan.gather[:, 2]] != plan.topology.as_array()[plan.gather[:, 3]]
    by_rank = [
        sum(n * (2048 / 40e3 if s else 2048 / 300e3) for n, s, dst in zip(rows, is_slow, plan.gather[:, 3], strict=True)
            if dst == rank)
        for rank in range(4)
    ]  # fmt: skip
    assert transfer_us(plan, COST) == pytest.approx(max(by_rank))
    assert call_us(plan, COST) == pytest.approx(25 + 13 * 8192 * 32 * 128 * 2 / 3.3e6)


def test_short_transfers_are_not_worth_a_call_and_long_ones_are() -> None:
    plan = build_plan(MASK, 4, topology=Topology.uniform(4, 2), cost=COST, options=PlanOptions(num_stages=1))
    assert len(plan.bwd_steps(0)) == 3
    styles = [choose_bwd_style(plan, with_links(rate, rate)) for rate in (1e5, 1e4, 300, 40, 5, 1)]
    assert styles[0] == "one" and styles[-1] == "plan"
    assert sorted(styles, key=["one", "two", "plan"].index) == styles  # only ever more calls as links get slower
    many = build_plan(MASK, 4, topology=Topology.uniform(4, 2), cost=COST, options=PlanOptions(num_stages=4))
    costs = [with_links(rate, rate) for rate in (300, 200, 100, 80, 60, 40, 20)]
    assert "two" in [choose_bwd_style(many, replace(cost, d=192)) for cost in costs]
    # A call that tells when its received keys are done has both.
    assert "two" not in [choose_bwd_style(many, cost) for cost in costs]


@pytest.mark.parametrize("strategy", ["ring", "fm3_no_overlap", "dual_chunk_allgather"])
def test_plans_without_a_choice_stay_as_they_are(strategy: str) -> None:
    plan = build_plan(MASK, 4, topology=Topology.uniform(4, 2), strategy=strategy, cost=COST)
    assert choose_bwd_style(plan, with_links(1e6, 1e6)) == "plan"
