# SPDX-License-Identifier: Apache-2.0
"""A rank with another plan, mask, a failing kernel, a stall or a death in the middle of a planned step."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch_unsupervised

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("plan_failure_worker.py")
TIMEOUT_S = 3.0  # as in the worker


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[float, str]]]:
    """By rank: mode -> (seconds, error)."""
    output_dir = tmp_path_factory.mktemp("plan_failures")
    result = launch_unsupervised(WORKER, [str(output_dir)], 3, output_dir, timeout_s=120)
    assert result.exit_code == 3, result.tail()
    met = []
    for rank in range(3):
        lines = [line.split("|", 2) for line in (output_dir / f"rank{rank}.txt").read_text().splitlines()]
        met.append({mode: (float(seconds), error) for mode, seconds, error in lines})
    return met


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("other plan", "the ranks disagree: partition (digest) is plan "),
        ("other mask", "startend_row_indices (or block_mask) differ in content between ranks; digests: "),
    ],
)
def test_disagreement_is_one_message_on_every_rank(reports: list, mode: str, words: str) -> None:
    errors = {report[mode][1] for report in reports}
    assert len(errors) == 1, errors
    assert errors.pop().startswith(f"ValueError: flashmask_cp_attention: {words}")


def test_rows_of_another_length_are_refused_on_every_rank(reports: list) -> None:
    said = "ValueError: unshard_rows: rows by rank on axis 1 are [32, 33, 32]; the partition of s=96 for 3 ranks wants "
    assert [report["other rows"][1] for report in reports] == [f"{said}[32, 32, 32]"] * 3


def test_ranks_that_make_different_calls_are_told_at_once(reports: list) -> None:
    for report in reports:
        seconds, error = report["skips backward"]
        assert seconds < TIMEOUT_S and error.startswith("CommError: context parallelism: "), error
        assert "'comparison of the ranks' arguments' while rank" in error or "'dK/dV sums' while rank" in error, error
        assert "the ranks do not make the same calls in the same order" in error, error


def test_backwards_in_another_order_are_told_at_once(reports: list) -> None:
    """Of calls that look alike: their sums would fit each other, and be wrong."""
    for report in reports:
        seconds, error = report["other order"]
        assert seconds < TIMEOUT_S and error.startswith("CommError: context parallelism: "), error
        assert "in the backward of call " in error and "the ranks do not make the same calls in the same order" in error


def test_a_rank_that_comes_late_to_a_step_is_named(reports: list) -> None:
    """And the groups of the following cases work: nothing is stuck in gloo, which knows no timeouts but its own."""
    said = "gave up on 'comparison of shapes, masks and plans': no byte for 3 s; missing: rank 1 (dead or stalled)"
    for rank in (0, 2):
        seconds, error = reports[rank]["late"]
        assert said in error and TIMEOUT_S - 1 < seconds < TIMEOUT_S + 5, error
    assert said in reports[1]["late"][1]


def test_a_failing_kernel_is_reported_by_every_rank(reports: list) -> None:
    said = "rank 1 stopped: RuntimeError: broken kernel"
    assert reports[1]["kernel fails"][1] == "RuntimeError: broken kernel"
    for rank in (0, 2):
        seconds, error = reports[rank]["kernel fails"]
        assert said in error and error.startswith("CommError: ") and seconds < TIMEOUT_S, error


def test_a_stalled_rank_ends_the_step_with_one_message(reports: list) -> None:
    by_rank = [report["stalled"] for report in reports]
    for seconds, error in by_rank[::2]:
        assert TIMEOUT_S - 1 < seconds < TIMEOUT_S + 5, error
        assert "gave up on 'dK/dV sums: the end': no byte for 3 s; missing: messages of rank 1 (dead or st" in error
    # Whoever gave up first told the others; two may do so at once.
    assert by_rank[1][1] in {by_rank[0][1], by_rank[2][1]}


def test_a_dead_rank_is_named_at_once(reports: list) -> None:
    for rank in (0, 2):
        seconds, error = reports[rank]["killed"]
        assert "lost rank 1: " in error and error.startswith("CommError: "), error
        assert seconds < TIMEOUT_S
