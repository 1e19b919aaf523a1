# SPDX-License-Identifier: Apache-2.0
"""Computes one rank's share of a CpPlan, step by step, while `phases.py` moves rows beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paddle_fm3.distributed import cpu_rows
from paddle_fm3.distributed.cpu_rows import Array
from paddle_fm3.distributed.exchange import Exchange
from paddle_fm3.distributed.phases import GatherPhase, ReducePhase
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.query_range import seen_query_rows, select_query_rows
from paddle_fm3.distributed.rank_plan import RankPlan, Step
from paddle_fm3.distributed.trace import Trace, span_of
from paddle_fm3.distributed.transport import TcpTransport
from paddle_fm3.mask.column_mask import ColumnMask


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


@dataclass(eq=False)
class Forwarded:
    """What forward leaves for backward; arrays in the frame of one rank."""

    q: Array  # [b, s_local, h_q, d_qk]
    k: Array  # [b, num_k_rows, h_kv, d_qk], or [b, s_local, ...] if the gathered rows are not kept
    v: Array  # [b, num_k_rows, h_kv, d_v], likewise
    out: Array  # [b, s_local, h_q, d_v], in q's dtype
    lse: cpu_rows.Float32Array  # [b, h_q, s_local]
    call: int  # of the transport's numbers
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
        call = 0 if self._transport is None else self._transport.next_call()
        gather = self._gather(call, k, v)
        total = out if out.dtype == np.float32 else np.zeros(out.shape, np.float32)  # [b, s_local, h_q, d_v]
        lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, np.float32)  # [b, h_q, s_local]
        is_first = True
        for step in filter(None, self._work.fwd_steps):
            self._wait_for(gather, step)
            with span_of(self._trace, "compute", f"forward step {step.step_idx}"):
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
            return Forwarded(q, gather.k, gather.v, out, lse, call)
        num_own = q.shape[1]
        own = [x[:, :num_own].copy() for x in (gather.k, gather.v)]
        return Forwarded(q, *own, out, lse, call, has_gathered=False)

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
            gather = self._gather(saved.call, saved.k, saved.v)
            saved = replace(saved, k=gather.k, v=gather.v)
        dq = np.zeros(saved.q.shape, np.float32)
        dk, dv = np.zeros(saved.k.shape, np.float32), np.zeros(saved.v.shape, np.float32)
        reduce = ReducePhase(
            self._work.reduce, self._transport, saved.call, self._timeout_s, self._trace, plan.bwd_steps, dk, dv,
            reduce_dtype,
        )  # fmt: skip
        for step_idx, step in enumerate(self._work.bwd_steps):
            if step is not None:
                if gather is not None:
                    self._wait_for(gather, step)
                with span_of(self._trace, "compute", f"backward step {step_idx}"):
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

    def _gather(self, call: int, k: Array, v: Array) -> GatherPhase:
        """Key buffers with the own rows in, the others on their way."""
        plan = self._work.rank_plan
        buffers = [np.empty((x.shape[0], plan.num_k_rows, *x.shape[2:]), x.dtype) for x in (k, v)]
        for buffer, own in zip(buffers, (k, v), strict=True):
            buffer[:, : plan.num_q_rows] = own
        return GatherPhase(self._work.gather, self._transport, call, self._timeout_s, self._trace, *buffers)

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
