# SPDX-License-Identifier: Apache-2.0
"""The transport in one process: order, back-pressure, misuse, strangers, and the end of a connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paddle_fm3.distributed import rendezvous
from paddle_fm3.distributed.record_exchange import RecordExchange
from paddle_fm3.distributed.rendezvous import connect
from paddle_fm3.distributed.transport import TcpTransport, TransportError

BIG = 3_000_001  # bytes: more than the sockets' buffers hold


def pair() -> tuple[TcpTransport, TcpTransport]:
    ends = socket.socketpair()
    return TcpTransport(0, {1: ends[0]}), TcpTransport(1, {0: ends[1]})


def view(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8))


def post(transport: TcpTransport, kind: str, peer: int, tag: int, *arrays: np.ndarray) -> Callable[[], bool]:
    """Posts a message of phase 1; the result says whether it is done."""
    done: list[float] = []
    getattr(transport, f"post_{kind}")(peer, 1, tag, [view(x) for x in arrays], done.append)
    return lambda: bool(done)


def test_messages_find_their_memory_in_any_order_of_posting() -> None:
    left, right = pair()
    rng = np.random.default_rng(0)
    sent = [rng.integers(0, 256, BIG, np.uint8) for _ in range(3)]
    received = [np.zeros(BIG, np.uint8) for _ in range(3)]
    sends = [post(left, "send", 1, tag, sent[tag][:7], sent[tag][7:]) for tag in range(3)]
    backwards = post(right, "send", 0, 9, sent[0])
    into = np.zeros(BIG, np.uint8)
    time.sleep(0.1)
    assert not any(done() for done in sends)  # nobody offered memory: they wait, and so does the other direction
    recvs = [post(right, "recv", 0, tag, received[tag]) for tag in (2, 0, 1)]
    recvs.append(post(left, "recv", 1, 9, into))
    for transport, dones in ((left, [*sends, recvs[3]]), (right, [*recvs[:3], backwards])):
        assert transport.wait_until(lambda d=dones: all(done() for done in d), 10.0)
    for tag in range(3):
        np.testing.assert_array_equal(received[tag], sent[tag])
    np.testing.assert_array_equal(into, sent[0])
    assert left.sent_bytes == [0, 3 * BIG] and left.received_bytes == [0, BIG]
    assert right.sent_bytes == [BIG, 0] and right.received_bytes == [3 * BIG, 0]


def test_a_wrong_length_ends_both_with_one_message() -> None:
    left, right = pair()
    post(right, "recv", 0, 5, np.zeros(8, np.uint8))
    post(left, "send", 1, 5, np.zeros(9, np.uint8))
    words = "rank 1: rank 0 sends 9 bytes as phase 1, tag 5; 8 were expected"
    waiting = post(left, "recv", 1, 6, np.zeros(1, np.uint8))
    for transport in (right, left):
        with pytest.raises(TransportError) as met:
            transport.wait_until(waiting, 10.0)
        assert str(met.value) == words


def test_posting_twice_is_refused() -> None:
    left, _right = pair()
    for _ in range(2):
        done = post(left, "recv", 1, 4, np.zeros(8, np.uint8))
    with pytest.raises(TransportError, match="phase 1, tag 4 of rank 1 was posted twice"):
        left.wait_until(done, 10.0)


def test_silence_is_bounded_and_progress_extends_it() -> None:
    left, right = pair()
    done = post(left, "recv", 1, 0, np.zeros(4, np.uint8))
    began = time.monotonic()
    assert not left.wait_until(done, 0.3)
    assert 0.2 < time.monotonic() - began < 2.0
    post(right, "send", 0, 0, np.zeros(4, np.uint8))
    assert left.wait_until(done, 10.0)


def test_a_peer_that_ends_is_a_failure_only_for_who_wants_more() -> None:
    left, right = pair()
    received = np.zeros(4, np.uint8)
    done = post(left, "recv", 1, 0, received)
    sent = post(right, "send", 0, 0, np.arange(4, dtype=np.uint8))
    assert right.wait_until(sent, 10.0)
    right.call_soon(lambda: right._close(right._peers[0]))
    assert left.wait_until(done, 10.0)
    np.testing.assert_array_equal(received, np.arange(4))
    time.sleep(0.1)
    assert left.failure is None
    more = post(left, "recv", 1, 1, received)
    with pytest.raises(TransportError, match="rank 0 lost rank 1: its connection is closed"):
        left.wait_until(more, 10.0)


def test_a_forked_child_does_not_keep_a_dead_rank_s_connections_open() -> None:
    """A data loader's workers outlive their rank by seconds; the others must see at once that it is gone."""
    left, right = pair()
    done = post(left, "recv", 1, 0, np.zeros(4, np.uint8))
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        right._peers[0].connection.close()  # as the death of its process would
        with pytest.raises(TransportError, match="rank 0 lost rank 1: it closed its connection"):
            left.wait_until(done, 3.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Ranks:
    """connect() of several ranks in threads; exchange by a barrier."""

    def __init__(self, num_ranks: int, change: Callable[[int, dict], None] = lambda rank, record: None) -> None:
        self.results: list = [None] * num_ranks
        self._records: list = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, action=lambda: self.before_calls(self._records))
        self._change = change
        self.before_calls: Callable[[list], None] = lambda records: None

    def run(self, timeout_s: float = 5.0) -> list:
        threads = [threading.Thread(target=self._one, args=(rank, timeout_s)) for rank in range(len(self.results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return self.results

    def _one(self, rank: int, timeout_s: float) -> None:
        def exchange(record: dict) -> list[dict]:
            self._change(rank, record)
            self._records[rank] = record
            self._barrier.wait(10)
            return self._records

        try:
            self.results[rank] = connect(rank, len(self.results), exchange, timeout_s)
        except TransportError as error:
            self.results[rank] = str(error)


def test_strangers_are_turned_away_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, talkative, slow and lying ones, and more of them than may wait, ahead of the ranks and among them."""
    monkeypatch.setattr(rendezvous, "_MAX_CALLERS", 8)
    ranks = Ranks(3)
    strangers: list[socket.socket] = []
    is_over = threading.Event()
    hellos = [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, bytes(1 << 16), rendezvous._HELLO.pack(b"FM3hello", 1, bytes(16))]

    def drip(stranger: socket.socket) -> None:
        while not is_over.wait(0.05):
            try:
                stranger.send(b"F")
            except OSError:
                return

    def intrude(records: list[dict]) -> None:
        for hello in [*hellos, *[b""] * 6]:
            strangers.append(socket.create_connection((records[0]["address"], records[0]["port"]), 2))
            try:
                strangers[-1].sendall(hello)
            except OSError:
                pass  # closed already
        threading.Thread(target=drip, args=(strangers[-1],), daemon=True).start()

    ranks.before_calls = intrude
    began_s = time.monotonic()
    transports = ranks.run()
    is_over.set()
    assert time.monotonic() - began_s < 3
    received = [np.zeros(2, np.uint8) for _ in range(3)]
    for rank, transport in enumerate(transports):
        assert isinstance(transport, TcpTransport), transport
        post(transport, "send", (rank + 1) % 3, 0, np.full(2, rank, np.uint8))
    for rank, transport in enumerate(transports):
        assert transport.wait_until(post(transport, "recv", (rank - 1) % 3, 0, received[rank]), 10.0)
    assert [x.tolist() for x in received] == [[2, 2], [0, 0], [1, 1]]


def test_listens_on_loopback_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FM3_TRANSPORT_ADDRESS", raising=False)
    seen = []
    Ranks(2, lambda rank, record: seen.append(record["address"])).run()
    assert seen == ["127.0.0.1"] * 2
    monkeypatch.setenv("FM3_TRANSPORT_ADDRESS", "192.0.2.1")  # reserved for documentation: nobody has it
    said = Ranks(2).run()
    assert said[0] == said[1] and "rank 0 cannot listen at 192.0.2.1" in said[0]
    monkeypatch.setenv("FM3_TRANSPORT_ADDRESS", "0.0.0.0")
    said = Ranks(2).run()
    assert said[0] == said[1] and "FM3_TRANSPORT_ADDRESS=0.0.0.0 is no address that others can call" in said[0]


@pytest.mark.parametrize("address", ["", "localhost"])
def test_several_machines_need_an_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FM3_TRANSPORT_ADDRESS", address)
    said = Ranks(2, lambda rank, record: record.update(machine=f"host{rank}")).run()
    assert said[0] == said[1]
    assert "several machines; set FM3_TRANSPORT_ADDRESS to the address of the network to use on rank 0, 1" in said[0]


def test_a_rank_that_does_not_call_is_named() -> None:
    def mislead(rank: int, record: dict) -> None:
        if rank == 1:  # others call a port where nobody listens
            with socket.create_server(("127.0.0.1", 0)) as free:
                record["port"] = free.getsockname()[1]

    said = Ranks(3, mislead).run(timeout_s=1.0)
    assert "rank 2 has no connection to rank 1 within 1 s" in said[2]


def exchanges(timeout_s: float, num_ranks: int = 3) -> list[RecordExchange]:
    """RecordExchange of each rank over real connections."""
    transports: list[TcpTransport] = []
    ends = {(a, b): socket.socketpair() for a in range(num_ranks) for b in range(a)}
    for rank in range(num_ranks):
        peers = [peer for peer in range(num_ranks) if peer != rank]
        connections = {peer: ends[max(rank, peer), min(rank, peer)][int(rank < peer)] for peer in peers}
        transports.append(TcpTransport(rank, connections))
    return [RecordExchange(transport, timeout_s) for transport in transports]


def test_records_reach_every_rank_in_order() -> None:
    ranks = exchanges(10.0)
    with ThreadPoolExecutor(3) as pool:
        for turn in range(20):
            calls = [pool.submit(exchange, {"rank": r, "turn": turn}, "test") for r, exchange in enumerate(ranks)]
            assert [c.result() for c in calls] == [[{"rank": r, "turn": turn} for r in range(3)]] * 3


def test_a_rank_missing_from_an_exchange_is_named_on_every_rank() -> None:
    ranks = exchanges(0.5)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(exchange, {}, "masks") for exchange in ranks[:2]]
        messages = set()
        for call in calls:
            with pytest.raises(TransportError) as met:
                call.result()
            messages.add(str(met.value))
    assert len(messages) <= 2 and all("gave up on 'masks'" in m and "missing: rank 2" in m for m in messages), messages


def test_a_long_record_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 9\\d+ bytes; at most 8192"):
        exchanges(1.0)[0]({"text": "x" * 9000}, "masks")


ENDING = """
import atexit, socket, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith("paddle_fm3")]))  # runs last
from paddle_fm3.distributed import comm
from paddle_fm3.distributed.transport import TcpTransport
ends = socket.socketpair()
transports = [TcpTransport(rank, {1 - rank: end}) for rank, end in enumerate(ends)]
comm._gloo_thread()
print(sorted(t.name for t in threading.enumerate() if t.name.startswith("paddle_fm3")))
"""


def test_no_communication_thread_outlives_the_interpreter() -> None:
    """A thread that a dying peer wakes during teardown can abort the process, with all its work done."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120, check=True)
    before, after = done.stdout.splitlines()[-2:]
    assert before == "['paddle_fm3-gloo', 'paddle_fm3-transport-0', 'paddle_fm3-transport-1']"
    assert after == "[]"
