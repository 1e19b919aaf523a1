# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is split across the ranks of a context-parallel group (FlashMask-3, section 3)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from paddle_fm3 import _paddle
from paddle_fm3.distributed import agreement, call_checks, dist_tensors, groups
from paddle_fm3.distributed.collective import collective_attention
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.distributed.partition import LAYOUTS, Partition
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planned import PlanChoice, plan_attention, planned_attention
from paddle_fm3.distributed.prepared import content_digest, digest_of
from paddle_fm3.distributed.strategy import STRATEGIES as PLANNED_STRATEGIES
from paddle_fm3.distributed.strategy import Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.trace import Trace


def make_partition(
    strategy: Strategy | str,
    s: int,
    num_ranks: int,
    startend_row_indices: paddle.Tensor | np.ndarray | None = None,
    *,
    causal: bool | None = None,
    b: int = 1,
    block_mask: paddle.Tensor | np.ndarray | None = None,
    topology: Topology | None = None,
) -> Partition:
    """How `flashmask_cp_attention(strategy=...)` expects the s rows to be cut: hand it to `shard_rows`.

    Args:
        strategy: any that `flashmask_cp_attention` takes. Those that cut by work, as "fm3" does, need the mask.
        startend_row_indices, causal, b, block_mask, topology: as in `plan_attention`, and the same as in the call.

    Raises:
        ValueError: unknown strategy; the message lists the known ones. Or one that needs the mask, without it.
    """
    if isinstance(strategy, str) and strategy in LAYOUTS:
        return LAYOUTS[strategy](s, num_ranks)
    planned = _planned_strategy(strategy)
    if planned is None:
        raise ValueError(f"make_partition: {call_checks.unknown_strategy(strategy)}")
    if planned.layout in LAYOUTS:
        return LAYOUTS[planned.layout](s, num_ranks)
    if causal is None:
        raise ValueError(
            f"make_partition: strategy={planned.name!r} cuts by the work of the mask: pass startend_row_indices (None "
            "hides nothing) and causal"
        )
    plan = plan_attention(
        startend_row_indices, causal=causal, num_ranks=num_ranks, s=s, b=b, block_mask=block_mask, strategy=planned,
        topology=topology,
    )  # fmt: skip
    return plan.partition


def _group_of(group: Any | None) -> Any | None:
    return dist_tensors.sep_group(group) if dist_tensors.is_mesh(group) else groups.resolve_group(group)


def _planned_strategy(strategy: Strategy | str) -> Strategy | None:
    return strategy if isinstance(strategy, Strategy) else PLANNED_STRATEGIES.get(strategy)


