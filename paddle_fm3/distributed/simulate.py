# SPDX-License-Identifier: Apache-2.0
"""Executes a CpPlan for all ranks in one process with the CPU kernels: what every rank would compute, in the order in
which the plan allows it, from buffers that hold nothing but what the plan has brought. No process group, no Paddle.

The plan is checked on the way: a transfer that sends rows its sender does not have, puts them at the wrong place,
or sends a gradient before it is complete raises PlanError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.rank_plan import RankPlan, Step
from paddle_fm3.mask.column_mask import ColumnMask

Array = NDArray
# (q, k, v, mask, softmax_scale) -> out, lse; (q, k, v, mask, out, lse, dout, dlse, softmax_scale) -> dq, dk, dv
Forward = Callable[..., tuple[Array, Array]]
Backward = Callable[..., tuple[Array, Array, Array]]


class PlanError(RuntimeError):
    """The plan moves rows wrongly; the message names the transfer."""


@dataclass(frozen=True, eq=False)
class SimulatedAttention:
    """Results in global row order, and what was moved.

    Attributes:
        out: [b, s, h_q, d_v]. lse: float32 [b, h_q, s]. dq, dk, dv: like q, k, v; None without dout.
        slow_rows, fast_rows: K/V rows gathered between and inside nodes.
        peak_k_rows: rows of the largest key buffer.
    """

    out: Array
    lse: Array
    dq: Array | None
    dk: Array | None
    dv: Array | None
    slow_rows: int
    fast_rows: int
    peak_k_rows: int


def simulate(
    plan: CpPlan,
    mask: ColumnMask,
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    dlse: Array | None = None,
    *,
    softmax_scale: float | None = None,
    backend: tuple[Forward, Backward] | None = None,
) -> SimulatedAttention:
    """Runs the plan's forward, and with ``dout`` its backward.

    Args:
        mask: the global mask the plan was made from.
        q: float32 [b, s, h_q, d_qk]. k: [b, s, h_kv, d_qk]. v: [b, s, h_kv, d_v].
        dout: [b, s, h_q, d_v]. dlse: [b, h_q, s].
        backend: kernels to use; default the compiled CPU backend.

    Raises:
        PlanError: the plan is wrong.
        ValueError: shapes that do not fit the plan.
    """
    if q.shape[1] != plan.partition.s or k.shape[1] != plan.partition.s:
        raise ValueError(f"simulate: q has {q.shape[1]} and k {k.shape[1]} rows; the plan is for s={plan.partition.s}")
    forward, backward = backend or cpu_backend()
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    ranks = [_Rank(plan.rank_plan(rank, mask), q, k, v) for rank in range(plan.num_ranks)]
    _gather(plan, ranks)

    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)  # [b, s, h_q, d_v]
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, np.float32)  # [b, h_q, s]
    for rank in ranks:
        rank.forward(forward, scale)
        out[:, rank.rows], lse[:, :, rank.rows] = rank.out, rank.lse
    figures = (plan.slow_rows, plan.fast_rows, plan.peak_k_rows)
    if dout is None:
        return SimulatedAttention(out, lse, None, None, None, *figures)

    for step_idx in range(len(ranks[0].plan.bwd_steps)):
        for rank in ranks:
            rank.backward_step(backward, scale, rank.plan.bwd_steps[step_idx], dout, dlse)
        _reduce(plan, ranks, step_idx)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for rank in ranks:
        num_own = len(rank.rows)
        dq[:, rank.rows] = rank.dq
        dk[:, rank.rows], dv[:, rank.rows] = rank.dk[:, :num_own], rank.dv[:, :num_own]
    return SimulatedAttention(out, lse, dq, dk, dv, *figures)


class _Rank:
    """One rank's memory."""

    def __init__(self, plan: RankPlan, q: Array, k: Array, v: Array) -> None:
        self.plan = plan
        self.key_rows = plan.key_rows_global()  # [num_k_rows] global index of each buffer row
        self.rows = self.key_rows[: plan.num_q_rows]  # own rows come first
        if len(self.key_rows) != plan.num_k_rows:
            raise PlanError(f"rank {plan.rank}: key_ranges hold {len(self.key_rows)} rows, stages {plan.num_k_rows}")
        self.q = q[:, self.rows]  # [b, s_local, h_q, d_qk]
        # NaN wherever nothing has arrived: a row used too early shows in the result.
        self.k = np.full((k.shape[0], plan.num_k_rows, *k.shape[2:]), np.nan, k.dtype)
        self.v = np.full((v.shape[0], plan.num_k_rows, *v.shape[2:]), np.nan, v.dtype)
        self.k[:, : plan.num_q_rows], self.v[:, : plan.num_q_rows] = k[:, self.rows], v[:, self.rows]
        self.has_row = np.arange(plan.num_k_rows) < plan.num_q_rows
        self.dq = np.zeros_like(self.q)
        self.dk, self.dv = np.zeros_like(self.k), np.zeros_like(self.v)
        self.is_computed = np.zeros(plan.num_k_rows, bool)
        self.is_sent = np.zeros(plan.num_k_rows, bool)

    def forward(self, forward: Forward, scale: float) -> None:
        b, s_local, h_q, _ = self.q.shape
        self.out = np.zeros((b, s_local, h_q, self.v.shape[3]), self.q.dtype)
        self.lse = np.full((b, h_q, s_local), -np.inf, np.float32)
        for step in self.plan.fwd_steps:
            if step.k_begin < step.k_end and s_local:
                keys = slice(step.k_begin, step.k_end)
                part, part_lse = forward(self.q, self.k[:, keys], self.v[:, keys], self.plan.step_mask(step), scale)
                self.out, self.lse = merge(self.out, self.lse, part, part_lse)

    def backward_step(self, backward: Backward, scale: float, step: Step, dout: Array, dlse: Array | None) -> None:
        keys = slice(step.k_begin, step.k_end)
        if self.is_computed[keys].any():
            raise PlanError(f"rank {self.plan.rank}: {step} computes rows again")
        self.is_computed[keys] = True
        if step.k_begin == step.k_end or not len(self.rows):
            return
        dlse_local = None if dlse is None else np.ascontiguousarray(dlse[:, :, self.rows])
        dq, dk, dv = backward(
            self.q, self.k[:, keys], self.v[:, keys], self.plan.step_mask(step),
            self.out, self.lse, np.ascontiguousarray(dout[:, self.rows]), dlse_local, scale,
        )  # fmt: skip
        self.dq += dq
        self.dk[:, keys] += dk
        self.dv[:, keys] += dv


