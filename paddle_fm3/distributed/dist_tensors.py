# SPDX-License-Identifier: Apache-2.0
"""Auto-parallel: dist tensors of a ProcessMesh with a `sep` dimension go in, dist tensors of the same layout come out.

The work is done on each process's local part, by the sep dimension's group. Batch and heads may be sharded over
other dimensions of the mesh: their processes work side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base import core

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.partition import Partition, contiguous_partition

SEP = "sep"
BATCH, SEQUENCE, HEADS = 0, 1, 2  # axes of q, k, v
_groups: dict[tuple[Any, ...], Any] = {}  # mesh and process -> group of its sep dimension


def is_mesh(group: Any) -> bool:
    return isinstance(group, core.ProcessMesh)


def has_dist_tensor(*tensors: paddle.Tensor | None) -> bool:
    return any(x is not None and x.is_dist() for x in tensors)


def sep_group(mesh: Any) -> Any:
    """The group of this process along the mesh's `sep` dimension. The first call for a mesh is collective over it.

    Raises:
        ValueError: the mesh has no such dimension, does not hold this process, or runs it in descending ranks.
    """
    names, ids = list(mesh.dim_names), np.array(mesh.process_ids).reshape(mesh.shape)
    if SEP not in names:
        raise ValueError(f"flashmask_cp_attention: the ProcessMesh has dimensions {names}; one must be named {SEP!r}")
    if dist.get_rank() not in mesh.process_ids:
        raise ValueError(
            f"flashmask_cp_attention: rank {dist.get_rank()} is not in the ProcessMesh of ranks {mesh.process_ids}"
        )
    key = (tuple(mesh.process_ids), tuple(mesh.shape), tuple(names))
    if key not in _groups:
        rows = np.moveaxis(ids, names.index(SEP), -1).reshape(-1, mesh.shape[names.index(SEP)])  # [groups, sep]
        if (np.diff(rows, axis=1) <= 0).any():
            raise ValueError(
                f"flashmask_cp_attention: ranks along {SEP!r} are {rows.tolist()}; they must ascend, as in a group"
            )
        # As fleet does: every process makes every group, in one order, so that all number them alike. `mesh.get_group`
        # makes only its own, under a number that the other groups of the dimension get as well.
        with groups.gloo_subgroups():
            for ranks in rows.tolist():
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    _groups[key] = group
    return groups.usable(_groups[key])


def attend(
    call: Callable[..., tuple[paddle.Tensor, paddle.Tensor]],
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None,
    mesh: Any | None,
    partition: Partition | None,
    *,
    needs_whole_mask: bool,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """out and lse as dist tensors laid out like q, from
    ``call(q, k, v, bounds, block_mask=..., group=..., partition=...)`` on the local parts.

    Args:
        q, k, v: dist tensors [b, s, h, d] of one mesh, rows sharded over `sep`; batch and heads sharded alike over
            other dimensions of the mesh, or replicated.
        bounds: int32 [b, h_mask, s, n]: a plain tensor, equal on every process, or a dist tensor.
        block_mask: likewise.
        mesh: that of the group argument, or None.
        partition: whose rows the shards hold, rank by rank; None: they are consecutive, the tensor is in token order.
        needs_whole_mask: whether bounds sharded over `sep` must be gathered.

    Raises:
        ValueError: mixed plain and dist tensors, several meshes, or a layout that is none of these.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_dist():
            raise ValueError(f"flashmask_cp_attention: {name} is a plain tensor; q, k and v must all be dist tensors")
        if x.process_mesh != q.process_mesh:
            raise ValueError(f"flashmask_cp_attention: {name} is on {x.process_mesh}, q on {q.process_mesh}")
        _check_layout(name, x, q)
    if mesh is not None and mesh != q.process_mesh:
        raise ValueError(f"flashmask_cp_attention: group is {mesh}; q, k and v are on {q.process_mesh}")
    mesh, placements = q.process_mesh, list(q.placements)
    group = sep_group(mesh)
    if partition is None:
        partition = contiguous_partition(q.shape[SEQUENCE], groups.group_size(group))
    if bounds is not None:
        bounds = _local_mask("startend_row_indices", bounds, q, k, 2, needs_whole_mask)
    if block_mask is not None:
        block_mask = _local_mask("block_mask", block_mask, q, k, None, True)

    local = [_to_local(x, mesh, list(x.placements)) for x in (q, k, v)]
    out, lse = call(*local, bounds, block_mask=block_mask, group=group, partition=partition)
    axis_of_lse = {BATCH: 0, SEQUENCE: 2, HEADS: 1}
    lse_placements = [dist.Shard(axis_of_lse[p.get_dim()]) if p.is_shard() else dist.Replicate() for p in placements]
    return _from_local(out, mesh, placements), _from_local(lse, mesh, lse_placements)


