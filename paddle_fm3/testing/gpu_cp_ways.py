# SPDX-License-Identifier: Apache-2.0
"""A phase of context parallelism (forward or backward) with parts left out, by the executor that runs it whole, in the
same buffers. `gpu_cp_pairs` times it.

    moving   the phase as it is
    paced    nothing is copied; ranks wait for each other as ever
    beside   rows are copied when they would be, and nobody waits for them or for a rank
    still    kernels alone: nothing is copied, and nobody waits

Rows that are not copied are those of the last phase that did copy: real numbers, for power depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddle_fm3._device_api import PackWords
from paddle_fm3.distributed.device import Sm90Device
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_page import NUM_READY_WORDS
from paddle_fm3.distributed.device_transport import Batch, Ticket


@dataclass(frozen=True)
class Way:
    has_copies: bool
    has_waits: bool


WAYS = {
    "moving": Way(has_copies=True, has_waits=True),
    "paced": Way(has_copies=False, has_waits=True),
    "beside": Way(has_copies=True, has_waits=False),
    "still": Way(has_copies=False, has_waits=False),
}


class LeavesOut:
    """Before a Device among a class's bases: copies only where `way` has copies, for what is enqueued from then on.

    Attributes:
        streams: all that were made by it and are left.
    """

    way = WAYS["moving"]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.streams: list[int] = []

    def stream_create(self) -> int:
        self.streams.append(super().stream_create())  # type: ignore[misc]
        return self.streams[-1]

    def copy(self, copies: Any, stream: int) -> None:
        if self.way.has_copies:
            super().copy(copies, stream)  # type: ignore[misc]


class PartsDevice(LeavesOut, Sm90Device):
    def _call(self, name: str, *arguments: Any) -> None:
        super()._call(name, *arguments)
        if name == "stream_destroy":
            self.streams.remove(arguments[0])


class PartsTransport(IpcTransport):
    """Where the device's way has no waits, no stream waits for another, and the words are written all the same: batches
    after them are counted on from there."""

    _device: Any  # a LeavesOut

    def _post(
        self, ticket: Ticket, stream: int, after: tuple[Ticket, ...], word: tuple[int, int, int] | None,
        recv_after: int | None,
    ) -> None:  # fmt: skip
        page, device = self._page, self._device
        if device.way.has_waits:
            super()._post(ticket, stream, after, word, recv_after)
            return
        self._tickets[ticket.number % NUM_READY_WORDS] = ticket
        if device.way.has_copies:
            device.event_record(self._begin_event, stream)
            device.event_wait(self._begin_event, self._pull_stream)
            for _, copies, _ in self._copies_of(ticket.batch, word is not None):
                device.copy(copies, self._pull_stream)
        # Beside `stream`: a word through host memory takes some microseconds. That of `word` holds what the last phase
        # with waits has left in this place, all rows.
        for offset in (page.ready_offset(self.rank, ticket.number), page.pulled_offset(self.rank)):
            device.write_word(self._pull_stream, self._base + offset, ticket.number + 1)

    def _wait_free(self, tickets: list[Ticket], stream: int, beside: int) -> None:
        if self._device.way.has_waits:
            super()._wait_free(tickets, stream, beside)

    def _announce(self, words: PackWords, num_batches: int, here: tuple[int, int], caller: int) -> None:
        if self._device.way.has_waits:
            super()._announce(words, num_batches, here, caller)

    def _wait(self, ticket: Ticket, stream: int) -> None:
        if self._device.way.has_waits:
            super()._wait(ticket, stream)

    def _wait_sent(self, sends: dict[int, Ticket], stream: int) -> None:
        if self._device.way.has_waits:
            super()._wait_sent(sends, stream)

    def _wait_ready(self, tickets: list[Ticket], stream: int) -> None:
        if self._device.way.has_waits:
            super()._wait_ready(tickets, stream)


class Meeting(IpcTransport):
    """Moves nothing: `meet` lets all ranks' streams go on together."""

    _nothing = Batch("a meeting of all ranks")

    def meet(self, stream: int) -> None:
        """All wait for one word, which rank 0 writes when all are there. With a word of each, whoever comes last would
        go ahead of the others by the time that a word takes through host memory."""
        number = self._num_posts
        if self.rank == 0:
            for peer in range(1, self.num_ranks):
                self._wait_peer(peer, number, stream)
        self.post(self._nothing, stream)
        self._wait_peer(0, number, stream)

    def _post(self, ticket: Ticket, stream: int, *_: Any) -> None:
        self._tickets[ticket.number % NUM_READY_WORDS] = ticket
        for offset in (self._page.pulled_offset(self.rank), self._page.ready_offset(self.rank, ticket.number)):
            self._device.write_word(stream, self._base + offset, ticket.number + 1)


class Phases:
    """Enqueues phases of an executor over `device`, whose transport is a PartsTransport.

    Before each, all streams of a rank come to rest and all ranks meet: it begins everywhere at once, and words written
    without waits are not mixed up with those of the phase before.
    """

    def __init__(self, device: Any, meeting: Meeting) -> None:
        self._device, self._meeting = device, meeting
        self._events: dict[int, int] = {}  # by stream

    def enqueue(self, way: str, call: Callable[[], None], stream: int) -> None:
        """`call` enqueues the phase on `stream`."""
        self._device.way = WAYS[way]
        try:
            call()
        finally:
            self._device.way = WAYS["moving"]

    def meet(self, stream: int) -> None:
        device = self._device
        others = [other for other in device.streams if other != stream]
        for other in others:
            device.event_record(self._event(other), other)
            device.event_wait(self._event(other), stream)
        device.event_record(self._event(stream), stream)
        for other in others:
            device.event_wait(self._event(stream), other)
        self._meeting.meet(stream)

    def _event(self, stream: int) -> int:
        if stream not in self._events:
            self._events[stream] = self._device.event_create()
        return self._events[stream]
