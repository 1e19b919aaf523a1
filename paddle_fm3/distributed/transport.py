# SPDX-License-Identifier: Apache-2.0
"""Messages of any size between CPU ranks, moved by one communication thread beside the compute.

Paddle's gloo has no uneven all-to-all, and its point-to-point calls block and must be matched in number over a whole
group. So the rows of a plan travel over plain TCP connections, one for each pair of ranks, all of them non-blocking
and served by one thread: no order of calls can deadlock, and no byte moves that the plan does not name.

A message is a header (phase, tag, call, length) and raw bytes; nothing is unpickled. It goes straight into the memory
that the receiver posted for (phase, tag); until it is posted, the connection is not read. `rendezvous.py` makes the
connections.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paddle_fm3.distributed.trace import now_us

_HEADER = struct.Struct("<4sIIIQ")  # magic, phase, tag, call, payload bytes
_MAGIC, _END_MAGIC = b"FM3m", b"FM3x"
_MAX_BYTES_A_CALL = 1 << 20  # so that one connection does not keep the thread from the others
_MAX_PARTS_A_CALL = 64
_MAX_REASON_BYTES = 1000
_END_TIMEOUT_S = 1.0
# What a phase moves. Phase numbers hold it, so that ranks which do different things are found out.
RECORDS, KEY_ROWS, GRAD_ROWS = "comparison of the ranks' arguments", "K/V rows", "dK/dV sums"
_PHASE_KINDS = (RECORDS, KEY_ROWS, GRAD_ROWS)
NOT_ALIKE = "the ranks do not make the same calls in the same order (has only one of them met an exception?)"

Parts = list[memoryview]  # contiguous bytes, in order
OnDone = Callable[[float], None]  # called with the time (trace.now_us) of the message's first byte


class TransportError(RuntimeError):
    """A connection broke, or a message does not fit what was posted for it."""


@dataclass(eq=False)
class _Message:
    phase: int
    tag: int
    parts: deque[memoryview]
    on_done: OnDone
    call: int = 0
    begin_us: float = 0.0


class _Peer:
    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.is_open = True
        self.is_sending = False  # the first of `sends` has left in part
        self.sends: deque[_Message] = deque()
        self.posted: dict[tuple[int, int], _Message] = {}
        self.header = bytearray(_HEADER.size)
        self.header_filled = 0
        self.incoming: _Message | None = None


_transports: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child, as a data loader's worker, would keep the connections of its dead parent open."""
    for transport in list(_transports):
        for peer in transport._peers.values():
            peer.connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def _is_of_rows(message: _Message) -> bool:
    return message.phase % len(_PHASE_KINDS) != _PHASE_KINDS.index(RECORDS)


