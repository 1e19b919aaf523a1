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
from cp_cases import CASES, CpCase

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention

TIMEOUT_S = 30.0


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
    how = {"partition": partition} if case.split == "scattered" else {"strategy": case.split}

    def attend() -> tuple[paddle.Tensor, paddle.Tensor]:
        return flashmask_cp_attention(
            q, k, v, bounds, causal=case.causal, group=group, return_softmax_lse=True, timeout_s=TIMEOUT_S, **how
        )

    attend()  # the second call finds the prepared mask: the two paths must agree
    out, lse = attend()
    paddle.autograd.backward([out, lse], [dout, dlse])
    results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.astype("float32").numpy() for name, x in results.items()}


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


main()
