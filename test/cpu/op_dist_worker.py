# SPDX-License-Identifier: Apache-2.0
"""One rank of test_op_dist.py: the op on dist tensors against the op on whole tensors.

Usage: op_dist_worker.py REPORT_DIR

Each rank holds the whole inputs, shards them over all ranks, and checks placements, values and gradients.
It writes ``rank<i>.json``: the number of checked cases by name, or fails with the difference.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import op_support
import paddle
import paddle.distributed as dist

from paddle_fm3 import flashmask_attention
from paddle_fm3.testing.cases import AttentionCase, RawMask, make_inputs

B, S_Q, S_K, D_QK, D_V = 2, 140, 150, 16, 24
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
MASKS = ("none", "h_mask_1", "h_mask_kv", "h_mask_q", "block_mask")
SPLITS = {"replicated": None, "batch": 0, "rows": 1, "heads": 2}


def make_case(heads: str, mask: str) -> AttentionCase:
    h_q, h_kv = HEADS[heads]
    h_mask = {"h_mask_kv": h_kv, "h_mask_q": h_q}.get(mask, 1)

    def build() -> RawMask:
        rng = np.random.default_rng(3)
        if mask == "none":
            return RawMask(None, True)
        bounds = rng.integers(0, S_Q, (B, h_mask, S_K, 2)).astype(np.int32)
        tiles = None
        if mask == "block_mask":
            tiles = rng.integers(0, 2, (B, h_mask, -(-S_Q // 128), -(-S_K // 128))).astype(np.int32)
        return RawMask(bounds, True, tiles)

    return AttentionCase(f"{heads}_{mask}", B, S_Q, S_K, h_q, h_kv, D_QK, D_V, build_mask=build)


def run_sharded(case: AttentionCase, axis: int | None, mesh: dist.ProcessMesh, outputs: str):
    """Whole out, lse, dq, dk, dv after gathering, and the placements of out, q.grad, k.grad."""
    inputs = make_inputs(case)
    is_split = axis is not None

    def shard(array, can_split: bool = True) -> paddle.Tensor:
        placement = dist.Shard(axis) if is_split and can_split else dist.Replicate()
        tensor = dist.shard_tensor(op_support.to_tensor(array), mesh, [placement])
        tensor.stop_gradient = False
        return tensor

    q = shard(inputs.q)
    fits = axis != 2 or case.h_kv % mesh.size == 0  # one K/V head stays whole
    k, v = shard(inputs.k, fits), shard(inputs.v, fits)
    out, lse = flashmask_attention(q, k, v, **op_support.call_arguments(case), return_softmax_lse=True)
    loss = paddle.zeros([])
    if "out" in outputs:
        loss = (out * dist.shard_tensor(op_support.to_tensor(inputs.dout), mesh, out.placements)).sum()
    if "lse" in outputs:
        seen = paddle.where(paddle.isfinite(lse), lse, paddle.zeros_like(lse))
        loss = loss + (seen * dist.shard_tensor(op_support.to_tensor(inputs.dlse), mesh, lse.placements)).sum()
    loss.backward()
    whole = [
        dist.reshard(x, mesh, [dist.Replicate()])._local_value().numpy() for x in (out, lse, q.grad, k.grad, v.grad)
    ]
    return op_support.Result(*whole), [str(x.placements[0]) for x in (out, q.grad, k.grad)]


def run_whole(case: AttentionCase, outputs: str) -> op_support.Result:
    inputs = make_inputs(case)
    if "out" not in outputs:
        inputs.dout[:] = 0
    if "lse" not in outputs:
        inputs.dlse[:] = 0
    return op_support.run_op(case, inputs)


def expected_placements(split: str, heads: str, num_ranks: int) -> list[str]:
    """Of out, dq and dk."""
    if split == "batch":
        return ["Shard(dim=0)"] * 3
    if split != "heads":
        return ["Replicate()"] * 3
    is_key_whole = HEADS[heads][1] % num_ranks != 0
    partial = "Partial(reduce_type=SUM)"
    return ["Shard(dim=2)", "Shard(dim=2)", partial if is_key_whole else "Shard(dim=2)"]


def check(heads: str, mask: str, split: str, outputs: str, mesh: dist.ProcessMesh) -> None:
    case = make_case(heads, mask)
    got, placements = run_sharded(case, SPLITS[split], mesh, outputs)
    label = f"{heads} {mask} {split} {outputs}"
    wanted = expected_placements(split, heads, mesh.size)
    assert placements == wanted, f"{label}: placements of out, dq, dk are {placements}, expected {wanted}"
    whole = run_whole(case, outputs)
    for name in op_support.OUTPUTS:
        np.testing.assert_allclose(
            getattr(got, name), getattr(whole, name), rtol=2e-5, atol=2e-6, err_msg=f"{label}: {name}"
        )


def main(report_dir: Path) -> None:
    num_ranks = dist.get_world_size()
    if num_ranks > 1:
        dist.init_parallel_env()
    mesh = dist.ProcessMesh(list(range(num_ranks)), dim_names=["x"])
    done = []
    for heads, mask, split in itertools.product(HEADS, MASKS, SPLITS):
        check(heads, mask, split, "out+lse", mesh)
        done.append(f"{heads} {mask} {split}")
    for split, outputs in itertools.product(SPLITS, ("out", "lse")):  # a missing gradient ended the process
        check("gqa", "h_mask_1", split, outputs, mesh)
        done.append(f"gqa h_mask_1 {split} {outputs}")
    (report_dir / f"rank{dist.get_rank()}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
