# SPDX-License-Identifier: Apache-2.0
"""Experts split over ranks, and tokens sent to them by index, against PaddleNLP's dense dispatch on one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launch import launch

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("paddlenlp_expert_worker.py")
NUM_RANKS, NUM_EXPERTS = 4, 8
# fp32 rounding of a 2-layer model, relative to each gradient's largest value.
GRADIENT_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("experts")
    for num_ranks, mode in ((1, "data"), (NUM_RANKS, "data"), (NUM_RANKS, "sharding")):
        result = launch(WORKER, [str(output_dir), mode], num_ranks, output_dir, timeout_s=300)
        assert result.exit_code == 0, f"{num_ranks} ranks, {mode}: exit code {result.exit_code}\n{result.tail()}"
    return output_dir


def load(saved: Path, name: str, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(saved / f"{name}_rank{rank}.npz") as arrays:
        return dict(arrays)


def gradients_of(step: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x for name, x in step.items() if name not in ("loss", "norm") and not name.startswith("after.")}


def assert_same(name: str, gradient: np.ndarray, expected: np.ndarray) -> None:
    largest = np.abs(expected).max()
    assert largest > 0, f"{name} has no gradient: the comparison would see nothing"
    np.testing.assert_allclose(gradient / largest, expected / largest, atol=GRADIENT_TOLERANCE, err_msg=name)


def experts_of(rank: int, degree: int) -> set[int]:
    return {expert for expert in range(NUM_EXPERTS) if expert // (NUM_EXPERTS // degree) == rank % degree}


def held(names: set[str]) -> set[int]:
    return {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_gradients_are_those_of_the_dense_dispatch(saved: Path, degree: int, rank: int) -> None:
    """Degree 2 splits over the ranks of one sequence, with copies in the other replica; degree 4 over both replicas."""
    step, reference = gradients_of(load(saved, f"data{degree}", rank)), gradients_of(load(saved, "dense"))
    is_expert = {name for name in reference if ".experts." in name}
    own = {name for name in step if ".experts." in name}
    assert len(is_expert) == 2 * NUM_EXPERTS * 3 and len(own) == len(is_expert) // degree
    assert held(own) == experts_of(rank, degree)
    assert set(step) == own | (reference.keys() - is_expert)
    for name, gradient in step.items():
        assert_same(name, gradient, reference[name])


@pytest.mark.parametrize("degree", [2, 4])
def test_gradients_with_states_sharded_over_replicas(saved: Path, degree: int) -> None:
    """Each rank's optimizer has its own experts, and together the two replicas have everything else once."""
    reference = gradients_of(load(saved, "dense"))
    shared: dict[str, int] = {}
    for rank in range(NUM_RANKS):
        step = gradients_of(load(saved, f"sharding{degree}", rank))
        assert held(set(step)) == experts_of(rank, degree)
        for name, gradient in step.items():
            assert_same(name, gradient, reference[name])
            if ".experts." not in name:
                shared[name] = shared.get(name, 0) + 1
    assert shared == {name: 2 for name in reference if ".experts." not in name}  # on both ranks of one replica


@pytest.mark.parametrize("mode, degree", [("data", 1), ("data", 2), ("data", 4), ("sharding", 2), ("sharding", 4)])
def test_after_the_step_all_copies_are_the_same(saved: Path, mode: str, degree: int) -> None:
    steps = [load(saved, f"{mode}{degree}", rank) for rank in range(NUM_RANKS)]
    reference = load(saved, "dense")
    for rank, step in enumerate(steps):
        for name in (name for name in step if name.startswith("after.")):
            first = rank % degree if ".experts." in name else 0
            np.testing.assert_array_equal(step[name], steps[first][name], err_msg=name)
            # AdamW's first step moves a weight by about the learning rate, the same way as the reference's.
            np.testing.assert_allclose(step[name], reference[name], atol=3e-5, err_msg=name)


@pytest.mark.parametrize("mode, degree", [("data", 1), ("data", 2), ("data", 4), ("sharding", 2), ("sharding", 4)])
def test_loss_and_clipping_are_those_of_the_dense_dispatch(saved: Path, mode: str, degree: int) -> None:
    reference = load(saved, "dense")
    losses = [float(load(saved, f"{mode}{degree}", rank)["loss"]) for rank in range(NUM_RANKS)]
    assert losses[0] == losses[1] and losses[2] == losses[3] and losses[0] != losses[2]  # replicas of two ranks
    np.testing.assert_allclose((losses[0] + losses[2]) / 2, reference["loss"], rtol=2e-6)
    expected = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in gradients_of(reference).values()))
    norms = [load(saved, f"{mode}{degree}", rank)["norm"] for rank in range(NUM_RANKS)]
    assert all(norm.shape == (1,) for norm in norms)
    assert len({float(norm[0]) for norm in norms}) == 1  # bit for bit: shared weights must stay the same
    np.testing.assert_allclose(norms[0][0], expected, rtol=1e-5)
