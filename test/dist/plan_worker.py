# SPDX-License-Identifier: Apache-2.0
"""One rank of test_plan_attention.py: runs every case as its plan says; saves out, lse, dq, dk, dv and bytes moved.

Usage: plan_worker.py OUTPUT_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from plan_cases import CASES, PlanCase

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.planned import plan_attention, transport_bytes
from paddle_fm3.distributed.trace import Trace

TIMEOUT_S = 30.0


def moved_bytes(group: object | None) -> np.ndarray:
    """[2, num_ranks] sent and received so far."""
    return np.zeros((2, 1), np.int64) if group is None else np.array(transport_bytes(group))


def run_case(case: PlanCase, group: object | None, trace: Trace | None = None) -> dict[str, np.ndarray]:
    num_ranks, rank = groups.group_size(group), groups.group_rank(group)
    call, plan = case.call, case.plan(num_ranks)
    rows = plan.partition.rows_of(rank)
    tensors = call.tensors()
    q, k, v, dout = (paddle.to_tensor(tensors[name][:, rows]).astype(call.dtype) for name in ("q", "k", "v", "dout"))
    dlse = paddle.to_tensor(tensors["dlse"][:, :, rows])  # [b, h_q, s_local]
    for x in (q, k, v):
        x.stop_gradient = False
    bounds = call.bounds()
    if bounds is not None:
        bounds = paddle.to_tensor(bounds[:, :, rows] if call.frame == "own" else bounds)
    block_mask = call.block_mask()
    before = moved_bytes(group)
    out, lse = flashmask_cp_attention(
        q, k, v, bounds, causal=call.causal, group=group, plan=plan, return_softmax_lse=True, timeout_s=TIMEOUT_S,
        block_mask=None if block_mask is None else paddle.to_tensor(block_mask), reduce_dtype=call.reduce_dtype,
        trace=trace,
    )  # fmt: skip
    gathered = moved_bytes(group)
    paddle.autograd.backward([out, lse], [dout, dlse])
    reduced = moved_bytes(group)
    results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    arrays = {name: x.astype("float32").numpy() for name, x in results.items()}
    arrays["gather_sent"], arrays["gather_received"] = gathered - before
    arrays["reduce_sent"], arrays["reduce_received"] = reduced - gathered
    return arrays


def check_names_and_repeats(group: object | None) -> None:
    """plan_attention makes the plan of the case, and a second run gives the same bits."""
    num_ranks = groups.group_size(group)
    case = CASES[0]
    plan = case.plan(num_ranks)
    again = plan_attention(
        paddle.to_tensor(case.call.bounds()), causal=True, num_ranks=num_ranks, strategy=case.strategy,
        topology=plan.topology, options=case.options,
    )  # fmt: skip
    assert again == plan
    first, second = run_case(case, group), run_case(case, group)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def main() -> None:
    output_dir = Path(sys.argv[1])
    group = None
    if int(dist.get_world_size()) > 1:
        groups.enable_gloo_subgroups()
        dist.init_parallel_env()
        group = dist.new_group(list(range(dist.get_world_size())))
    rank = groups.group_rank(group)
    for case_idx, case in enumerate(CASES):
        print(f"case {case_idx}: {case.name}", flush=True)
        trace = Trace() if case_idx == 0 else None
        np.savez(output_dir / f"case{case_idx}_rank{rank}.npz", **run_case(case, group, trace))
        if trace is not None:
            trace.save(output_dir / f"trace_rank{rank}.json", rank)
    check_names_and_repeats(group)


if __name__ == "__main__":
    main()
