# SPDX-License-Identifier: Apache-2.0
"""The GPU executor on model devices: any order that streams, events and words allow gives the right result."""

from __future__ import annotations

import numpy as np
import pytest
from device_support import Group
from plan_support import random_mask

from paddle_fm3.distributed.device import DeviceTensor
from paddle_fm3.distributed.device_execute import DeviceAttention, Heads
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.strategy import STRATEGIES, Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing import reference
from paddle_fm3.testing.fake_device import FakeDevice


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
        inputs["q"], inputs["k"], inputs["v"], startend_row_indices=indices, causal=causal,
        block_mask=mask.block_mask, dout=inputs["dout"], dlse=inputs["dlse"],
    )  # fmt: skip
    for name in ("out", "lse", "dq", "dk", "dv") if has_backward else ("out", "lse"):
        actual, oracle = getattr(results, name), getattr(wanted, name)
        assert np.array_equal(np.isnan(actual), np.isnan(oracle)), f"{name}: NaN at other places"
        assert np.array_equal(np.isinf(actual), np.isinf(oracle)), f"{name}: infinity at other places"
        finite = np.isfinite(oracle)
        error = np.abs(np.where(finite, actual, 0) - np.where(finite, oracle, 0)).max()
        scale = np.abs(oracle[finite]).max(initial=1.0)
        assert error <= 4e-3 * scale, f"{name}: error {error} at scale {scale}"


