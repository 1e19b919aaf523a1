# SPDX-License-Identifier: Apache-2.0
"""The transfers of one rank, driven by the transport's communication thread beside the compute.

    GatherPhase   forward. A message brings K and V of some rows straight into the key buffer; rows to be passed on
                  (inside a node, or round a ring) leave as soon as they are in.
    ReducePhase   backward. A message brings partial dK and dV; they are added once the rank's own partial sum of
                  these rows is there and earlier messages for the same rows have been added, so that the sums do not
                  depend on timing. Sums leave as soon as they are complete.

What the plan names moves, and nothing else: `simulate.py` says what must come out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from paddle_fm3.distributed import cpu_rows
from paddle_fm3.distributed.cpu_rows import Array
from paddle_fm3.distributed.exchange import Exchange, Message
from paddle_fm3.distributed.rank_plan import Step
from paddle_fm3.distributed.trace import Trace, span_of
from paddle_fm3.distributed.transport import GRAD_ROWS, KEY_ROWS, Parts, TcpTransport, TransportError


class _Phase:
    """Common to both: posts what the exchange names, counts what is open, waits with a bound.

    Args:
        call: the attention call's number, of `TcpTransport.next_call`.
    """

    def __init__(self, exchange: Exchange, transport: TcpTransport | None, call: int, what: str, timeout_s: float,
                 trace: Trace | None) -> None:  # fmt: skip
        self._exchange = exchange
        self._transport = transport
        self._call = call
        self._what = what
        self._timeout_s = timeout_s
        self._trace = trace
        self._has_come = [False] * len(exchange.recvs)
        self._is_in = [False] * len(exchange.recvs)  # rows usable: received, and in ReducePhase added
        self._is_posted = [False] * len(exchange.sends)
        self._num_open_sends = len(exchange.sends)
        if transport is None:
            if exchange.sends or exchange.recvs:
                raise ValueError(f"{what}: the plan has transfers, and there is no process group to make them")
            return
        self._phase = transport.next_phase(what)
        transport.call_soon(self._start)

    def wait_sent(self) -> None:
        """Until every message of this rank has left."""
        self._wait(lambda: self._num_open_sends == 0 and all(self._is_in), "the end")

    def _start(self) -> None:
        assert self._transport is not None
        for at, recv in enumerate(self._exchange.recvs):
            came = partial(self._came, at)
            self._transport.post_recv(recv.peer, self._phase, recv.tag, self._recv_parts(at), came, self._call)
        self._post_ready()

    def _post_ready(self) -> None:
        assert self._transport is not None
        for at, send in enumerate(self._exchange.sends):
            if not self._is_posted[at] and self._may_send(send) and all(self._is_in[before] for before in send.after):
                self._is_posted[at] = True
                done = partial(self._left, send)
                self._transport.post_send(send.peer, self._phase, send.tag, self._send_parts(send), done, self._call)

    def _left(self, send: Message, begin_us: float) -> None:
        self._num_open_sends -= 1
        if self._trace is not None:
            self._trace.add("send", f"{self._what} stage {send.stage} to rank {send.peer}", begin_us)

    def _came(self, at: int, begin_us: float) -> None:
        recv = self._exchange.recvs[at]
        self._has_come[at] = True
        if self._trace is not None:
            self._trace.add("receive", f"{self._what} stage {recv.stage} from rank {recv.peer}", begin_us)
        self._take(at)
        self._post_ready()

    def _wait(self, is_done: Callable[[], bool], until: str) -> None:
        transport = self._transport
        if transport is None or is_done():
            return
        with span_of(self._trace, "wait", f"{self._what}: {until}"):
            if transport.wait_until(is_done, self._timeout_s):
                return
        arrivals = zip(self._exchange.recvs, self._has_come, strict=True)
        silent = sorted({recv.peer for recv, has_come in arrivals if not has_come})
        transport.fail(
            f"rank {transport.rank} of {transport.num_ranks} gave up on '{self._what}: {until}': no byte for "
            f"{self._timeout_s:g} s; missing: messages of rank {', '.join(map(str, silent)) or 'none'} "
            "(dead or stalled)"
        )
        raise TransportError(transport.failure)

    def _may_send(self, send: Message) -> bool:
        return True

    def _send_parts(self, send: Message) -> Parts:
        raise NotImplementedError

    def _recv_parts(self, at: int) -> Parts:
        raise NotImplementedError

    def _take(self, at: int) -> None:
        raise NotImplementedError


class GatherPhase(_Phase):
    """Fills the key buffer. `k` [b, num_k_rows, h_kv, d_qk] and `v` hold the own rows first; starts at once."""

    def __init__(self, exchange: Exchange, transport: TcpTransport | None, call: int, timeout_s: float,
                 trace: Trace | None, k: Array, v: Array) -> None:  # fmt: skip
        self.k, self.v = k, v
        self._num_missing: dict[int, int] = {}  # by stage
        for recv in exchange.recvs:
            self._num_missing[recv.stage] = self._num_missing.get(recv.stage, 0) + 1
        super().__init__(exchange, transport, call, KEY_ROWS, timeout_s, trace)

    def wait_stage(self, stage: int, is_all: bool) -> None:
        """Until the rows of the stage are in, or those of all stages up to it."""
        stages = range(1, stage + 1) if is_all else (stage,)
        self._wait(lambda: not any(self._num_missing.get(s, 0) for s in stages), f"stage {stage}")

    def _send_parts(self, send: Message) -> Parts:
        return _parts(send.rows, self.k, self.v)

    def _recv_parts(self, at: int) -> Parts:
        return _parts(self._exchange.recvs[at].rows, self.k, self.v)

    def _take(self, at: int) -> None:
        self._is_in[at] = True
        self._num_missing[self._exchange.recvs[at].stage] -= 1


class ReducePhase(_Phase):
    """Sums dK and dV at their owners. `dk`, `dv`: float32 [b, num_k_rows, h_kv, d], written step by step."""

    def __init__(self, exchange: Exchange, transport: TcpTransport | None, call: int, timeout_s: float,
                 trace: Trace | None, steps: tuple[Step, ...], dk: Array, dv: Array,
                 wire_dtype: np.dtype) -> None:  # fmt: skip
        self._dk, self._dv = dk, dv
        self._wire_dtype = wire_dtype
        self._num_steps_done = 0
        self._last_step = [
            max((at for at, step in enumerate(steps) if _overlaps(step, recv)), default=-1) for recv in exchange.recvs
        ]
        self._staged: list[tuple[Array, Array]] = [
            tuple(np.empty((x.shape[0], recv.num_rows, *x.shape[2:]), wire_dtype) for x in (dk, dv))
            for recv in exchange.recvs
        ]  # type: ignore[misc]
        super().__init__(exchange, transport, call, GRAD_ROWS, timeout_s, trace)

    def step_done(self, step_idx: int) -> None:
        """The rank's own partial sums of the step's rows are written."""

        def advance() -> None:
            self._num_steps_done = step_idx + 1
            self._add_ready()
            self._post_ready()

        if self._transport is not None:
            self._transport.call_soon(advance)

    def _may_send(self, send: Message) -> bool:
        return send.stage < self._num_steps_done

    def _send_parts(self, send: Message) -> Parts:
        if self._wire_dtype == np.float32:
            return _parts(send.rows, self._dk, self._dv)
        rounded = [cpu_rows.from_float32(x[:, send.rows], self._wire_dtype) for x in (self._dk, self._dv)]
        return _parts(slice(None), *rounded)

    def _recv_parts(self, at: int) -> Parts:
        return _parts(slice(None), *self._staged[at])

    def _take(self, at: int) -> None:
        self._add_ready()

    def _add_ready(self) -> None:
        for at, recv in enumerate(self._exchange.recvs):  # table order: earlier messages for the same rows come first
            is_due = self._has_come[at] and not self._is_in[at] and self._last_step[at] < self._num_steps_done
            if is_due and all(self._is_in[before] for before in recv.after):
                for total, staged in zip((self._dk, self._dv), self._staged[at], strict=True):
                    total[:, recv.rows] += cpu_rows.to_float32(staged)
                self._staged[at] = ()  # type: ignore[assignment]  # its memory is free again
                self._is_in[at] = True


def _overlaps(step: Step, message: Message) -> bool:
    return step.k_begin < message.row + message.num_rows and message.row < step.k_end


def _parts(rows: slice, *buffers: Array) -> Parts:
    """The memory of these rows: one contiguous part a buffer and batch entry."""
    pieces = [buffer[entry, rows] for buffer in buffers for entry in range(buffer.shape[0])]
    return [memoryview(piece.reshape(-1).view(np.uint8)) for piece in pieces]
