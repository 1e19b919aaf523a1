# SPDX-License-Identifier: Apache-2.0
"""One rank of test_cp_attention.py: runs every case and saves this rank's rows of out, lse, dq, dk, dv.

Usage: cp_worker.py OUTPUT_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from cp_cases import CASES, CpCase

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.comm import communicator_for
from paddle_fm3.distributed.partition import dual_chunk_partition
from paddle_fm3.distributed.shard import shard_rows, unshard_rows

TIMEOUT_S = 30.0
PAIR_CASE_IDX = 2


def run_case(case: CpCase, group: object | None) -> dict[str, np.ndarray]:
    num_ranks, rank = groups.group_size(group), groups.group_rank(group)
    partition = case.partition(num_ranks)
    rows = partition.rows_of(rank)
    tensors = case.tensors()
    q, k, v, dout = (paddle.to_tensor(tensors[name][:, rows]).astype(case.dtype) for name in ("q", "k", "v", "dout"))
    dlse = paddle.to_tensor(tensors["dlse"][:, :, rows])  # [b, h_q, s_local]
    for x in (q, k, v):
        x.stop_gradient = False
    bounds = case.bounds()
    if bounds is not None:
        bounds = paddle.to_tensor(bounds[:, :, rows] if case.frame == "own" else bounds)
    block_mask = case.block_mask()
    how = {"partition": partition} if case.split == "scattered" else {"strategy": case.split}

    def attend() -> tuple[paddle.Tensor, paddle.Tensor]:
        return flashmask_cp_attention(
            q,
            k,
            v,
            bounds,
            causal=case.causal,
            group=group,
            return_softmax_lse=True,
            timeout_s=TIMEOUT_S,
            block_mask=None if block_mask is None else paddle.to_tensor(block_mask),
            reduce_dtype=case.reduce_dtype,
            softmax_scale=case.softmax_scale,
            **how,
        )

    attend()  # the second call finds the prepared mask: the two paths must agree
    out, lse = attend()
    paddle.autograd.backward([out, lse], [dout, dlse])
    results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.astype("float32").numpy() for name, x in results.items()}


def check_shards(group: object | None) -> None:
    """shard_rows / unshard_rows: there and back, uneven, along two axes, with the gradient that a shared loss needs."""
    num_ranks, rank = groups.group_size(group), groups.group_rank(group)
    partition = dual_chunk_partition(29, num_ranks)
    rows = partition.rows_of(rank)
    hidden = paddle.to_tensor(np.random.default_rng(5).standard_normal((2, 29, 3)).astype("float32"))
    local = shard_rows(hidden, partition, rank)
    np.testing.assert_array_equal(local.numpy(), hidden.numpy()[:, rows])
    local.stop_gradient = False
    whole = unshard_rows(local, partition, group)
    np.testing.assert_array_equal(whole.numpy(), hidden.numpy())
    (whole * hidden).sum().backward()  # the same loss on every rank
    np.testing.assert_array_equal(local.grad.numpy(), hidden.numpy()[:, rows])
    lse = paddle.transpose(hidden, [0, 2, 1])  # [b, h, s]
    np.testing.assert_array_equal(unshard_rows(shard_rows(lse, partition, rank, 2), partition, group, 2).numpy(), lse)
    with pytest.raises(ValueError, match=r"axis 1 must have the partition's s=29 rows"):
        shard_rows(lse, partition, rank)


def check_refilled_mask(group: object | None) -> None:
    """A mask tensor that is refilled by any of Paddle's ways is not taken for the mask it held before."""
    partition = dual_chunk_partition(32, groups.group_size(group))
    rows = partition.rows_of(groups.group_rank(group))
    q, k, v = (
        paddle.to_tensor(x) for x in np.random.default_rng(6).standard_normal((3, 1, 32, 1, 8)).astype("float32")
    )
    local = [x[:, rows] for x in (q, k, v)]
    bounds = paddle.full([1, 1, 32, 1], 32, "int32")

    def fill(tensor: paddle.Tensor) -> None:
        bounds[:] = tensor

    for end, refill in ((8, bounds.set_value), (16, lambda x: bounds.copy_(x, True)), (24, fill)):
        flashmask_cp_attention(*local, bounds, causal=True, group=group, timeout_s=TIMEOUT_S)
        ends = np.where(np.arange(32) < end, end, 32).astype(np.int32)  # two documents
        refill(paddle.to_tensor(ends.reshape(1, 1, 32, 1)))
        out = flashmask_cp_attention(*local, bounds, causal=True, group=group, timeout_s=TIMEOUT_S)
        whole = flashmask_attention(q, k, v, bounds, causal=True)
        np.testing.assert_allclose(out.numpy(), whole.numpy()[:, rows], rtol=1e-5, atol=1e-6)


def check_comm(group: object) -> None:
    """fp16 sums do not overflow on the way, results arrive by rank, and a transfer is waited for once."""
    communicator = communicator_for(group, TIMEOUT_S)
    num_ranks, rank = communicator.num_ranks, communicator.rank
    factors = np.arange(1, num_ranks + 1, dtype=np.float16)[:, None]
    parts = paddle.to_tensor(np.full([num_ranks, 4], 3.0, np.float16) * factors)
    pending = communicator.post_reduce_scatter(parts, "test sum")
    np.testing.assert_array_equal(pending.wait().numpy(), np.full(4, 3.0 * (rank + 1) * num_ranks, np.float16))
    with pytest.raises(RuntimeError, match=r"wait\(\) called twice on 'test sum'"):
        pending.wait()
    assert communicator.exchange({"rank": rank}, "test") == [{"rank": r} for r in range(num_ranks)]


def main() -> None:
    output_dir = Path(sys.argv[1])
    group = None
    if int(dist.get_world_size()) > 1:
        groups.enable_gloo_subgroups()
        dist.init_parallel_env()
        group = dist.new_group(list(range(dist.get_world_size())))
    rank = groups.group_rank(group)
    for case_idx, case in enumerate(CASES):
        np.savez(output_dir / f"case{case_idx}_rank{rank}.npz", **run_case(case, group))
        print(f"done: {case.name}", flush=True)
    check_shards(group)
    check_refilled_mask(group)
    if group is not None:
        check_comm(group)
    if groups.group_size(group) == 4:
        # As in a data-parallel x context-parallel mesh: every process makes both groups, in the same order.
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair_idx = rank // 2
        results = run_case(CASES[PAIR_CASE_IDX], pairs[pair_idx])
        np.savez(output_dir / f"pair{pair_idx}_rank{rank % 2}.npz", **results)


main()
