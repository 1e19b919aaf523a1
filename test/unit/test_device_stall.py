# SPDX-License-Identifier: Apache-2.0
"""A rank that only sends, and is to overwrite what a peer has not fetched, is told in time, and not before."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pytest
from device_support import Group
from program import run_program
from test_device_ipc import Pair, batch
from test_device_order import SCALE, both_ways, inputs_of, one_way

from paddle_fm3.distributed.device_held import EXIT_STATUS
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_page import NUM_READY_WORDS
from paddle_fm3.distributed.device_transport import Batch, Piece, Ticket
from paddle_fm3.distributed.transport import TransportError
from paddle_fm3.testing.fake_device import FakeWorld

TIMEOUT_S = 0.4


@pytest.fixture
def pair():
    made = Pair(TIMEOUT_S)
    yield made
    made.close()


def sends(rank: int, *peers: int, name: str = "rows") -> Batch:
    """Rank 0's first bytes go to the peers; this rank's part of it."""
    if rank == 0:
        return Batch(name, tuple(Piece(peer, "x", 0, 256, "x", 768) for peer in peers))
    return Batch(name, recvs=(Piece(0, "x", 768, 256, "x", 0),) if rank in peers else ())


def wait(pair: Pair, how: str, tickets: list[Ticket]) -> None:
    """Rank 0's stream is to overwrite what they send."""
    zero, stream = pair.transports[0], pair.streams[0]
    if how == "sent":
        zero.wait_sent(tickets, stream)
    else:
        zero.wait_free(tickets, stream, pair.world.new_stream())


def new_gate(world: FakeWorld, stream: int) -> Callable[[], None]:
    """The stream's work from now on comes after a call of what is returned: long work."""
    gate = world.new_memory(4)
    ctypes.c_uint32.from_address(gate).value = 0
    world.rank_device().wait_word(stream, gate, 1)

    def open_it() -> None:
        ctypes.c_uint32.from_address(gate).value = 1

    return open_it


