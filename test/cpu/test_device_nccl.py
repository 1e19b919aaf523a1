# SPDX-License-Identifier: Apache-2.0
"""The NCCL transport on model devices and a model of NCCL: what comes before what, and how a lost rank ends.

The model: sends and receives of a group run on the stream that is current, in order; a receive waits until the peer's
send has run. Real NCCL is test/gpu/test_paddle_cp_gpu.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from device_support import Group
from plan_support import random_mask
from program import run_program
from test_device_execute import check, make_inputs

from paddle_fm3 import _paddle
from paddle_fm3.distributed import device_nccl
from paddle_fm3.distributed.device_held import EXIT_STATUS
from paddle_fm3.distributed.device_nccl import NcclTransport
from paddle_fm3.distributed.device_trace import DeviceTrace
from paddle_fm3.distributed.device_transport import Batch
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.strategy import STRATEGIES, Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.trace import Trace
from paddle_fm3.distributed.transport import TcpTransport
from paddle_fm3.mask import builders
from paddle_fm3.testing.fake_device import FakeDevice, FakeWorld

ROOT = Path(__file__).resolve().parents[2]


class FakeNccl:
    """All ranks' process groups; enqueues on the world's streams."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.current = threading.local()
        self.mail: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)  # (source, destination)

    def new_stream(self, *, is_urgent: bool) -> Any:
        return SimpleNamespace(cuda_stream=self.world.new_stream())

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        self.current.stream = stream.cuda_stream
        yield
        del self.current.stream

    @contextlib.contextmanager
    def grouped_p2p(self, process_group: FakeProcessGroup) -> Iterator[None]:
        process_group.batch = []
        yield
        # All sends of a group make progress whether or not its receives do.
        for kind in ("send", "recv"):
            for what, address, num_bytes, peer in process_group.batch:
                if what == kind:
                    self._enqueue(kind, address, num_bytes, process_group.rank, peer)
        process_group.batch = None

    def _enqueue(self, kind: str, address: int, num_bytes: int, rank: int, peer: int) -> None:
        sent, awaited = self.mail[rank, peer], self.mail[peer, rank]

        def send() -> None:
            sent.append(ctypes.string_at(address, num_bytes))

        def receive() -> None:
            data = awaited.popleft()
            assert len(data) == num_bytes, (rank, peer, len(data), num_bytes)
            ctypes.memmove(address, data, num_bytes)

        run, is_ready = (send, None) if kind == "send" else (receive, lambda: bool(awaited))
        self.world.enqueue(self.current.stream, f"{kind} of rank {rank}, peer {peer}", run, is_ready)


class FakeProcessGroup:
    def __init__(self, nccl: FakeNccl, rank: int) -> None:
        self.nccl, self.rank = nccl, rank
        self.batch: list[Any] | None = None

    def send_on_calc_stream(self, tensor: paddle.Tensor, peer: int) -> None:
        assert self.batch is not None
        self.batch.append(("send", tensor.data_ptr(), tensor.shape[0], peer))

    def recv_on_calc_stream(self, tensor: paddle.Tensor, peer: int) -> None:
        assert self.batch is not None
        self.batch.append(("recv", tensor.data_ptr(), tensor.shape[0], peer))


def controls(num_ranks: int) -> list[TcpTransport]:
    ends = {(a, b): socket.socketpair() for a in range(num_ranks) for b in range(a)}
    return [
        TcpTransport(r, {p: ends[max(r, p), min(r, p)][int(r < p)] for p in range(num_ranks) if p != r})
        for r in range(num_ranks)
    ]


def patch(monkeypatch: Any) -> None:
    """The calls of Paddle that need a GPU; which world is meant is known by the device of the call."""
    monkeypatch.setattr(paddle.distributed.stream, "all_reduce", lambda tensor, group: None)


