# SPDX-License-Identifier: Apache-2.0
"""Executes one rank's share of a CpPlan: sends and adds rows as soon as the plan allows, beside the compute.

Two phases, each driven by the transport's communication thread:

    GatherPhase   forward. A message brings K and V of some rows straight into the key buffer; rows to be passed on
                  (inside a node, or round a ring) leave as soon as they are in.
    ReducePhase   backward. A message brings partial dK and dV; they are added once the rank's own partial sum of
                  these rows is there and earlier messages for the same rows have been added, so that the sums do not
                  depend on timing. Sums leave as soon as they are complete.

What the plan names moves, and nothing else: `simulate.py` says what must come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed import cpu_rows
from paddle_fm3.distributed.exchange import Exchange, Message
from paddle_fm3.distributed.plan import CpPlan, RankPlan, Step
from paddle_fm3.distributed.query_range import seen_query_rows, select_query_rows
from paddle_fm3.distributed.trace import Trace
from paddle_fm3.distributed.transport import GRAD_ROWS, KEY_ROWS, Parts, TcpTransport, TransportError
from paddle_fm3.mask.column_mask import ColumnMask

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class StepWork:
    """One attention call: own query rows [q_begin, q_end) over buffer rows [k_begin, k_end)."""

    step_idx: int
    stage: int
    queries: slice
    keys: slice
    mask: cpu_rows.StepMask

    @classmethod
    def of(cls, rank_plan: RankPlan, steps: tuple[Step, ...]) -> tuple[StepWork | None, ...]:
        """None for a step in which nobody sees anything. Rows that see no key of a step are left out of it."""
        found: list[StepWork | None] = []
        for step_idx, step in enumerate(steps):
            mask = rank_plan.step_mask(step)
            q_begin, q_end = seen_query_rows(mask)
            work = None
            if q_begin < q_end:
                view = cpu_rows.StepMask(select_query_rows(mask, q_begin, q_end))
                work = cls(step_idx, step.stage, slice(q_begin, q_end), slice(step.k_begin, step.k_end), view)
            found.append(work)
        return tuple(found)


@dataclass(frozen=True, eq=False)
class RankWork:
    """What one rank needs to execute a plan, made once for a mask and used by every layer."""

    plan: CpPlan
    rank_plan: RankPlan
    gather: Exchange
    reduce: Exchange
    fwd_steps: tuple[StepWork | None, ...]  # None: nothing to compute
    bwd_steps: tuple[StepWork | None, ...]

    @classmethod
    def of(cls, plan: CpPlan, rank: int, mask_global: ColumnMask) -> RankWork:
        rank_plan = plan.rank_plan(rank, mask_global)
        return cls(
            plan,
            rank_plan,
            Exchange.of(plan.gather, rank),
            Exchange.of(plan.reduce, rank),
            StepWork.of(rank_plan, rank_plan.fwd_steps),
            StepWork.of(rank_plan, rank_plan.bwd_steps),
        )


class _Phase:
    """Common to both: posts what the exchange names, counts what is open, waits with a bound."""

    def __init__(self, exchange: Exchange, transport: TcpTransport | None, what: str, timeout_s: float,
                 trace: Trace | None) -> None:  # fmt: skip
        self._exchange = exchange
        self._transport = transport
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
            self._transport.post_recv(recv.peer, self._phase, recv.tag, self._recv_parts(at), partial(self._came, at))
        self._post_ready()

    def _post_ready(self) -> None:
        assert self._transport is not None
        for at, send in enumerate(self._exchange.sends):
            if not self._is_posted[at] and self._may_send(send) and all(self._is_in[before] for before in send.after):
                self._is_posted[at] = True
                done = partial(self._left, send)
                self._transport.post_send(send.peer, self._phase, send.tag, self._send_parts(send), done)

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
        with _span(self._trace, "wait", f"{self._what}: {until}"):
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

    def __init__(self, exchange: Exchange, transport: TcpTransport | None, timeout_s: float, trace: Trace | None,
                 k: Array, v: Array) -> None:  # fmt: skip
        self.k, self.v = k, v
        self._num_missing: dict[int, int] = {}  # by stage
        for recv in exchange.recvs:
            self._num_missing[recv.stage] = self._num_missing.get(recv.stage, 0) + 1
        super().__init__(exchange, transport, KEY_ROWS, timeout_s, trace)

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

    def __init__(self, exchange: Exchange, transport: TcpTransport | None, timeout_s: float, trace: Trace | None,
                 steps: tuple[Step, ...], dk: Array, dv: Array, wire_dtype: np.dtype) -> None:  # fmt: skip
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
        super().__init__(exchange, transport, GRAD_ROWS, timeout_s, trace)

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


@contextmanager
def _span(trace: Trace | None, track: str, name: str) -> Iterator[None]:
    if trace is None:
        yield
        return
    with trace.span(track, name):
        yield


@dataclass(eq=False)
class Forwarded:
    """What forward leaves for backward; arrays in the frame of one rank."""

    q: Array  # [b, s_local, h_q, d_qk]
    k: Array  # [b, num_k_rows, h_kv, d_qk], or [b, s_local, ...] if the gathered rows are not kept
    v: Array  # [b, num_k_rows, h_kv, d_v], likewise
    out: Array  # [b, s_local, h_q, d_v], in q's dtype
    lse: cpu_rows.Float32Array  # [b, h_q, s_local]
    has_gathered: bool = True


class RankRun:
    """Forward and backward of one attention call on one rank.

    Args:
        transport: None for a single rank.
        timeout_s: longest wait without a byte.
    """

    def __init__(self, work: RankWork, transport: TcpTransport | None, scale: float, timeout_s: float,
                 trace: Trace | None = None) -> None:  # fmt: skip
        self._work = work
        self._transport = transport
        self._scale = scale
        self._timeout_s = timeout_s
        self._trace = trace

    def forward(self, q: Array, k: Array, v: Array, out: Array, keep_gathered: bool = True) -> Forwarded:
        """Own rows q [b, s_local, h_q, d_qk], k, v -> out, written in place, and lse over all keys.

        Args:
            out: zeros [b, s_local, h_q, d_v] in q's dtype. It and q are part of the result, not copied.
            keep_gathered: whether the result holds the keys of other ranks, or backward gathers them again.

        Raises:
            TransportError: a rank was lost or stalled.
        """
        gather = self._gather(k, v)
        total = out if out.dtype == np.float32 else np.zeros(out.shape, np.float32)  # [b, s_local, h_q, d_v]
        lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, np.float32)  # [b, h_q, s_local]
        is_first = True
        for step in filter(None, self._work.fwd_steps):
            self._wait_for(gather, step)
            with _span(self._trace, "compute", f"forward step {step.step_idx}"):
                rows = step.queries
                part, part_lse = cpu_rows.forward(
                    q[:, rows], gather.k[:, step.keys], gather.v[:, step.keys], step.mask, self._scale
                )
                if is_first:
                    total[:, rows], lse[:, :, rows], is_first = cpu_rows.to_float32(part), part_lse, False
                else:
                    cpu_rows.merge(total[:, rows], lse[:, :, rows], cpu_rows.to_float32(part), part_lse)
        gather.wait_sent()
        if total is not out:
            out[...] = cpu_rows.from_float32(total, out.dtype)
        if keep_gathered:
            return Forwarded(q, gather.k, gather.v, out, lse)
        num_own = q.shape[1]
        return Forwarded(q, gather.k[:, :num_own].copy(), gather.v[:, :num_own].copy(), out, lse, has_gathered=False)

    def backward(
        self, saved: Forwarded, dout: Array, dlse: cpu_rows.Float32Array, reduce_dtype: np.dtype
    ) -> tuple[cpu_rows.Float32Array, cpu_rows.Float32Array, cpu_rows.Float32Array]:
        """dq, dk, dv of the own rows, summed over ranks, all float32.

        Args:
            reduce_dtype: in which partial sums travel; they are added in float32.

        Raises:
            TransportError: a rank was lost or stalled.
        """
        plan = self._work.rank_plan
        num_own = plan.num_q_rows
        gather = None
        if not saved.has_gathered:
            gather = self._gather(saved.k, saved.v)
            saved = replace(saved, k=gather.k, v=gather.v)
        dq = np.zeros(saved.q.shape, np.float32)
        dk, dv = np.zeros(saved.k.shape, np.float32), np.zeros(saved.v.shape, np.float32)
        reduce = ReducePhase(
            self._work.reduce, self._transport, self._timeout_s, self._trace, plan.bwd_steps, dk, dv, reduce_dtype
        )
        for step_idx, step in enumerate(self._work.bwd_steps):
            if step is not None:
                if gather is not None:
                    self._wait_for(gather, step)
                with _span(self._trace, "compute", f"backward step {step_idx}"):
                    self._backward_step(saved, step, dout, dlse, dq, dk, dv)
            reduce.step_done(step_idx)
        if gather is not None:
            gather.wait_sent()
        reduce.wait_sent()
        return dq, dk[:, :num_own], dv[:, :num_own]

    def abandon(self, reason: str) -> None:
        """Lets the other ranks know that this one will not go on."""
        if self._transport is not None:
            self._transport.fail(f"rank {self._transport.rank} stopped: {reason}")

    def _gather(self, k: Array, v: Array) -> GatherPhase:
        """Key buffers with the own rows in, the others on their way."""
        plan = self._work.rank_plan
        buffers = [np.empty((x.shape[0], plan.num_k_rows, *x.shape[2:]), x.dtype) for x in (k, v)]
        for buffer, own in zip(buffers, (k, v), strict=True):
            buffer[:, : plan.num_q_rows] = own
        return GatherPhase(self._work.gather, self._transport, self._timeout_s, self._trace, *buffers)

    def _wait_for(self, gather: GatherPhase, step: StepWork) -> None:
        gather.wait_stage(step.stage, is_all=step.keys == slice(0, self._work.rank_plan.num_k_rows))

    def _backward_step(
        self, saved: Forwarded, step: StepWork, dout: Array, dlse: Array, dq: Array, dk: Array, dv: Array
    ) -> None:
        rows, keys = step.queries, step.keys
        k, v = saved.k[:, keys], saved.v[:, keys]
        # float32 sums are written in place; narrower ones are widened first.
        is_wide = k.dtype == np.float32
        step_dk = dk[:, keys] if is_wide else np.empty(k.shape, k.dtype)
        step_dv = dv[:, keys] if is_wide else np.empty(v.shape, v.dtype)
        step_dq = cpu_rows.backward(
            saved.q[:, rows], k, v, step.mask, self._scale, saved.out[:, rows],
            np.ascontiguousarray(saved.lse[:, :, rows]), dout[:, rows], np.ascontiguousarray(dlse[:, :, rows]),
            step_dk, step_dv,
        )  # fmt: skip
        dq[:, rows] += cpu_rows.to_float32(step_dq)
        if not is_wide:
            dk[:, keys], dv[:, keys] = cpu_rows.to_float32(step_dk), cpu_rows.to_float32(step_dv)
