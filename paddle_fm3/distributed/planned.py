# SPDX-License-Identifier: Apache-2.0
"""Attention over a split sequence as a CpPlan says: only the rows that a rank needs come to it, while it computes."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddle_fm3 import _paddle
from paddle_fm3.distributed import agreement, cpu_rows
from paddle_fm3.distributed.cache import PlanCache
from paddle_fm3.distributed.collective import gather_bounds
from paddle_fm3.distributed.comm import CommError, Communicator
from paddle_fm3.distributed.cost import CPU_COST, DEFAULT_COST, CostModel
from paddle_fm3.distributed.execute import Forwarded, RankRun, RankWork
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import CpPlan, mask_digest
from paddle_fm3.distributed.planner import DEFAULT_OPTIONS, PlanOptions
from paddle_fm3.distributed.prepared import CACHE_ENTRIES, check_unwritten, global_mask
from paddle_fm3.distributed.record_exchange import RecordExchange
from paddle_fm3.distributed.rendezvous import connect
from paddle_fm3.distributed.strategy import FM3, Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.trace import Trace
from paddle_fm3.distributed.transport import TcpTransport, TransportError
from paddle_fm3.mask.column_mask import ColumnMask

_plans = PlanCache()
_work: OrderedDict[tuple[Any, ...], RankWork] = OrderedDict()
_byte_counts: dict[int, Any] = {}  # group id -> whatever moves its rows: it has sent_bytes and received_bytes


@dataclass(frozen=True)
class PlanChoice:
    """The plan that a call runs: `plan`, or else that of `strategy` for the call's mask."""

    plan: CpPlan | None
    strategy: Strategy
    topology: Topology | None = None
    partition: Partition | None = None

    def plan_of(self, mask: ColumnMask, num_ranks: int) -> CpPlan:
        if self.plan is not None:
            self.plan.check_mask(mask_digest(mask), "flashmask_cp_attention")
            return self.plan
        return _plans.get(
            mask, num_ranks, topology=self.topology, strategy=self.strategy, partition=self.partition,
            cost=device_cost(),
        )  # fmt: skip


