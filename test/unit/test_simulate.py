# SPDX-License-Identifier: Apache-2.0
"""Whole plans, all ranks in one process on the CPU kernels, against dense float64 attention of the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.simulate import PlanError, SimulatedAttention, merge, simulate
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing.reference import AttentionResult, attention

S = 384
DOCUMENTS = [1, 40, 129, 7, 200, 7]  # a document of one token, and one longer than s / P
MASKS = {
    "full": lambda: builders.full(S),
    "causal": lambda: builders.causal(S),
    "window": lambda: builders.sliding_window(S, 50),
    "causal_document": lambda: builders.causal_document(DOCUMENTS),
    "document": lambda: builders.document(DOCUMENTS),
    "prefix_document": lambda: builders.prefix_lm_document(DOCUMENTS, [1, 20, 100, 3, 10, 7]),
    "global_window": lambda: builders.global_sliding_window(S, 16, 30, 30),
    "causal_blockwise": lambda: builders.causal_blockwise(DOCUMENTS),
    "qk_sparse": lambda: builders.qk_sparse(S, [(50, 90), (200, 260)]),
    "random_eviction": lambda: builders.random_eviction(S, seed=1, first_row=0),
    "two_batches_two_heads": lambda: _two_by_two(),
}
LAYOUTS = {"1": (0,), "3": (0, 0, 1), "4 on 2 nodes": (0, 0, 1, 1), "8 on 3 nodes": (0, 0, 0, 1, 1, 1, 2, 2)}


def _two_by_two() -> ColumnMask:
    """Different masks in each batch entry and mask head; some rows see nothing, some columns are seen by none."""
    rng = np.random.default_rng(5)
    bounds = np.sort(rng.integers(0, S + 1, (4, 2, 2, S)).astype(np.int32), axis=0)
    bounds[:, 0, 0, 100:140] = np.array([0, S, 0, 0], np.int32)[:, None]
    return ColumnMask(*np.ascontiguousarray(bounds), s_q=S, is_causal=False)


@lru_cache(maxsize=32)
def inputs(b: int, h_q: int, h_kv: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(11)
    q, dout = (rng.standard_normal((b, S, h_q, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((b, S, h_kv, 16)).astype(np.float32) for _ in range(2))
    return q, k, v, dout, rng.standard_normal((b, h_q, S)).astype(np.float32)


@lru_cache(maxsize=32)
def oracle(name: str) -> AttentionResult:
    mask = MASKS[name]()
    q, k, v, dout, dlse = inputs(mask.b, 2, 2 if mask.h_mask == 2 else 1)
    bounds = np.stack([mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end], -1)
    if mask.is_causal:  # four bounds are a non-causal format: the causal rule takes the free second interval
        assert (mask.ut_begin >= mask.ut_end).all()
        bounds[..., 2], bounds[..., 3] = 0, np.arange(S)
    return attention(q, k, v, bounds, causal=False, dout=dout, dlse=dlse)


def run(name: str, plan: CpPlan) -> SimulatedAttention:
    mask = MASKS[name]()
    q, k, v, dout, dlse = inputs(mask.b, 2, 2 if mask.h_mask == 2 else 1)
    return simulate(plan, mask, q, k, v, dout, dlse)


def assert_equals_oracle(name: str, result: SimulatedAttention) -> None:
    expected = oracle(name)
    for field in ("out", "lse", "dq", "dk", "dv"):
        got, want = getattr(result, field), getattr(expected, field)
        assert np.array_equal(np.isfinite(got), np.isfinite(want)), f"{name}: {field}: finite at different places"
        finite = np.isfinite(want)
        np.testing.assert_allclose(got[finite], want[finite], rtol=2e-4, atol=2e-5, err_msg=f"{name}: {field}")


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "paper"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strategy_equals_one_device(strategy: str, layout: str) -> None:
    topology = Topology(LAYOUTS[layout])
    for name in MASKS:
        options = PlanOptions(num_stages=2, coalesce_rows=1, piece_rows=64)
        plan = build_plan(MASKS[name](), topology.num_ranks, topology=topology, strategy=strategy, options=options)
        assert_equals_oracle(name, run(name, plan))


def test_paper_planner_equals_one_device() -> None:
    topology = Topology((0, 0, 1, 1))
    for name in MASKS:
        plan = build_plan(MASKS[name](), 4, topology=topology, strategy="paper", options=PlanOptions(chunk_rows=32))
        assert_equals_oracle(name, run(name, plan))


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_uneven_chunks_and_ranks_without_work(num_ranks: int) -> None:
    # 100-row chunks: the last has 84 rows; 5 ranks of one chunk at most leave one rank with nothing.
    for name in ("document", "random_eviction", "causal_blockwise"):
        options = PlanOptions(chunk_rows=100, num_stages=3)
        plan = build_plan(MASKS[name](), num_ranks, topology=Topology.uniform(num_ranks, 2), options=options)
        assert_equals_oracle(name, run(name, plan))


def test_block_mask() -> None:
    rng = np.random.default_rng(2)
    block_mask = rng.integers(0, 2, (1, 1, 3, 3)).astype(np.int32)
    bounds = np.full((1, 1, S, 1), S, np.int32)
    mask = ColumnMask.from_bounds(bounds, is_causal=True, s_q=S, block_mask=block_mask)
    q, k, v, dout, dlse = inputs(1, 2, 1)
    expected = attention(q, k, v, bounds, causal=True, block_mask=block_mask, dout=dout, dlse=dlse)
    for num_ranks in (1, 2, 3):
        plan = build_plan(mask, num_ranks, topology=Topology.uniform(num_ranks, 2))
        result = simulate(plan, mask, q, k, v, dout, dlse)
        for field in ("out", "dq", "dk", "dv"):
            np.testing.assert_allclose(getattr(result, field), getattr(expected, field), rtol=2e-4, atol=2e-5)


# --- a wrong plan is noticed ---------------------------------------------------------------------


def _plan() -> CpPlan:
    options = PlanOptions(num_stages=2, coalesce_rows=1)
    return build_plan(MASKS["document"](), 4, topology=Topology((0, 0, 1, 1)), options=options)


def _changed(plan: CpPlan, direction: str, row: int, column: int, by: int) -> CpPlan:
    table = getattr(plan, direction).copy()
    table[row, column] += by
    return replace(plan, **{direction: table})


@pytest.mark.parametrize(
    "direction, change, message",
    [
        ("gather", lambda p: replace(p, gather=p.gather[1:]), "never arrive|does not have"),
        ("gather", lambda p: replace(p, gather=np.concatenate([p.gather, p.gather[:1]])), "arrive twice|outside"),
        ("gather", lambda p: _changed(p, "gather", 0, 6, 1), "disagree|does not have"),
        ("gather", lambda p: _changed(p, "gather", 0, 7, 1), "disagree"),
        ("reduce", lambda p: replace(p, reduce=p.reduce[1:]), "stay behind"),
        ("reduce", lambda p: replace(p, reduce=np.concatenate([p.reduce, p.reduce[-1:]])), "before it was complete"),
        ("reduce", lambda p: _changed(p, "reduce", len(p.reduce) - 1, 0, -2), "before the sender|complete|stay behind"),
        ("reduce", lambda p: _changed(p, "reduce", 0, 7, 1), "disagree"),
    ],
)
def test_a_broken_plan_is_refused(direction: str, change, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run("document", change(_plan()))


def test_a_mask_that_is_not_the_plans_is_noticed() -> None:
    """Rows that the plan did not bring are not in the buffer, so a wider mask gives another result."""
    plan = _plan()
    mask = MASKS["full"]()
    q, k, v, _, _ = inputs(1, 2, 1)
    result = simulate(plan, mask, q, k, v)
    assert np.abs(result.out - oracle("full").out).max() > 1e-3


def test_merge_of_empty_parts() -> None:
    zero, empty = np.zeros((1, 1, 1, 2), np.float32), np.full((1, 1, 1), -np.inf, np.float32)
    out, lse = merge(zero, empty, zero, empty)
    assert not np.isnan(out).any() and np.isneginf(lse).all()
    one = np.ones_like(zero)
    out, lse = merge(zero, empty, one, np.zeros_like(empty))
    assert (out == 1).all() and (lse == 0).all()
