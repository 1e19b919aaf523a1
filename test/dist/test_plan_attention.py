# SPDX-License-Identifier: Apache-2.0
"""Plans executed by real ranks under Paddle's launcher against the fp64 oracle, and the bytes they moved."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from grid_checks import TOLERANCE, grid_cases
from launch import finished_launch
from plan_cases import CASES, NODES, PlanCase, case_indices, expected_bytes
from test_cp_attention import DTYPES, SEQUENCE_AXIS, oracle_of

from paddle_fm3.distributed.partition import LAYOUTS
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.testing.compare import assert_close_to_oracle

pytestmark = pytest.mark.dist
LAUNCH_TIMEOUT_S = 150


@functools.lru_cache(maxsize=64)
def oracle(case_idx: int) -> tuple:
    return oracle_of(CASES[case_idx].call)


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8])
def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    return finished_launch("plan_worker.py", request.param, tmp_path_factory, LAUNCH_TIMEOUT_S)


@pytest.mark.parametrize("case_idx", range(len(CASES)), ids=[case.name for case in CASES])
def test_matches_the_oracle_and_moves_the_plan_s_bytes(finished_run: tuple[int, Path], case_idx: int) -> None:
    num_ranks, output_dir = finished_run
    if case_idx not in case_indices(num_ranks):
        pytest.skip("a selection runs on 8 ranks")
    case = CASES[case_idx]
    by_rank = [dict(np.load(output_dir / f"case{case_idx}_rank{rank}.npz")) for rank in range(num_ranks)]
    compare(case_idx, case, by_rank)
    for rank, arrays in enumerate(by_rank):
        for name, expected in expected_bytes(case, num_ranks, rank).items():
            np.testing.assert_array_equal(arrays[name], expected, err_msg=f"{case.name}: rank {rank}, {name}")


def compare(case_idx: int, case: PlanCase, by_rank: list[dict[str, np.ndarray]]) -> None:
    num_ranks = len(by_rank)
    exact, low_precision = oracle(case_idx)
    plan = case.plan(num_ranks)
    for name, axis in SEQUENCE_AXIS.items():
        whole = np.full_like(getattr(exact, name), np.nan, dtype=np.float32)
        for rank in range(num_ranks):
            index = [slice(None)] * whole.ndim
            index[axis] = plan.partition.rows_of(rank)
            whole[tuple(index)] = by_rank[rank][name]
        dtype = np.float32 if name == "lse" else DTYPES[case.call.dtype]
        # As in test_cp_attention; in 16 bits every step rounds its own out, dq, dk and dv once.
        factor = 4.0 if case.call.dtype == "float32" else 2.0 + num_ranks
        assert_close_to_oracle(
            whole, getattr(exact, name), getattr(low_precision, name), name, (num_ranks, case.name),
            dtype=dtype, factor=factor,
        )  # fmt: skip


def test_trace_shows_compute_and_transfers(finished_run: tuple[int, Path]) -> None:
    num_ranks, output_dir = finished_run
    plan = CASES[0].plan(num_ranks)
    assert plan.topology.node_of_rank == NODES[num_ranks]
    for rank in range(num_ranks):
        events = json.loads((output_dir / f"trace_rank{rank}.json").read_text())["traceEvents"]
        track = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        spans = [(track[event["tid"]], event["dur"]) for event in events if event["ph"] == "X"]
        assert all(duration >= 0 for _, duration in spans)
        for name, column in (("send", 2), ("receive", 3)):
            wanted = (plan.gather[:, column] == rank).sum() + (plan.reduce[:, column] == rank).sum()
            assert sum(kind == name for kind, _ in spans) == wanted, (rank, name)
        assert any(kind == "compute" for kind, _ in spans)


def test_rows_arrive_while_the_rank_computes(finished_run: tuple[int, Path]) -> None:
    num_ranks, output_dir = finished_run
    if num_ranks != 2:
        pytest.skip("measured on two ranks")
    found = [np.load(output_dir / f"overlap_rank{rank}.npz") for rank in range(2)]
    overlapped, waiting = (sum(f[name] for f in found) for name in ("fm3_no_pruning", "fm3_no_overlap"))  # [repeats]
    assert overlapped.max() > 100, overlapped  # us; 4 MB take 2 ms or more
    assert waiting.max() == 0, waiting  # one step that waits for all rows: the measure can say no


def test_a_hundred_steps_take_no_memory(finished_run: tuple[int, Path]) -> None:
    num_ranks, output_dir = finished_run
    if num_ranks != 2:
        pytest.skip("measured on two ranks")
    for rank in range(2):
        # A step's buffers are about 0.1 MB: if each stayed behind, that would be 10 MB.
        assert np.load(output_dir / f"overlap_rank{rank}.npz")["growth_bytes"] < 4e6


def test_every_strategy_on_every_mask_is_the_one_device_operator(finished_run: tuple[int, Path]) -> None:
    num_ranks, output_dir = finished_run
    if num_ranks != 4:
        pytest.skip("measured on four ranks, two nodes of two")
    for rank in range(num_ranks):
        errors = json.loads((output_dir / f"grid_rank{rank}.json").read_text())
        assert len(errors) == len(grid_cases()) * (len(STRATEGIES) + len(LAYOUTS))
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


def test_halves_of_a_larger_world_are_groups_of_their_own(finished_run: tuple[int, Path]) -> None:
    """And what two groups compute at their own pace is equal bit by bit."""
    num_ranks, output_dir = finished_run
    if num_ranks < 4:
        pytest.skip("two halves need four ranks")
    halves = [
        [dict(np.load(output_dir / f"half{half}_rank{rank}.npz")) for rank in range(num_ranks // 2)]
        for half in range(2)
    ]
    compare(0, CASES[0], halves[0])
    for first, second in zip(*halves, strict=True):
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