def _check_layout(name: str, x: paddle.Tensor, q: paddle.Tensor) -> None:
    allowed = f"Shard({SEQUENCE}) over {SEP!r}; Shard({BATCH}), Shard({HEADS}) or Replicate() over other dimensions"
    mesh = x.process_mesh
    if len(x.shape) != 4:
        raise ValueError(f"flashmask_cp_attention: {name}.shape is {list(x.shape)}; expected [b, s, h, d]")
    for mesh_dim, placement, of_q in zip(mesh.dim_names, x.placements, q.placements, strict=True):
        axis = placement.get_dim() if placement.is_shard() else None
        is_legal = axis == SEQUENCE if mesh_dim == SEP else placement.is_replicated() or axis in (BATCH, HEADS)
        if not is_legal or placement != of_q:
            raise ValueError(
                f"flashmask_cp_attention: {name} is {placement} over {mesh_dim!r} and q {of_q}; wanted, alike for q, k "
                f"and v: {allowed}"
            )
    for axis in (BATCH, SEQUENCE, HEADS):
        parts = int(np.prod([n for n, p in zip(mesh.shape, x.placements, strict=True) if p.is_shard(axis)]))
        if x.shape[axis] % parts:
            raise ValueError(
                f"flashmask_cp_attention: {name}.shape is {list(x.shape)}; axis {axis} is sharded over {parts} "
                "processes and must be a multiple of that"
            )


def _local_mask(
    name: str, x: paddle.Tensor, q: paddle.Tensor, k: paddle.Tensor, key_axis: int | None, is_whole: bool
) -> paddle.Tensor:
    """This process's part of [b, h_mask, ...]: its batch entries and mask heads, all key columns or its own."""
    mesh = q.process_mesh
    target = []
    for mesh_dim, placement in zip(mesh.dim_names, q.placements, strict=True):
        wanted = dist.Replicate()
        if mesh_dim == SEP:
            is_sharded = x.is_dist() and x.placements[mesh.dim_names.index(SEP)] == dist.Shard(key_axis or -1)
            if is_sharded and not is_whole:
                wanted = dist.Shard(key_axis)
        elif placement.is_shard(BATCH):
            wanted = dist.Shard(0)
        elif placement.is_shard(HEADS) and x.shape[1] > 1:
            wanted = dist.Shard(1)
        target.append(wanted)
    if list(x.shape)[0] != q.shape[BATCH] or x.shape[1] not in (1, k.shape[HEADS], q.shape[HEADS]):
        raise ValueError(
            f"flashmask_cp_attention: {name}.shape is {list(x.shape)}; expected b={q.shape[BATCH]} and h_mask 1, "
            f"{k.shape[HEADS]} or {q.shape[HEADS]}: the sizes of the dist tensors, not of their parts"
        )
    if not x.is_dist():
        x = dist.shard_tensor(x, mesh, target)
    elif list(x.placements) != target:
        x = dist.reshard(x, mesh, target)
    return x._local_value()


def _to_local(x: paddle.Tensor, mesh: Any, placements: list[Any]) -> paddle.Tensor:
    from paddle.distributed.auto_parallel.api import dtensor_to_local

    return dtensor_to_local(x, mesh, placements)  # differentiable


def _from_local(x: paddle.Tensor, mesh: Any, placements: list[Any]) -> paddle.Tensor:
    from paddle.distributed.auto_parallel.api import dtensor_from_local

    return dtensor_from_local(x, mesh, placements)  # differentiable
