# SPDX-License-Identifier: Apache-2.0
"""Context parallelism without a plan: Paddle's collectives bring all keys to every rank, then one attention call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddle_fm3 import _paddle
from paddle_fm3.distributed import agreement
from paddle_fm3.distributed.comm import Communicator, Pending
from paddle_fm3.distributed.mask_guard import Kept, MaskGuard
from paddle_fm3.distributed.paddle_device import PaddleDevice, array_of, spans_of
from paddle_fm3.distributed.partition import LAYOUTS, Partition
from paddle_fm3.distributed.prepared import (
    PreparedCache,
    PreparedMask,
    check_unwritten,
    digest_of,
    global_mask,
    is_read_each_time,
    prepare_mask,
)
from paddle_fm3.distributed.shard import assemble_rows, pad_rows, rows_by_rank

_cache: PreparedCache[tuple[PreparedMask, Kept | None]] = PreparedCache()


def collective_attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    causal: bool,
    block_mask: paddle.Tensor | None,
    partition: Partition | str,
    describe: Callable[[str | None], agreement.Record],
    communicator: Communicator,
    *,
    reduce_dtype: str,
    keep_gathered: bool,
    **options: Any,
) -> list[paddle.Tensor]:
    """[out, lse] of this rank's rows. See `flashmask_cp_attention`.

    Args:
        partition: who owns which rows, or a name of LAYOUTS.
        describe: this rank's side of the comparison, which happens here, by the digest of its prepared mask.
        options: for `flashmask_attention`.
    """
    from paddle_fm3.attention import flashmask_attention

    key = (communicator.group.id, causal, partition, None if bounds is not None else tuple(q.shape[:2]))
    # A block_mask is part of the mask but rarely used: such masks are prepared anew at each call.
    found = None if block_mask is not None else _cache.find(bounds, key)
    prepared, kept = found or (None, None)
    guard = None if bounds is None or block_mask is not None or is_read_each_time(bounds) else _guard()
    if guard is not None:
        guard.check()
    if communicator.is_gloo or prepared is None:
        if guard is not None and kept is None:
            kept = guard.keep(bounds.numpy())  # before the mask is read to be prepared
        record = describe(None if prepared is None else prepared.digest)
        prepared = _agree(record, communicator, bounds, block_mask, partition, prepared)
        if block_mask is None:
            for _, unused in _cache.put(bounds, key, (prepared, kept)):
                if unused is not None and unused is not kept:
                    _guard().discard(unused)

    k_global, v_global = _GatherKeysValues.apply(k, v, prepared.partition, communicator, reduce_dtype)
    again = _Regathered(k, v, prepared.partition, communicator)
    with nullcontext() if keep_gathered else again.hooks(k_global, v_global):
        out, lse = flashmask_attention(
            q, k_global, v_global, prepared.bounds_local, causal=False, block_mask=prepared.block_mask_local,
            return_softmax_lse=True, **options,
        )  # fmt: skip
    if guard is not None and kept is not None:
        guard.watch(kept, (array_of(bounds),), spans_of(out, lse), _paddle.current_stream())
    return [out, lse]


@cache
def _guard() -> MaskGuard:
    """This process's, made when it first sees a mask on a GPU."""
    return MaskGuard(PaddleDevice())


def _agree(
    record: agreement.Record,
    communicator: Communicator,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None,
    partition: Partition | str,
    prepared: PreparedMask | None,
) -> PreparedMask:
    """Compares the ranks' records, then returns the mask made ready for this rank. Collective."""
    records = communicator.exchange(record, "comparison of shapes and masks")
    agreement.check_agreement(records)
    if isinstance(partition, str):
        partition = LAYOUTS[partition](sum(r["s_local"] for r in records), communicator.num_ranks)
    is_whole = agreement.check_lengths(records, partition)
    # Of masks given in parts the digests are of the parts unless all ranks have them prepared: then of the whole.
    is_same = all(r["mask_digest"] == records[0]["mask_digest"] for r in records)
    if prepared is not None and is_same and all(r["is_prepared"] for r in records):
        return prepared
    if is_whole:
        agreement.check_same_mask(records)
        bounds_global = None if bounds is None else bounds.numpy()  # [b, h_mask, s, n]
    else:
        bounds_global = gather_bounds(bounds, partition, communicator)
    block_mask_global = None if block_mask is None else block_mask.numpy()
    mask = global_mask(bounds_global, record["causal"], partition, record["b"], block_mask_global)
    # The digest that later calls compare. For whole masks it must be the one other ranks compute unprepared.
    digest = record["mask_digest"] if is_whole else digest_of(bounds_global, record["causal"])
    return prepare_mask(mask, partition, communicator.rank, digest)


def gather_bounds(bounds: paddle.Tensor, partition: Partition, communicator: Communicator) -> np.ndarray:
    """All key columns in global order, int32 [b, h_mask, s, n], from each rank's own."""
    columns = paddle.transpose(bounds, [0, 2, 1, 3])  # [b, s_local, h_mask, n]
    gathered = communicator.post_all_gather(pad_rows(columns, partition), "gather of mask columns").wait()
    return assemble_rows(gathered, partition).numpy().transpose(0, 2, 1, 3)


def _post_gather(x: paddle.Tensor, name: str, partition: Partition, communicator: Communicator) -> Pending:
    return communicator.post_all_gather(pad_rows(x, partition), f"gather of {name}")


@_paddle.backward_once
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
        pending = [_post_gather(x, name, partition, communicator) for name, x in (("K", k), ("V", v))]
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


@contextmanager
def _unless_inside_others(hooks: Any) -> Iterator[None]:
    """Paddle takes one pair of hooks at a time. Inside another, as recompute(use_reentrant=False) has, that one says
    what is kept."""
    with ExitStack() as stack:
        with suppress(ValueError):
            stack.enter_context(hooks)
        yield


class _Regathered:
    """Has an operator save for backward how to gather K and V once more, in place of what was gathered."""

    def __init__(self, k: paddle.Tensor, v: paddle.Tensor, partition: Partition, communicator: Communicator) -> None:
        self._local = [x.detach() for x in (k, v)]  # [b, s_local, h_kv, d]
        self._partition, self._communicator = partition, communicator
        self._pending: dict[int, Pending] = {}

    def hooks(self, k_global: paddle.Tensor, v_global: paddle.Tensor) -> Any:
        """A context for the operator's forward."""
        places = [(x.data_ptr(), x.shape) for x in (k_global, v_global)]

        def pack(x: paddle.Tensor) -> int | tuple[paddle.Tensor, int]:
            place = (x.data_ptr(), x.shape)
            if place in places:
                return places.index(place)
            # NOTE: detached, because an output that is saved with its graph would hold what holds it, for ever.
            return x.detach(), x.inplace_version

        return _unless_inside_others(paddle.autograd.saved_tensors_hooks(pack, self._unpack))

    def _unpack(self, packed: int | tuple[paddle.Tensor, int]) -> paddle.Tensor:
        if isinstance(packed, tuple):
            x, version = packed
            check_unwritten(f"a saved tensor of shape {list(x.shape)}", x, version)
            return x
        # Both are gathered when backward asks for the first of them: every rank's collectives keep one order.
        if packed not in self._pending:
            for at, (name, x) in enumerate(zip("KV", self._local, strict=True)):
                self._pending[at] = _post_gather(x, f"{name} again", self._partition, self._communicator)
        return assemble_rows(self._pending.pop(packed).wait(), self._partition)  # [b, s, h_kv, d]
