# SPDX-License-Identifier: Apache-2.0
"""The GPU executor on model devices: any order that streams, events and words allow gives the right result."""

from __future__ import annotations

import numpy as np
import pytest
from device_support import Group
from plan_support import random_mask

from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.strategy import STRATEGIES, Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing import reference


def make_inputs(rng: np.random.Generator, b: int, s: int, h_q: int, h_kv: int, d_qk: int, d_v: int) -> dict:
    shapes = {"q": (b, s, h_q, d_qk), "k": (b, s, h_kv, d_qk), "v": (b, s, h_kv, d_v), "dout": (b, s, h_q, d_v)}
    inputs = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    return inputs | {"dlse": rng.standard_normal((b, h_q, s)).astype(np.float32)}


def check(results, inputs: dict, mask: ColumnMask, has_backward: bool = True) -> None:
    bounds = np.stack([mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end], axis=-1)
    if mask.is_causal:
        indices, causal = mask.to_bounds()
    else:
        indices, causal = bounds, False
    wanted = reference.attention(
        inputs["q"], inputs["k"], inputs["v"], startend_row_indices=indices, causal=causal, dout=inputs["dout"],
        dlse=inputs["dlse"],
    )  # fmt: skip
    for name in ("out", "lse", "dq", "dk", "dv") if has_backward else ("out", "lse"):
        actual, oracle = getattr(results, name), getattr(wanted, name)
        assert np.array_equal(np.isnan(actual), np.isnan(oracle)), f"{name}: NaN at other places"
        assert np.array_equal(np.isinf(actual), np.isinf(oracle)), f"{name}: infinity at other places"
        finite = np.isfinite(oracle)
        error = np.abs(np.where(finite, actual, 0) - np.where(finite, oracle, 0)).max()
        scale = np.abs(oracle[finite]).max(initial=1.0)
        assert error <= 4e-3 * scale, f"{name}: error {error} at scale {scale}"


@pytest.mark.parametrize("mode", ["rows", "steps"])
@pytest.mark.parametrize("num_step_streams", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_in_any_order(name: str, num_step_streams: int, mode: str) -> None:
    seed = sum(map(ord, name)) + num_step_streams
    rng = np.random.default_rng(seed)
    for num_ranks, num_nodes in ((2, 1), (4, 2)):
        group = Group(num_ranks, seed, forward_mode=mode, num_step_streams=num_step_streams, timeout_s=20.0)
        try:
            cases = []
            for _ in range(3):  # one after another, all enqueued before any runs: buffers are reused
                s = 256 if name == "paper" else int(rng.integers(130, 300))
                mask = random_mask(rng, s)
                plan = build_plan(
                    mask, num_ranks, topology=Topology.uniform(num_ranks, num_ranks // num_nodes), strategy=name,
                    options=PlanOptions(chunk_rows=16, num_stages=2),
                )  # fmt: skip
                inputs = make_inputs(rng, 1, s, 2, 1, 8, 8)
                collect = group.step(plan, mask, inputs, 8**-0.5)
                cases.append((collect, inputs, mask))
            group.world.run()
            for collect, inputs, mask in cases:
                check(collect(), inputs, mask)
        finally:
            group.close()


@pytest.mark.parametrize("has_backward", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_buffers_are_reused_only_when_all_have_read_them(seed: int, has_backward: bool) -> None:
    """Rank 0 needs no rows of rank 1, and rank 1 no sums of rank 0: only the transport holds them back."""
    rng = np.random.default_rng(seed)
    s = 128
    mask = builders.causal(s)
    plan = build_plan(mask, 2, strategy=Strategy("one_way", "contiguous"), options=PlanOptions(num_stages=2))
    assert set(plan.gather[:, 2].tolist()) == {0}
    group = Group(2, seed, timeout_s=20.0)
    try:
        cases = []
        for _ in range(6):
            inputs = make_inputs(rng, 1, s, 2, 1, 8, 8)
            cases.append((group.step(plan, mask, inputs, 8**-0.5, has_backward=has_backward), inputs))
        group.world.run()
        for collect, inputs in cases:
            check(collect(), inputs, mask, has_backward)
    finally:
        group.close()