@pytest.mark.parametrize(("mode", "num_step_streams"), [("rows", 2), ("steps", 1), (None, 2)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_in_any_order(name: str, mode: str | None, num_step_streams: int) -> None:
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


@pytest.mark.parametrize(
    ("strategy", "options", "what"),
    [
        ("fm3", PlanOptions(chunk_rows=16, num_stages=3), "batch and mask heads"),
        ("dual_chunk_allgather", PlanOptions(), "batch and mask heads"),
        ("fm3", PlanOptions(chunk_rows=16, num_stages=2, capacities=(20, 0, 20, 20)), "idle rank"),
        ("ring", PlanOptions(), "narrow sums"),
        ("dual_chunk_allgather", PlanOptions(), "narrow sums"),
        ("fm3", PlanOptions(chunk_rows=128), "block mask"),
        ("fm3", PlanOptions(chunk_rows=16, num_stages=2), "nothing visible"),
    ],
)
def test_uncommon_plans(strategy: str, options: PlanOptions, what: str) -> None:
    rng = np.random.default_rng(len(what))
    b, h_mask, s = (2, 2, 150) if what == "batch and mask heads" else (1, 1, 160)
    mask = random_mask(rng, s, b=b, h_mask=h_mask)
    if what == "block mask":
        s = 1024
        keep = (rng.random((1, 1, 8, 8)) < 0.6).astype(np.int32)
        bounds, causal = builders.causal_document([600, 424]).to_bounds()
        mask = ColumnMask.from_bounds(bounds, is_causal=causal, s_q=s, block_mask=keep)
    if what == "nothing visible":
        mask = ColumnMask.from_bounds(np.zeros((1, 1, s, 1), np.int32), is_causal=True, s_q=s)
    plan = build_plan(mask, 4, topology=Topology.uniform(4, 2), strategy=strategy, options=options)
    if what == "idle rank":
        assert plan.partition.num_rows(1) == 0
    for mode in ("rows", "steps"):
        group = Group(4, 3, forward_mode=mode, num_step_streams=2, timeout_s=20.0)
        try:
            inputs = make_inputs(rng, b, s, 4, 2, 16, 8)
            collect = group.step(plan, mask, inputs, 0.25, is_wire_float32=what != "narrow sums")
            group.world.run()
            check(collect(), inputs, mask)
        finally:
            group.close()


@pytest.mark.parametrize("strategy", ["fm3", "fm3_no_hierarchy", "ring", "dual_chunk_allgather"])
def test_ranks_may_group_their_backward_calls_differently(strategy: str) -> None:
    rng = np.random.default_rng(7)
    mask = builders.causal_document([90, 70, 40])
    plan = build_plan(
        mask, 4, topology=Topology.uniform(4, 2), strategy=strategy, options=PlanOptions(chunk_rows=16, num_stages=3)
    )
    group = Group(4, 5, num_step_streams=2, timeout_s=20.0)
    try:
        cases = []
        for styles in (("plan", "two", "one", "two"), ("one",) * 4, ("two",) * 4):
            inputs = make_inputs(rng, 1, 200, 2, 1, 8, 8)
            cases.append((group.step(plan, mask, inputs, 8**-0.5, bwd_styles=styles), inputs))
        group.world.run()
        for collect, inputs in cases:
            check(collect(), inputs, mask)
    finally:
        group.close()
    with pytest.raises(ValueError, match="bwd_style='three'"):
        DeviceWork.of(plan, plan.rank_plan(0, mask), bwd_style="three")


@pytest.mark.parametrize("seed", range(24))
def test_single_calls_of_ranks_of_few_rows(seed: int) -> None:
    """One to 64 rows a rank or none; masks that hide all received keys, or everything; calls that begin with own keys and
    tell, beside others; a recomputed forward, or two backwards of one."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 5))
    topology = Topology.uniform(num_ranks, 2) if num_ranks == 4 and rng.random() < 0.5 else None
    group = Group(num_ranks, seed, forward_mode=("rows", "whole", "steps", None)[seed % 4], timeout_s=20.0)
    try:
        cases = []
        for _ in range(4):
            s = int(rng.integers(num_ranks, num_ranks * int(rng.choice((4, 64)))))
            mask = random_mask(rng, s)
            if rng.random() < 0.2:
                bounds = np.zeros((1, 1, s, 1), np.int32)
                bounds[..., : s // 2, :] = rng.integers(0, s)  # nobody sees the second half
                mask = ColumnMask.from_bounds(bounds, is_causal=True, s_q=s)
            capacities = tuple(rng.multinomial(-(-s // 4) + 3, np.full(num_ranks, 1 / num_ranks)).tolist())
            plan = build_plan(
                mask, num_ranks, topology=topology, strategy=str(rng.choice(["fm3", "fm3_no_pruning", "fm3_no_overlap"])),
                options=PlanOptions(chunk_rows=4, num_stages=int(rng.integers(1, 4)), capacities=capacities),
            )  # fmt: skip
            styles = tuple(rng.choice(["one", "one", "two", "plan"], num_ranks).tolist())
            inputs = make_inputs(rng, 1, s, 2, 1, 8, 8)
            if rng.random() < 0.5:
                group.step(plan, mask, inputs, 8**-0.5, has_backward=False)
            num_backwards = int(rng.integers(1, 3))
            collect = group.step(plan, mask, inputs, 8**-0.5, bwd_styles=styles, num_backwards=num_backwards)
            cases.append((collect, inputs, mask))
        group.world.run()
        for collect, inputs, mask in cases:
            check(collect(), inputs, mask)
    finally:
        group.close()


@pytest.mark.parametrize(("mode", "num_schedules"), [("rows", 1), ("whole", 1), ("steps", 3)])
def test_a_mask_is_taken_to_the_device_once_and_given_back(mode: str, num_schedules: int) -> None:
    mask = builders.causal(192)
    plan = build_plan(mask, 2, strategy="fm3_no_pruning", options=PlanOptions(chunk_rows=16, num_stages=2))
    group = Group(2, 4, forward_mode=mode, timeout_s=20.0)
    try:
        one, before = group.ranks[0], set(group.world.live)
        work = DeviceWork.of(plan, plan.rank_plan(0, mask))
        prepared = one.attention.prepare(work, Heads(1, 2, 1, 8, 8, "float16"))
        bwd_masks = [call for call in prepared.bwd_masks if call is not None]
        taken = group.world.live - before
        assert len(work.fwd_calls) == 3 == len(bwd_masks) and len(taken) == 1 + num_schedules + len(bwd_masks)
        for call in bwd_masks:
            assert call.bwd_schedule is not None and call.bwd_schedule.data in taken
        one.attention.discard(prepared)
        assert group.world.live == before
    finally:
        group.close()


def test_one_rank_needs_no_transport() -> None:
    rng = np.random.default_rng(0)
    mask = random_mask(rng, 100)
    group = Group(1, 0)
    inputs = make_inputs(rng, 1, 100, 2, 2, 8, 8)
    collect = group.step(build_plan(mask, 1), mask, inputs, 8**-0.5)
    group.world.run()
    check(collect(), inputs, mask)


def test_buffers_that_cannot_grow_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given back before larger ones are asked for: a smaller step afterwards must not use them."""
    group = Group(1, 0)
    device, attention = group.ranks[0].device, group.ranks[0].attention
    masks = [builders.causal(s) for s in (64, 128, 64)]
    inputs = [make_inputs(np.random.default_rng(s), 1, mask.s_q, 2, 1, 8, 8) for s, mask in enumerate(masks)]
    plans = [build_plan(mask, 1) for mask in masks]
    freed: list[int] = []
    monkeypatch.setattr(device, "free", freed.append)
    group.step(plans[0], masks[0], inputs[0], 8**-0.5)
    group.world.run()
    malloc, old = device.malloc, set(attention._buffers.values())

    def failing(size: int) -> int:
        if old <= set(freed) and attention._buffers:  # the second of the new ones, at the latest
            raise MemoryError("no room")
        return malloc(size)

    with monkeypatch.context() as patch:
        patch.setattr(device, "malloc", failing)
        with pytest.raises(MemoryError, match="no room"):
            group.step(plans[1], masks[1], inputs[1], 8**-0.5)
    collect = group.step(plans[2], masks[2], inputs[2], 8**-0.5)
    assert not set(attention._buffers.values()) & set(freed)
    group.world.run()
    check(collect(), inputs[2], masks[2])


def test_wrong_tensors_and_options_are_refused() -> None:
    mask = builders.causal(64)
    plan = build_plan(mask, 1)
    group = Group(1, 0)
    inputs = make_inputs(np.random.default_rng(0), 1, 64, 2, 1, 8, 8)
    rank = group.ranks[0]
    heads = Heads(1, 2, 1, 8, 8, "float16")
    prepared = rank.attention.prepare(DeviceWork.of(plan, plan.rank_plan(0, mask)), heads)
    x = {name: DeviceTensor.contiguous(256, *inputs[name].shape) for name in ("q", "k", "v", "dout")}
    wrong = DeviceTensor.contiguous(256, 1, 63, 1, 8)
    with pytest.raises(ValueError, match=r"k is \[1, 63, 1, 8\]; rank 0 of this plan wants \[1, 64, 1, 8\]"):
        rank.attention.forward(prepared, heads, x["q"], wrong, x["v"], x["dout"], 256, 1.0, rank.stream)
    strided = DeviceTensor(256, 1, 64, 1, 8, (1024, 16, 8))
    with pytest.raises(ValueError, match="dk has strides"):
        rank.attention.backward(
            prepared, heads, x["q"], x["k"], x["v"], x["dout"], 256, x["dout"], None, x["q"], strided, x["v"], 1.0,
            rank.stream,
        )  # fmt: skip
    with pytest.raises(ValueError, match="forward_mode='fast'"):
        DeviceAttention(rank.device, None, forward_mode="fast")
    with pytest.raises(ValueError, match="num_step_streams=3"):
        DeviceAttention(rank.device, None, num_step_streams=3)


@pytest.mark.parametrize(("strategy", "wanted"), [("fm3_no_pruning", 8), ("fm3_no_overlap", 0)])
def test_attention_leaves_a_transport_s_kernels_room(
    strategy: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows travel beside it, and only for these launches."""
    reserved: list[int] = []
    for name in ("forward", "backward"):
        original = getattr(FakeDevice, name)

        def noting(device: FakeDevice, *arguments: object, original: object = original) -> None:
            reserved.append(device.num_reserved_sms)
            original(device, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(FakeDevice, name, noting)
    rng = np.random.default_rng(8)
    mask = builders.causal(192)
    plan = build_plan(mask, 2, strategy=strategy, options=PlanOptions(chunk_rows=16, num_stages=2))
    group = Group(2, 4, forward_mode="steps", timeout_s=20.0)
    try:
        for rank in group.ranks:
            assert rank.transport is not None
            rank.transport.num_sms = 8
        inputs = make_inputs(rng, 1, 192, 2, 1, 8, 8)
        collect = group.step(plan, mask, inputs, 8**-0.5)
        group.world.run()
        check(collect(), inputs, mask)
        assert len(reserved) >= 4 and set(reserved) == {wanted}
        assert all(rank.device.num_reserved_sms == 0 for rank in group.ranks)
    finally:
        group.close()
