# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is split across the ranks of a context-parallel group (FlashMask-3, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddle_fm3.distributed import agreement, groups
from paddle_fm3.distributed.comm import Communicator, communicator_for
from paddle_fm3.distributed.partition import Partition, contiguous_partition, dual_chunk_partition
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.prepared import PreparedCache, PreparedMask, digest_of, global_mask, prepare_mask
from paddle_fm3.distributed.shard import assemble_rows, pad_rows, rows_by_rank
from paddle_fm3.distributed.trace import Trace

DEFAULT_TIMEOUT_S = 60.0
STRATEGIES: dict[str, Callable[[int, int], Partition]] = {
    "dual_chunk": dual_chunk_partition,
    "contiguous": contiguous_partition,
}

_cache = PreparedCache()


def make_partition(strategy: str, s: int, num_ranks: int) -> Partition:
    """The partition of s rows that a strategy name stands for.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"make_partition: strategy={strategy!r} is unknown; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy](s, num_ranks)


def flashmask_cp_attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    startend_row_indices: paddle.Tensor | None = None,
    *,
    causal: bool,
    group: Any | None = None,
    partition: Partition | None = None,
    strategy: str = "dual_chunk",
    plan: CpPlan | None = None,
    block_mask: paddle.Tensor | None = None,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    deterministic: bool = False,
    reduce_dtype: str = "float32",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    trace: Trace | None = None,
) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
    """FlashMask attention of this rank's rows over the whole sequence, differentiable in q, k, v.

    Every rank of the group calls it with the rows it owns, chunks in ascending global order (`shard_rows` cuts
    them). K and V are gathered into global order, the mask is rewritten for the local rows, one device-local
    attention runs, and in backward dK and dV are summed back to their owners. The gathered K and V are kept for
    backward: memory for them is that of the whole sequence.

    With ``plan`` (CPU ranks so far) a rank is sent only the rows that its plan names, stage by stage while it
    computes, keeps only these, and dK and dV go back along the plan's reduction.

    Args:
        q: [b, s_local, h_q, d_qk], fp32, bf16 or fp16.
        k: [b, s_local, h_kv, d_qk].
        v: [b, s_local, h_kv, d_v].
        startend_row_indices: int32 [b, h_mask, s, n] for all key columns, the same on every rank, or
            [b, h_mask, s_local, n] for this rank's columns. Values are rows of the whole sequence in both cases.
            None hides nothing but what `causal` hides.
        causal: whether later keys are hidden as well.
        group: Paddle group; None finds fleet's context-parallel or sep group.
        partition: who owns which rows; None cuts by `strategy`.
        strategy: "dual_chunk" or "contiguous", used when partition is None. Lengths that do not divide evenly
            give chunks of unequal length.
        plan: of `plan_attention`, for this mask and group; replaces partition and strategy.
        block_mask: int32 [b, h_mask, ceil(s/128), ceil(s/128)] over the whole sequence, or None.
        softmax_scale: default d_qk ** -0.5.
        return_softmax_lse: also return the lse, fp32 [b, h_q, s_local].
        deterministic: bitwise repeatable gradients.
        reduce_dtype: "float32" sums dK and dV of the ranks in fp32; "input" in the inputs' dtype.
        timeout_s: longest wait for another rank.
        trace: with a plan: collects what this rank did when.

    Returns:
        out [b, s_local, h_q, d_v], or (out, lse).

    Raises:
        ValueError: bad arguments on any rank, or ranks that disagree in shape, dtype, mask or settings. On gloo
            the same message on every rank; it names the ranks and their values. Over NCCL the comparison is made
            when a mask is first seen, not at every call.
        CommError: a rank did not arrive within timeout_s.
    """
    from paddle_fm3.attention import _autocast, flashmask_attention

    q, k, v = _autocast(q, k, v)  # before K and V travel: half the bytes
    group = groups.resolve_group(group)
    options = {
        "softmax_scale": softmax_scale,
        "return_softmax_lse": return_softmax_lse,
        "deterministic": deterministic,
    }
    if plan is not None:
        from paddle_fm3.distributed import planned

        record = _describe(q, k, v, startend_row_indices, causal, plan.partition, strategy, block_mask, None)
        record.update(softmax_scale=softmax_scale, deterministic=deterministic, reduce_dtype=reduce_dtype)
        record.update(partition=f"plan {plan.plan_hash}")
        out, lse = planned.planned_attention(
            q, k, v, startend_row_indices, block_mask, plan, record, group,
            softmax_scale=softmax_scale, reduce_dtype=reduce_dtype, timeout_s=timeout_s, trace=trace,
        )  # fmt: skip
        return (out, lse) if return_softmax_lse else out
    if group is None:
        whole = flashmask_attention(q, k, v, startend_row_indices, causal=causal, block_mask=block_mask, **options)
        return tuple(whole) if return_softmax_lse else whole

    communicator = communicator_for(group, timeout_s)
    partition_key = strategy if partition is None else partition
    key = (group.id, causal, partition_key, None if startend_row_indices is not None else tuple(q.shape[:2]))
    # A block_mask is part of the mask but rarely used: such masks are prepared anew at each call.
    prepared = None if block_mask is not None else _cache.find(startend_row_indices, key)
    if communicator.is_gloo or prepared is None:
        record = _describe(q, k, v, startend_row_indices, causal, partition, strategy, block_mask, prepared)
        record.update(softmax_scale=softmax_scale, deterministic=deterministic, reduce_dtype=reduce_dtype)
        prepared = _agree(record, communicator, startend_row_indices, block_mask, causal, partition, strategy, prepared)
        if block_mask is None:
            _cache.put(startend_row_indices, key, prepared)

    k_global, v_global = _GatherKeysValues.apply(k, v, prepared.partition, communicator, reduce_dtype)
    result = flashmask_attention(
        q, k_global, v_global, prepared.bounds_local, causal=False, block_mask=prepared.block_mask_local, **options
    )
    return tuple(result) if return_softmax_lse else result


def _describe(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    causal: bool,
    partition: Partition | None,
    strategy: str,
    block_mask: paddle.Tensor | None,
    prepared: PreparedMask | None,
) -> agreement.Record:
    """This rank's record for the comparison. An own error goes into it, so that no rank waits for this one."""
    error = _own_error(q, k, v, bounds, strategy)
    if error is not None:
        return {"error": error[:1000]}
    return {
        "error": None,
        "b": q.shape[0],
        "s_local": q.shape[1],
        "h_q": q.shape[2],
        "h_kv": k.shape[2],
        "d_qk": q.shape[3],
        "d_v": v.shape[3],
        "dtype": str(q.dtype).removeprefix("paddle."),
        "needs_grad": paddle.is_grad_enabled() and not (k.stop_gradient and v.stop_gradient),
        "causal": causal,
        "num_bounds": None if bounds is None else bounds.shape[3],
        "h_mask": None if bounds is None else bounds.shape[1],
        "s_bounds": None if bounds is None else bounds.shape[2],
        "partition": None if partition is None else digest_of(partition),
        "strategy": strategy if partition is None else None,
        "is_prepared": prepared is not None,
        "mask_digest": prepared.digest if prepared is not None else _content_digest(bounds, causal, block_mask),
    }


