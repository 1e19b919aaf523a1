# SPDX-License-Identifier: Apache-2.0
"""Runs of several steps on 2 ranks: what is logged, and that a resumed run goes on where the first one went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("paddlenlp_run_worker.py")
MODELS = ("qwen2_moe", "llama", "qwen2_moe_split")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("run")
    for mode in ("first", "resumed"):
        result = launch(WORKER, [str(output_dir), mode], 2, output_dir, timeout_s=240)
        assert result.exit_code == 0, f"{mode} ended with {result.exit_code}\n{result.tail()}"
    return output_dir


def steps(saved: Path, mode: str, model: str, rank: int = 0) -> dict[int, dict[str, Any]]:
    lines = json.loads((saved / f"{mode}-{model}_rank{rank}.json").read_text())
    return {line["global_step"]: line for line in lines if "loss" in line}


@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_run_goes_on_with_the_same_losses(saved: Path, model: str) -> None:
    first, resumed = steps(saved, "first", model), steps(saved, "resumed", model)
    assert sorted(first) == [1, 2, 3, 4] and sorted(resumed) == [3, 4]
    for step in (3, 4):
        np.testing.assert_allclose(resumed[step]["loss"], first[step]["loss"], rtol=1e-6)
    losses = [first[step]["loss"] for step in sorted(first)]
    assert len(set(losses)) == 4, f"steps of different data and weights: {losses}"


def test_more_ranks_go_on_from_the_checkpoint_of_fewer(saved: Path) -> None:
    """Another cut and other plans; the model and the data are the same. (Optimizer states go by names that Paddle counts
    through, so the model must be the process's first one again.)"""
    result = launch(WORKER, [str(saved), "resumed_on_three", MODELS[0]], 3, saved, timeout_s=240)
    assert result.exit_code == 0, result.tail()
    first, resumed = steps(saved, "first", MODELS[0]), steps(saved, "resumed_on_three", MODELS[0], rank=2)
    assert sorted(resumed) == [3, 4]
    for step in (3, 4):
        np.testing.assert_allclose(resumed[step]["loss"], first[step]["loss"], rtol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_what_context_parallelism_cost_is_logged_with_the_loss(saved: Path, model: str, rank: int) -> None:
    for line in steps(saved, "first", model, rank).values():
        assert line["cp_plan_ms"] > 0 and line["cp_plan_wait_ms"] >= 0 and line["cp_wait_ms"] >= 0
        assert 0 <= line["cp_imbalance"] < 1
        assert line["cp_sent_mb"] > 0 and line["cp_received_mb"] > 0
        assert 0 <= line["cp_hidden_share"] <= 1
    # Both ranks plan alike; what one sends the other receives, once all of a step has moved.
    one, other = (list(steps(saved, "first", model, r).values()) for r in (rank, 1 - rank))
    assert [line["cp_imbalance"] for line in one] == [line["cp_imbalance"] for line in other]
    sent, received = sum(line["cp_sent_mb"] for line in one), sum(line["cp_received_mb"] for line in other)
    assert sent == pytest.approx(received, rel=1e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_batch_s_timeline_is_written_by_every_rank(saved: Path, rank: int) -> None:
    """Of one batch: two layers, each forward, recomputed and backward."""
    events = json.loads((saved / "timelines" / f"cp_timeline_rank{rank}.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {rank}
    assert sum(name == "forward step 0" for name in names) == 4
    assert any(name.startswith("dK/dV sums stage") for name in names)


@pytest.mark.parametrize("model", MODELS)
def test_no_file_of_a_checkpoint_is_written_by_two_ranks(saved: Path, model: str) -> None:
    one, other = (json.loads((saved / f"paths-{model}_rank{rank}.json").read_text()) for rank in range(2))
    assert any("optimizer" in path for path in one) and not set(one) & set(other)


def test_a_checkpoint_of_split_experts_holds_all_of_them(saved: Path) -> None:
    from paddle_fm3.integration.paddlenlp.expert_checkpoint import read_experts

    folder = saved / "qwen2_moe_split" / "checkpoint-2"
    experts = read_experts(folder)
    found = {tuple(name.partition(".mlp.experts.")[::2]) for name in experts}
    assert len(found) == len(experts) == 2 * 4 * 3  # layers, experts, matrices
    # Split or whole, it is the same training.
    for step in (1, 2, 3, 4):
        whole, split = (steps(saved, "first", name)[step]["loss"] for name in ("qwen2_moe", "qwen2_moe_split"))
        np.testing.assert_allclose(split, whole, rtol=1e-5)
    (folder / "experts_001_of_002.pdparams").rename(folder / "elsewhere.pdparams")
    with pytest.raises(FileNotFoundError, match="has 1 of 2 files of split experts"):
        read_experts(folder)
    with pytest.raises(FileNotFoundError, match="has no experts_"):
        read_experts(saved)
