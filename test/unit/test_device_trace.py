# SPDX-License-Identifier: Apache-2.0
"""The timeline of a step on model devices: what ran is there once, on its track, in an order that can have been."""

from __future__ import annotations

import json

import numpy as np
import pytest
from device_support import Group, Rank
from test_device_execute import check, make_inputs

from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_trace import DeviceTrace
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.trace import TRACKS, Span, Trace, hidden_us
from paddle_fm3.mask import builders


def traced_step(mode: str, strategy: str) -> tuple[Group, list[Trace], list[DeviceWork]]:
    """The group, and by rank what the second of three equal steps left, and the work."""
    mask = builders.causal_document([90, 70, 40])
    plan = build_plan(mask, 2, strategy=strategy, options=PlanOptions(chunk_rows=16, num_stages=2))
    group = Group(2, 6, forward_mode=mode, num_step_streams=2, timeout_s=20.0)
    inputs = make_inputs(np.random.default_rng(3), 1, 200, 2, 1, 8, 8)
    group.step(plan, mask, inputs, 8**-0.5)
    group.world.run()
    traces = [Trace() for _ in group.ranks]
    device_traces = [DeviceTrace(rank.device, trace) for rank, trace in zip(group.ranks, traces, strict=True)]
    for rank, device_trace in zip(group.ranks, device_traces, strict=True):
        assert rank.transport is not None
        rank.attention.trace = rank.transport.trace = device_trace
    num_run = group.world.num_run
    collect = group.step(plan, mask, inputs, 8**-0.5)
    assert group.world.num_run == num_run  # nothing was waited for
    for rank in group.ranks:
        rank.attention.trace = rank.transport.trace = None
    group.step(plan, mask, inputs, 8**-0.5)  # leaves nothing
    for rank, trace, device_trace in zip(group.ranks, traces, device_traces, strict=True):
        assert trace.spans  # reading them runs what is needed
        check_enclosed(rank, trace, device_trace)
    group.world.run()
    check(collect(), inputs, mask)
    works = [DeviceWork.of(plan, plan.rank_plan(rank, mask)) for rank in range(2)]
    return group, traces, works


def check_enclosed(rank: Rank, trace: Trace, device_trace: DeviceTrace) -> None:
    """Each span holds what it is named after, on its stream. The model's clock counts what has run."""
    assert isinstance(rank.transport, IpcTransport)
    main, side, extra = rank.stream, rank.attention._side, rank.attention._extra
    keys = rank.attention._key_stream
    wanted = {
        "forward: merge": ("merge", [main]), "forward": ("forward", [main]), "backward": ("backward", [main, *extra]),
        "dQ": ("sum_parts", [main]), "dK/dV sums of own": ("sum_rows", [main]), "own K/V": ("pack", [main, keys]),
        "dK/dV of own": ("sum_rows", [main]), "dK/dV sums step": ("sum_rows", [main, side]),
    }  # fmt: skip
    begin_at = rank.device.world.when(device_trace._origin)
    for span in trace.spans:
        if span.track == "wait":
            continue
        prefix = next(prefix for prefix in wanted if span.name.startswith(prefix)) if span.track == "compute" else ""
        what, streams = wanted[prefix] if prefix else ("copy", [rank.transport._pull_stream])
        begin, end = (begin_at + round((t - device_trace._origin_us) / 1e3) for t in (span.begin_us, span.end_us))
        ran = rank.device.world.history[begin:end]
        assert any((stream, what) in ran for stream in streams), span.name


def named(trace: Trace, track: str, name: str) -> list[Span]:
    return sorted((s for s in trace.spans if s.track == track and name in s.name), key=lambda span: span.begin_us)


@pytest.mark.parametrize("mode", ["whole", "rows", "steps"])
def test_a_step_is_all_there(mode: str) -> None:
    group, traces, works = traced_step(mode, "fm3_no_pruning")
    try:
        for rank, trace in enumerate(traces):
            assert {span.track for span in trace.spans} == {"compute", "wait", "receive"}
            assert all(span.begin_us < span.end_us for span in trace.spans)
            names = [span.name for span in trace.spans if span.track == "compute"]
            forwards = [name for name in names if name.startswith("forward")]
            work = works[rank]
            if mode == "steps":
                steps = [at for at, call in enumerate(work.fwd_calls) if call.k_begin < call.k_end]
                assert forwards == [*(f"forward step {at}" for at in steps), "forward: merge of steps"]
            else:
                assert forwards == ["forward"]
            steps = [at for at, call in enumerate(work.bwd_calls) if call.k_begin < call.k_end]
            assert sorted(name for name in names if name.startswith("backward")) == [
                f"backward step {a}" for a in steps
            ]
            assert names.count("dK/dV sums of own rows") == 1 and names.count("own K/V rows to the key buffer") == 2
            assert names.count("dQ of all steps") == 1
            received = sorted(span.name for span in trace.spans if span.track == "receive")
            batches = [batch.name for batch in (*work.gather, *work.gather, *work.reduce) if batch.recvs]
            assert received == sorted(f"{name} from rank {1 - rank}" for name in batches)
            moved, hidden = hidden_us(trace.spans)
            assert 0 < moved and 0 <= hidden <= moved
            events = json.loads(trace.to_chrome(rank))["traceEvents"]
            assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {f"rank {rank}", *TRACKS}
            assert sum(e["ph"] == "X" for e in events) == len(trace.spans)
    finally:
        group.close()


@pytest.mark.parametrize("strategy", ["fm3_no_overlap", "fm3_no_pruning"])
def test_spans_are_where_the_work_was(strategy: str) -> None:
    group, traces, _ = traced_step("whole", strategy)
    try:
        for trace in traces:
            sums = named(trace, "receive", "dK/dV sums")
            gathers = named(trace, "receive", "K/V rows")
            num_first = len(gathers) // 2  # the forward's
            (forward,), (last,) = named(trace, "compute", "forward"), named(trace, "compute", "sums of own rows")
            packs, backwards = named(trace, "compute", "own K/V"), named(trace, "compute", "backward")
            assert all(span.end_us <= forward.begin_us for span in gathers[:num_first])
            assert forward.end_us <= packs[1].begin_us <= packs[1].end_us
            assert forward.end_us <= min(span.begin_us for span in backwards)
            assert max(span.end_us for span in backwards) <= last.begin_us
            assert all(span.end_us <= last.begin_us for span in sums)
            (waited,) = named(trace, "wait", "K/V rows: forward")
            assert packs[0].end_us <= waited.begin_us and waited.end_us <= forward.begin_us
            assert all(span.end_us <= waited.end_us for span in gathers[:num_first])
    finally:
        group.close()
