# SPDX-License-Identifier: Apache-2.0
"""One rank of test_plan_attention.py: runs every case as its plan says; saves out, lse, dq, dk, dv and bytes moved.

Usage: plan_worker.py OUTPUT_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import grid_checks
import mesh_checks
import numpy as np
import paddle
import paddle.distributed as dist
from plan_cases import CASES, NODES, PlanCase, case_indices
from rank_inputs import TIMEOUT_S, RankInputs, growth_bytes, start

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.planned import plan_attention, transport_bytes
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.trace import Trace


def moved_bytes(group: object | None) -> np.ndarray:
    """[2, num_ranks] sent and received so far."""
    return np.zeros((2, 1), np.int64) if group is None else np.array(transport_bytes(group))


def run_case(case: PlanCase, group: object | None, trace: Trace | None = None) -> dict[str, np.ndarray]:
    plan = case.plan(groups.group_size(group))
    inputs = RankInputs.of(case.call, plan.partition.rows_of(groups.group_rank(group)), group)
    before = moved_bytes(group)
    out, lse = inputs.attend(plan=plan, trace=trace)
    gathered = moved_bytes(group)
    arrays = inputs.backward(out, lse)
    reduced = moved_bytes(group)
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


def main() -> None:
    output_dir = Path(sys.argv[1])
    group = start()
    rank, num_ranks = groups.group_rank(group), groups.group_size(group)
    for case_idx in case_indices(num_ranks):
        case = CASES[case_idx]
        print(f"case {case_idx}: {case.name}", flush=True)
        trace = Trace() if case_idx == 0 else None
        np.savez(output_dir / f"case{case_idx}_rank{rank}.npz", **run_case(case, group, trace))
        if trace is not None:
            trace.save(output_dir / f"trace_rank{rank}.json", rank)
    check_names_and_repeats(group)
    grid_checks.check_names(group)
    if num_ranks in (2, 4):
        grid_checks.check_gathered_again(group)
    if num_ranks == 2:
        found = {strategy: np.array(overlap(strategy, group)) for strategy in OVERLAP_STRATEGIES}
        np.savez(
            output_dir / f"overlap_rank{rank}.npz",
            growth_bytes=growth_bytes(lambda: run_case(CASES[0], group)),
            **found,
        )
    if num_ranks == 4:
        errors = grid_checks.grid(group, Topology(NODES[4]))
        (output_dir / f"grid_rank{rank}.json").write_text(json.dumps(errors))
    if num_ranks in (4, 8):
        # As in a data-parallel x context-parallel mesh: every process makes both groups, in the same order.
        half = num_ranks // 2
        halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, num_ranks)))]
        np.savez(output_dir / f"half{rank // half}_rank{rank % half}.npz", **run_case(CASES[0], halves[rank // half]))
    if num_ranks == 8:
        mesh_checks.check_meshes()
        mesh_checks.check_plain_tensors_with_a_mesh()
        mesh_checks.check_refusals()
    print("all checks done", flush=True)


if __name__ == "__main__":
    main()