def _own_error(
    q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, bounds: paddle.Tensor | None, strategy: str
) -> str | None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            return f"{name}.shape is {x.shape}; expected [b, s_local, h, d]"
        if x.dtype != q.dtype:
            return f"{name}.dtype is {x.dtype}; q has {q.dtype}"
        if x.shape[:2] != q.shape[:2]:
            return f"{name}.shape is {x.shape}; b and s_local must be those of q, {q.shape}"
    if k.shape[2] != v.shape[2] or k.shape[3] != q.shape[3]:
        return f"k.shape is {k.shape}; heads must be those of v {v.shape}, head_dim that of q {q.shape}"
    if strategy not in STRATEGIES:
        return (
            f"strategy={strategy!r} is unknown; known: {', '.join(STRATEGIES)}; the planner's strategies come as "
            "plan=plan_attention(..., strategy=...)"
        )
    if bounds is not None:
        if len(bounds.shape) != 4 or bounds.shape[0] != q.shape[0]:
            return f"startend_row_indices.shape is {bounds.shape}; expected [b={q.shape[0]}, h_mask, s, n]"
        if bounds.dtype != paddle.int32:
            return f"startend_row_indices.dtype is {bounds.dtype}; expected int32"
    return None


def _content_digest(bounds: paddle.Tensor | None, causal: bool, block_mask: paddle.Tensor | None) -> str:
    arrays = [None if x is None else x.numpy() for x in (bounds, block_mask)]
    return digest_of(*arrays, causal)


