# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree, die or stall: the same clear message everywhere, within a bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launch import LaunchResult, launch, launch_unsupervised

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("failure_worker.py")
TIMEOUT_S = 10.0  # as in the worker

# what rank 1 does differently -> what every rank must say
EXPECTED = {
    "heads": "the ranks disagree: query heads is 2 on rank 0, 4 on rank 1, 2 on rank 2",
    "head_dim": "query/key head_dim is 8 on rank 0, 16 on rank 1, 8 on rank 2",
    "dtype": "dtype is float32 on rank 0, bfloat16 on rank 1, float32 on rank 2",
    "mask content": "startend_row_indices (or block_mask) differ in content between ranks; digests:",
    "strategy": "strategy is dual_chunk on rank 0, contiguous on rank 1, dual_chunk on rank 2",
    "gradients": "what needs gradients is q, k, v on rank 0, none on rank 1, q, k, v on rank 2",
    "no tensor": "rank 1: q is a NoneType; expected a paddle.Tensor",
    "scale": "rank 1: softmax_scale is 'x'; expected a finite number",
    "reduce_dtype": "rank 1: reduce_dtype is 'fp32'; expected one of 'float32', 'input'",
    "long name": "rank 1: strategy='語",
    "own error": "rank 1: q.shape is ",
    "bounds dtype": "rank 1: startend_row_indices.dtype is int64; expected int32",
    "rows": "local rows by rank are [8, 9, 8]; the partition of s=25 wants ",
    "prepared masks": "startend_row_indices (or block_mask) differ in content between ranks; digests:",
    "columns": "startend_row_indices has [24, 8, 24] key columns by rank; wanted all s=24 on every rank",
}


def run(mode: str, num_ranks: int, tmp_path: Path) -> tuple[LaunchResult, list[list[str]], float]:
    began = time.monotonic()
    start = launch_unsupervised if mode != "disagree" else launch
    result = start(WORKER, [mode, str(tmp_path)], num_ranks, tmp_path, timeout_s=120)
    reports = [tmp_path / f"rank{rank}.txt" for rank in range(num_ranks)]
    lines = [report.read_text().splitlines() if report.exists() else [] for report in reports]
    return result, lines, time.monotonic() - began


def test_disagreement_gives_one_message_on_every_rank(tmp_path: Path) -> None:
    result, reports, _ = run("disagree", 3, tmp_path)
    assert result.exit_code == 0, result.tail()
    assert reports[0] == reports[1] == reports[2]
    assert reports[0][-1] == "done"
    said = dict(line.split(": ", 1) for line in reports[0][:-1])
    assert set(said) == set(EXPECTED)
    for name, words in EXPECTED.items():
        assert said[name].startswith("ValueError: flashmask_cp_attention: "), (name, said[name])
        assert words in said[name], (name, said[name])


def test_launcher_ends_the_others_when_a_rank_dies(tmp_path: Path) -> None:
    """Under Paddle's launcher the survivors may be ended before they can say anything; the job still ends."""
    began = time.monotonic()
    result = launch(WORKER, ["killed", str(tmp_path)], 2, tmp_path, timeout_s=120)
    assert result.exit_code not in (0, -9), f"ended with {result.exit_code} after {time.monotonic() - began:.0f} s"


@pytest.mark.parametrize("mode", ["killed", "stalled"])
def test_lost_rank_ends_the_step_in_bounded_time(mode: str, tmp_path: Path) -> None:
    result, reports, wall_s = run(mode, 2, tmp_path)
    assert result.exit_code not in (0, -9), f"ended with {result.exit_code} after {wall_s:.0f} s\n{result.tail()}"
    assert reports[0], f"rank 0 met nothing\n{result.tail()}"
    seconds, message = reports[0][0].split(" s: ", 1)
    assert float(seconds) < TIMEOUT_S + 5
    assert message.startswith("CommError: context parallelism: rank 0 of 2 gave up on 'comparison of shapes and masks'")
    assert "rank 1 did not arrive (dead or stalled)" in message
    if mode == "stalled":
        assert float(seconds) > TIMEOUT_S - 1 and f"no answer within {TIMEOUT_S:g} s" in message
        assert "refused: an earlier collective of this group failed" in reports[0][1]
