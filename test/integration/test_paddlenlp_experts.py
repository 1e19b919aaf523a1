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
    for num_ranks in (1, NUM_RANKS):
        result = launch(WORKER, [str(output_dir)], num_ranks, output_dir, timeout_s=180)
        assert result.exit_code == 0, f"{num_ranks} ranks ended with {result.exit_code}\n{result.tail()}"
    return output_dir


def load(saved: Path, name: str, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(saved / f"{name}_rank{rank}.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_gradients_are_those_of_the_dense_dispatch(saved: Path, degree: int, rank: int) -> None:
    """Degree 2 splits over the ranks of one sequence, with copies in the other replica; degree 4 over both replicas."""
    step, reference = load(saved, f"split{degree}", rank), load(saved, "dense")
    is_expert = [name for name in reference if ".experts." in name]
    own = {name for name in step if ".experts." in name}
    assert len(is_expert) == 2 * NUM_EXPERTS * 3 and len(own) == len(is_expert) // degree
    held = {int(name.split(".experts.")[1].split(".")[0]) for name in own}
    assert held == {expert for expert in range(NUM_EXPERTS) if expert // (NUM_EXPERTS // degree) == rank % degree}
    assert set(step) == own | {name for name in reference if name not in is_expert}
    for name in step.keys() - {"loss", "norm"}:
        expected = reference[name]
        largest = np.abs(expected).max()
        assert largest > 0, f"{name} has no gradient: the comparison would see nothing"
        np.testing.assert_allclose(step[name] / largest, expected / largest, atol=GRADIENT_TOLERANCE, err_msg=name)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_loss_and_clipping_are_those_of_the_dense_dispatch(saved: Path, degree: int) -> None:
    reference = load(saved, "dense")
    losses = [float(load(saved, f"split{degree}", rank)["loss"]) for rank in range(NUM_RANKS)]
    assert losses[0] == losses[1] and losses[2] == losses[3] and losses[0] != losses[2]  # replicas of two ranks
    np.testing.assert_allclose((losses[0] + losses[2]) / 2, reference["loss"], rtol=2e-6)
    gradients = [values for name, values in reference.items() if name not in ("loss", "norm")]
    expected = np.sqrt(sum((values.astype(np.float64) ** 2).sum() for values in gradients))
    norms = [load(saved, f"split{degree}", rank)["norm"] for rank in range(NUM_RANKS)]
    assert all(norm.shape == (1,) for norm in norms)
    assert len({float(norm[0]) for norm in norms}) == 1  # bit for bit: shared weights must stay the same
    np.testing.assert_allclose(norms[0][0], expected, rtol=1e-5)
