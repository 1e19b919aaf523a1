# SPDX-License-Identifier: Apache-2.0
"""One rank of test_cp_attention.py: runs every case and saves this rank's rows of out, lse, dq, dk, dv.

Usage: cp_worker.py OUTPUT_DIR
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import wrapping_checks
from cp_cases import CASES, CpCase
from paddle.base import core
from rank_inputs import TIMEOUT_S, RankInputs, growth_bytes, start

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.distributed.partition import dual_chunk_partition
from paddle_fm3.distributed.shard import shard_rows, unshard_rows

PAIR_CASE_IDX = 2
BFLOAT16_CASE_IDX = next(at for at, case in enumerate(CASES) if case.dtype == "bfloat16")


def run_case(case: CpCase, group: object | None, **options: Any) -> dict[str, np.ndarray]:
    partition = case.partition(groups.group_size(group))
    inputs = RankInputs.of(case, partition.rows_of(groups.group_rank(group)), group)
    how = options | ({"partition": partition} if case.split == "scattered" else {"strategy": case.split})
    inputs.attend(**how)  # the second call finds the prepared mask: the two paths must agree
    return inputs.backward(*inputs.attend(**how))


def check_gathered_again(group: object | None) -> None:
    """keep_gathered=False gives the same bits, and what was gathered is gone between forward and backward."""
    num_ranks, rank = groups.group_size(group), groups.group_rank(group)
    case = CpCase("large keys", "causal_documents", 1024, d_qk=64, d_v=64, seed=20)
    gathered_bytes = 4 * case.s * case.h_kv * (case.d_qk + case.d_v)
    held, results = [], []
    for keep_gathered in (True, False):
        inputs = RankInputs.of(case, case.partition(num_ranks).rows_of(rank), group)
        before = host_bytes()
        out, lse = inputs.attend(strategy=case.split, keep_gathered=keep_gathered)
        held.append(host_bytes() - before)
        results.append(inputs.backward(out, lse))
        del inputs, out, lse
    for name, x in results[0].items():
        np.testing.assert_array_equal(results[1][name], x, err_msg=name)
    if num_ranks > 1:
        assert abs(held[0] - held[1] - gathered_bytes) < 0.1 * gathered_bytes, (held, gathered_bytes)


def check_written(group: object) -> None:
    """NOTE: last of all: after an exception in an unpack hook Paddle's next backward yields no gradients."""
    case = CASES[2]
    partition = case.partition(groups.group_size(group))
    inputs = RankInputs.of(case, partition.rows_of(groups.group_rank(group)), group)
    inputs.q = inputs.q * 1.0
    out, _ = inputs.attend(strategy=case.split, keep_gathered=False)
    with paddle.no_grad():
        inputs.q.add_(paddle.ones([1]))
    with pytest.raises((OSError, ValueError), match="was written to in place between forward and backward"):
        out.sum().backward()


def host_bytes() -> int:
    gc.collect()
    return core.host_memory_stat_current_value("Allocated", 0)


def check_reduce_dtype(group: object) -> None:
    """In which dtype partial sums are handed to the collective. NOTE: gloo adds 16-bit numbers in fp32 anyway."""
    seen = []
    original = Communicator.post_reduce_scatter

    def post(self: Communicator, parts: paddle.Tensor, what: str) -> Any:
        seen.append(parts.dtype)
        return original(self, parts, what)

    Communicator.post_reduce_scatter = post
    try:
        for reduce_dtype, dtype in (("float32", paddle.float32), ("input", paddle.bfloat16)):
            case = replace(CASES[BFLOAT16_CASE_IDX], reduce_dtype=reduce_dtype)
            assert case.dtype == "bfloat16"
            run_case(case, group)
            assert seen == [dtype, dtype], (reduce_dtype, seen)
            seen.clear()
    finally:
        Communicator.post_reduce_scatter = original


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
    communicator = Communicator(group, TIMEOUT_S)
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
    group = start()
    rank = groups.group_rank(group)
    for case_idx, case in enumerate(CASES):
        np.savez(output_dir / f"case{case_idx}_rank{rank}.npz", **run_case(case, group))
        print(f"done: {case.name}", flush=True)
    check_shards(group)
    check_refilled_mask(group)
    check_gathered_again(group)
    wrapping_checks.check_wrapped(group)
    if group is not None:
        check_comm(group)
        check_reduce_dtype(group)
    if groups.group_size(group) == 2:
        case = CpCase("larger keys", "causal_documents", 512, d_qk=64, d_v=64, seed=21)
        for keep_gathered in (True, False):
            # Each step has a mask tensor of its own, and a forward whose backward never comes. One tensor is 0.13 MB.
            growth = growth_bytes(lambda keep=keep_gathered: run_case(case, group, keep_gathered=keep))
            assert growth < 6e6, (keep_gathered, growth)
    if groups.group_size(group) == 4:
        # As in a data-parallel x context-parallel mesh: every process makes both groups, in the same order.
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair_idx = rank // 2
        results = run_case(CASES[PAIR_CASE_IDX], pairs[pair_idx])
        np.savez(output_dir / f"pair{pair_idx}_rank{rank % 2}.npz", **results)
    if group is not None:
        check_written(group)


main()
