# SPDX-License-Identifier: Apache-2.0
"""Auto-parallel: dist tensors of meshes with a sep dimension, against the one-device operator, gradients included;
and every layout that must be refused. Runs inside plan_worker.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from cp_cases import CpCase
from grid_checks import TOLERANCE, on_one_device
from rank_inputs import TIMEOUT_S

from paddle_fm3.distributed import dist_tensors, groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.partition import contiguous_partition, dual_chunk_partition
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planned import plan_attention
from paddle_fm3.distributed.shard import rank_order, token_order

PER_HEAD = CpCase("mask per kv head", "documents", 96, b=4, h_q=8, h_kv=4, h_mask=4, seed=50)
CAUSAL = CpCase("causal documents", "causal_documents", 96, b=4, h_q=8, h_kv=4, seed=51)
FOUR_BOUNDS = CpCase("four bounds", "random_nc4", 96, b=4, h_q=8, h_kv=4, seed=52)
Orders = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def meshes() -> dict[str, tuple[Any, list[Any]]]:
    """name -> (mesh of all ranks, layout of q, k and v)."""
    count = dist.get_world_size()
    ranks = np.arange(count)
    sep, batch, heads = dist.Shard(1), dist.Shard(0), dist.Shard(2)
    half = ranks.reshape(2, count // 2)
    return {
        "sep": (dist.ProcessMesh(ranks, ["sep"]), [sep]),
        "dp x sep": (dist.ProcessMesh(half, ["dp", "sep"]), [batch, sep]),
        "sep x mp": (dist.ProcessMesh(half.T, ["sep", "mp"]), [sep, heads]),
        "sep x replicas": (dist.ProcessMesh(half, ["x", "sep"]), [dist.Replicate(), sep]),
    }


def check_meshes() -> None:
    groups.disable_gloo_subgroups()  # the meshes' own groups come without it
    for name, (mesh, layout) in meshes().items():
        sep_ranks = mesh.shape[mesh.dim_names.index("sep")]
        per_entry = name == "dp x sep"  # each dp replica has batch entries, and so masks, of its own
        for case in (CAUSAL, PER_HEAD, FOUR_BOUNDS):
            how: list[dict[str, Any]] = [{}, {"strategy": "fm3"}, {"strategy": "fm3", "keep_gathered": False}]
            if not per_entry and case is CAUSAL:
                plan = plan_attention(case.bounds(), causal=True, num_ranks=sep_ranks)
                how += [{"plan": plan}, {"partition": dual_chunk_partition(case.s, sep_ranks)}]
            for at, options in enumerate(how):
                run(case, mesh, layout, options, mask_is_dist=at % 2 == 1)


def run(case: CpCase, mesh: Any, layout: list[Any], options: dict[str, Any], mask_is_dist: bool) -> None:
    what = (case.name, mesh.dim_names, str(options)[:60])
    expected = on_one_device(case)
    plan: CpPlan | None = options.get("plan")
    partition = plan.partition if plan else options.get("partition")
    tensors = {name: paddle.to_tensor(x) for name, x in case.tensors().items()}

    def laid_out(x: paddle.Tensor, axis: int = 1) -> paddle.Tensor:
        return x if partition is None else rank_order(x, partition, axis)

    def given(name: str) -> paddle.Tensor:
        x = dist.shard_tensor(laid_out(tensors[name]), mesh, layout)
        x.stop_gradient = name == "dout"  # NOTE: shard_tensor's own argument does nothing here in Paddle 3.3.1
        return x

    q, k, v, dout = (given(name) for name in ("q", "k", "v", "dout"))
    of_lse = {0: 0, 1: 2, 2: 1}  # axis of q -> axis of lse
    lse_layout = [dist.Shard(of_lse[p.get_dim()]) if p.is_shard() else p for p in layout]
    dlse = dist.shard_tensor(laid_out(tensors["dlse"], 2), mesh, lse_layout)
    bounds = paddle.to_tensor(case.bounds())
    if mask_is_dist:
        bounds = dist.shard_tensor(bounds, mesh, [dist.Replicate()] * mesh.ndim)
    out, lse = flashmask_cp_attention(
        q, k, v, bounds, causal=case.causal, group=mesh, return_softmax_lse=True, timeout_s=TIMEOUT_S, **options
    )
    assert list(out.placements) == layout and list(out.shape) == list(q.shape), what
    assert list(lse.placements) == lse_layout and list(lse.shape) == list(dlse.shape), what
    paddle.autograd.backward([out, lse], [dout, dlse])
    results = {"out": (out, 1), "lse": (lse, 2), "dq": (q.grad, 1), "dk": (k.grad, 1), "dv": (v.grad, 1)}
    for name, (x, axis) in results.items():
        whole = dist.reshard(x.detach(), mesh, [dist.Replicate()] * mesh.ndim)._local_value()
        whole = whole if partition is None else token_order(whole, partition, axis)
        np.testing.assert_allclose(whole.numpy(), expected[name], rtol=0, atol=TOLERANCE, err_msg=f"{what} {name}")


def check_plain_tensors_with_a_mesh() -> None:
    """A mesh is also a group: local rows in, local rows out."""
    case = CAUSAL
    mesh, _ = meshes()["dp x sep"]
    group = dist_tensors.sep_group(mesh)
    assert group is dist_tensors.sep_group(mesh) and group.nranks == mesh.shape[1]
    rows = contiguous_partition(case.s, group.nranks).rows_of(group.rank)
    q, k, v = (paddle.to_tensor(case.tensors()[name][:, rows]) for name in ("q", "k", "v"))
    out = flashmask_cp_attention(
        q, k, v, paddle.to_tensor(case.bounds()), causal=True, group=mesh, strategy="contiguous", timeout_s=TIMEOUT_S
    )
    np.testing.assert_allclose(out.numpy(), on_one_device(case)["out"][:, rows], rtol=0, atol=TOLERANCE)


def check_refusals() -> None:
    """Every rank refuses alike, before anything is sent."""
    mesh, layout = meshes()["dp x sep"]
    tensors = {name: paddle.to_tensor(x) for name, x in CAUSAL.tensors().items()}
    bounds = paddle.to_tensor(CAUSAL.bounds())

    def call(
        layouts: list[Any] | None = None, k_layouts: list[Any] | None = None, cut: int = 96, **options: Any
    ) -> Any:
        q, v = (dist.shard_tensor(tensors[n][:, :cut], mesh, layouts or layout) for n in ("q", "v"))
        k = dist.shard_tensor(tensors["k"][:, :cut], mesh, k_layouts or layouts or layout)
        return flashmask_cp_attention(q, k, v, options.pop("bounds", bounds), causal=True, **options)

    replicate, heads = dist.Replicate(), dist.Shard(2)
    other = dist.ProcessMesh(np.arange(mesh.size), ["sep"])
    plain = tensors["q"]
    for action, words in (
        (lambda: call([dist.Shard(0), replicate]), r"q is Replicate\(\) over 'sep' .*wanted.*Shard\(1\) over 'sep'"),
        (lambda: call([dist.Shard(3), dist.Shard(1)]), r"q is Shard\(dim=3\) over 'dp'"),
        (lambda: call([heads, dist.Shard(1)], [replicate, dist.Shard(1)]), r"k is Replicate\(\) over 'dp' and q Shard"),
        (lambda: call(cut=95), r"axis 1 is sharded over \d processes and must be a multiple"),
        (lambda: call(strategy="dual_chunk"), "dist tensors hold consecutive rows; for dual chunks"),
        (lambda: call(group=other), "group is .*q, k and v are on "),
        (lambda: call(group=dist.get_group()), "group must be the ProcessMesh of the dist tensors"),
        (lambda: call(bounds=bounds[:1]), r"startend_row_indices.shape is \[1, 1, 96, 1\]; expected b=4 and h_mask"),
        (
            lambda: flashmask_cp_attention(
                plain, dist.shard_tensor(plain, mesh, layout), plain, causal=True, group=mesh
            ),
            "q is a plain tensor; q, k and v must all be dist tensors",
        ),
        (
            lambda: dist_tensors.sep_group(dist.ProcessMesh(np.arange(mesh.size), ["dp"])),
            r"dimensions \['dp'\]; one must be named 'sep'",
        ),
        (
            lambda: dist_tensors.sep_group(dist.ProcessMesh(np.arange(mesh.size)[::-1], ["sep"])),
            "they must ascend, as in a group",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            action()
