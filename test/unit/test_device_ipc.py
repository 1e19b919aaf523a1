# SPDX-License-Identifier: Apache-2.0
"""Peer copies on model devices: misuse raises, and a lost or silent rank ends all waits with one message."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from device_support import Exchanger, Group, on_ranks
from program import run_program
from test_device_execute import check, make_inputs

from paddle_fm3.distributed.device import DeviceError
from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.distributed.device_held import EXIT_STATUS
from paddle_fm3.distributed.device_ipc import MOST_BATCHES, IpcTransport
from paddle_fm3.distributed.device_page import NOTE_SCALE, NUM_READY_WORDS, SignalPage
from paddle_fm3.distributed.device_transport import Batch, DeviceTransport, Piece
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.transport import TransportError
from paddle_fm3.mask import builders
from paddle_fm3.testing.fake_device import FakeWorld, view


class Pair:
    """Two ranks, or more, with a registered buffer "x" of 1024 bytes each, filled with the rank."""

    def __init__(self, timeout_s: float = 20.0, num_ranks: int = 2) -> None:
        self.world = FakeWorld(0)
        exchanger = Exchanger(num_ranks)

        def make(rank: int) -> tuple[IpcTransport, int, int]:
            device = self.world.rank_device()
            transport = IpcTransport(device, rank, num_ranks, exchanger.of(rank), timeout_s)
            address = transport.register({"x": 1024})["x"]
            view(address, (1024,), np.uint8)[...] = rank
            return transport, device.stream_create(), address

        made = on_ranks(num_ranks, make)
        self.transports, self.streams, self.addresses = zip(*made, strict=True)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def batch(rank: int, num_bytes: int = 256, name: str = "rows") -> Batch:
    """Each rank sends its first bytes to the other's last ones."""
    send = Piece(1 - rank, "x", 0, num_bytes, "x", 768)
    recv = Piece(1 - rank, "x", 768, num_bytes, "x", 0)
    return Batch(name, (send,), (recv,))


def test_bytes_arrive_and_are_counted(pair: Pair) -> None:
    tickets = [t.post(batch(rank), pair.streams[rank]) for rank, t in enumerate(pair.transports)]
    for rank, transport in enumerate(pair.transports):
        transport.wait(tickets[rank], pair.streams[rank])
        transport.wait_sent([tickets[rank]], pair.streams[rank])
    pair.world.run()
    for rank, transport in enumerate(pair.transports):
        assert (view(pair.addresses[rank], (1024,), np.uint8)[768:] == 1 - rank).all()
        assert transport.sent_bytes[1 - rank] == transport.received_bytes[1 - rank] == 256


def test_a_word_is_written_after_the_bytes(pair: Pair) -> None:
    word = pair.world.new_memory(4)
    ctypes.c_uint32.from_address(word).value = 0
    pair.transports[0].post(batch(0), pair.streams[0], word=(word, 3, 7))
    pair.transports[1].post(batch(1), pair.streams[1])
    seen: list[int] = []
    while 7 not in seen:
        assert pair.world._step()
        seen.append(ctypes.c_uint32.from_address(word).value)
    assert list(dict.fromkeys(seen)) == [0, 3, 7]
    assert (view(pair.addresses[0], (1024,), np.uint8)[768:] == 1).all()


def test_ready_means_every_batch_at_every_sender(pair: Pair) -> None:
    word = pair.world.new_memory(4)
    batches = [[batch(rank, name=f"rows {at}") for at in range(2)] for rank in range(2)]
    tickets = [pair.transports[0].post(one, pair.streams[0], word=(word, 0, 1)) for one in batches[0]]
    pair.transports[0].wait_ready(tickets, pair.streams[0])
    for one in batches[1]:
        pair.world.run_until_stuck()
        assert pair.world.head(pair.streams[0]).startswith("wait")
        pair.transports[1].post(one, pair.streams[1])
    pair.world.hold(pair.transports[0]._pull_stream)  # only the first copy may have been made
    pair.world.run_until_stuck()
    assert pair.world.head(pair.streams[0]) == ""
    pair.world.hold()
    pair.world.run()