def plan_attention(
    startend_row_indices: paddle.Tensor | np.ndarray | None,
    *,
    causal: bool,
    num_ranks: int,
    s: int | None = None,
    b: int = 1,
    block_mask: paddle.Tensor | np.ndarray | None = None,
    strategy: Strategy | str = FM3,
    topology: Topology | None = None,
    partition: Partition | None = None,
    cost: CostModel | None = None,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> CpPlan:
    """The plan for `flashmask_cp_attention(plan=...)`; its `partition` says how to cut the sequence.

    Pure: every rank that calls it with the same mask gets the same plan. The last 16 plans are kept by mask content.
    With the defaults it is the plan that `flashmask_cp_attention(strategy=...)` makes for itself.

    Args:
        startend_row_indices: int32 [b, h_mask, s, n] for all key columns, or None; then s must be given.
        causal, block_mask: as in `flashmask_cp_attention`.
        num_ranks: ranks of the context-parallel group.
        b: batch size, where startend_row_indices is None.
        strategy: a planner strategy or its name (`paddle_fm3.distributed.strategy.STRATEGIES`).
        topology: which ranks share a node; default nodes of 8.
        partition: who owns which rows, if that is settled: several masks of one batch are planned for one cut.
        cost: rates that the plan is made for; default `CPU_COST` where Paddle's device is the CPU, else that of
            `build_plan`.

    Raises:
        ValueError: as `build_plan`; neither startend_row_indices nor s, or another s; no such shape.
    """
    bounds, tiles = (
        x.numpy() if isinstance(x, paddle.Tensor) else x for x in (startend_row_indices, block_mask)
    )  # [b, h_mask, s, n], [b, h_mask, s/128, s/128]
    if bounds is None and s is None:
        raise ValueError("plan_attention: without startend_row_indices the length s must be given")
    if bounds is not None:
        if not isinstance(bounds, np.ndarray) or bounds.ndim != 4:
            shown = list(bounds.shape) if isinstance(bounds, np.ndarray) else type(bounds).__name__
            raise ValueError(
                f"plan_attention: startend_row_indices is {shown}; expected int32 [b, h_mask, s, n] as a paddle.Tensor "
                "or NumPy array, which a ColumnMask gives by to_bounds()[0]"
            )
        if s not in (None, bounds.shape[2]):
            raise ValueError(f"plan_attention: s={s}; startend_row_indices has s={bounds.shape[2]} key columns")
    length = s if bounds is None else bounds.shape[2]
    mask = global_mask(bounds, causal, Partition((0, length), (0,), 1), b, tiles)
    return _plans.get(
        mask, num_ranks, topology=topology, strategy=strategy, options=options, partition=partition,
        cost=cost or device_cost(),
    )  # fmt: skip


def device_cost() -> CostModel:
    """The rates that plans are made for where nobody names others: by the kind of Paddle's current device."""
    return CPU_COST if paddle.get_device().startswith("cpu") else DEFAULT_COST


def planned_attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None,
    choice: PlanChoice,
    record: agreement.Record,
    group: Any | None,
    *,
    softmax_scale: float | None,
    reduce_dtype: str,
    keep_gathered: bool,
    timeout_s: float,
    trace: Trace | None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """out [b, s_local, h_q, d_v] and lse [b, h_q, s_local] of this rank's rows. See `flashmask_cp_attention`.

    Args:
        record: this rank's side of the comparison, which happens here.
    """
    communicator = None if group is None else Communicator(group, timeout_s)
    with _one_call(communicator):
        plan, mask = agree(record, communicator, bounds, block_mask, choice)
        rank = 0 if communicator is None else communicator.rank
        run = RankRun(
            _work_of(plan, mask, rank),
            None if communicator is None else _transport_of(communicator),
            q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
            timeout_s,
            trace,
        )
        return _PlannedAttention.apply(q, k, v, run, communicator, reduce_dtype, keep_gathered)


def _one_call(communicator: Communicator | None) -> AbstractContextManager[None]:
    return nullcontext() if communicator is None else communicator.one_call("flashmask_cp_attention")


def agree(
    record: agreement.Record, communicator: Communicator | None, bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None, choice: PlanChoice,
) -> tuple[CpPlan, ColumnMask]:  # fmt: skip
    """Compares the ranks' records; the plan and the mask over the whole sequence. Collective."""
    what = "comparison of shapes, masks and plans"
    records = [record] if communicator is None else communicator.exchange(record, what)
    agreement.check_agreement(records)
    if choice.plan is not None:
        partition = choice.plan.partition
        is_whole = agreement.check_lengths(records, partition)
    else:
        agreement.check_whole_masks(records, choice.strategy.name)
        partition, is_whole = Partition((0, sum(r["s_local"] for r in records)), (0,), 1), True
    bounds_global = None if bounds is None else bounds.numpy()  # [b, h_mask, s, n]
    if is_whole:
        agreement.check_same_mask(records)
    else:
        assert communicator is not None and bounds is not None
        bounds_global = gather_bounds(bounds, partition, communicator)
    block_mask_global = None if block_mask is None else block_mask.numpy()
    mask = global_mask(bounds_global, record["causal"], partition, record["b"], block_mask_global)
    plan = choice.plan_of(mask, len(records))
    if choice.plan is None:
        agreement.check_lengths(records, plan.partition)
    return plan, mask


def _work_of(plan: CpPlan, mask: ColumnMask, rank: int) -> RankWork:
    # A plan bound to no mask serves several.
    key = (plan.plan_hash, plan.mask_digest or mask_digest(mask), rank)
    if key not in _work:
        _work[key] = RankWork.of(plan, rank, mask)
        while len(_work) > CACHE_ENTRIES:
            _work.popitem(last=False)
    _work.move_to_end(key)
    return _work[key]


def _transport_of(communicator: Communicator) -> TcpTransport:
    """The group's connections, made at its first planned call. From then on its records travel over them as well."""
    if communicator.host_exchange is None:

        def exchange(record: agreement.Record) -> list[agreement.Record]:
            return communicator.exchange(record, "addresses of the ranks")

        try:
            transport = connect(communicator.rank, communicator.num_ranks, exchange, communicator.timeout_s)
        except TransportError as error:
            raise CommError(f"context parallelism: {error}") from error
        communicator.host_exchange = RecordExchange(transport, communicator.timeout_s)
        count_bytes_of(communicator.group, transport)
    return communicator.host_exchange.transport


def transport_bytes(group: Any) -> tuple[list[int], list[int]]:
    """Payload bytes that planned attention has sent to and received from each rank of the group, so far."""
    transport = _byte_counts.get(group.id)
    if transport is None:
        return [0] * group.nranks, [0] * group.nranks
    return list(transport.sent_bytes), list(transport.received_bytes)


def count_bytes_of(group: Any, transport: Any) -> None:
    """Has `transport_bytes` of the group answer with what this transport counts."""
    _byte_counts[group.id] = transport


@_paddle.backward_once
class _PlannedAttention(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        q: paddle.Tensor,
        k: paddle.Tensor,
        v: paddle.Tensor,
        run: RankRun,
        communicator: Communicator | None,
        reduce_dtype: str,
        keep_gathered: bool,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        ctx.run, ctx.communicator, ctx.reduce_dtype = run, communicator, reduce_dtype
        ctx.is_wanted = tuple(not x.stop_gradient for x in (q, k, v))
        dense = [x.detach().contiguous() for x in (q, k, v)]
        out = paddle.zeros([*q.shape[:3], v.shape[3]], q.dtype)  # [b, s_local, h_q, d_v]
        ctx.saved = saved = _guarded(
            run, run.forward, *map(cpu_rows.view_of, dense), cpu_rows.view_of(out), keep_gathered
        )  # fmt: skip
        # Not copied. NOTE: a detached tensor shares memory and write count, and keeps no graph alive.
        ctx.lent = [(name, x, x.inplace_version) for name, x in (("q", dense[0]), ("out", out.detach()))]
        return out, _tensor_of(saved.lse, paddle.float32)  # [b, h_q, s_local]

    @staticmethod
    def backward(ctx: Any, dout: paddle.Tensor, dlse: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        saved: Forwarded = ctx.saved
        dtype = dout.dtype
        for name, x, version in ctx.lent:
            _guarded(ctx.run, check_unwritten, name, x, version)
        wire_dtype = np.dtype(np.float32) if ctx.reduce_dtype == "float32" else saved.k.dtype
        given = [dout.detach().contiguous(), dlse.astype("float32").contiguous()]
        with _one_call(ctx.communicator):
            grads = _guarded(ctx.run, ctx.run.backward, saved, *map(cpu_rows.view_of, given), wire_dtype)
        return tuple(
            _tensor_of(cpu_rows.from_float32(grad, saved.q.dtype), dtype) if is_wanted else None
            for grad, is_wanted in zip(grads, ctx.is_wanted, strict=True)
        )


def _guarded(run: RankRun, action: Any, *arguments: Any) -> Any:
    """An error of this rank ends the transport, so that the others do not wait for it."""
    try:
        return action(*arguments)
    except TransportError as error:
        raise CommError(f"context parallelism: {error}") from error
    except BaseException as error:
        run.abandon(f"{type(error).__name__}: {error}")
        raise


def _tensor_of(x: np.ndarray, dtype: Any) -> paddle.Tensor:
    tensor = paddle.empty(x.shape, dtype)
    cpu_rows.view_of(tensor)[...] = x
    return tensor
