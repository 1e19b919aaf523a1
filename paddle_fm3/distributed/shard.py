# SPDX-License-Identifier: Apache-2.0
"""Cuts tensors into a rank's rows and puts them back: hidden states, labels, position ids, mask columns, losses.

A rank's rows are its chunks in ascending global order, which is token order only for a contiguous partition.
Whatever depends on a token's place (rope, shifted labels, per-token losses) must therefore be computed from
global values *before* `shard_rows`, or from rows put back by `unshard_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddle_fm3 import _paddle
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.distributed.partition import Partition


def shard_rows(x: paddle.Tensor, partition: Partition, rank: int, axis: int = 1) -> paddle.Tensor:
    """This rank's rows of a tensor of the whole sequence, chunks ascending. Local, differentiable.

    Args:
        x: any tensor with ``x.shape[axis] == partition.s``, the same on every rank: token ids [b, s], labels,
            position ids, hidden states [b, s, d], mask columns [b, h_mask, s, n] (axis 2).
        partition: who owns which rows.
        rank: whose rows.
        axis: the sequence axis.

    Raises:
        ValueError: the axis does not have partition.s entries; no such axis or rank.
    """
    axis = _axis_of("shard_rows", x, axis)
    if x.shape[axis] != partition.s:
        raise ValueError(
            f"shard_rows: x.shape is {x.shape}; axis {axis} must have the partition's s={partition.s} rows"
        )
    return _concat([_slice(x, axis, *chunk) for chunk in partition.chunks_of(rank)], axis, like=x)


def unshard_rows(
    x: paddle.Tensor, partition: Partition, group: Any | None = None, axis: int = 1, timeout_s: float = 60.0
) -> paddle.Tensor:
    """The tensor of the whole sequence from every rank's rows. Collective.

    Differentiable for the usual case that every rank goes on to compute the same value from the result (a loss
    over all tokens): each rank's rows receive the gradient that this rank computed for them, not a sum over ranks.

    Args:
        x: this rank's rows, ``x.shape[axis] == partition.num_rows(rank)``.
        partition: who owns which rows.
        group: Paddle group; None finds fleet's context-parallel or sep group.
        axis: the sequence axis.
        timeout_s: longest wait for another rank.

    Raises:
        ValueError: the partition is for another number of ranks; a rank brings other rows than its own; the ranks
            disagree in shape or dtype. The same message on every rank.
        CommError: a rank did not arrive within timeout_s.
    """
    axis = _axis_of("unshard_rows", x, axis)
    group = groups.resolve_group(group)
    communicator = None if group is None else Communicator(group, timeout_s)
    _check_rows(x, partition, communicator, axis)
    if communicator is None:
        return x
    order = [axis] + [i for i in range(len(x.shape)) if i != axis]
    back = [order.index(i) for i in range(len(order))]
    rows_first = paddle.transpose(x, order).unsqueeze(0)  # [1, s_local, ...]
    whole = _GatherRows.apply(rows_first, partition, communicator)  # [1, s, ...]
    return paddle.transpose(whole.squeeze(0), back)


def _check_rows(x: paddle.Tensor, partition: Partition, communicator: Communicator | None, axis: int) -> None:
    other_axes = [size for at, size in enumerate(x.shape) if at != axis]
    record = {"rows": x.shape[axis], "rest": f"{other_axes} of {x.dtype}", "axis": axis}
    what = "comparison of shapes"
    records = [record] if communicator is None else communicator.exchange(record, what)
    rows, wanted = [r["rows"] for r in records], [partition.num_rows(rank) for rank in range(partition.num_ranks)]
    if rows != wanted:
        raise ValueError(
            f"unshard_rows: rows by rank on axis {axis} are {rows}; the partition of s={partition.s} for "
            f"{partition.num_ranks} ranks wants {wanted}"
        )
    if any(r["rest"] != record["rest"] or r["axis"] != axis for r in records):
        shapes = ", ".join(f"axis {r['axis']}, others {r['rest']} on rank {at}" for at, r in enumerate(records))
        raise ValueError(f"unshard_rows: the ranks disagree: {shapes}")


def _axis_of(who: str, x: paddle.Tensor, axis: int) -> int:
    if not -len(x.shape) <= axis < len(x.shape):
        raise ValueError(f"{who}: axis={axis} of x.shape {list(x.shape)}")
    return axis % len(x.shape)


@_paddle.backward_once
class _GatherRows(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, partition: Partition, communicator: Communicator) -> paddle.Tensor:
        ctx.partition, ctx.rank = partition, communicator.rank
        gathered = communicator.post_all_gather(pad_rows(x, partition), "gather of sequence rows").wait()
        return assemble_rows(gathered, partition)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return shard_rows(grad, ctx.partition, ctx.rank)


def rank_order(x: paddle.Tensor, partition: Partition, axis: int = 1) -> paddle.Tensor:
    """A tensor of the whole sequence with rank 0's rows first, then rank 1's, ...: the order in which a dist tensor
    that is sharded over the ranks holds them. Differentiable.

    Raises:
        ValueError: the axis does not have partition.s entries.
    """
    parts = [shard_rows(x, partition, rank, axis) for rank in range(partition.num_ranks)]
    return _concat([part for part in parts if part.shape[axis]], axis, like=x)


def token_order(x: paddle.Tensor, partition: Partition, axis: int = 1) -> paddle.Tensor:
    """Undoes `rank_order`."""
    if x.shape[axis] != partition.s:
        raise ValueError(
            f"token_order: x.shape is {x.shape}; axis {axis} must have the partition's s={partition.s} rows"
        )
    rows = np.concatenate([partition.rows_of(rank) for rank in range(partition.num_ranks)])  # [s]
    return paddle.index_select(x, paddle.to_tensor(np.argsort(rows)), axis)


def max_rows(partition: Partition) -> int:
    """Rows of the rank that owns most: the equal length that collectives are padded to."""
    return max(partition.num_rows(rank) for rank in range(partition.num_ranks))


def pad_rows(x: paddle.Tensor, partition: Partition) -> paddle.Tensor:
    """[b, s_local, ...] -> [b, max_rows, ...], zeros after the rank's rows."""
    missing = max_rows(partition) - x.shape[1]
    if missing == 0:
        return x.contiguous()
    zeros = paddle.zeros([x.shape[0], missing, *x.shape[2:]], x.dtype)
    return zeros if x.shape[1] == 0 else paddle.concat([x, zeros], axis=1)


