# SPDX-License-Identifier: Apache-2.0
"""Rows between the GPUs of a group: what a transport must do, and the book that refuses misuse.

A transport moves *batches* between *registered buffers*. The host only enqueues; what comes before what is said by
streams. Two exist: peer copies inside a node (`device_ipc`), and NCCL through Paddle's groups (`device_nccl`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from paddle_fm3._device_api import PackWords
from paddle_fm3.distributed.device_trace import DeviceTrace
from paddle_fm3.distributed.transport import TransportError

BUFFER_ALIGNMENT = 256


@dataclass(frozen=True)
class Piece:
    """Contiguous bytes of one message, here and at the peer."""

    peer: int
    buffer: str  # a registered buffer of this rank
    offset: int  # in bytes
    num_bytes: int
    peer_buffer: str
    peer_offset: int


@dataclass(frozen=True)
class Part:
    """Some of a batch's recvs, or of their bytes."""

    recvs: tuple[Piece, ...]
    num_rows: int  # of the batch, that are in with this part and those before it


@dataclass(frozen=True)
class Batch:
    """What all ranks post together. Two ranks list the pieces between them in the same order.

    Keep and post the same object: what follows from its pieces is then worked out once.
    """

    name: str  # for errors and traces: "K/V rows stage 2 hop 0"
    sends: tuple[Piece, ...] = ()
    recvs: tuple[Piece, ...] = ()
    # The same bytes as recvs, one part after the other, for a transport that can say how far it is; may be empty.
    parts: tuple[Part, ...] = ()

    @cached_property
    def send_peers(self) -> frozenset[int]:
        return frozenset(piece.peer for piece in self.sends)

    @cached_property
    def recv_peers(self) -> frozenset[int]:
        return frozenset(piece.peer for piece in self.recvs)


@dataclass(eq=False)
class Ticket:
    """A posted batch."""

    batch: Batch
    number: int  # of posts before it; the same on every rank
    owner: DeviceTransport = field(repr=False)
    call: int = 0  # of attention, that it belongs to; the same on every rank


def last_sends(tickets: Iterable[Ticket]) -> dict[int, Ticket]:
    """By peer: the last of these batches that sends to it, which stands for those before it."""
    return {peer: ticket for ticket in tickets for peer in ticket.batch.send_peers}


