# SPDX-License-Identifier: Apache-2.0
"""What a context-parallel step shows of its transfers: beside itself with parts left out, in turns.

Over a run clocks swing by more than transfers take, and after a pause a GPU slows down from step to step. So each step
in some way (`gpu_cp_ways`) runs between two "still" ones, many times over, in a random order of ways that is the same
on every rank; what counts is its time less the mean of those two. The hosts run ahead: times are the devices'.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.testing.gpu_cp import RankStep
from paddle_fm3.testing.gpu_cp_ways import WAYS, Meeting, PartsDevice, PartsTransport, Phases

HEAD_START = 1_000_000  # cycles a phase, more than the host takes to enqueue one
PHASES = ("fwd", "bwd")
_HOST_MS = 1.2  # to enqueue a step, at most
_STEPS_TOGETHER = 24  # that are enqueued ahead; a stream holds some hundred operations
_FEWEST_TURNS, _MOST_TURNS = 6, 300
_OTHERS = tuple(way for way in WAYS if way != "still")
Times = dict[str, dict[str, list[list[float]]]]


class Pairs:
    """What runs a step in turns; one for all jobs with the same ranks and options."""

    def __init__(self, process: Any, job: dict[str, Any]) -> None:
        num_ranks, timeout_s = job["num_ranks"], process.config["timeout_s"]
        self._exchange = process.exchange(num_ranks)
        place = (process.rank, num_ranks, self._exchange, timeout_s)
        device = PartsDevice(process.library)
        self._phases = Phases(device, Meeting(process.device, *place))
        self.attention = DeviceAttention(device, PartsTransport(device, *place), timeout_s=timeout_s, **job["options"])

    def run(self, step: RankStep, seconds: float, step_ms: float, seed: str, stream: torch.cuda.Stream) -> Times:
        """Way -> phase -> by turn: ms of the phase still, in that way, and still again. As many turns as the seconds
        allow, the same on every rank.

        Args:
            step: under `self.attention`; afterwards it holds the results of a whole step.
            step_ms: what a step takes.
        """
        step_ms = max(record["step_ms"] for record in self._exchange({"step_ms": step_ms}))
        steps_a_turn = 2 * len(_OTHERS)
        turns = min(max(int(seconds * 1e3 / (steps_a_turn * step_ms)), _FEWEST_TURNS), _MOST_TURNS)
        together = _STEPS_TOGETHER // steps_a_turn
        # Steps that the host must be ahead by at first, so as not to be caught up with.
        ahead = 2 + math.ceil(_STEPS_TOGETHER * max(0.0, 1 - step_ms / _HOST_MS))
        times: Times = {way: {phase: [] for phase in PHASES} for way in _OTHERS}
        order = random.Random(seed)
        for _ in range(2):  # both key buffers get real rows, once buffers have their size
            self._enqueue(step, "moving", stream.cuda_stream)
        for _ in range(math.ceil(turns / together)):
            stream.synchronize()
            self._exchange({"turn": len(times["moving"]["fwd"])})
            torch.cuda._sleep(HEAD_START * len(PHASES) * ahead)
            self._enqueue(step, "moving", stream.cuda_stream)  # the first of them begins on a rested GPU
            ways = ["still"]
            for _ in range(together):
                for way in order.sample(_OTHERS, len(_OTHERS)):
                    ways += [way, "still"]
            events = [self._enqueue(step, way, stream.cuda_stream) for way in ways]
            stream.synchronize()
            for at in range(1, len(ways), 2):
                for phase_idx, phase in enumerate(PHASES):
                    three = [begin.elapsed_time(end) for begin, end in (events[at + i][phase_idx] for i in (-1, 0, 1))]
                    times[ways[at]][phase].append([round(ms, 5) for ms in three])
        self._enqueue(step, "moving", stream.cuda_stream)
        stream.synchronize()
        return times

    def _enqueue(self, step: RankStep, way: str, stream: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Events before and after each phase."""
        events = []
        for call in (step.forward, step.backward):
            self._phases.meet(stream)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._phases.enqueue(way, call, stream)
            end.record()
            events.append((begin, end))
        return events
