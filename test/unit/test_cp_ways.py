# SPDX-License-Identifier: Apache-2.0
"""Phases with parts left out, one after another by one executor, as tools/bench_cp.py times them: on the model device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_support import Group, on_ranks
from test_device_execute import check, make_inputs

from paddle_fm3.distributed.planner import build_plan
from paddle_fm3.mask import builders
from paddle_fm3.testing.fake_device import FakeDevice
from paddle_fm3.testing.gpu_cp_ways import WAYS, LeavesOut, Meeting, PartsTransport, Phases

NUM_RANKS = 3
MASK = builders.causal_document([100, 60, 32])
SCALE = 8**-0.5


class PartsFake(LeavesOut, FakeDevice):
    pass


class InPhases:
    """A rank's executor, each of whose calls is a phase; `way` is that of the next ones."""

    def __init__(self, attention: Any, phases: Phases) -> None:
        self._attention, self._phases, self.way = attention, phases, "moving"
        self.prepare = attention.prepare

    def forward(self, *arguments: Any) -> None:
        self._phases.meet(arguments[-1])
        self._phases.enqueue(self.way, lambda: self._attention.forward(*arguments), arguments[-1])

    def backward(self, *arguments: Any) -> None:
        self._phases.meet(arguments[-1])
        self._phases.enqueue(self.way, lambda: self._attention.backward(*arguments), arguments[-1])


@contextmanager
def group_of(seed: int) -> Iterator[Group]:
    group = Group(NUM_RANKS, seed, lambda *arguments: PartsTransport(*arguments, timeout_s=20.0), make_device=PartsFake)
    meetings = on_ranks(
        NUM_RANKS, lambda rank: Meeting(group.world.rank_device(), rank, NUM_RANKS, group.exchanger.of(rank), 20.0)
    )
    for rank, meeting in zip(group.ranks, meetings, strict=True):
        rank.attention = InPhases(rank.attention, Phases(rank.device, meeting))  # type: ignore[assignment]
    try:
        yield group
    finally:
        group.close()
        for meeting in meetings:
            meeting.close()


def step(group: Group, way: str, inputs: dict[str, Any], style: str) -> Any:
    for rank in group.ranks:
        rank.attention.way = way  # type: ignore[attr-defined]
    plan = build_plan(MASK, NUM_RANKS)
    return group.step(plan, MASK, inputs, SCALE, bwd_styles=(style,) * NUM_RANKS)


@pytest.mark.parametrize("style", ["one", "two", "plan"])
def test_a_step_is_right_whatever_was_left_out_of_those_before(style: str) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        inputs = make_inputs(rng, 1, MASK.s_q, 2, 1, 8, 8)
        with group_of(seed) as group:
            for _ in range(2):
                step(group, "moving", inputs, style)
            for way in rng.permutation([*WAYS, *WAYS]).tolist():
                step(group, way, inputs, style)
            other = make_inputs(rng, 1, MASK.s_q, 2, 1, 8, 8)
            whole = step(group, "moving", other, style)
            last = step(group, "still", other, style)
            group.world.run()
            check(whole(), other, MASK)
            # With the rows of the step before, which are its own.
            check(last(), other, MASK)


def test_what_is_left_out() -> None:
    inputs = make_inputs(np.random.default_rng(0), 1, MASK.s_q, 2, 1, 8, 8)
    with group_of(0) as group:
        step(group, "moving", inputs, "one")
        group.world.run()
        moved, num_words = {}, {}
        for way in WAYS:
            before, begin = sum(rank.device.num_copied_bytes for rank in group.ranks), len(group.world.history)
            step(group, way, inputs, "one")
            group.world.run()
            moved[way] = sum(rank.device.num_copied_bytes for rank in group.ranks) - before
            ran = [what for _, what in group.world.history[begin:]]
            num_words[way] = sum(what.startswith("wait word") for what in ran)
        assert moved["moving"] > 0 and moved["paced"] == moved["still"] == 0
        assert 0 < moved["beside"] <= moved["moving"]
        assert num_words["paced"] == num_words["moving"] > num_words["beside"] == num_words["still"]


def test_no_phase_begins_before_all_ranks_have_ended_the_last() -> None:
    """In every way: else words written without waits would let another phase's rows go."""
    inputs = make_inputs(np.random.default_rng(0), 1, MASK.s_q, 2, 1, 8, 8)
    with group_of(1) as group:
        step(group, "moving", inputs, "one")
        group.world.run()
        begin = len(group.world.history)
        for way in ("still", "moving", "beside", "still", "paced", "moving"):
            step(group, way, inputs, "one")
        group.world.run()
        kernels = [what for _, what in group.world.history[begin:] if what in ("forward", "backward")]
        assert kernels == (["forward"] * NUM_RANKS + ["backward"] * NUM_RANKS) * 6


def test_all_streams_of_a_rank_come_to_rest_between_phases() -> None:
    inputs = make_inputs(np.random.default_rng(0), 1, MASK.s_q, 2, 1, 8, 8)
    with group_of(1) as group:
        step(group, "moving", inputs, "one")
        group.world.run()
        for held in ([rank.stream for rank in group.ranks], [rank.transport._pull_stream for rank in group.ranks]):
            begin = len(group.world.history)
            step(group, "beside", inputs, "one")
            group.world.hold(*held)
            group.world.run_until_stuck()
            ran = [what for _, what in group.world.history[begin:]]
            # No other stream goes ahead of the caller's, nor that one ahead of the others.
            assert "forward" not in ran and not any(what.startswith("write word") for what in ran)
            group.world.hold()
            group.world.run()