class DeviceTransport:
    """Base of all transports: checks every call, counts bytes, and hands on to the methods with an underscore.

    Attributes:
        raises_words: `post` can write a device word once a batch is in.
        gb_per_s: what a rank sends or receives, at least; a link between machines, if it is not known better.
        num_sms: multiprocessors that its own kernels need, which attention running beside them must leave.
        status_word: device address of a word that a kernel sets when it gives up waiting; None without.
        failed_word: device address of a word that is not 0 once the transport has failed and lets streams run on, with
            contents that mean nothing; None where it does not.
        sent_bytes, received_bytes: payload by peer, counted when posted.
        trace: where batches posted from now on leave when they moved; None for nowhere.
    """

    raises_words = False
    gb_per_s = 20.0
    num_sms = 0
    status_word: int | None = None
    failed_word: int | None = None
    trace: DeviceTrace | None = None

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.sent_bytes, self.received_bytes = [0] * num_ranks, [0] * num_ranks
        self._sizes: dict[str, int] = {}
        self._num_posts = 0
        self._last_recvs = [-1] * num_ranks  # by peer: number of the last batch that receives from it
        self._is_attached = False
        self._checked: dict[int, Batch] = {}  # by id; batches are posted again and again

    def attach(self) -> None:
        """Taken by an executor, whose buffers the registered ones are.

        Raises:
            TransportError: another one has it.
        """
        if self._is_attached:
            raise TransportError("this transport serves an executor already; two would replace each other's buffers")
        self._is_attached = True

    # --- for the executor ------------------------------------------------------------------------

    def register(self, sizes: dict[str, int]) -> dict[str, int]:
        """Buffers of these bytes, by name; addresses. Collective, with the same names everywhere.

        Called again to grow: earlier addresses are void then, and everything posted before must have run.

        Raises:
            TransportError: a rank was lost, or the device refused.
        """
        self.check()
        addresses = self._register(sizes)
        for name, address in addresses.items():
            if address % BUFFER_ALIGNMENT:
                raise TransportError(f"buffer {name!r} is at {address:#x}, not a multiple of {BUFFER_ALIGNMENT}")
        self._sizes = dict(sizes)
        self.forget()
        return addresses

    def forget(self) -> None:
        """Drops what was worked out from batches, for their masks are gone; those posted again cost it once more."""
        self._checked = {}

    def post(
        self,
        batch: Batch,
        stream: int,
        after: tuple[Ticket, ...] = (),
        word: tuple[int, int, int] | None = None,
        call: int = 0,
        recv_after: int | None = None,
    ) -> Ticket:
        """Enqueues a batch. Every rank posts the same batches, with or without pieces, in the same order.

        Args:
            stream: what is enqueued on it so far writes the sends, and is the last to touch the recvs' memory.
            after: tickets whose recvs this batch sends on.
            word: (address, before, after): values to write before anything moves, and once the recvs are in; between
                them, `before` and the rows that are in, after each of the batch's parts. Work that follows `wait_ready`
                sees one of them. Only if `raises_words`.
            call: number of the attention call that the batch belongs to.
            recv_after: an event that the memory of the recvs is free after, if that is before the sends are written.

        Raises:
            TransportError: misuse, or a failure known by now: another rank posts another batch, for one.
        """
        self.check()
        if self._checked.get(id(batch)) is not batch:
            for piece in (*batch.sends, *batch.recvs, *(piece for part in batch.parts for piece in part.recvs)):
                self._check_piece(batch, piece)
            self._checked[id(batch)] = batch
        self._check_tickets(after, "post after")
        if word is not None and not self.raises_words:
            raise TransportError(f"post of {batch.name!r}: {type(self).__name__} cannot write device words")
        ticket = Ticket(batch, self._num_posts, self, call)
        self._num_posts += 1
        self._compare(ticket)
        self._post(ticket, stream, after, word, recv_after)
        for piece in batch.sends:
            self.sent_bytes[piece.peer] += piece.num_bytes
        for piece in batch.recvs:
            self.received_bytes[piece.peer] += piece.num_bytes
            self._last_recvs[piece.peer] = ticket.number
        return ticket

    def wait(self, ticket: Ticket, stream: int) -> None:
        """Work enqueued on `stream` from now on sees the recvs of the batch."""
        self._check_tickets([ticket], "wait")
        self._wait(ticket, stream)

    def wait_sent(self, tickets: list[Ticket], stream: int) -> None:
        """Work enqueued on `stream` from now on may overwrite the sends of these batches, which are in order."""
        self._check_tickets(tickets, "wait_sent")
        sends = last_sends(tickets)
        if sends:
            self._wait_sent(sends, stream)

    def wait_free(self, tickets: list[Ticket], stream: int, beside: int) -> None:
        """Work enqueued on `stream` from now on may use the memory of these batches, which are in order: peers have
        fetched what they sent, and what they received is in, their words written. `beside`: a stream to wait on, so
        that `stream` waits for an event alone. Only if `raises_words`."""
        self._check_tickets(tickets, "wait_free")
        if tickets:
            self._wait_free(tickets, stream, beside)

    def announce(self, words: PackWords, num_batches: int, here: tuple[int, int], caller: int) -> None:
        """Adds to `words` those by which peers learn that this rank has come to the next batches to post, of which none
        sends on what another one receives, and that their sends are ready; the launch that makes them ready, and waits
        for nobody, is to write them. Every rank announces the same, or none of it.

        Args:
            words: `begins[0]` is the caller's own.
            here: (address, value) of a device word to write before anything of these batches comes.
            caller: the stream that attention is called on.
        """
        self.check()
        self._announce(words, num_batches, here, caller)

    def wait_ready(self, tickets: Iterable[Ticket], stream: int) -> None:
        """Work enqueued on `stream` from now on starts once what these batches receive, posted one after another with
        words, is ready at its senders, or these have announced it: from then on copies alone are waited for, and the
        launch that makes rows ready. A kernel that holds the GPU until its rows are in could otherwise wait for a peer
        that waits, in another collective, for a kernel that finds no room on this GPU."""
        posted = list(tickets)
        self._check_tickets(posted, "wait_ready")
        self._wait_ready(posted, stream)

    def check(self) -> None:
        """Raises TransportError if a failure is known. Looks at host memory only."""

    def fail(self, reason: str) -> None:
        """Ends the transport on every rank: what waits is released, later calls raise. The first reason stays."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees what the transport holds; everything posted must have run."""

    # --- for transports --------------------------------------------------------------------------

    def _compare(self, ticket: Ticket) -> None:
        """Raises TransportError if a rank is seen to post another batch in the ticket's place, or in one before it."""

    def _register(self, sizes: dict[str, int]) -> dict[str, int]:
        raise NotImplementedError

    def _post(
        self, ticket: Ticket, stream: int, after: tuple[Ticket, ...], word: tuple[int, int, int] | None,
        recv_after: int | None,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    def _wait(self, ticket: Ticket, stream: int) -> None:
        raise NotImplementedError

    def _wait_sent(self, sends: dict[int, Ticket], stream: int) -> None:
        raise NotImplementedError

    def _wait_free(self, tickets: list[Ticket], stream: int, beside: int) -> None:
        raise NotImplementedError

    def _announce(self, words: PackWords, num_batches: int, here: tuple[int, int], caller: int) -> None:
        raise NotImplementedError

    def _wait_ready(self, tickets: list[Ticket], stream: int) -> None:
        raise NotImplementedError

    def _check_tickets(self, tickets: Iterable[Ticket], what: str) -> None:
        for ticket in tickets:
            if not isinstance(ticket, Ticket) or ticket.owner is not self:
                raise TransportError(f"{what}: {ticket!r} was not posted on this transport")

    def _check_piece(self, batch: Batch, piece: Piece) -> None:
        size = self._sizes.get(piece.buffer)
        if not 0 <= piece.peer < self.num_ranks or piece.peer == self.rank:
            raise TransportError(f"post of {batch.name!r}: peer {piece.peer} of rank {self.rank} of {self.num_ranks}")
        if size is None or piece.peer_buffer not in self._sizes:
            raise TransportError(
                f"post of {batch.name!r}: buffer {piece.buffer!r} or {piece.peer_buffer!r} is not registered"
            )
        if piece.num_bytes <= 0 or piece.offset < 0 or piece.offset + piece.num_bytes > size:
            raise TransportError(
                f"post of {batch.name!r}: bytes [{piece.offset}, {piece.offset + piece.num_bytes}) are not inside "
                f"buffer {piece.buffer!r} of {size}"
            )