def assemble_rows(gathered: list[paddle.Tensor], partition: Partition) -> paddle.Tensor:
    """Every rank's [b, max_rows, ...] -> [b, s, ...] in global order."""
    next_row = [0] * partition.num_ranks
    pieces = []
    begins = partition.chunk_begins_global
    for chunk_id, rank in enumerate(partition.chunk_ranks):
        begin_local, next_row[rank] = next_row[rank], next_row[rank] + begins[chunk_id + 1] - begins[chunk_id]
        pieces.append(_slice(gathered[rank], 1, begin_local, next_row[rank]))
    return _concat(pieces, 1, like=gathered[0])


def rows_by_rank(x: paddle.Tensor, partition: Partition) -> paddle.Tensor:
    """[b, s, ...] -> [num_ranks, b, max_rows, ...], zeros after each rank's rows."""
    return paddle.stack(
        [pad_rows(shard_rows(x, partition, rank), partition) for rank in range(partition.num_ranks)], axis=0
    )


def _slice(x: paddle.Tensor, axis: int, begin: int, end: int) -> paddle.Tensor:
    return paddle.slice(x, [axis], [begin], [end])


def _concat(pieces: list[paddle.Tensor], axis: int, like: paddle.Tensor) -> paddle.Tensor:
    if not pieces:
        shape = list(like.shape)
        shape[axis] = 0
        return paddle.zeros(shape, like.dtype)
    return pieces[0] if len(pieces) == 1 else paddle.concat(pieces, axis=axis)
