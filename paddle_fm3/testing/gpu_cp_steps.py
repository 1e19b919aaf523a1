# SPDX-License-Identifier: Apache-2.0
"""Step times of context parallelism on GPUs: jobs of kind "time" of `gpu_cp_rank`, all jobs of a case in turns.

Each figure is of `calls` calls one after another, enqueued before the first of them may start, so that it is the
devices' time and not the hosts'. `loops` rounds take all figures of a case in a random order, the same on every rank:
what clocks and temperature do in the course of a run meets all of them alike.

A step beside itself with parts left out ("has_parts"):

    ""          the step
    paced_      nothing is copied; ranks wait for each other as in the step
    still_      nothing is copied, no rank waits for another
    transfers_  transfers alone: no kernels

Rows that are not copied are those of the last step that did copy: real numbers, for power depends on them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paddle_fm3._c_api import BwdParams, FwdParams
from paddle_fm3._device_api import MergeParams, PackParams, SumPartsParams, SumRowsParams
from paddle_fm3.distributed.device import Sm90Device
from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_trace import DeviceTrace
from paddle_fm3.distributed.device_transport import Ticket
from paddle_fm3.distributed.trace import Trace, hidden_us
from paddle_fm3.testing.gpu_cp import RankStep, relative_errors

Job = dict[str, Any]
_Figure = tuple[Job, str, Callable[[], None], Callable[[], None]]  # where it goes, its name, what to set, one call
_HEAD_START = 1_000_000  # cycles a call and more than the host takes to enqueue one
_NUM_TRACED = 3


class QuietDevice(Sm90Device):
    """Copies nothing while `is_quiet`."""

    is_quiet = False

    def copy(self, copies: Any, stream: int) -> None:
        if not self.is_quiet:
            super().copy(copies, stream)


class StillTransport(IpcTransport):
    """While `is_still` no stream waits for another rank, and the words are written all the same: batches after them are
    counted on from there."""

    is_still = False

    def _post(
        self, ticket: Ticket, stream: int, after: tuple[Ticket, ...], word: tuple[int, int, int] | None,
        recv_after: int | None,
    ) -> None:  # fmt: skip
        if not self.is_still:
            super()._post(ticket, stream, after, word, recv_after)
            return
        page, device = self._page, self._device
        for offset in (page.ready_offset(self.rank, ticket.number), page.pulled_offset(self.rank)):
            device.write_word(stream, self._base + offset, ticket.number + 1)
        if word is not None:
            device.write_word(stream, word[0], word[2])

    def _wait(self, ticket: Ticket, stream: int) -> None:
        if not self.is_still:
            super()._wait(ticket, stream)

    def _wait_sent(self, ticket: Ticket, stream: int) -> None:
        if not self.is_still:
            super()._wait_sent(ticket, stream)

    def _wait_ready(self, tickets: list[Ticket], stream: int) -> None:
        if not self.is_still:
            super()._wait_ready(tickets, stream)


class NoKernels(Sm90Device):
    """Transfers alone: everything but kernels."""

    def forward(self, params: FwdParams, stream: int) -> None:
        pass

    def backward(self, params: BwdParams, stream: int) -> None:
        if params.sent_word is not None:
            self.write_word(stream, params.sent_word, params.sent_value)

    def sum_parts(self, params: SumPartsParams, stream: int) -> None:
        pass

    def sum_rows(self, params: SumRowsParams, stream: int) -> None:
        pass

    def merge(self, params: MergeParams, stream: int) -> None:
        pass

    def pack(self, params: PackParams, stream: int) -> None:
        pass


class _Parts:
    """Executors that leave parts of a step out, one of each for all jobs with the same ranks and options."""

    def __init__(self, process: Any, job: Job) -> None:
        num_ranks, timeout_s = job["num_ranks"], process.config["timeout_s"]
        exchange = process.exchange(num_ranks)
        self._device = QuietDevice(process.library)
        self._still = StillTransport(self._device, process.rank, num_ranks, exchange, timeout_s)
        self.quiet = DeviceAttention(self._device, self._still, timeout_s=timeout_s, **job["options"])
        self._alone = IpcTransport(process.device, process.rank, num_ranks, exchange, timeout_s)
        self.alone = DeviceAttention(NoKernels(process.library), self._alone, timeout_s=timeout_s, **job["options"])

    def set(self, is_quiet: bool, is_still: bool) -> None:
        """For what is enqueued from now on. All ranks do it between steps that have run."""
        self._device.is_quiet, self._still.is_still = is_quiet, is_still

    def wait_alone(self, stream: torch.cuda.Stream) -> None:
        """Makes the timed stream wait for what was posted, where no kernel does."""
        for ticket in self.alone.open_tickets():
            self._alone.wait(ticket, stream.cuda_stream)


def run(process: Any, jobs: list[Job]) -> list[Job]:
    """Results of all jobs of a case: ms a call of forward, backward and both, as this rank sees them, by loop.
    `prepare_ms`: what a mask costs once, on the host's clock."""
    stream, results = process.stream, []
    figures: list[_Figure] = []
    quiet: list[tuple[_Parts, RankStep]] = []
    steps: list[RankStep] = []
    with torch.cuda.stream(stream):
        for job in jobs:
            moving, ipc = process.attention(job)
            step, rows = process.step(job, moving)
            steps.append(step)
            result: Job = {"forward_mode": moving.mode_of(step.work)}
            results.append(result)
            begin_s = time.perf_counter()
            moving.discard(moving.prepare(step.work))
            result["prepare_ms"] = round(1e3 * (time.perf_counter() - begin_s), 3)
            before = sum(ipc.received_bytes)
            _step(step)
            result["bytes_received"] = sum(ipc.received_bytes) - before
            stream.synchronize()
            result["errors"] = relative_errors(step.results(), process.reference(job), rows)
            figures += [(result, name, _nothing, call) for name, call in _calls("", step)]
            figures.append((result, "total_ms", _nothing, partial(_step, step)))
            if job.get("has_parts"):
                parts: _Parts = process.shared("parts", job, lambda job=job: _Parts(process, job))
                quiet.append((parts, step.with_attention(parts.quiet)))
                figures += _part_figures(parts, quiet[-1][1], step.with_attention(parts.alone), result, stream)
        for parts, one in quiet:  # both key buffers get real rows, once buffers have their size
            parts.set(is_quiet=False, is_still=False)
            for _ in range(2):
                _step(one)
            stream.synchronize()
        calls, loops = jobs[0]["calls"], jobs[0]["loops"]
        order = random.Random(jobs[0]["name"])
        for _ in range(loops):
            for result, name, set_up, call in order.sample(figures, len(figures)):
                stream.synchronize()
                set_up()
                process.exchange(jobs[0]["num_ranks"])({"next": name})  # together
                result.setdefault(name, []).append(_time(call, calls, stream))
        for job, step, result in zip(jobs, steps, results, strict=True):
            if job.get("has_parts") or job.get("has_trace"):
                result["overlapped_pct"] = _trace_steps(process, job, step)
    return results


