# SPDX-License-Identifier: Apache-2.0
"""Rows between GPUs through NCCL, by a Paddle process group: grouped sends and receives on a stream of our own.

The group's calls are made "on the calculation stream" while a guard makes our stream that one, so that what precedes
and what follows a batch is said by events alone: nothing waits for the device. All batches share the stream and leave
in the order of their posts, which is the same on every rank.

NCCL's kernels need multiprocessors, and attention takes all of them: with NCCL_MAX_CTAS set, attention leaves as many
while rows travel; without it, rows travel between the attention kernels rather than beside them.

They cannot be called back either. A watchdog thread therefore reads from host memory how many batches the stream has
come to, and how many are done (it writes both there), and listens to the host connections of the group. When a rank is
lost, or a batch takes longer than the timeout, it says so on every rank; a process that is still held by a transfer
some seconds later is ended, because nothing else would end it.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import sys
import threading
import time
from collections import deque

import numpy as np
import paddle

from paddle_fm3 import _paddle, env
from paddle_fm3.distributed.device import Device
from paddle_fm3.distributed.device_held import RunningTime, end_process
from paddle_fm3.distributed.device_trace import span_of
from paddle_fm3.distributed.device_transport import Batch, DeviceTransport, Piece, Ticket
from paddle_fm3.distributed.transport import TcpTransport, TransportError

NUM_EVENTS = 512  # reused in turn; a wait for an old batch then waits for a later one as well, which is as right
POLL_S = 0.05
GOODBYE_PHASE = 0xFFFFFFFF  # of what a rank sends when it ends in order; a connection that ends without it was lost


class NcclTransport(DeviceTransport):
    """See the module. Collective: every rank of the group makes one.

    Args:
        group: a Paddle group over NCCL, this process in it.
        device: of this process.
        control: host connections between the same ranks; only failures travel there.
        timeout_s: longest time that a batch may take once this rank's stream has come to it.
    """

    def __init__(
        self, group: paddle.distributed.collective.Group, device: Device, control: TcpTransport, timeout_s: float
    ) -> None:
        super().__init__(group.rank, group.nranks)
        self.num_sms = env.nccl_max_ctas()
        self._process_group = group.process_group
        self._device = device
        self._control = control
        self._timeout_s = timeout_s
        self._buffers: dict[str, paddle.Tensor] = {}  # uint8 [bytes]
        self._slices: dict[tuple[str, int, int], paddle.Tensor] = {}
        self._stream = _paddle.new_stream(is_urgent=True)  # where both wait for room, its blocks go first
        self._events = [device.event_create() for _ in range(NUM_EVENTS)]
        self._start_event = device.event_create()
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._counts = np.frombuffer(self._page, np.uint32)[:2]  # of batches: done, and come to
        self._words = device.host_register(self._counts.ctypes.data, mmap.PAGESIZE)
        self._names: deque[tuple[int, Batch]] = deque()  # posted and perhaps not done, for the watchdog
        self._was_raised = False
        for peer in range(self.num_ranks):
            if peer != self.rank:
                control.post_recv(peer, GOODBYE_PHASE, 0, [memoryview(bytearray(1))], lambda _: None)
        atexit.register(self._say_goodbye)
        # The group's communicator is made by its first collective; inside a batch that would hang.
        paddle.distributed.stream.all_reduce(paddle.to_tensor(np.zeros(1, np.float32)), group=group)
        threading.Thread(target=self._watch, name=f"paddle_fm3-nccl-watch-{self.rank}", daemon=True).start()

    def check(self) -> None:
        if self._control.failure is not None:
            self._was_raised = True
            raise TransportError(self._control.failure)

    def fail(self, reason: str) -> None:
        self._control.fail(f"rank {self.rank} of {self.num_ranks} stopped: {reason}")

    def _register(self, sizes: dict[str, int]) -> dict[str, int]:
        while not self._device.stream_is_done(self._stream.cuda_stream):  # it may still use the old buffers
            self.check()
            time.sleep(1e-4)
        self._buffers = {name: paddle.empty([max(size, 1)], "uint8") for name, size in sizes.items()}
        return {name: buffer.data_ptr() for name, buffer in self._buffers.items()}

    def forget(self) -> None:
        super().forget()
        self._slices = {}

    def _post(
        self, ticket: Ticket, stream: int, after: tuple[Ticket, ...], word: tuple[int, int, int] | None,
        recv_after: int | None,
    ) -> None:  # fmt: skip
        batch, side = ticket.batch, self._stream.cuda_stream
        self._device.event_record(self._start_event, stream)
        self._device.event_wait(self._start_event, side)
        self._device.write_word(side, self._words + 4, ticket.number + 1)
        if batch.sends or batch.recvs:
            # One NCCL kernel for both directions. It is there as soon as this rank is ready, and waits for the peers.
            span = span_of(self.trace, "receive" if batch.recvs else "send", batch.name, side)
            with span, _paddle.on_stream(self._stream), _paddle.grouped_p2p(self._process_group):
                for piece in batch.sends:
                    self._process_group.send_on_calc_stream(self._slice(piece), piece.peer)
                for piece in batch.recvs:
                    self._process_group.recv_on_calc_stream(self._slice(piece), piece.peer)
        self._device.event_record(self._events[ticket.number % NUM_EVENTS], side)
        self._names.append((ticket.number, batch))
        self._device.write_word(side, self._words, ticket.number + 1)

    def _wait(self, ticket: Ticket, stream: int) -> None:
        self._device.event_wait(self._events[ticket.number % NUM_EVENTS], stream)

    def _wait_sent(self, sends: dict[int, Ticket], stream: int) -> None:
        # A batch is done as a whole, and after those before it.
        self._wait(max(sends.values(), key=lambda ticket: ticket.number), stream)

    def _slice(self, piece: Piece) -> paddle.Tensor:
        """The piece's bytes of the buffer itself, not a copy."""
        key = (piece.buffer, piece.offset, piece.num_bytes)
        part = self._slices.get(key)
        if part is None:
            buffer = self._buffers[piece.buffer]
            part = buffer[piece.offset : piece.offset + piece.num_bytes]
            if part.data_ptr() != buffer.data_ptr() + piece.offset:
                raise TransportError("this Paddle copies where it slices; FLAGS_use_stride_kernel must be on")
            self._slices[key] = part
        return part

    def _say_goodbye(self) -> None:
        if getattr(sys, "last_type", None) is not None:
            return  # an error ends the process
        end_s = time.monotonic() + self._timeout_s
        while self._num_open() and self._control.failure is None and time.monotonic() < end_s:
            time.sleep(1e-3)  # what others still receive from this GPU would end with the process
        if self._control.failure is not None:
            return
        left: list[float] = []
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        for peer in peers:
            self._control.post_send(peer, GOODBYE_PHASE, 0, [memoryview(b"x")], left.append)
        with contextlib.suppress(TransportError):
            self._control.wait_until(lambda: len(left) == len(peers), 1.0)

    # --- watchdog thread -------------------------------------------------------------------------

    def _num_open(self) -> int:
        """Batches posted and not done. The counter is 32 bits wide and may wrap."""
        return (self._num_posts - int(self._counts[0])) & 0xFFFFFFFF

    def _watch(self) -> None:
        last, since_s, running = -1, 0.0, RunningTime()
        while self._control.failure is None:
            now_s = running.look()
            done, come_to = map(int, self._counts)
            if done != last or come_to == done:  # work before a batch may take any time
                last, since_s = done, now_s
                while self._names and (self._names[0][0] - done) & 0x80000000:
                    self._names.popleft()
            elif now_s - since_s > self._timeout_s:
                self._control.fail(self._stalled())
            time.sleep(POLL_S)
        end_process(self._control.failure, lambda: self._num_open() > 0, lambda: self._was_raised)

    def _stalled(self) -> str:
        _, batch = self._names[0]
        peers = sorted({piece.peer for piece in (*batch.sends, *batch.recvs)})
        return (
            f"rank {self.rank} of {self.num_ranks} gave up on {batch.name!r}: no transfer was done for "
            f"{self._timeout_s:g} s; it needs rank {', '.join(map(str, peers)) or 'none'} (dead or stalled)"
        )
