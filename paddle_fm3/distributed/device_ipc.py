# SPDX-License-Identifier: Apache-2.0
"""Peer copies inside a node: each rank's copy engines fetch rows from the other ranks' GPU memory.

No multiprocessor takes part, so an attention kernel may hold all of them and wait for rows. A rank tells that a batch
is ready, and a receiver that it has it, by words in host memory (`device_page`) that streams write and wait for; that
rows are ready the launch writes that makes them so, where a kernel will wait for them itself.
Memory is shared through CUDA IPC handles; they and the page's path go through the group's own exchange of small
records, and nothing is unpickled.

A stream that waits for a word cannot give up by itself. So a thread of each rank looks at the page: when a peer has
ended, or a stream has waited for longer than the timeout, it writes why, and every rank's thread releases all words.
Streams then run to their end, with contents that mean nothing, and the next call raises the reason; a program that
makes no further call is ended before it trusts them for long (`device_held`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paddle_fm3._device_api import MOST_READY_WORDS, PackWords
from paddle_fm3.distributed.device import Device, DeviceError
from paddle_fm3.distributed.device_held import RunningTime, end_process, end_process_now
from paddle_fm3.distributed.device_page import FAILURE_OFFSET, NOTE_SCALE, NUM_READY_WORDS, SignalPage
from paddle_fm3.distributed.device_trace import span_of
from paddle_fm3.distributed.device_transport import Batch, DeviceTransport, Part, Ticket, last_sends
from paddle_fm3.distributed.rendezvous import machine_name
from paddle_fm3.distributed.transport import NOT_ALIKE, TransportError

Record = dict[str, Any]
ExchangeRecords = Callable[[Record], list[Record]]

_TICK_S = 0.02
_CALL_FACTOR = 2654435761  # spreads the numbers of calls over 32 bits
_callers: dict[str, set[int]] = {}  # by GPU: streams of this process on which attention was called that waits for rows
_FAR = 1 << 30  # a released word is so far ahead that no wait to come is behind it
MOST_BATCHES = 0xFFFFFFFF - _FAR  # a word of the page has 32 bits: of 1,000 batches a second 37 days


@dataclass(eq=False)
class _Fetch:
    """Something waits until a peer has fetched what a batch sends."""

    peer: int
    ticket: Ticket
    is_due: Callable[[], bool]  # it has come to wait, or the peer has come as far
    since_s: float | None = None  # when that, and what the peer is to fetch, was first seen to be there


class IpcTransport(DeviceTransport):
    """See the module.

    `raises_words` unless ranks share a GPU.

    Args:
        device: of this rank; several ranks may share one GPU.
        exchange: hands this rank's small record to all ranks and returns everyone's, by rank. Collective.
        timeout_s: longest time a stream may wait for a peer.

    Raises:
        TransportError: the ranks are on several machines, or a rank cannot map the page.
    """

    gb_per_s = 300.0

    def __init__(self, device: Device, rank: int, num_ranks: int, exchange: ExchangeRecords, timeout_s: float) -> None:
        super().__init__(rank, num_ranks)
        self._device, self._exchange, self._timeout_s = device, exchange, timeout_s
        self._gpu = device.name()
        self._page = self._open_page()
        base = device.host_register(self._page.address, self._page.num_bytes)
        self._base = base
        self.status_word = base + self._page.status_offset(rank)
        self.failed_word = base + FAILURE_OFFSET
        self._relay_stream, self._pull_stream = (device.stream_create() for _ in range(2))
        self._begin_event, self._free_event = device.event_create(), device.event_create()
        # Of the pack: what it counts in, and the last batch that it has made ready, which no failure releases.
        self._num_packed = device.upload(np.zeros(64, np.uint32))
        self._packed_word = self._num_packed + 128
        self._announced = range(0)  # numbers of batches whose words are written with their rows
        self._in_events = [device.event_create() for _ in range(NUM_READY_WORDS)]
        self._word_events = [device.event_create() for _ in range(NUM_READY_WORDS)]
        self._buffers: dict[str, int] = {}
        self._peers: list[dict[str, int]] = [{} for _ in range(num_ranks)]  # by rank: buffer -> address here
        # By id of the batch, and whether in parts.
        self._copies: dict[tuple[int, bool], tuple[Batch, list[tuple[int, Any, int]]]] = {}
        self._tickets: dict[int, Ticket] = {}  # by number modulo NUM_READY_WORDS
        self._whats: dict[str, int] = {}  # 32 bits of each batch's name
        self._fetches: list[_Fetch] = []  # that the watch is to time
        self._num_alike = 0  # batches that all ranks are known to have posted alike
        self._num_pulled = 0  # batches that were in when the watch last looked
        self._was_raised = self._is_ending = False
        self._is_closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_page, name=f"paddle_fm3-ipc-{rank}", daemon=True)
        self._watch.start()
        atexit.register(self._leave)

    def _open_page(self) -> SignalPage:
        page = SignalPage.create(self.num_ranks) if self.rank == 0 else None
        try:
            namespace = os.readlink("/proc/self/ns/pid")
            path = str(page.path) if page is not None else None
            records = self._exchange({"path": path, "machine": machine_name(), "pids": namespace, "gpu": self._gpu})
            # Copies inside one GPU are kernels, whatever is asked for (seen on an H200): a kernel that holds all
            # multiprocessors and waits for rows would wait for ever.
            self.raises_words = len({record["gpu"] for record in records}) == self.num_ranks
            error = None
            if len({(r["machine"], r["pids"]) for r in records}) > 1:
                error = "peer copies work inside one machine and one container; these ranks are in several: use NCCL"
            elif page is None:
                try:
                    page = SignalPage(Path(records[0]["path"]), self.rank, self.num_ranks, False)
                except OSError as failure:
                    error = f"rank {self.rank} cannot map {records[0]['path']}: {failure}"
            self._agree(error)
        finally:
            if page is not None and self.rank == 0:
                page.unlink()
        assert page is not None
        return page

    def _agree(self, error: str | None, **record: Any) -> list[Record]:
        """All ranks' records. If one of them has an error, every rank raises it."""
        records = self._exchange({"error": error, **record})
        for other in records:
            if other["error"]:
                raise TransportError(other["error"])
        return records

    # --- the transport ---------------------------------------------------------------------------

    def _register(self, sizes: dict[str, int]) -> dict[str, int]:
        streams = (self._relay_stream, self._pull_stream)
        while not all(self._device.stream_is_done(stream) for stream in streams):
            self.check()
            time.sleep(1e-4)
        self._exchange({"idle": True})  # nobody reads the old buffers any more
        self._close_peers()
        self._exchange({"closed": True})  # CUDA leaves open what freeing memory does that another process has mapped
        self._free_buffers()
        error, handles = None, {}
        try:
            for name, num_bytes in sizes.items():
                self._buffers[name] = self._device.malloc(num_bytes)
                handles[name] = self._device.ipc_export(self._buffers[name]).hex()
        except DeviceError as failure:
            error = f"rank {self.rank} cannot share {sum(sizes.values())} bytes: {failure}"
        records = self._agree(error, handles=handles)
        try:
            for peer, record in enumerate(records):
                if peer != self.rank:
                    self._peers[peer] = {
                        name: self._device.ipc_open(bytes.fromhex(handle)) for name, handle in record["handles"].items()
                    }
        except DeviceError as failure:
            error = f"rank {self.rank} cannot reach the memory of rank {peer}: {failure}"
        self._agree(error)
        return dict(self._buffers)

    def forget(self) -> None:
        super().forget()
        self._copies = {}

    def _post(
        self, ticket: Ticket, stream: int, after: tuple[Ticket, ...], word: tuple[int, int, int] | None,
        recv_after: int | None,
    ) -> None:  # fmt: skip
        device, number = self._device, ticket.number
        value = number + 1  # words are 0 at first
        if number in self._announced:
            if after:
                raise TransportError(f"post of {ticket.batch.name!r}: it sends rows on, and was announced")
            # Rows may come where the own ones are; an event would cost `stream` more than this the other one. Not for
            # the page's word: released, it would let `word` be written before the pack takes it back, for good.
            if number == self._announced.start:
                device.wait_word(self._pull_stream, self._packed_word, self._announced.stop + 1)
        else:
            device.event_record(self._begin_event, stream)
            # Relayed rows must not hold up what `stream` does next, nor batches of other rows.
            if after:
                device.event_wait(self._begin_event, self._relay_stream)
            for earlier in after:
                device.event_wait(self._in_event(earlier), self._relay_stream)
            ready_stream = self._relay_stream if after else stream
            device.write_word(ready_stream, self._base + self._page.ready_offset(self.rank, number), value)
            if word is not None:  # on the stream that has written it before, and ahead of all waits: see _wait_ready
                device.write_word(self._pull_stream, word[0], word[1])
                device.event_record(self._word_events[number % NUM_READY_WORDS], self._pull_stream)
            device.event_wait(self._begin_event if recv_after is None else recv_after, self._pull_stream)
        last_peer, num_told = -1, 0
        for peer, copies, num_rows in self._copies_of(ticket.batch, word is not None):
            if word is not None and num_told:
                device.write_word(self._pull_stream, word[0], word[1] + num_told)
            if peer != last_peer:
                self._wait_peer(peer, number, self._pull_stream)
            with span_of(self.trace, "receive", f"{ticket.batch.name} from rank {peer}", self._pull_stream):
                device.copy(copies, self._pull_stream)
            last_peer, num_told = peer, num_rows
        if word is not None:
            device.write_word(self._pull_stream, word[0], word[2])
        device.event_record(self._in_events[number % NUM_READY_WORDS], self._pull_stream)
        device.write_word(self._pull_stream, self._base + self._page.pulled_offset(self.rank), value)
        self._tickets[number % NUM_READY_WORDS] = ticket

    def _compare(self, ticket: Ticket) -> None:
        """Whoever comes last to a batch sees what all the others posted there."""
        name, page = ticket.batch.name, self._page
        what = self._whats.get(name)
        if what is None:
            what = self._whats[name] = zlib.crc32(name.encode())
        # Who announces a batch waits for all to come to it, and only those who announce it say that they have.
        what += ticket.number in self._announced
        page.note(ticket.number, (what + ticket.call * _CALL_FACTOR) % NOTE_SCALE)
        while self._num_alike <= ticket.number:
            number = self._num_alike
            notes = page.notes_of(number)
            if min(notes) < (number + 1) * NOTE_SCALE:
                return
            if max(notes) != min(notes):
                self._check_alike(number, notes, ticket)
            self._num_alike += 1

    def _check_alike(self, number: int, notes: list[int], ticket: Ticket) -> None:
        """A note that is not alike may be of a later batch."""
        posted = {rank: note for rank, note in enumerate(notes) if note < (number + 2) * NOTE_SCALE}
        if len(set(posted.values())) <= 1:
            return
        mine = ticket if ticket.number == number else self._tickets[number % NUM_READY_WORDS]
        others = [rank for rank, note in posted.items() if note != posted.get(self.rank)]
        self._end(
            f"rank {self.rank} of {self.num_ranks} is at '{mine.batch.name}' of call {mine.call} and rank "
            f"{_listed(others)} is not: {NOT_ALIKE}"
        )
        self.check()

    def _wait_peer(self, peer: int, number: int, stream: int) -> None:
        self._device.wait_word(stream, self._base + self._page.ready_offset(peer, number), number + 1)

    def _copies_of(self, batch: Batch, in_parts: bool) -> list[tuple[int, Any, int]]:
        """Peer, copies, and the rows that are in with them (0: not said). By part; in each, or without parts, by peer,
        in an order in which not all ranks begin with the same one."""
        key = (id(batch), in_parts)
        known = self._copies.get(key)
        if known is not None and known[0] is batch:
            return known[1]
        found = []
        for part in (batch.parts if in_parts else ()) or (Part(batch.recvs, 0),):
            peers = sorted({p.peer for p in part.recvs}, key=lambda peer: (peer - self.rank) % self.num_ranks)
            for peer in peers:
                copies = [
                    (self._buffers[p.buffer] + p.offset, self._peers[peer][p.peer_buffer] + p.peer_offset, p.num_bytes)
                    for p in part.recvs
                    if p.peer == peer
                ]
                found.append((peer, self._device.copies(copies), part.num_rows if peer == peers[-1] else 0))
        self._copies[key] = batch, found
        return found

    def _in_event(self, ticket: Ticket) -> int:
        if self._tickets.get(ticket.number % NUM_READY_WORDS) is not ticket:
            raise TransportError(f"{ticket.batch.name!r} was posted more than {NUM_READY_WORDS} batches ago")
        return self._in_events[ticket.number % NUM_READY_WORDS]

    def _wait(self, ticket: Ticket, stream: int) -> None:
        self._device.event_wait(self._in_event(ticket), stream)

    def _wait_sent(self, sends: dict[int, Ticket], stream: int) -> None:
        self._wait_fetched(sends, stream, stream)

    def _wait_free(self, tickets: list[Ticket], stream: int, beside: int) -> None:
        self._wait_fetched(last_sends(tickets), stream, beside)
        self._device.event_wait(self._in_event(tickets[-1]), beside)
        if beside != stream:
            self._device.event_record(self._free_event, beside)
            self._device.event_wait(self._free_event, stream)

    def _wait_fetched(self, sends: dict[int, Ticket], stream: int, beside: int) -> None:
        """Where `stream` is to overwrite what these batches send, by peer; the waits are enqueued on `beside`. Peers
        from which something is still to come are timed by that; for the others `stream` says that it has come here.

        Claim:      no stream waits here for ever, and none that is not kept waiting ends the group.
        Because:    a batch that was posted before this wait does not need it. If it receives from the peer, it is in
                    only when the peer has come to it, too: after it has posted what it is to fetch, and watches that;
                    from then on it has its time even if it does not watch.
        Breaks if:  a batch is in before its peers have come to it.
        Tested by:  test/unit/test_device_stall.py
        """
        untimed = [ticket.number for peer, ticket in sends.items() if self._last_recvs[peer] < ticket.number]
        wanted = max(untimed, default=-1)
        if untimed:
            self._device.write_word(stream, self._base + self._page.wanted_offset(self.rank, wanted), wanted + 1)
        for peer, ticket in sends.items():
            last = self._last_recvs[peer]
            is_due = partial(self._page.is_wanted, wanted) if last < ticket.number else partial(self._is_in, last)
            self._fetches.append(_Fetch(peer, ticket, is_due))
            self._device.wait_word(beside, self._base + self._page.pulled_offset(peer), ticket.number + 1)

    def _announce(self, words: PackWords, num_batches: int, here: tuple[int, int], caller: int) -> None:
        _callers.setdefault(self._gpu, set()).add(caller)
        if num_batches >= MOST_READY_WORDS:
            return
        first = self._num_posts
        self._announced = range(first, first + num_batches)
        words.begins[1:] = self._base + self._page.come_offset(self.rank), here[0]
        words.begin_values[1:] = first + 1, here[1]
        words.num_ready, words.ready_value, words.num_done = num_batches + 1, first + 1, self._num_packed
        words.ready[:num_batches] = [self._base + self._page.ready_offset(self.rank, at) for at in self._announced]
        words.ready[num_batches] = self._packed_word

    def _wait_ready(self, tickets: list[Ticket], stream: int) -> None:
        """For the peers to have come to the first batch, or for all to be ready. Where that is not announced, also for
        the first word, which holds until rows come. (An event of the stream that copies would come some microseconds
        after these words.)

        Claim:      a kernel that starts when peers have come has its rows some time, whatever holds their GPUs.
        Because:    a peer has then only to pack its rows, for which it needs room and nobody else. What holds its GPU
                    and waits for this rank is attention of another call, on another stream: in this process there is
                    none, so this rank is in no other call that waits for it.
        Breaks if:  calls of two groups wait for each other, each holding one GPU: so where attention is called on
                    several streams, kernels start when rows are ready.
        Tested by:  test/unit/test_device_order.py
        """
        is_announced = bool(tickets) and tickets[0].number in self._announced
        for at, ticket in enumerate(tickets):
            if at == 0 and not is_announced:
                self._device.event_wait(self._word_events[ticket.number % NUM_READY_WORDS], stream)
            for peer in sorted(ticket.batch.recv_peers):
                if not is_announced or len(_callers[self._gpu]) > 1:
                    self._wait_peer(peer, ticket.number, stream)
                elif all(peer not in one.batch.recv_peers for one in tickets[:at]):
                    word = self._base + self._page.come_offset(peer)
                    self._device.wait_word(stream, word, tickets[0].number + 1)

    # --- failure ---------------------------------------------------------------------------------

    def check(self) -> None:
        failure = self._page.failure
        if failure is not None:
            self._was_raised = True
            raise TransportError(failure)
        if self._is_closed.is_set():
            raise TransportError("the transport is closed")
        if self._num_posts >= MOST_BATCHES:
            raise TransportError(
                f"{self._num_posts} batches were posted, as many as the page's words number; start the processes again"
            )

    def fail(self, reason: str) -> None:
        self._end(f"rank {self.rank} of {self.num_ranks} stopped: {reason}")

    def _end(self, reason: str) -> None:
        self._page.fail(reason)
        self._page.release(self._num_posts + _FAR)

    def close(self) -> None:
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        atexit.unregister(self._leave)
        self._watch.join()
        self._close_peers()
        self._free_buffers()
        self._device.free(self._num_packed)
        self._device.host_unregister(self._page.address)
        self._page.close()

    def _close_peers(self) -> None:
        for buffers in self._peers:
            for address in buffers.values():
                self._device.ipc_close(address)
        self._peers = [{} for _ in range(self.num_ranks)]

    def _free_buffers(self) -> None:
        for address in self._buffers.values():
            self._device.free(address)
        self._buffers = {}

    def _watch_page(self) -> None:
        watched, since_s, running = -1, 0.0, RunningTime()
        while not self._is_closed.wait(_TICK_S):
            now_s = running.look()
            number = self._num_pulled_by(self.rank)  # first: a failure releases this word too
            if self._page.failure is not None:
                self._release()
                continue
            self._num_pulled = number
            is_waiting = number < self._num_posts and self._is_ready(self.rank, number)
            if not is_waiting or number != watched:
                watched, since_s = number if is_waiting else -1, now_s
            reason = self._why_lost() or self._missed_by_one_that_left() or self._why_unfetched(now_s)
            if reason is None and is_waiting and now_s - since_s > self._timeout_s:
                reason = self._why_waiting(number)
            if reason is not None:
                self._page.fail(f"rank {self.rank} of {self.num_ranks}: {reason}")

    def _why_lost(self) -> str | None:
        ended = [rank for rank in range(self.num_ranks) if rank != self.rank and self._page.has_ended(rank)]
        if ended:
            return f"the process of rank {_listed(ended)} has ended"
        gave_up_row = self._page.word(self._page.status_offset(self.rank))
        return f"its attention kernel waited too long for key row {gave_up_row - 1}" if gave_up_row else None

    def _missed_by_one_that_left(self) -> str | None:
        """Says so if a rank has taken its leave without having posted a batch that this one has."""
        for rank in range(self.num_ranks):
            if rank == self.rank or not self._page.has_closed(rank):
                continue
            number = self._num_pulled_by(rank)
            ticket = self._tickets.get(number % NUM_READY_WORDS)
            if ticket is not None and ticket.number == number:
                return f"rank {rank} has ended in order, before '{ticket.batch.name}'"
        return None

    def _release(self) -> None:
        """Lets streams run to their end. If rows were still to come, what they compute means nothing."""
        self._page.release(self._num_posts + _FAR)
        failure = self._page.failure
        if self._num_pulled < self._num_posts and not self._is_ending and failure is not None:
            self._is_ending = True
            threading.Thread(
                target=end_process,
                args=(failure, lambda: not self._was_raised and not self._is_closed.is_set(), lambda: self._was_raised),
                name="paddle_fm3-ipc-end",
                daemon=True,
            ).start()

    def _leave(self) -> None:
        """At exit. A program that read results of a failed transport, and then ends, did not come to a right end.

        One that ends in order waits, for a while, until the others have copied what they need of its memory.
        """
        is_error = getattr(sys, "last_type", None) is not None
        sends, unfetched = last_sends(sorted(self._tickets.values(), key=lambda ticket: ticket.number)), list[int]()
        self._fetches.extend(_Fetch(peer, ticket, lambda: True) for peer, ticket in sends.items())
        running = RunningTime()
        while not is_error:
            num_pulled = [self._num_pulled_by(rank) for rank in range(self.num_ranks)]  # first, as in `_watch_page`
            if self._page.failure is not None:
                break
            unfetched = [peer for peer, ticket in sends.items() if num_pulled[peer] <= ticket.number]
            if min(num_pulled) >= self._num_posts:
                self._page.mark_closed()
                break
            if running.look() > self._timeout_s and all(fetch.since_s is None for fetch in self._fetches):
                break
            time.sleep(1e-3)
        failure = self._page.failure
        if failure is not None and (self._num_pulled < self._num_posts or unfetched) and not self._was_raised:
            end_process_now(failure)

    def _num_pulled_by(self, rank: int) -> int:
        """How many batches a rank has in; the word counts all that were posted."""
        return self._page.word(self._page.pulled_offset(rank))

    def _is_in(self, number: int) -> bool:
        return self._num_pulled_by(self.rank) > number

    def _is_ready(self, rank: int, number: int) -> bool:
        """The rank has come to the batch: its sends are ready."""
        return self._page.word(self._page.ready_offset(rank, number)) >= number + 1

    def _why_waiting(self, number: int) -> str:
        ticket = self._tickets[number % NUM_READY_WORDS]
        silent = [peer for peer in ticket.batch.recv_peers if not self._is_ready(peer, number)]
        what = f"gave up on '{ticket.batch.name}' after {self._timeout_s:g} s: "
        return what + (f"nothing came from rank {_listed(silent)} (stalled)" if silent else "the copies do not end")

    def _why_unfetched(self, now_s: float) -> str | None:
        """Says so if something has waited too long for peers to fetch."""
        late = dict[int, tuple[Ticket, list[int]]]()
        for fetch in self._fetches[:]:  # others are added meanwhile
            number = fetch.ticket.number
            if self._num_pulled_by(fetch.peer) > number:
                self._fetches.remove(fetch)
            elif self._is_ready(self.rank, number) and fetch.is_due():
                fetch.since_s = now_s if fetch.since_s is None else fetch.since_s
                # A peer that has come to the batch waits for another rank, and names it in time unless it has stopped.
                limit_s = self._timeout_s * (2 if self._is_ready(fetch.peer, number) else 1)
                if now_s - fetch.since_s > limit_s:
                    late.setdefault(number, (fetch.ticket, []))[1].append(fetch.peer)
        if not late:
            return None
        ticket, peers = late[min(late)]
        return (
            f"gave up on '{ticket.batch.name}' after {self._timeout_s:g} s: rank {_listed(peers)} has not fetched it "
            "(stalled)"
        )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))