def _agree(
    record: agreement.Record,
    communicator: Communicator,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None,
    causal: bool,
    partition: Partition | None,
    strategy: str,
    prepared: PreparedMask | None,
) -> PreparedMask:
    """Compares the ranks' records, then returns the mask made ready for this rank. Collective."""
    records = communicator.exchange(record, "comparison of shapes and masks")
    agreement.check_agreement(records)
    if partition is None:
        partition = make_partition(strategy, sum(r["s_local"] for r in records), communicator.num_ranks)
    is_whole = agreement.check_lengths(records, partition)
    is_same = all(r["mask_digest"] == records[0]["mask_digest"] for r in records)
    if prepared is not None and is_same and all(r["is_prepared"] for r in records):
        return prepared
    if is_whole:
        agreement.check_same_mask(records)
        bounds_global = None if bounds is None else bounds.numpy()  # [b, h_mask, s, n]
    else:
        bounds_global = _gather_bounds(bounds, partition, communicator)
    block_mask_global = None if block_mask is None else block_mask.numpy()
    mask = global_mask(bounds_global, causal, partition, record["b"], block_mask_global)
    # The digest that later calls compare. For whole masks it must be the one other ranks compute unprepared.
    digest = record["mask_digest"] if is_whole else digest_of(bounds_global, causal)
    return prepare_mask(mask, partition, communicator.rank, digest)


def _gather_bounds(bounds: paddle.Tensor, partition: Partition, communicator: Communicator) -> np.ndarray:
    """All key columns in global order, int32 [b, h_mask, s, n], from each rank's own."""
    columns = paddle.transpose(bounds, [0, 2, 1, 3])  # [b, s_local, h_mask, n]
    gathered = communicator.post_all_gather(pad_rows(columns, partition), "gather of mask columns").wait()
    return assemble_rows(gathered, partition).numpy().transpose(0, 2, 1, 3)


class _GatherKeysValues(PyLayer):
    """Local K and V -> K and V of the whole sequence; backward sums dK and dV over ranks at their owners."""

    @staticmethod
    def forward(
        ctx: Any,
        k: paddle.Tensor,
        v: paddle.Tensor,
        partition: Partition,
        communicator: Communicator,
        reduce_dtype: str,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        ctx.partition, ctx.communicator, ctx.reduce_dtype = partition, communicator, reduce_dtype
        ctx.is_wanted = (not k.stop_gradient, not v.stop_gradient)
        pending = [
            communicator.post_all_gather(pad_rows(x, partition), f"gather of {name}")
            for name, x in (("K", k), ("V", v))
        ]
        k_global, v_global = (assemble_rows(transfer.wait(), partition) for transfer in pending)
        return k_global, v_global  # [b, s, h_kv, d_qk], [b, s, h_kv, d_v]

    @staticmethod
    def backward(ctx: Any, *grads_global: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        num_rows = ctx.partition.num_rows(ctx.communicator.rank)
        pending = []
        for name, grad in zip(("dK", "dV"), grads_global, strict=True):
            parts = rows_by_rank(grad, ctx.partition)  # [num_ranks, b, max_rows, h_kv, d]
            if ctx.reduce_dtype == "float32":
                parts = parts.astype("float32")
            pending.append(ctx.communicator.post_reduce_scatter(parts, f"sum of {name}"))
        summed = [
            transfer.wait()[:, :num_rows].astype(grad.dtype)
            for transfer, grad in zip(pending, grads_global, strict=True)
        ]
        return tuple(grad if is_wanted else None for grad, is_wanted in zip(summed, ctx.is_wanted, strict=True))
