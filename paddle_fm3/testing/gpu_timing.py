# SPDX-License-Identifier: Apache-2.0
"""How the GPU benchmark times a call: behind half a second of itself, without a gap, with the chip's clock beside it.

A power-limited chip runs a call slower when it is hot, and slower right behind a hungrier call, while the limiter
still holds the clock down. So every block of timed calls follows its own heating: what ran before does not count.
A call has several such blocks: gpu_rounds.py.
"""

from __future__ import annotations

import math
import time

import torch

from paddle_fm3.testing.bench import TimingStats
from paddle_fm3.testing.gpu_clock import ClockStamps
from paddle_fm3.testing.gpu_power import PowerLog
from paddle_fm3.testing.gpu_rounds import HEATING_S, TIMED_S, Block, Call

_ESTIMATE_S = 0.05  # of the first heating: calls that are waited for; others are enqueued in front of the timed ones
MIN_CALLS, MAX_CALLS = 3, 400  # timed in a block
_WAIT_CYCLES = 2_000_000  # about a millisecond: longer than the host takes to enqueue a call
_FLUSH_BYTES = 256 << 20  # several times the L2


def heat(call: Call, seconds: float) -> float:
    """Calls for about `seconds`, at least once; returns how long one call took, in seconds."""
    torch.cuda.synchronize()
    begin, num_calls = time.perf_counter(), 0
    while num_calls == 0 or time.perf_counter() < begin + seconds:
        call()
        torch.cuda.synchronize()
        num_calls += 1
    return (time.perf_counter() - begin) / num_calls


def time_block(
    call: Call, first: Block | None = None, *, repeats: int | None = None, power: PowerLog | None = None
) -> Block:
    """Heats with `call`, then times it.

    Args:
        first: a block of this call; as many calls are timed again, and its times say how many calls heat.
        repeats: default what fits in TIMED_S.
    """
    begin_s = time.perf_counter()
    if first is None:
        duration_s = heat(call, 0.0)
        if duration_s < HEATING_S:  # else it has heated
            duration_s = heat(call, _ESTIMATE_S)  # the first call may have loaded and allocated
        num_calls = repeats or min(max(MIN_CALLS, math.ceil(TIMED_S / duration_s)), MAX_CALLS)
    else:
        duration_s, num_calls = 1e-3 * first.ms_median, len(first.times_ms)
    left_s = HEATING_S - (time.perf_counter() - begin_s)
    stamps = ClockStamps(num_calls)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(num_calls)]
    torch.cuda._sleep(_WAIT_CYCLES)
    for _ in range(max(0, math.ceil(left_s / duration_s))):
        call()
    stamps.stamp()
    for begin, end in events:
        begin.record()
        call()
        end.record()
        stamps.stamp()
    events[0][0].synchronize()
    begin_s = time.perf_counter()
    events[-1][1].synchronize()
    draw = power.between(begin_s, time.perf_counter()) if power else None
    return Block([begin.elapsed_time(end) for begin, end in events], stamps.megahertz(), draw)


def time_call(call: Call, repeats: int) -> list[float]:
    """Milliseconds of single calls by CUDA events, behind one that does not count."""
    call()
    times_ms: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return times_ms


def measure_matmul(size: int = 8192, repeats: int = 100) -> float:
    """TFLOP/s of a bf16 size^3 product after heating with it: median of `repeats`."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    heat(lambda: a @ b, HEATING_S)
    times_ms = time_call(lambda: a @ b, repeats)
    return float(f"{2 * size**3 / TimingStats.from_ms(times_ms).ms_median * 1e-9:.5g}")


def time_in_a_row(call: Call, calls: int = 50, replays: int = 9) -> TimingStats:
    """Microseconds (in the fields of milliseconds) of a call: a CUDA graph of `calls` in a row, by their number."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return TimingStats.from_ms([1e3 * ms / calls for ms in time_call(graph.replay, replays)])


def time_cold(call: Call, repeats: int = 15) -> TimingStats:
    """Microseconds (in the fields of milliseconds) of single calls, enqueued ahead, after the L2 was overwritten."""
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    call()
    times_us = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.fill_(1)
        torch.cuda._sleep(_WAIT_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times_us.append(1e3 * begin.elapsed_time(end))
    return TimingStats.from_ms(times_us)