def nccl_group(num_ranks: int, seed: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Group:
    patch(monkeypatch)
    connections = controls(num_ranks)
    models: dict[int, FakeNccl] = {}

    def make(device: FakeDevice, rank: int, num_ranks: int, exchange: Any) -> NcclTransport:
        with lock:
            nccl = models.setdefault(id(device.world), FakeNccl(device.world))
            for name in ("new_stream", "on_stream", "grouped_p2p"):
                monkeypatch.setattr(_paddle, name, getattr(nccl, name))
        exchange(None)  # every rank sees the patches
        group = SimpleNamespace(rank=rank, nranks=num_ranks, process_group=FakeProcessGroup(nccl, rank))
        return NcclTransport(group, device, connections[rank], timeout_s=20.0)

    lock = threading.Lock()
    return Group(num_ranks, seed, make_transport=make, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_in_any_order(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = sum(map(ord, strategy))
    rng = np.random.default_rng(seed)
    for num_ranks, num_nodes in ((2, 1), (4, 2)):
        group = nccl_group(num_ranks, seed, monkeypatch, num_step_streams=2, timeout_s=20.0)
        cases = []
        for _ in range(3):
            s = 256 if strategy == "paper" else int(rng.integers(130, 300))
            mask = random_mask(rng, s)
            plan = build_plan(
                mask, num_ranks, topology=Topology.uniform(num_ranks, num_ranks // num_nodes), strategy=strategy,
                options=PlanOptions(chunk_rows=16, num_stages=2),
            )  # fmt: skip
            inputs = make_inputs(rng, 1, s, 2, 1, 8, 8)
            cases.append((group.step(plan, mask, inputs, 8**-0.5), inputs, mask))
            group.world.run()  # buffers may grow between steps, which waits for the stream
        for collect, inputs, mask in cases[-1:]:
            check(collect(), inputs, mask)


def test_a_key_buffer_is_not_filled_again_before_all_of_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's first batch has left when the third call comes to the same memory; its second one has not."""
    mask = builders.causal(96)
    plan = build_plan(mask, 3, strategy=Strategy("one_way", "contiguous"), options=PlanOptions(num_stages=2))
    gather = DeviceWork.of(plan, plan.rank_plan(0, mask)).gather
    early, late = ({piece.peer for piece in batch.sends} for batch in gather)
    assert early and late and not early & late
    group = nccl_group(3, 1, monkeypatch, timeout_s=20.0)
    cases = [make_inputs(np.random.default_rng(seed), 1, 96, 2, 1, 8, 8) for seed in range(4)]
    group.step(plan, mask, cases[0], 8**-0.5, has_backward=False)
    group.world.run()
    side = group.ranks[0].transport._stream.cuda_stream
    collects = [group.step(plan, mask, inputs, 8**-0.5, has_backward=False) for inputs in cases[1:]]
    while group.world.head(side) != f"send of rank 0, peer {min(late)}":
        assert group.world._step()
    group.world.hold(side)
    group.world.run_until_stuck()
    group.world.hold()
    group.world.run()
    for collect, inputs in zip(collects, cases[1:], strict=True):
        check(collect(), inputs, mask, has_backward=False)


def test_batches_are_in_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that has pieces, on the track of what it brings this rank, by its own name."""
    rng = np.random.default_rng(4)
    mask = random_mask(rng, 200)
    plan = build_plan(mask, 3, strategy="fm3", options=PlanOptions(chunk_rows=16, num_stages=2))
    group = nccl_group(3, 4, monkeypatch, timeout_s=20.0)
    inputs = make_inputs(rng, 1, 200, 2, 1, 8, 8)
    group.step(plan, mask, inputs, 8**-0.5)
    group.world.run()
    traces = [Trace() for _ in group.ranks]
    posted: list[list[Batch]] = [[] for _ in group.ranks]
    for rank, trace, batches in zip(group.ranks, traces, posted, strict=True):
        assert rank.transport is not None
        rank.transport.trace = DeviceTrace(rank.device, trace)
        post = rank.transport._post
        rank.transport._post = lambda ticket, *rest, post=post, batches=batches: (
            batches.append(ticket.batch), post(ticket, *rest),
        )  # fmt: skip
    collect = group.step(plan, mask, inputs, 8**-0.5)
    for trace, batches in zip(traces, posted, strict=True):
        wanted = [("receive" if batch.recvs else "send", batch.name) for batch in batches if batch.recvs or batch.sends]
        assert [(span.track, span.name) for span in trace.spans] == wanted and wanted
        assert all(span.begin_us < span.end_us for span in trace.spans)
    group.world.run()
    check(collect(), inputs, mask)


GAVE_UP = "rank 0 of 2 gave up on 'rows stage 1': no transfer was done for 1 s; it needs rank 1 (dead or stalled)"
# A rank with a batch that nothing will ever finish; then its peer closes, stays silent, or all is done. Or its own work
# before the batch takes long, or the whole job is stopped for a while.
HELD = """
    import os, signal, subprocess, sys, threading, time
    import pytest
    from types import SimpleNamespace
    from test_device_nccl import FakeNccl, FakeProcessGroup, controls, patch
    from paddle_fm3 import _paddle
    from paddle_fm3.distributed import device_held, device_nccl
    from paddle_fm3.distributed.device_transport import Batch, Piece
    from paddle_fm3.distributed.transport import TransportError
    from paddle_fm3.testing.fake_device import FakeWorld

    how = sys.argv[1]
    device_held.EXIT_GRACE_S = 0.5
    patch(pytest.MonkeyPatch())
    world = FakeWorld(0)
    nccl = FakeNccl(world)
    for name in ("new_stream", "on_stream", "grouped_p2p"):
        setattr(_paddle, name, getattr(nccl, name))
    own, other = controls(2)
    group = SimpleNamespace(rank=0, nranks=2, process_group=FakeProcessGroup(nccl, 0))
    transport = device_nccl.NcclTransport(group, world.rank_device(), own, timeout_s=1.0)
    transport.register({"key": 256})
    stream = world.new_stream()
    piece = Piece(1, "key", 0, 64, "key", 0)
    if how == "all done":
        transport.post(Batch("rows", sends=(piece,)), stream)
        world.run()
        time.sleep(1.5)  # longer than the timeout
        transport.check()
        print("alive", flush=True)
        sys.exit(0)
    if how in ("left", "died"):
        if how == "left":
            other.post_send(0, device_nccl.GOODBYE_PHASE, 0, [memoryview(b"x")], lambda _: None)
            time.sleep(0.5)
        other._peers[0].connection.shutdown(2)  # as the end of its process does
        time.sleep(0.5)
        try:
            transport.check()
            print("alive", flush=True)
        except TransportError as error:
            print("raised", error, flush=True)
        sys.exit(0)
    if how == "sends last":
        transport.post(Batch("rows", sends=(piece,)), stream)

        def late():
            time.sleep(0.5)
            world.run()
            print("sent", flush=True)

        threading.Thread(target=late, daemon=True).start()
        sys.exit(0)
    if how == "busy":
        gate = world.new_memory(4)
        device = world.rank_device()
        device.write_word(stream, gate, 0)
        device.wait_word(stream, gate, 1)
    transport.post(Batch("rows stage 1", recvs=(piece,)), stream)
    world.run_until_stuck()
    if how == "busy":
        time.sleep(1.5)  # longer than the timeout
        transport.check()
        print("alive", flush=True)
        device.write_word(world.new_stream(), gate, 1)
        world.run_until_stuck()
    elif how == "stopped":
        time.sleep(0.3)
        subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)
        transport.check()
        print("alive", flush=True)
    elif how == "closed":
        other.fail("rank 1 stopped: boom")
    elif how == "raised":
        other.fail("rank 1 stopped: boom")
        while True:
            try:
                transport.check()
                time.sleep(0.01)
            except TransportError as error:
                print("raised", error, flush=True)
                break
    time.sleep(30)  # as a reader that waits for the device
    print("alive", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "status", "out", "err"),
    [
        ("closed", EXIT_STATUS, "", "context parallelism: rank 1 stopped: boom\n"),
        ("raised", EXIT_STATUS, "raised rank 1 stopped: boom\n", ""),
        ("silent", EXIT_STATUS, "", f"context parallelism: {GAVE_UP}\n"),
        ("busy", EXIT_STATUS, "alive\n", f"context parallelism: {GAVE_UP}\n"),
        ("stopped", EXIT_STATUS, "alive\n", f"context parallelism: {GAVE_UP}\n"),
        ("all done", 0, "alive\n", ""),
        ("left", 0, "alive\n", ""),
        ("sends last", 0, "sent\n", ""),
        ("died", 0, "raised rank 0 lost rank 1: it closed its connection (dead, or it gave up; see its own message)\n", ""),
    ],
)  # fmt: skip
def test_a_held_process_says_why_and_ends(how: str, status: int, out: str, err: str) -> None:
    done = run_program(HELD, how)
    assert (done.returncode, done.stdout) == (status, out), done.stderr
    assert "\n".join(line for line in done.stderr.splitlines() if line.startswith("context parallelism")) == err.strip()


def test_attention_leaves_nccl_the_room_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    group = nccl_group(2, 0, monkeypatch, timeout_s=20.0)
    assert [rank.transport.num_sms for rank in group.ranks if rank.transport is not None] == [16, 16]
    monkeypatch.setenv("NCCL_MAX_CTAS", "many")
    with pytest.raises(ValueError, match="NCCL_MAX_CTAS='many'"):
        device_nccl.env.nccl_max_ctas()
