# SPDX-License-Identifier: Apache-2.0
"""One rank of test_plan_attention.py: runs every case as its plan says; saves out, lse, dq, dk, dv and bytes moved.

Usage: plan_worker.py OUTPUT_DIR
"""

from __future__ import annotations

import gc
import os
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


OVERLAP_S = 4096
OVERLAP_STRATEGIES = ("fm3_no_pruning", "fm3_no_overlap")


def overlap(strategy: str, group: object) -> list[float]:
    """Per repeat: microseconds in which rows of K and V arrived while this rank computed its forward."""
    plan = plan_attention(None, causal=True, num_ranks=group.nranks, s=OVERLAP_S, strategy=strategy)
    num_rows = plan.partition.num_rows(group.rank)
    q, k, v = (paddle.randn([1, num_rows, 4, 64]) for _ in range(3))
    overlaps = []
    for _ in range(8):
        trace = Trace()
        flashmask_cp_attention(q, k, v, causal=True, group=group, plan=plan, timeout_s=TIMEOUT_S, trace=trace)
        by_track = {name: [s for s in trace.spans if s.track == name] for name in ("compute", "receive")}
        assert by_track["compute"] and by_track["receive"]
        overlaps.append(
            sum(
                max(0.0, min(work.end_us, rows.end_us) - max(work.begin_us, rows.begin_us))
                for work in by_track["compute"]
                for rows in by_track["receive"]
            )
        )
    return overlaps


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_bytes(group: object) -> int:
    """Memory that 100 further steps add after 20."""
    before = 0
    for step in range(120):
        if step == 20:
            gc.collect()
            before = resident_bytes()
        run_case(CASES[0], group)
    gc.collect()
    return resident_bytes() - before


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
    if groups.group_size(group) == 2:
        found = {strategy: np.array(overlap(strategy, group)) for strategy in OVERLAP_STRATEGIES}
        np.savez(output_dir / f"overlap_rank{rank}.npz", growth_bytes=growth_bytes(group), **found)
    if groups.group_size(group) == 4:
        # As in a data-parallel x context-parallel mesh: every process makes both groups, in the same order.
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        np.savez(output_dir / f"pair{rank // 2}_rank{rank % 2}.npz", **run_case(CASES[0], pairs[rank // 2]))


if __name__ == "__main__":
    main()