def merge(out: Array, lse: Array, part: Array, part_lse: Array) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of keys, from each set's out [b, s, h, d] and lse [b, h, s]."""
    top = np.maximum(lse, part_lse)
    safe = np.where(np.isneginf(top), 0.0, top)  # both empty: exp(-inf - 0) = 0, never exp(-inf + inf)
    weight, part_weight = np.exp(lse - safe), np.exp(part_lse - safe)
    total = weight + part_weight
    with np.errstate(divide="ignore"):
        merged_lse = safe + np.log(total)
    share = np.where(total > 0, weight / np.where(total > 0, total, 1), 0).swapaxes(1, 2)[..., None]  # [b, s, h, 1]
    part_share = np.where(total > 0, part_weight / np.where(total > 0, total, 1), 0).swapaxes(1, 2)[..., None]
    return (out * share + part * part_share).astype(out.dtype), merged_lse.astype(np.float32)


def _gather(plan: CpPlan, ranks: list[_Rank]) -> None:
    for transfer in plan.transfers("gather"):
        src, dst = ranks[transfer.src_rank], ranks[transfer.dst_rank]
        source = slice(transfer.src_row, transfer.src_row + transfer.num_rows)
        target = slice(transfer.dst_row, transfer.dst_row + transfer.num_rows)
        wanted = np.arange(transfer.k_begin_global, transfer.k_begin_global + transfer.num_rows)
        if not src.has_row[source].all():
            raise PlanError(f"{transfer}: the sender does not have these rows yet")
        if not (np.array_equal(src.key_rows[source], wanted) and np.array_equal(dst.key_rows[target], wanted)):
            raise PlanError(f"{transfer}: buffer rows and global rows disagree")
        stage_rows = dst.plan.stage_rows
        if not (stage_rows[transfer.stage] <= target.start and target.stop <= stage_rows[transfer.stage + 1]):
            raise PlanError(f"{transfer}: lands outside its stage")
        if transfer.hop > 0 and not (
            src.plan.stage_rows[transfer.stage] <= source.start < src.plan.stage_rows[transfer.stage + 1]
        ):
            raise PlanError(f"{transfer}: relays rows of another stage, which backward may not have gathered yet")
        if dst.has_row[target].any():
            raise PlanError(f"{transfer}: rows arrive twice")
        dst.k[:, target], dst.v[:, target] = src.k[:, source], src.v[:, source]
        dst.has_row[target] = True
    for rank in ranks:
        if not rank.has_row.all():
            raise PlanError(f"rank {rank.plan.rank}: {(~rank.has_row).sum()} buffer rows never arrive")


def _reduce(plan: CpPlan, ranks: list[_Rank], step_idx: int) -> None:
    """The reduction's transfers that may leave after this step; they change only complete partial sums."""
    for transfer in plan.transfers("reduce"):
        if transfer.stage != step_idx:
            continue
        src, dst = ranks[transfer.src_rank], ranks[transfer.dst_rank]
        source = slice(transfer.src_row, transfer.src_row + transfer.num_rows)
        target = slice(transfer.dst_row, transfer.dst_row + transfer.num_rows)
        if not src.is_computed[source].all():
            raise PlanError(f"{transfer}: leaves before the sender has computed these rows")
        if src.is_sent[source].any() or dst.is_sent[target].any():
            raise PlanError(f"{transfer}: a partial sum was sent before it was complete")
        if not np.array_equal(src.key_rows[source], dst.key_rows[target]):
            raise PlanError(f"{transfer}: sender's and receiver's rows disagree")
        src.is_sent[source] = True
        dst.dk[:, target] += src.dk[:, source]
        dst.dv[:, target] += src.dv[:, source]
    if step_idx == len(ranks[0].plan.bwd_steps) - 1:
        for rank in ranks:
            num_own = rank.plan.num_q_rows
            if not rank.is_sent[num_own:].all() or rank.is_sent[:num_own].any():
                raise PlanError(f"rank {rank.plan.rank}: gradients of foreign rows stay behind, or own ones leave")


def cpu_backend() -> tuple[Forward, Backward]:
    """The compiled CPU kernels (C ABI)."""
    from paddle_fm3.testing import native_call

    def native(mask: ColumnMask) -> native_call.NativeMask:
        bounds = np.stack([mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end], axis=-1)
        return native_call.NativeMask.from_bounds(bounds, False, mask.s_q, mask.block_mask)

    def forward(q: Array, k: Array, v: Array, mask: ColumnMask, scale: float) -> tuple[Array, Array]:
        return native_call.forward(q, k, v, native(mask), scale)

    def backward(
        q: Array,
        k: Array,
        v: Array,
        mask: ColumnMask,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array | None,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        return native_call.backward(q, k, v, native(mask), out, lse, dout, dlse, scale)

    return forward, backward
