# SPDX-License-Identifier: Apache-2.0
"""Step times of context parallelism on GPUs: jobs of kind "time" of `gpu_cp_rank`, all jobs of a case in turns.

Each figure is of `calls` calls one after another, enqueued before the first of them may start, so that it is the
devices' time and not the hosts'. `loops` rounds take all figures of a case in a random order, the same on every rank:
what clocks and temperature do in the course of a run meets all of them alike.

With "has_parts" also transfers alone (transfers_: no kernels), and the step beside itself with parts left out ("pairs":
see `gpu_cp_pairs`).
"""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paddle_fm3._c_api import BwdParams, FwdParams
from paddle_fm3._device_api import MergeParams, PackParams, PackWords, SumPartsParams, SumRowsParams
from paddle_fm3.distributed.device import Sm90Device
from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.distributed.device_trace import DeviceTrace
from paddle_fm3.distributed.trace import Trace, hidden_us
from paddle_fm3.testing.gpu_cp import RankStep, relative_errors
from paddle_fm3.testing.gpu_cp_pairs import HEAD_START, Pairs

Job = dict[str, Any]
_Figure = tuple[Job, str, Callable[[], None]]  # where it goes, its name, one call
_NUM_TRACED = 3


class NoKernels(Sm90Device):
    """Transfers alone: everything but kernels that compute."""

    def forward(self, params: FwdParams, stream: int) -> None:
        pass

    def backward(self, params: BwdParams, stream: int) -> None:
        if params.sent_word is not None:
            self.write_word(stream, params.sent_word, params.sent_value)

    def sum_parts(self, params: SumPartsParams, stream: int) -> None:
        pass

    def sum_rows(self, tensors: ctypes.Array[SumRowsParams], stream: int) -> None:
        pass

    def merge(self, params: MergeParams, stream: int) -> None:
        pass

    def pack(self, tensors: ctypes.Array[PackParams], words: PackWords | None, stream: int) -> None:
        """Of no rows: for the words."""
        empty = (PackParams * len(tensors)).from_buffer_copy(tensors)
        for params in empty:
            params.s = 0
        super().pack(empty, words, stream)


class _Alone:
    """An executor without kernels, for all jobs with the same ranks and options."""

    def __init__(self, process: Any, job: Job) -> None:
        timeout_s = process.config["timeout_s"]
        self._transport = process.transport(job["num_ranks"], timeout_s)
        self.attention = DeviceAttention(
            NoKernels(process.library), self._transport, timeout_s=timeout_s, **job["options"]
        )

    def figures(self, step: RankStep, result: Job, stream: torch.cuda.Stream) -> list[_Figure]:
        own = step.with_attention(self.attention)
        self._run(partial(_step, own), stream)
        stream.synchronize()
        return [
            (result, f"transfers_{name}_ms", partial(self._run, call, stream))
            for name, call in (("fwd", own.forward), ("bwd", own.backward))
        ]

    def _run(self, call: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """The timed stream waits for what was posted, where no kernel does."""
        call()
        for ticket in self.attention.open_tickets():
            self._transport.wait(ticket, stream.cuda_stream)


def run(process: Any, jobs: list[Job]) -> list[Job]:
    """Results of all jobs of a case: ms a call of forward, backward and both, as this rank sees them, by loop.
    `prepare_ms`: what a mask costs once, on the host's clock."""
    stream, results = process.stream, []
    figures: list[_Figure] = []
    steps: list[tuple[Job, RankStep, torch.Tensor]] = []
    with torch.cuda.stream(stream):
        for job in jobs:
            moving, ipc = process.attention(job)
            step, rows = process.step(job, moving)
            steps.append((job, step, rows))
            result: Job = {"forward_mode": moving.mode_of(step.work)}
            results.append(result)
            begin_s = time.perf_counter()
            moving.discard(moving.prepare(step.work, step.heads))
            result["prepare_ms"] = round(1e3 * (time.perf_counter() - begin_s), 3)
            before = sum(ipc.received_bytes)
            _step(step)
            result["bytes_received"] = sum(ipc.received_bytes) - before
            stream.synchronize()
            result["errors"] = relative_errors(step.results(), process.reference(job), rows)
            figures += [
                (result, "fwd_ms", step.forward), (result, "bwd_ms", step.backward),
                (result, "total_ms", partial(_step, step)),
            ]  # fmt: skip
            if job.get("has_parts"):
                alone: _Alone = process.shared("alone", job, lambda job=job: _Alone(process, job))
                figures += alone.figures(step, result, stream)
        calls, loops = jobs[0]["calls"], jobs[0]["loops"]
        order = random.Random(jobs[0]["name"])
        for _ in range(loops):
            for result, name, call in order.sample(figures, len(figures)):
                stream.synchronize()
                process.exchange(jobs[0]["num_ranks"])({"next": name})  # together
                result.setdefault(name, []).append(_time(call, calls, stream))
        for (job, step, rows), result in zip(steps, results, strict=True):
            if job.get("has_parts"):
                _pair(process, job, step, rows, result)
            if job.get("has_parts") or job.get("has_trace"):
                result["overlapped_pct"] = _trace_steps(process, job, step)
    return results


def _pair(process: Any, job: Job, step: RankStep, rows: torch.Tensor, result: Job) -> None:
    pairs: Pairs = process.shared("pairs", job, lambda: Pairs(process, job))
    own = step.with_attention(pairs.attention)
    step_ms = statistics.median(result["total_ms"])
    result["pairs"] = pairs.run(own, job["pair_seconds"], step_ms, job["name"], process.stream)
    errors = relative_errors(own.results(), process.reference(job), rows)
    result["errors"] = {name: max(error, errors[name], key=_nan_first) for name, error in result["errors"].items()}


def _nan_first(error: float) -> tuple[bool, float]:
    return math.isnan(error), error


def _step(step: RankStep) -> None:
    step.forward()
    step.backward()


def _time(call: Callable[[], None], calls: int, stream: torch.cuda.Stream) -> float:
    """ms a call; one before them brings the ranks into step."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START * (calls + 1))
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
