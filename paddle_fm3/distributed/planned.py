# SPDX-License-Identifier: Apache-2.0
"""Attention over a split sequence as a CpPlan says: only the rows that a rank needs come to it, while it computes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddle_fm3.distributed import agreement, cpu_rows
from paddle_fm3.distributed.cache import PlanCache
from paddle_fm3.distributed.comm import CommError, Communicator, communicator_for
from paddle_fm3.distributed.execute import Forwarded, RankRun, RankWork
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import CpPlan, mask_digest
from paddle_fm3.distributed.planner import DEFAULT_OPTIONS, PlanOptions
from paddle_fm3.distributed.prepared import CACHE_ENTRIES, global_mask
from paddle_fm3.distributed.strategy import FM3, Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.trace import Trace
from paddle_fm3.distributed.transport import TcpTransport, TransportError, connect
from paddle_fm3.mask.column_mask import ColumnMask

_plans = PlanCache()
_work: OrderedDict[tuple[Any, ...], RankWork] = OrderedDict()
_transports: dict[int, TcpTransport] = {}  # group id -> its connections, made at the first planned call


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
    options: PlanOptions = DEFAULT_OPTIONS,
) -> CpPlan:
    """The plan for `flashmask_cp_attention(plan=...)`; its `partition` says how to cut the sequence.

    Pure: every rank that calls it with the same mask gets the same plan. The last 16 plans are kept by mask content.

    Args:
        startend_row_indices: int32 [b, h_mask, s, n] for all key columns, or None; then s must be given.
        causal, block_mask: as in `flashmask_cp_attention`.
        num_ranks: ranks of the context-parallel group.
        b: batch size, where startend_row_indices is None.
        strategy: a planner strategy or its name (`paddle_fm3.distributed.strategy.STRATEGIES`).
        topology: which ranks share a node; default nodes of 8.

    Raises:
        ValueError: as `build_plan`; or neither startend_row_indices nor s.
    """
    bounds, tiles = (
        x.numpy() if isinstance(x, paddle.Tensor) else x for x in (startend_row_indices, block_mask)
    )  # [b, h_mask, s, n], [b, h_mask, s/128, s/128]
    if bounds is None and s is None:
        raise ValueError("plan_attention: without startend_row_indices the length s must be given")
    length = s if bounds is None else bounds.shape[2]
    mask = global_mask(bounds, causal, Partition((0, length), (0,), 1), b, tiles)
    return _plans.get(mask, num_ranks, topology=topology, strategy=strategy, options=options)


def planned_attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None,
    plan: CpPlan,
    record: agreement.Record,
    group: Any | None,
    *,
    softmax_scale: float | None,
    reduce_dtype: str,
    timeout_s: float,
    trace: Trace | None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """out [b, s_local, h_q, d_v] and lse [b, h_q, s_local] of this rank's rows. See `flashmask_cp_attention`.

    Args:
        record: this rank's side of the comparison, which happens here.
    """
    communicator = None if group is None else communicator_for(group, timeout_s)
    mask = _agree(record, communicator, bounds, block_mask, plan)
    rank = 0 if communicator is None else communicator.rank
    run = RankRun(
        _work_of(plan, mask, rank),
        None if communicator is None else _transport_of(communicator),
        q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        timeout_s,
        trace,
    )
    return _PlannedAttention.apply(q, k, v, run, reduce_dtype)


def _agree(
    record: agreement.Record, communicator: Communicator | None, bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None, plan: CpPlan,
) -> ColumnMask:  # fmt: skip
    """Compares the ranks' records; the mask over the whole sequence. Collective."""
    from paddle_fm3.distributed.attention import _gather_bounds

    error = record["error"]
    if error is None and not paddle.get_device().startswith("cpu"):
        record = {"error": f"plan={plan.strategy.name!r} runs on CPU ranks only so far, not on {paddle.get_device()}"}
    what = "comparison of shapes, masks and plans"
    records = [record] if communicator is None else communicator.exchange(record, what)
    agreement.check_agreement(records)
    bounds_global = None if bounds is None else bounds.numpy()  # [b, h_mask, s, n]
    if agreement.check_lengths(records, plan.partition):
        agreement.check_same_mask(records)
    else:
        assert communicator is not None and bounds is not None
        bounds_global = _gather_bounds(bounds, plan.partition, communicator)
    return global_mask(
        bounds_global, record["causal"], plan.partition, record["b"], None if block_mask is None else block_mask.numpy()
    )


def _work_of(plan: CpPlan, mask: ColumnMask, rank: int) -> RankWork:
    digest = mask_digest(mask)
    plan.check_mask(digest, "flashmask_cp_attention")
    key = (plan.plan_hash, digest, rank)
    if key not in _work:
        _work[key] = RankWork.of(plan, rank, mask)
        while len(_work) > CACHE_ENTRIES:
            _work.popitem(last=False)
    _work.move_to_end(key)
    return _work[key]


def _transport_of(communicator: Communicator) -> TcpTransport:
    transport = _transports.get(communicator.group.id)
    if transport is None:

        def exchange(record: agreement.Record) -> list[agreement.Record]:
            return communicator.exchange(record, "addresses of the ranks")

        try:
            transport = connect(communicator.rank, communicator.num_ranks, exchange, communicator.timeout_s)
        except TransportError as error:
            raise CommError(f"context parallelism: {error}") from error
        _transports[communicator.group.id] = transport
    return transport


def transport_bytes(group: Any) -> tuple[list[int], list[int]]:
    """Payload bytes that planned attention has sent to and received from each rank of the group, so far."""
    transport = _transports.get(group.id)
    if transport is None:
        return [0] * group.nranks, [0] * group.nranks
    return list(transport.sent_bytes), list(transport.received_bytes)


class _PlannedAttention(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, run: RankRun, reduce_dtype: str
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        ctx.run, ctx.reduce_dtype = run, reduce_dtype
        ctx.is_wanted = tuple(not x.stop_gradient for x in (q, k, v))
        ctx.dtype = q.dtype
        # Copies: the caller may write to q before backward reads it.
        ctx.saved = _guarded(run, run.forward, *(_array_of(x) for x in (q, k, v)))
        out = _tensor_of(ctx.saved.out, q.dtype)  # [b, s_local, h_q, d_v]
        return out, _tensor_of(ctx.saved.lse, paddle.float32)  # [b, h_q, s_local]

    @staticmethod
    def backward(ctx: Any, dout: paddle.Tensor, dlse: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        saved: Forwarded = ctx.saved
        wire_dtype = np.dtype(np.float32) if ctx.reduce_dtype == "float32" else saved.k.dtype
        arrays = _array_of(dout.astype(ctx.dtype)), _array_of(dlse.astype("float32"))
        grads = _guarded(ctx.run, ctx.run.backward, saved, *arrays, wire_dtype)
        return tuple(
            _tensor_of(cpu_rows.from_float32(grad, saved.q.dtype), ctx.dtype) if is_wanted else None
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


def _array_of(x: paddle.Tensor) -> np.ndarray:
    """A copy; bfloat16 as uint16."""
    return np.array(x.numpy(), copy=True)


def _tensor_of(x: np.ndarray, dtype: Any) -> paddle.Tensor:
    tensor = paddle.empty(x.shape, dtype)
    cpu_rows.view_of(tensor)[...] = x
    return tensor