def run_for(world: FakeWorld, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        world.run_until_stuck()
        time.sleep(1e-3)


def message(transports: list[IpcTransport]) -> str:
    """What all of them say."""
    texts = []
    for transport in transports:
        with pytest.raises(TransportError) as caught:
            transport.check()
        texts.append(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.parametrize("how", ["sent", "free"])
def test_who_does_not_fetch_is_named_in_time(pair: Pair, how: str) -> None:
    ticket = pair.transports[0].post(sends(0, 1, name="K/V rows stage 1"), pair.streams[0])
    wait(pair, how, [ticket])
    begin_s = time.monotonic()
    pair.world.run(timeout_s=5.0)  # the stream is let go
    assert TIMEOUT_S - 0.05 < time.monotonic() - begin_s < 3.0
    said = "rank 0 of 2: gave up on 'K/V rows stage 1' after 0.4 s: rank 1 has not fetched it (stalled)"
    assert message(pair.transports) == said


@pytest.mark.parametrize("how", ["sent", "free"])
def test_work_before_the_wait_may_take_longer_than_the_timeout(pair: Pair, how: str) -> None:
    """Nobody is kept waiting until then, however late a peer is."""
    ticket = pair.transports[0].post(sends(0, 1), pair.streams[0])
    open_gate = new_gate(pair.world, pair.streams[0])
    wait(pair, how, [ticket])
    run_for(pair.world, 2.5 * TIMEOUT_S)
    open_gate()
    run_for(pair.world, 0.5 * TIMEOUT_S)
    pair.transports[0].check()
    pair.transports[1].post(sends(1, 1), pair.streams[1])
    pair.world.run()
    run_for(pair.world, 1.5 * TIMEOUT_S)
    pair.transports[0].check()


def test_a_peer_has_its_time_from_when_rows_are_ready(pair: Pair) -> None:
    """Though a stream waits to overwrite them ever since."""
    writer = pair.world.new_stream()
    open_gate = new_gate(pair.world, writer)
    ticket = pair.transports[0].post(sends(0, 1), writer)
    wait(pair, "sent", [ticket])
    run_for(pair.world, 2.5 * TIMEOUT_S)
    open_gate()
    run_for(pair.world, 0.5 * TIMEOUT_S)
    pair.transports[0].check()
    pair.transports[1].post(sends(1, 1), pair.streams[1])
    pair.world.run()
    pair.transports[0].check()


def test_each_batch_of_a_wait_has_its_own_time() -> None:
    """The peer of the first is slow and yet in time; the second's rows are ready late."""
    trio = Pair(TIMEOUT_S, num_ranks=3)
    try:
        zero, writer = trio.transports[0], trio.world.new_stream()
        tickets = [zero.post(sends(0, 1), trio.streams[0])]
        open_gate = new_gate(trio.world, writer)
        tickets.append(zero.post(sends(0, 2), writer))
        wait(trio, "sent", tickets)
        run_for(trio.world, 0.5 * TIMEOUT_S)
        open_gate()
        trio.transports[1].post(sends(1, 1), trio.streams[1])
        run_for(trio.world, 0.75 * TIMEOUT_S)
        zero.check()
        trio.world.run(timeout_s=5.0)
        assert "rank 2 has not fetched it" in message(trio.transports)
    finally:
        trio.close()


def test_all_who_do_not_fetch_a_batch_are_named() -> None:
    trio = Pair(TIMEOUT_S, num_ranks=3)
    try:
        ticket = trio.transports[0].post(sends(0, 1, 2), trio.streams[0])
        wait(trio, "sent", [ticket])
        trio.world.run(timeout_s=5.0)
        assert message(trio.transports).endswith("after 0.4 s: rank 1, 2 has not fetched it (stalled)")
    finally:
        trio.close()


def test_the_first_of_two_batches_is_named() -> None:
    trio = Pair(TIMEOUT_S, num_ranks=3)
    try:
        zero, stream = trio.transports[0], trio.streams[0]
        wait(trio, "sent", [zero.post(sends(0, 1, 2, name="first"), stream), zero.post(sends(0, 2), stream)])
        trio.world.run(timeout_s=5.0)
        assert "gave up on 'first' after 0.4 s: rank 1 has not" in message(trio.transports)
    finally:
        trio.close()


def test_what_nobody_is_to_overwrite_may_stay(pair: Pair) -> None:
    """A peer may be long behind a rank that needs nothing of it."""
    first = pair.transports[0].post(sends(0, 1), pair.streams[0])
    wait(pair, "sent", [first])
    pair.transports[1].post(sends(1, 1), pair.streams[1])
    pair.world.run()
    pair.transports[0].post(sends(0, 1), pair.streams[0])
    run_for(pair.world, 2.5 * TIMEOUT_S)
    pair.transports[0].check()


def test_who_waits_for_another_rank_is_not_blamed() -> None:
    """Rank 1 comes late, and in time; it then waits for rank 2 and says so, later than rank 0's own time would end."""
    trio = Pair(TIMEOUT_S, num_ranks=3)
    try:
        ticket = trio.transports[0].post(sends(0, 1), trio.streams[0])
        wait(trio, "sent", [ticket])
        run_for(trio.world, 0.5 * TIMEOUT_S)
        both = (Piece(2, "x", 256, 256, "x", 0), *sends(1, 1).recvs)
        trio.transports[1].post(Batch("rows", recvs=both), trio.streams[1])
        trio.world.run(timeout_s=5.0)
        said = "rank 1 of 3: gave up on 'rows' after 0.4 s: nothing came from rank 2 (stalled)"
        assert message(trio.transports) == said
    finally:
        trio.close()


@pytest.mark.parametrize("is_two_way", [False, True], ids=["one way", "both ways"])
def test_who_stops_before_its_own_copies_is_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_two_way: bool
) -> None:
    """It has come to the batch, and both ways its rows have, too. Its own watch would time what it is to fetch, but its
    process is stopped."""
    monkeypatch.setattr(pair.transports[1], "_why_waiting", lambda number: None)
    pair.world.hold(pair.transports[1]._pull_stream)
    batches = (batch(0), batch(1)) if is_two_way else (sends(0, 1), sends(1, 1))
    ticket, _ = (pair.transports[rank].post(batches[rank], pair.streams[rank]) for rank in (0, 1))
    wait(pair, "sent", [ticket])
    run_for(pair.world, 1.5 * TIMEOUT_S)
    pair.transports[0].check()
    run_for(pair.world, TIMEOUT_S)
    assert message(pair.transports).endswith("rank 1 has not fetched it (stalled)")
    pair.world.hold()
    pair.world.run()


def test_a_batch_that_both_send_is_timed_as_one_that_comes(pair: Pair) -> None:
    ticket = pair.transports[0].post(batch(0), pair.streams[0])
    wait(pair, "sent", [ticket])
    pair.world.run(timeout_s=5.0)
    assert not pair.transports[0]._page.is_wanted(ticket.number)
    assert message(pair.transports).endswith("after 0.4 s: nothing came from rank 1 (stalled)")


def test_a_peer_has_the_time_of_what_it_is_to_send_later(pair: Pair) -> None:
    """Rank 0 has come to the first batch, which it only sends, and not to the second, which it receives."""
    zero, stream = pair.transports[0], pair.streams[0]
    tickets = [zero.post(sends(0, 1), stream)]
    open_gate = new_gate(pair.world, stream)
    zero.post(batch(0), stream)
    wait(pair, "sent", tickets)
    run_for(pair.world, 2.5 * TIMEOUT_S)
    open_gate()
    run_for(pair.world, 0.5 * TIMEOUT_S)
    zero.check()
    for one in (sends(1, 1), batch(1)):
        pair.transports[1].post(one, pair.streams[1])
    pair.world.run()
    run_for(pair.world, 0.1)
    zero.check()
    assert zero._fetches == []


def test_a_wait_that_is_over_is_forgotten(pair: Pair) -> None:
    for _ in range(5):
        wait(pair, "free", [pair.transports[0].post(sends(0, 1), pair.streams[0])])
        pair.transports[1].post(sends(1, 1), pair.streams[1])
    pair.world.run()
    run_for(pair.world, 0.1)
    assert pair.transports[0]._fetches == []


# --- the executor ------------------------------------------------------------------------------


def group_of(mode: str, timeout_s: float) -> Group:
    return Group(
        2, seed=1, make_transport=lambda *arguments: IpcTransport(*arguments, timeout_s=timeout_s), forward_mode=mode,
        timeout_s=20.0,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["rows", "whole"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_forwards_alone_end_where_a_peer_has_stalled(mode: str, is_busy: bool) -> None:
    """The fourth is the second to use its key buffer again. Rank 0 waits, or has yet to come to it."""
    mask, plan = one_way()
    group = group_of(mode, TIMEOUT_S)
    try:
        transports = [rank.transport for rank in group.ranks]
        group.step(plan, mask, inputs_of(mask, 0), SCALE, has_backward=False)
        group.world.run()
        group.world.hold(group.ranks[1].stream)
        for number in range(3):
            if number == 2 and is_busy:
                open_gate = new_gate(group.world, group.ranks[0].stream)
            group.step(plan, mask, inputs_of(mask, number), SCALE, has_backward=False)
        run_for(group.world, 2 * TIMEOUT_S)
        if is_busy:
            for transport in transports:
                transport.check()
            open_gate()
            run_for(group.world, 2 * TIMEOUT_S)
        said = "rank 0 of 2: gave up on 'K/V rows stage 1 hop 0' after 0.4 s: rank 1 has not fetched it (stalled)"
        assert message(transports) == said
        with pytest.raises(TransportError, match="has not fetched it"):
            group.step(plan, mask, inputs_of(mask, 3), SCALE, has_backward=False)
        group.world.hold()
        group.world.run()
    finally:
        group.close()


@pytest.mark.parametrize("mode", ["rows", "whole", "steps"])
@pytest.mark.parametrize(
    ("case", "has_backward", "wanted"),
    [(both_ways, True, [0, 0]), (both_ways, False, [0, 0]), (one_way, True, [0, 0]), (one_way, False, [3, 0])],
)
def test_only_waits_for_ranks_that_send_nothing_cost_a_word(
    mode: str, case: Callable, has_backward: bool, wanted: list[int]
) -> None:
    """Five calls; two find an empty buffer. Whoever is to send something, too, is timed by that."""
    mask, plan = case()
    group = group_of(mode, 20.0)
    try:
        for number in range(5):
            group.step(plan, mask, inputs_of(mask, number), SCALE, has_backward=has_backward)
        group.world.run()
        written = [what for _, what in group.world.history if what.startswith("write word")]
        found = []
        for rank in group.ranks:
            page, base = rank.transport._page, rank.transport._base
            words = {base + page.wanted_offset(page.rank, number) for number in range(NUM_READY_WORDS)}
            found.append(sum(written.count(f"write word {word:#x}") for word in words))
        assert found == wanted
    finally:
        group.close()


LEAVES = """
    import atexit, sys, threading, time
    from test_device_ipc import Pair, batch
    from test_device_stall import new_gate, sends

    pair = Pair(timeout_s=0.4)
    atexit.unregister(pair.transports[1]._leave)  # its process is stopped
    if sys.argv[1] == "busy":
        new_gate(pair.world, pair.streams[0])
    pair.transports[0].post(sends(0, 1), pair.streams[0])
    if sys.argv[1] == "done":
        pair.transports[1].post(sends(1, 1), pair.streams[1])
    pair.world.run_until_stuck()
    print("read", flush=True)
"""


@pytest.mark.parametrize(("how", "status"), [("stalled", EXIT_STATUS), ("busy", 0), ("done", 0)])
def test_a_rank_that_ends_says_who_has_not_fetched_its_rows(how: str, status: int) -> None:
    """Its own results are right; rows that a rank has yet to fetch end with its process."""
    ended = run_program(LEAVES, how)
    said = "context parallelism: rank 0 of 2: gave up on 'rows' after 0.4 s: rank 1 has not fetched it (stalled)"
    assert (ended.returncode, ended.stdout) == (status, "read\n"), ended.stderr
    assert ended.stderr.splitlines() == ([said] if how == "stalled" else [])


STOPS = """
    import os, signal, subprocess, sys, time
    from test_device_ipc import Pair, batch
    from test_device_stall import run_for, sends, wait
    from paddle_fm3.distributed.transport import TransportError

    how, then = sys.argv[1:]
    pair = Pair(timeout_s=0.6)
    posted = [sends(rank, 1) if how == "sends" else batch(rank) for rank in range(2)]
    ticket = pair.transports[0].post(posted[0], pair.streams[0])
    wait(pair, "sent", [ticket])
    run_for(pair.world, 0.1)
    subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    run_for(pair.world, 0.1)
    pair.transports[0].check()
    if then == "comes":
        pair.transports[1].post(posted[1], pair.streams[1])
    run_for(pair.world, 1.2)
    try:
        pair.transports[0].check()
        print("right", flush=True)
        pair.close()
    except TransportError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "said"), [("sends", "rank 1 has not fetched it"), ("receives", "nothing came from rank 1")]
)
@pytest.mark.parametrize("then", ["comes", "stays away"])
def test_the_time_in_which_all_processes_are_stopped_does_not_count(how: str, said: str, then: str) -> None:
    """A job that is suspended and goes on: nobody could have come meanwhile. Whoever does not come then is named."""
    ended = run_program(STOPS, how, then)
    wanted = "right" if then == "comes" else f"rank 0 of 2: gave up on 'rows' after 0.6 s: {said} (stalled)"
    assert (ended.returncode, ended.stdout) == (0, wanted + "\n"), ended.stderr