class TcpTransport:
    """Connections of this rank to all others. Post from any thread; callbacks run on the communication thread.

    Attributes:
        sent_bytes, received_bytes: bytes of rows so far, by peer; counted where the socket takes or gives them.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.num_ranks = len(connections) + 1
        self.sent_bytes = [0] * self.num_ranks
        self.received_bytes = [0] * self.num_ranks
        self.failure: str | None = None
        self.changed = threading.Condition()  # notified after every callback and on failure
        self.last_progress_s = time.monotonic()
        self._num_phases = 0
        self._num_calls = 0
        self._recent_phases: deque[int] = deque(maxlen=4)
        self._peers = {peer: _Peer(peer, connection) for peer, connection in connections.items()}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._is_ended = False
        self._thread = threading.Thread(target=self._serve, name=f"paddle_fm3-transport-{rank}", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)
        _transports.add(self)

    # --- any thread ------------------------------------------------------------------------------

    def next_phase(self, kind: str) -> int:
        """A number for one exchange of messages. Every rank must start the same kinds of phases in the same order."""
        self._num_phases += 1
        phase = self._num_phases * len(_PHASE_KINDS) + _PHASE_KINDS.index(kind)
        self._recent_phases.append(phase)
        return phase

    def next_call(self) -> int:
        """A number for one call of attention, its forward and its backward; the same on every rank, from 1."""
        self._num_calls += 1
        return self._num_calls

    def call_soon(self, call: Callable[[], None]) -> None:
        """Runs ``call`` on the communication thread."""
        self._calls.append(call)
        try:
            self._wake_sender.send(b"x")
        except BlockingIOError:  # plenty of wake-ups are pending already
            pass

    def post_send(self, peer: int, phase: int, tag: int, parts: Parts, on_done: OnDone, call: int = 0) -> None:
        """Queues a message; the memory must stay as it is until on_done. Messages to a peer keep their order."""
        num_bytes = sum(part.nbytes for part in parts)
        header = memoryview(_HEADER.pack(_MAGIC, phase, tag, call, num_bytes))
        message = _Message(phase, tag, deque([header, *(part for part in parts if part.nbytes)]), on_done, call)
        self.call_soon(lambda: self._queue_send(self._peers[peer], message))

    def post_recv(self, peer: int, phase: int, tag: int, parts: Parts, on_done: OnDone, call: int = 0) -> None:
        """Offers memory for the message (phase, tag) of a peer, which must be of the same call; it is written until
        on_done."""
        message = _Message(phase, tag, deque(part for part in parts if part.nbytes), on_done, call)
        self.call_soon(lambda: self._queue_recv(self._peers[peer], message))

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for is_done(); False once no byte has moved for timeout_s.

        Raises:
            TransportError: a connection broke.
        """
        began_s = time.monotonic()
        with self.changed:
            while not is_done():
                if self.failure is not None:
                    raise TransportError(self.failure)
                left_s = max(began_s, self.last_progress_s) + timeout_s - time.monotonic()
                if left_s <= 0:
                    return False
                self.changed.wait(min(left_s, 1.0))
        return True

    def fail(self, reason: str) -> None:
        """Ends all connections, so that the peers learn of it; further waits raise. The first reason stays."""
        is_told = threading.Event()

        def end() -> None:
            self._fail(reason)
            is_told.set()

        self.call_soon(end)
        is_told.wait(1.0)  # so that the peers hear of it even if the process ends next

    def _end_thread(self) -> None:
        """At the process's end. A peer that ends first would wake the thread while the interpreter, and the libraries
        whose thread-local state it holds, are being taken down. The sockets stay open until the process is gone."""

        def end() -> None:
            self._is_ended = True

        self.call_soon(end)
        self._thread.join(_END_TIMEOUT_S)

    # --- communication thread --------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_ended:
            for key, events in self._selector.select():
                peer = key.data
                try:
                    if peer is None:
                        self._run_calls()
                    else:
                        if events & selectors.EVENT_READ and peer.is_open:
                            self._read(peer)
                        if events & selectors.EVENT_WRITE and peer.is_open:
                            self._write(peer)
                except TransportError as error:
                    self._fail(f"rank {self.rank}: {error}")
                except Exception as error:  # noqa: BLE001  every waiting thread raises it
                    self._fail(f"rank {self.rank}: {type(error).__name__}: {error}")

    def _run_calls(self) -> None:
        try:
            self._wake_receiver.recv(4096)
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()()
        self._notify()

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self.changed:
            if self.failure is None:
                self.failure = reason
            self.changed.notify_all()
        for peer in self._peers.values():
            if peer.is_open:
                self._tell_end(peer)
                self._close(peer)

    def _tell_end(self, peer: _Peer) -> None:
        """The reason as a last message, so that every rank gives the same one. Not in the middle of another."""
        assert self.failure is not None
        if peer.is_sending:
            return
        reason = self.failure.encode()[:_MAX_REASON_BYTES]
        try:
            peer.connection.send(_HEADER.pack(_END_MAGIC, 0, 0, 0, len(reason)) + reason)
        except OSError:
            pass  # it is gone, or its buffer is full: it will see the connection close

    def _close(self, peer: _Peer) -> None:
        if peer.is_open:
            peer.is_open = False
            try:
                self._selector.unregister(peer.connection)
            except KeyError:
                pass  # paused: waiting for memory to be posted
            # NOTE: close() with unread input would throw away what was sent last; the process's end closes it.
            try:
                peer.connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the peer was first

    def _lost(self, peer: _Peer, how: str) -> None:
        self._close(peer)
        # A peer that has ended after its last message is no failure until somebody wants more from it.
        if peer.posted or peer.incoming or peer.sends or peer.header_filled:
            self._fail(f"rank {self.rank} lost rank {peer.rank}: {how} (dead, or it gave up; see its own message)")

    def _queue_send(self, peer: _Peer, message: _Message) -> None:
        peer.sends.append(message)
        if not peer.is_open:
            self._lost(peer, "its connection is closed")
            return
        self._watch(peer)

    def _queue_recv(self, peer: _Peer, message: _Message) -> None:
        key = (message.phase, message.tag)
        if key in peer.posted:
            raise TransportError(f"phase {key[0]}, tag {key[1]} of rank {peer.rank} was posted twice")
        peer.posted[key] = message
        if not peer.is_open:
            self._lost(peer, "its connection is closed")
            return
        self._accept_header(peer)
        self._watch(peer)

    def _watch(self, peer: _Peer) -> None:
        """Watches for what can go on: reading stops while a message waits for its memory."""
        is_paused = peer.header_filled == _HEADER.size and peer.incoming is None
        events = (0 if is_paused else selectors.EVENT_READ) | (selectors.EVENT_WRITE if peer.sends else 0)
        is_registered = peer.connection in self._selector.get_map()
        if is_registered and not events:
            self._selector.unregister(peer.connection)
        elif is_registered:
            self._selector.modify(peer.connection, events, peer)
        elif events:
            self._selector.register(peer.connection, events, peer)

    def _write(self, peer: _Peer) -> None:
        message = peer.sends[0]
        parts = [message.parts[at] for at in range(min(len(message.parts), _MAX_PARTS_A_CALL))]
        parts[0] = parts[0][:_MAX_BYTES_A_CALL]
        try:
            num_sent = peer.connection.sendmsg(parts if parts[0].nbytes < _MAX_BYTES_A_CALL else parts[:1])
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(peer, str(error))
            return
        if not peer.is_sending:
            peer.is_sending, message.begin_us = True, now_us()
        is_counted = _is_of_rows(message)
        self.sent_bytes[peer.rank] += num_sent * is_counted
        self.last_progress_s = time.monotonic()
        while num_sent:
            taken = min(num_sent, message.parts[0].nbytes)
            num_sent -= taken
            if taken == message.parts[0].nbytes:
                message.parts.popleft()
            else:
                message.parts[0] = message.parts[0][taken:]
        if not message.parts:
            self.sent_bytes[peer.rank] -= _HEADER.size * is_counted
            peer.sends.popleft()
            peer.is_sending = False
            self._watch(peer)
            self._done(message)

    def _read(self, peer: _Peer) -> None:
        try:
            if peer.incoming is None:
                num_read = peer.connection.recv_into(memoryview(peer.header)[peer.header_filled :])
            else:
                num_read = peer.connection.recv_into(peer.incoming.parts[0][:_MAX_BYTES_A_CALL])
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(peer, str(error))
            return
        if num_read == 0:
            self._lost(peer, "it closed its connection")
            return
        self.last_progress_s = time.monotonic()
        if peer.incoming is None:
            peer.header_filled += num_read
            self._accept_header(peer)
            self._watch(peer)
            return
        if _is_of_rows(peer.incoming):
            self.received_bytes[peer.rank] += num_read
        parts = peer.incoming.parts
        if num_read == parts[0].nbytes:
            parts.popleft()
            if not parts:
                self._finish_incoming(peer)
        else:
            parts[0] = parts[0][num_read:]

    def _accept_header(self, peer: _Peer) -> None:
        """Turns a complete header into the incoming message, if its memory is posted."""
        if peer.header_filled < _HEADER.size or peer.incoming is not None:
            return
        magic, phase, tag, call, num_bytes = _HEADER.unpack(peer.header)
        if magic == _END_MAGIC and num_bytes <= _MAX_REASON_BYTES:
            reason = bytearray(num_bytes)
            told = partial(self._was_told, reason)
            peer.incoming = _Message(0, 0, deque([memoryview(reason)]), told)
            return
        if magic != _MAGIC:
            raise TransportError(f"rank {peer.rank} sent {magic!r} where a header was due")
        message = peer.posted.get((phase, tag))
        if message is None:
            self._check_kind(peer, phase)
            return
        if call != message.call:  # of calls that look alike: the bytes would fit
            raise TransportError(
                f"rank {peer.rank} is in the backward of call {call} while rank {self.rank} is in that of call "
                f"{message.call}: {NOT_ALIKE}"
            )
        wanted = sum(part.nbytes for part in message.parts)
        if wanted != num_bytes:
            raise TransportError(
                f"rank {peer.rank} sends {num_bytes} bytes as phase {phase}, tag {tag}; {wanted} were expected"
            )
        del peer.posted[(phase, tag)]
        message.begin_us = now_us()
        peer.incoming = message
        if not message.parts:
            self._finish_incoming(peer)

    def _check_kind(self, peer: _Peer, phase: int) -> None:
        """A message that nobody here waits for yet must be of a phase that this rank will come to."""
        theirs = divmod(phase, len(_PHASE_KINDS))
        for number, kind in (divmod(own, len(_PHASE_KINDS)) for own in tuple(self._recent_phases)):
            if number == theirs[0] and kind != theirs[1]:
                raise TransportError(
                    f"rank {peer.rank} is at '{_PHASE_KINDS[theirs[1]]}' while rank {self.rank} is at "
                    f"'{_PHASE_KINDS[kind]}': {NOT_ALIKE}"
                )

    def _was_told(self, reason: bytearray, _begin_us: float) -> None:
        self._fail(reason.decode(errors="replace"))

    def _finish_incoming(self, peer: _Peer) -> None:
        message, peer.incoming, peer.header_filled = peer.incoming, None, 0
        assert message is not None
        self._done(message)

    def _done(self, message: _Message) -> None:
        message.on_done(message.begin_us)
        self._notify()