def _calls(prefix: str, step: RankStep) -> list[tuple[str, Callable[[], None]]]:
    return [(f"{prefix}fwd_ms", step.forward), (f"{prefix}bwd_ms", step.backward)]


def _part_figures(
    parts: _Parts, quiet: RankStep, alone: RankStep, result: Job, stream: torch.cuda.Stream
) -> list[_Figure]:
    found: list[_Figure] = []
    for prefix, is_still in (("paced_", False), ("still_", True)):
        found += [(result, name, partial(parts.set, True, is_still), call) for name, call in _calls(prefix, quiet)]
    for name, call in _calls("transfers_", alone):
        found.append((result, name, _nothing, partial(_transfers, call, parts, stream)))
    _step(alone)
    parts.wait_alone(stream)
    stream.synchronize()
    return found


def _nothing() -> None:
    pass


def _step(step: RankStep) -> None:
    step.forward()
    step.backward()


def _transfers(call: Callable[[], None], parts: _Parts, stream: torch.cuda.Stream) -> None:
    call()
    parts.wait_alone(stream)


def _time(call: Callable[[], None], calls: int, stream: torch.cuda.Stream) -> float:
    """ms a call; one before them brings the ranks into step."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START * (calls + 1))
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    stream.synchronize()
    return round(begin.elapsed_time(end) / calls, 5)


def _trace_steps(process: Any, job: Job, step: RankStep) -> float:
    """Of the time in which rows came to this rank the share in which it had attention or sums in hand, over a few steps
    after two others. The last one's timeline goes to out/trace_<job>_rank<rank>.json if it is wanted."""
    attention, ipc = process.attention(job)
    process.stream.synchronize()
    process.exchange(job["num_ranks"])({"traced": job["name"]})
    moving_us, both_us = 0.0, 0.0
    for number in range(2 + _NUM_TRACED):
        trace = Trace()
        attention.trace = ipc.trace = None if number < 2 else DeviceTrace(process.device, trace)
        _step(step)
        process.stream.synchronize()
        moving, both = hidden_us(trace.spans)
        moving_us, both_us = moving_us + moving, both_us + both
    attention.trace = ipc.trace = None
    if job.get("has_trace"):
        trace.save(Path(process.config["out"]) / f"trace_{job['name']}_rank{process.rank}.json", process.rank)
    return round(100 * both_us / moving_us, 1) if moving_us else 100.0