@pytest.mark.parametrize("how", ["sent", "free"])
def test_the_last_of_several_batches_to_a_peer_is_waited_for(pair: Pair, how: str) -> None:
    zero, stream = pair.transports[0], pair.streams[0]
    batches = [[batch(rank, name=f"rows {at}") for at in range(2)] for rank in range(2)]
    tickets = [zero.post(one, stream) for one in batches[0]]
    zero.wait_sent(tickets, stream) if how == "sent" else zero.wait_free(tickets, stream, pair.world.new_stream())
    for one in batches[1]:
        pair.world.run_until_stuck()
        assert pair.world.head(stream).startswith("wait")
        pair.transports[1].post(one, pair.streams[1])
    pair.world.run()


@pytest.mark.parametrize(
    ("what", "said"), [("malloc", "cannot share 4096 bytes"), ("ipc_open", "cannot reach the memory of rank 0")]
)
def test_memory_that_one_rank_cannot_get_is_an_error_on_all(
    pair: Pair, what: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise DeviceError("out of luck")

    monkeypatch.setattr(pair.transports[1]._device, what, failing)

    def register(rank: int) -> None:
        with pytest.raises(TransportError, match=f"^rank 1 {said}: out of luck$"):
            pair.transports[rank].register({"x": 4096})

    on_ranks(2, register)


def test_registering_again_gives_larger_buffers(pair: Pair) -> None:
    for rank, transport in enumerate(pair.transports):
        transport.post(batch(rank), pair.streams[rank])
    addresses = on_ranks(2, lambda rank: pair.transports[rank].register({"x": 4096, "y": 512}))
    assert pair.world.freed_while_mapped == []
    assert all(set(found) == {"x", "y"} for found in addresses)
    big = [Batch("big", (Piece(1 - r, "x", 0, 4096, "x", 0),), ()) for r in range(2)]
    pair.transports[0].post(big[0], pair.streams[0])


def test_a_closed_transport_gives_all_memory_back() -> None:
    """Also what it had before it was given other buffers."""
    pair = Pair()
    on_ranks(2, lambda rank: pair.transports[rank].register({"x": 4096, "y": 512}))
    assert len(pair.world.live) > 4
    pair.close()
    assert pair.world.live == set()


def test_words_of_the_page_lie_apart() -> None:
    page = SignalPage.create(3)
    try:
        words = [
            0,
            *(of(rank) for of in (page.pulled_offset, page.come_offset, page.status_offset) for rank in range(3)),
        ]
        for number in range(NUM_READY_WORDS):
            words += [of(rank, number) for of in (page.ready_offset, page.wanted_offset) for rank in range(3)]
        assert len(set(words)) == len(words) and max(words) < page.num_bytes
        before = [page.word(word) for word in words]
        for number in range(NUM_READY_WORDS):
            page.note(number, NOTE_SCALE - 1)
        page.mark_closed()
        assert [page.word(word) for word in words] == before
        assert page.notes_of(0)[0] == 2 * NOTE_SCALE - 1 and not page.has_closed(1)
    finally:
        page.unlink()
        page.close()


@pytest.mark.parametrize("num_answers", [0, 1])
def test_a_set_up_that_fails_leaves_no_file(num_answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer is lost in it, or works on another machine."""
    pages: list[SignalPage] = []
    create = SignalPage.create
    monkeypatch.setattr(SignalPage, "create", lambda num_ranks: pages.append(create(num_ranks)) or pages[-1])
    answers: list[dict] = []

    def exchange(record: dict) -> list[dict]:
        if len(answers) == num_answers:
            raise TransportError("rank 1 is lost")
        answers.append(record)
        return [record, record | {"machine": "another"}]

    with pytest.raises(TransportError, match="rank 1 is lost"):
        IpcTransport(FakeWorld(0).rank_device(), 0, 2, exchange, 1.0)
    assert len(pages) == 1 and not pages[0].path.exists()


def test_nothing_is_kept_of_masks_that_are_gone() -> None:
    """A training run has a new one every step."""
    group = Group(2, seed=3)
    try:
        num_known = []
        for lengths in ([100, 60, 96], [30, 200, 26], [128, 128], [250, 6], [1, 255]):
            mask = builders.causal_document(lengths)
            plan = build_plan(mask, 2)
            inputs = make_inputs(np.random.default_rng(0), 1, 256, 2, 1, 16, 16)
            collect = group.step(plan, mask, inputs, 0.25)
            group.world.run()
            check(collect(), inputs, mask)
            for rank in group.ranks:
                for bound in list(rank.attention._bound.values()):
                    rank.attention.discard(bound.prepared)
            transports = [rank.transport for rank in group.ranks]
            num_known.append([len(known) for t in transports for known in (t._checked, t._copies)])
        assert num_known == [[0] * 4] * 5
    finally:
        group.close()


@pytest.mark.parametrize(("name", "call"), [("sums", 1), ("rows", 2)])
def test_ranks_that_post_different_things_are_told_at_once(pair: Pair, name: str, call: int) -> None:
    """Whoever comes last sees it, before anything of the batch is enqueued there; also of two calls that look alike."""
    zero, one = pair.transports
    zero.post(batch(0), pair.streams[0], call=1)
    said = f"^rank 1 of 2 is at '{name}' of call {call} and rank 0 is not: the ranks do not make the same calls in the same "
    with pytest.raises(TransportError, match=said):
        one.post(batch(1, name=name), pair.streams[1], call=call)
    assert pair.world.head(pair.streams[1]) == ""
    with pytest.raises(TransportError, match=said):
        zero.check()
    pair.world.run()  # the stream is let go


def test_a_rank_far_ahead_is_compared_all_the_same(pair: Pair) -> None:
    for number in range(5):
        pair.transports[0].post(batch(0, name=f"rows {number}"), pair.streams[0])
    for number in range(4):
        pair.transports[1].post(batch(1, name=f"rows {number}"), pair.streams[1])
    with pytest.raises(TransportError, match="^rank 1 of 2 is at 'rows 5' of call 0 and rank 0 is not"):
        pair.transports[1].post(batch(1, name="rows 5"), pair.streams[1])


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece(1, "y", 0, 16, "x", 0), "not registered"),
        (Piece(1, "x", 0, 16, "y", 0), "not registered"),
        (Piece(1, "x", 1020, 16, "x", 0), r"\[1020, 1036\) are not inside"),
        (Piece(1, "x", -16, 16, "x", 0), "are not inside"),
        (Piece(1, "x", 0, 0, "x", 0), "are not inside"),
        (Piece(0, "x", 0, 16, "x", 0), "peer 0 of rank 0 of 2"),
        (Piece(2, "x", 0, 16, "x", 0), "peer 2 of rank 0 of 2"),
    ],
)
def test_wrong_pieces_are_refused(pair: Pair, piece: Piece, message: str) -> None:
    for wrong in (Batch("wrong", (piece,), ()), Batch("wrong", (), (piece,))):
        with pytest.raises(TransportError, match=message):
            pair.transports[0].post(wrong, pair.streams[0])
    assert pair.transports[0].sent_bytes == [0, 0]


def test_foreign_tickets_are_refused(pair: Pair) -> None:
    ticket = pair.transports[1].post(batch(1), pair.streams[1])
    zero = pair.transports[0]
    stream = pair.streams[0]
    for call in (
        lambda: zero.wait(ticket, stream),
        lambda: zero.wait_sent([ticket], stream),
        lambda: zero.wait_free([ticket], stream, stream),
        lambda: zero.wait_ready([ticket], stream),
    ):
        with pytest.raises(TransportError, match="was not posted on this transport"):
            call()
    with pytest.raises(TransportError, match="was not posted on this transport"):
        pair.transports[0].post(batch(0), pair.streams[0], after=(ticket,))
    pair.transports[0].post(batch(0), pair.streams[0])
    pair.world.run()


def test_a_transport_without_words_says_so() -> None:
    class Silent(DeviceTransport):
        pass

    with pytest.raises(TransportError, match="Silent cannot write device words"):
        Silent(0, 2).post(Batch("rows"), 1, word=(0, 0, 1))


def test_ranks_that_share_a_gpu_cannot_let_a_kernel_wait() -> None:
    world, exchanger = FakeWorld(0), Exchanger(3)

    def make(rank: int) -> bool:
        device = world.rank_device()
        device.gpu = ("0000:01", "0000:02", "0000:01")[rank]
        transport = IpcTransport(device, rank, 3, exchanger.of(rank), 20.0)
        raises_words = transport.raises_words
        transport.close()
        return raises_words

    assert on_ranks(3, make) == [False] * 3


def test_a_transport_serves_one_executor(pair: Pair) -> None:
    device = pair.world.rank_device()
    DeviceAttention(device, pair.transports[0])
    with pytest.raises(TransportError, match="serves an executor already"):
        DeviceAttention(device, pair.transports[0])


def test_a_closed_transport_refuses(pair: Pair) -> None:
    pair.transports[0].close()
    with pytest.raises(TransportError, match="is closed"):
        pair.transports[0].post(batch(0), pair.streams[0])


def test_batches_beyond_what_words_number_are_refused(pair: Pair) -> None:
    zero, page = pair.transports[0], pair.transports[0]._page
    zero._num_posts = MOST_BATCHES
    with pytest.raises(TransportError, match=f"^{MOST_BATCHES} batches were posted, .* start the processes again$"):
        zero.post(batch(0), pair.streams[0])
    zero.fail("enough")
    assert MOST_BATCHES < page.word(page.come_offset(1)) <= 0xFFFFFFFF


def test_a_silent_rank_is_named_in_time() -> None:
    pair = Pair(timeout_s=0.5)
    try:
        ticket = pair.transports[0].post(batch(0, name="K/V rows stage 1"), pair.streams[0])
        pair.transports[0].wait(ticket, pair.streams[0])
        failed = [ctypes.c_uint32.from_address(transport.failed_word) for transport in pair.transports]
        assert not any(word.value for word in failed)
        begin_s = time.monotonic()
        pair.world.run(timeout_s=5.0)  # the stream is let go
        assert 0.4 < time.monotonic() - begin_s < 3.0
        assert all(word.value for word in failed), "a stream that was let go must find the failure"
        texts = []
        for transport in pair.transports:
            with pytest.raises(TransportError) as caught:
                transport.check()
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
        assert texts[0] == (
            "rank 0 of 2: gave up on 'K/V rows stage 1' after 0.5 s: nothing came from rank 1 (stalled)"
        )
        with pytest.raises(TransportError, match="nothing came from rank 1"):
            pair.transports[1].post(batch(1), pair.streams[1])
    finally:
        pair.close()


READS_AND_ENDS = """
    import sys
    from test_device_ipc import Pair, batch
    from paddle_fm3.distributed.transport import TransportError

    pair = Pair(timeout_s=0.3)
    if sys.argv[1] == "done":
        for rank, transport in enumerate(pair.transports):
            transport.post(batch(rank), pair.streams[rank])
    else:
        pair.transports[0].post(batch(0), pair.streams[0])
    pair.world.run(timeout_s=5.0)  # as a reader that waits for the device
    if sys.argv[1] == "told":
        try:
            pair.transports[0].check()
        except TransportError as error:
            print(error)
            for transport in pair.transports:
                transport._was_raised = True  # both ranks are this process
    print("read")
"""


@pytest.mark.parametrize(
    ("how", "status", "out"), [("untold", EXIT_STATUS, ""), ("told", 0, "GAVE UP\n"), ("done", 0, "")]
)
def test_a_program_that_ends_with_what_it_read_is_told(how: str, status: int, out: str) -> None:
    """Its device wait returned because the transport had failed, and no call has raised that since."""
    said = "rank 0 of 2: gave up on 'rows' after 0.3 s: nothing came from rank 1 (stalled)"
    ended = run_program(READS_AND_ENDS, how)
    assert (ended.returncode, ended.stdout) == (status, out.replace("GAVE UP", said) + "read\n"), ended.stderr
    assert (f"context parallelism: {said}" in ended.stderr) == (how == "untold")


LEAVES = """
    import threading, time
    from test_device_ipc import Pair, batch

    pair = Pair(timeout_s=20.0)
    for rank, transport in enumerate(pair.transports):
        transport.post(batch(rank), pair.streams[rank])
    begin_s = time.monotonic()

    def late() -> None:
        time.sleep(0.5)
        pair.world.run()

    copies = threading.Thread(target=late)
    copies.start()
    pair.transports[0]._leave()
    waited_s = time.monotonic() - begin_s
    copies.join()
    print(0.5 <= waited_s < 19, pair.transports[1]._page.has_closed(0))
"""


def test_a_rank_that_ends_waits_until_its_rows_are_copied() -> None:
    ended = run_program(LEAVES)
    assert (ended.returncode, ended.stdout) == (0, "True True\n"), ended.stderr


def test_a_rank_that_left_in_order_is_missed_by_what_comes_later(pair: Pair) -> None:
    """At once, by name; and not before."""
    for rank, transport in enumerate(pair.transports):
        transport.post(batch(rank), pair.streams[rank])
    pair.world.run()
    pair.transports[1]._leave()
    time.sleep(0.1)
    pair.transports[0].check()
    pair.transports[0].post(batch(0, name="K/V rows stage 2"), pair.streams[0])
    pair.world.run(timeout_s=5.0)
    with pytest.raises(TransportError, match="^rank 0 of 2: rank 1 has ended in order, before 'K/V rows stage 2'$"):
        pair.transports[0].check()


def test_work_before_a_batch_may_take_longer_than_the_timeout() -> None:
    """The time counts from when this rank's own stream has got there."""
    pair = Pair(timeout_s=0.3)
    try:
        gate = pair.world.new_memory(4)
        ctypes.c_uint32.from_address(gate).value = 0
        pair.world.rank_device().wait_word(pair.streams[0], gate, 1)
        pair.transports[0].post(batch(0), pair.streams[0])
        end_s = time.monotonic() + 0.8
        while time.monotonic() < end_s:
            pair.world._step()
            time.sleep(1e-3)
        pair.transports[0].check()
        ctypes.c_uint32.from_address(gate).value = 1
        pair.transports[1].post(batch(1), pair.streams[1])
        pair.world.run()
        pair.transports[0].check()
    finally:
        pair.close()


def test_the_first_reason_reaches_every_rank(pair: Pair) -> None:
    ticket = pair.transports[0].post(batch(0), pair.streams[0])
    pair.transports[0].wait(ticket, pair.streams[0])
    pair.transports[1].fail("out of memory")
    pair.transports[0].fail("something else")
    pair.world.run()
    for transport in pair.transports:
        with pytest.raises(TransportError, match="^rank 1 of 2 stopped: out of memory$"):
            transport.check()


def test_a_kernel_that_gave_up_is_reported(pair: Pair) -> None:
    ctypes.c_uint32.from_address(pair.transports[1].status_word).value = 4097
    deadline_s = time.monotonic() + 5
    with pytest.raises(TransportError, match="rank 1 of 2: its attention kernel waited too long for key row 4096"):
        while time.monotonic() < deadline_s:
            pair.transports[0].check()
            time.sleep(0.01)


def test_a_killed_process_is_noticed() -> None:
    page = SignalPage.create(2)
    code = (
        "import sys, time; from pathlib import Path; from paddle_fm3.distributed.device_page import SignalPage\n"
        "page = SignalPage(Path(sys.argv[1]), 1, 2, False); print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(page.path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "open\n"
            assert not page.has_ended(0) and not page.has_ended(1)
            other.send_signal(signal.SIGKILL)
            deadline_s = time.monotonic() + 5
            while not page.has_ended(1) and time.monotonic() < deadline_s:
                time.sleep(0.01)  # a zombie counts as ended
            assert page.has_ended(1)
        finally:
            other.kill()
            page.unlink()
            page.close()


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_the_plan_s(name: str) -> None:
    num_ranks, b, h_kv, d_qk, d_v = 4, 1, 2, 16, 8
    mask = builders.causal_document([70, 100, 30, 56])
    plan = build_plan(
        mask, num_ranks, topology=Topology.uniform(num_ranks, 2), strategy=name, options=PlanOptions(chunk_rows=16)
    )
    group = Group(num_ranks, 0, timeout_s=20.0)
    try:
        inputs = make_inputs(np.random.default_rng(0), b, 256, 4, h_kv, d_qk, d_v)
        group.step(plan, mask, inputs, 0.25)
        group.world.run()
        row = h_kv * (d_qk + d_v)  # values
        gathered = int(plan.gather[:, 5].sum()) * row * 2
        works = [DeviceWork.of(plan, plan.rank_plan(rank, mask)) for rank in range(num_ranks)]
        wide = {p.peer_row for w in works for batch in w.reduce for p in batch.sends if p.peer_buffer == "wide"}
        reduced = sum(
            piece.num_rows * row * (4 if piece.buffer == "wide" else 2)
            for work in works for batch in work.reduce for piece in batch.recvs
        )  # fmt: skip
        if name in ("fm3_no_hierarchy",):
            assert not wide  # nothing is relayed, so nothing travels in float32
        received = [sum(rank.transport.received_bytes) for rank in group.ranks]
        assert sum(received) == 2 * gathered + reduced  # forward, and again in backward
        assert sum(sum(rank.transport.sent_bytes) for rank in group.ranks) == sum(received)
        modes = [rank.attention.mode_of(work) for rank, work in zip(group.ranks, works, strict=True)]
        assert len(set(modes)) == 1
        num_status_bytes = 4 if modes[0] == "rows" else 0
        assert [rank.device.num_copied_bytes - num_status_bytes for rank in group.ranks] == received
        rows_moved = sum(p.num_rows for work in works for batch in work.reduce for p in batch.recvs)
        assert rows_moved == int(plan.reduce[:, 5].sum())
    finally:
        group.close()