def _outside_graphs(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Among ranks a call is left out of what to_static and SOT compile: what ranks say to each other is no part of a
    graph."""

    @_paddle.eager
    def attend_eagerly(*arguments: Any, **options: Any) -> Any:
        if not paddle.in_dynamic_mode():
            raise RuntimeError(
                "flashmask_cp_attention: ranks exchange rows in every call, which a static graph cannot hold; "
                "to_static(full_graph=False) leaves the call outside"
            )
        return attend(*arguments, **options)

    @paddle.jit.not_to_static  # as it is into whole graphs, too
    @functools.wraps(attend)
    def attend_anywhere(*arguments: Any, **options: Any) -> Any:
        is_alone = options.get("plan") is None and paddle.distributed.get_world_size() == 1
        return (attend if is_alone else attend_eagerly)(*arguments, **options)

    return attend_anywhere


@_outside_graphs
def flashmask_cp_attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    startend_row_indices: paddle.Tensor | None = None,
    *,
    causal: bool,
    group: Any | None = None,
    partition: Partition | None = None,
    strategy: Strategy | str | None = None,
    plan: CpPlan | None = None,
    topology: Topology | None = None,
    block_mask: paddle.Tensor | None = None,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    deterministic: bool = False,
    reduce_dtype: str = "float32",
    keep_gathered: bool = True,
    timeout_s: float = 60.0,
    trace: Trace | None = None,
) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
    """FlashMask attention of this rank's rows over the whole sequence, differentiable in q, k, v.

    Every rank of the group calls it with the rows it owns, chunks in ascending global order (`shard_rows` cuts
    them). How they are cut, and how keys travel, is one of:

    * strategy "dual_chunk" or "contiguous": Paddle's collectives gather all K and V into global order, the mask is
      rewritten for the local rows, one attention runs, and in backward dK and dV are summed back to their owners.
    * a planner's strategy, as "fm3": a plan is made from the mask at its first use and kept. A
      rank is sent only the rows that its plan names, stage by stage while it computes, and dK and dV go back along
      the plan's reduction. The rows must be those of the plan's partition: `make_partition` with the same name and
      mask, or `plan_attention(...).partition`.
    * plan: such a plan, made by the caller.

    Kept for backward: q, out and lse of the own rows, and the K and V that were gathered: of the whole sequence with
    collectives, of the rows that the mask needs with a plan. With keep_gathered=False of the own rows only.

    Dist tensors: q, k, v [b, s, h, d] of one ProcessMesh, rows sharded over its "sep" dimension, batch and heads over
    others or not at all, give dist tensors laid out like q. Their shards are consecutive rows, so a planner's strategy
    plans what travels between these; balanced rows come in with partition or plan, the dist tensors then holding each
    rank's rows after the other's (`rank_order`). The mask is a plain tensor, equal everywhere, or a dist tensor.

    Args:
        q: [b, s_local, h_q, d_qk], fp32, bf16 or fp16.
        k: [b, s_local, h_kv, d_qk].
        v: [b, s_local, h_kv, d_v].
        startend_row_indices: int32 [b, h_mask, s, n] for all key columns, the same on every rank, or
            [b, h_mask, s_local, n] for this rank's columns (with collectives or a plan; a strategy plans from the
            whole mask). Values are rows of the whole sequence in both cases. None hides nothing but what `causal`
            hides. On a GPU a mask is read when it is first seen, and again after a write that Paddle counts
            (``mask[:] = ...``; `inplace_version`). After one that it does not count (`set_value`, `copy_`, DLPack, an
            address) that call's outputs are NaN and a later call raises ValueError: the device compares, at every
            call, the mask with what was prepared.
        causal: whether later keys are hidden as well.
        group: Paddle group, or an auto-parallel ProcessMesh with a dimension named "sep"; None finds fleet's
            context-parallel or sep group.
        partition: who owns which rows, in place of the strategy's own cut; a planner's strategy then plans the
            transfers for it.
        strategy: "dual_chunk", "contiguous", or a planner's `Strategy` or its name
            (`paddle_fm3.distributed.strategy.STRATEGIES`). Lengths that do not divide evenly give chunks of unequal
            length. Default "dual_chunk"; of dist tensors "contiguous".
        plan: of `plan_attention`, for this mask and group; replaces partition, strategy and topology.
        topology: which ranks share a node, for a planner's strategy; default nodes of 8.
        block_mask: int32 [b, h_mask, ceil(s/128), ceil(s/128)] over the whole sequence, or None.
        softmax_scale: default d_qk ** -0.5.
        return_softmax_lse: also return the lse, fp32 [b, h_q, s_local].
        deterministic: bitwise repeatable gradients. On CPU ranks they always are.
        reduce_dtype: "float32" sums dK and dV of the ranks in fp32; "input" in the inputs' dtype.
        keep_gathered: False gathers K and V once more in backward: less memory between the two, more traffic. A plan
            on GPUs always does.
        timeout_s: longest wait for another rank, in seconds. Gloo's collectives, and with them a CPU group's first
            planned call, wait 30 s at most.
        trace: with a plan: collects what this rank did when. On GPUs events on the streams take the times, and reading
            the trace waits for them.

    Returns:
        out [b, s_local, h_q, d_v], or (out, lse).

    Raises:
        ValueError: bad arguments on any rank; ranks that disagree in shape, dtype, mask or settings; a plan of
            another mask; a GPU mask refilled unseen (above). On gloo the same message on every rank; it names the
            ranks and their values. Over NCCL the comparison is made when a mask is first seen, not at every call.
        CommError: a rank was lost, did not arrive within timeout_s, or makes other calls than this one. The group is of
            no more use then.
        RuntimeError: another thread is in a call of the same group.
    """
    from paddle_fm3.attention import _autocast, flashmask_attention

    error = call_checks.option_error(
        strategy=strategy, partition=partition, plan=plan, topology=topology, trace=trace, softmax_scale=softmax_scale,
        reduce_dtype=reduce_dtype, timeout_s=timeout_s, causal=causal, deterministic=deterministic,
        keep_gathered=keep_gathered, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
    error = error or call_checks.kind_error(q, k, v, startend_row_indices, block_mask)
    if error is not None:
        call_checks.refuse(error, _group_of(group), timeout_s)
    # Plain Python values: they are compared between ranks.
    causal, deterministic, keep_gathered = bool(causal), bool(deterministic), bool(keep_gathered)
    softmax_scale = None if softmax_scale is None else float(softmax_scale)
    q, k, v = _autocast(q, k, v)  # before K and V travel: half the bytes
    if dist_tensors.has_dist_tensor(q, k, v):
        out, lse = _attend_dist(
            q, k, v, startend_row_indices, block_mask, group, partition, strategy, plan, causal=causal,
            topology=topology, softmax_scale=softmax_scale, deterministic=deterministic, reduce_dtype=reduce_dtype,
            keep_gathered=keep_gathered, timeout_s=timeout_s, trace=trace,
        )  # fmt: skip
        return (out, lse) if return_softmax_lse else out
    error = call_checks.shape_error(q, k, v, startend_row_indices, block_mask)
    if error is not None and not q.place.is_gpu_place():  # GPU ranks talk about masks that they have not seen only
        call_checks.refuse(error, _group_of(group), timeout_s)
    strategy = strategy or "dual_chunk"
    group = _group_of(group)
    planned = _planned_strategy(strategy) if plan is None else plan.strategy
    if group is None and plan is None:
        if partition is not None:
            agreement.check_lengths([_shapes(q, k, v, startend_row_indices)], partition)
        whole = flashmask_attention(
            q, k, v, startend_row_indices, causal=causal, block_mask=block_mask, softmax_scale=softmax_scale,
            return_softmax_lse=return_softmax_lse, deterministic=deterministic,
        )  # fmt: skip
        return tuple(whole) if return_softmax_lse else whole

    def describe(mask_digest: str | None = None) -> agreement.Record:
        """This rank's side of the comparison; without a digest that of the mask given, which is read for it."""
        if error is not None:  # it goes into the record, so that no rank waits for this one
            return {"error": error[:1000]}
        settings = (softmax_scale, deterministic, reduce_dtype, keep_gathered)
        return {
            "error": None,
            **_shapes(q, k, v, startend_row_indices),
            "causal": causal,
            **dict(zip(("softmax_scale", "deterministic", "reduce_dtype", "keep_gathered"), settings, strict=True)),
            **_cut(partition, strategy, plan, topology),
            "block_mask": None if block_mask is None else digest_of(block_mask.numpy()),
            "is_prepared": mask_digest is not None,
            "mask_digest": mask_digest or content_digest(startend_row_indices, causal, block_mask),
        }

    choice = None if planned is None else PlanChoice(plan, planned, topology, partition)
    if choice is not None and q.place.is_gpu_place():
        from paddle_fm3.distributed.planned_gpu import planned_attention_on_gpu

        out, lse = planned_attention_on_gpu(
            q, k, v, startend_row_indices, block_mask, causal, choice, describe, group, softmax_scale=softmax_scale,
            deterministic=deterministic, reduce_dtype=reduce_dtype, timeout_s=timeout_s, trace=trace,
        )  # fmt: skip
    elif choice is not None:
        out, lse = planned_attention(
            q, k, v, startend_row_indices, block_mask, choice, describe(), group, softmax_scale=softmax_scale,
            reduce_dtype=reduce_dtype, keep_gathered=keep_gathered, timeout_s=timeout_s, trace=trace,
        )  # fmt: skip
    else:
        communicator = Communicator(group, timeout_s)
        with communicator.one_call("flashmask_cp_attention"):
            out, lse = collective_attention(
                q, k, v, startend_row_indices, causal, block_mask, strategy if partition is None else partition,
                describe, communicator, reduce_dtype=reduce_dtype, keep_gathered=keep_gathered,
                softmax_scale=softmax_scale, deterministic=deterministic,
            )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _attend_dist(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None,
    group: Any | None,
    partition: Partition | None,
    strategy: Strategy | str | None,
    plan: CpPlan | None,
    **options: Any,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """out and lse as dist tensors, from this function's caller on the local parts."""
    if group is not None and not dist_tensors.is_mesh(group):
        raise ValueError("flashmask_cp_attention: group must be the ProcessMesh of the dist tensors, or None")
    if isinstance(strategy, str) and strategy == "dual_chunk" and partition is None and plan is None:
        raise ValueError(
            "flashmask_cp_attention: dist tensors hold consecutive rows; for dual chunks put them in rank_order "
            "and pass partition=dual_chunk_partition(s, num_ranks)"
        )
    strategy = strategy or "contiguous"

    def call(*local: paddle.Tensor, block_mask: paddle.Tensor | None, group: Any, partition: Partition) -> Any:
        return flashmask_cp_attention(
            *local, block_mask=block_mask, group=group, partition=None if plan is not None else partition,
            strategy=strategy, plan=plan, return_softmax_lse=True, **options,
        )  # fmt: skip

    return dist_tensors.attend(
        call, q, k, v, bounds, block_mask, group, partition if plan is None else plan.partition,
        needs_whole_mask=plan is None and _planned_strategy(strategy) is not None,
    )  # fmt: skip


def _shapes(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, bounds: paddle.Tensor | None) -> agreement.Record:
    tensors, is_recorded = {"q": q, "k": k, "v": v}, paddle.is_grad_enabled()
    return {
        "b": q.shape[0],
        "s_local": q.shape[1],
        "h_q": q.shape[2],
        "h_kv": k.shape[2],
        "d_qk": q.shape[3],
        "d_v": v.shape[3],
        "dtype": str(q.dtype).removeprefix("paddle."),
        "gradients": ", ".join(name for name, x in tensors.items() if not x.stop_gradient and is_recorded) or "none",
        "num_bounds": None if bounds is None else bounds.shape[3],
        "h_mask": None if bounds is None else bounds.shape[1],
        "s_bounds": None if bounds is None else bounds.shape[2],
    }


def _cut(
    partition: Partition | None, strategy: Strategy | str, plan: CpPlan | None, topology: Topology | None
) -> agreement.Record:
    """What decides who owns which rows and what travels."""
    if plan is not None:
        return {"partition": f"plan {plan.plan_hash}", "strategy": None}
    given = None if partition is None else digest_of(partition)
    planned = _planned_strategy(strategy)
    if planned is not None:
        name = f"{planned.name} ({digest_of(planned)})"
        return {"partition": given, "strategy": name, "topology": _shown(topology)}
    return {"partition": given, "strategy": strategy if given is None else None}


def _shown(topology: Topology | None) -> str | None:
    return None if topology is None else f"{topology.num_nodes} nodes ({digest_of(topology)})"
