# SPDX-License-Identifier: Apache-2.0
"""testing/training_rule.py: what is held against a training run, and what is not."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from paddle_fm3.testing import training_rule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import gpu_tables  # noqa: E402


def arms_of(seed: int, early: float, late: float, norm: float = 10.0, rounding: float = 1e-3) -> dict[str, dict]:
    """Arms whose distances to fp32 are `rounding` (dense bf16) and `early` times that at first, then 10 times as much
    and `late` times that."""
    rng = random.Random(seed)
    exact = [5 - 0.02 * step for step in range(200)]
    drift = [rounding * (1 if step < training_rule.EARLY_STEPS else 10) * rng.uniform(0.9, 1.1) for step in range(200)]
    factors = [early if step < training_rule.EARLY_STEPS else late for step in range(200)]
    losses = {
        "dense_fp32": exact,
        "dense_bf16": [x + y for x, y in zip(exact, drift, strict=True)],
        "fm3": [x - y * z for x, y, z in zip(exact, drift, factors, strict=True)],
    }
    return {
        arm: {"impl": arm, "seed": seed, "grad_norm_first": norm if arm == "fm3" else 10.0, "loss_last": curve[-1],
              "run": "r", "date": "2026-01-02", "device": "GPU", "commit": "c", "steps": 200, "tokens_per_s": 1000 + seed,
              "losses": curve, **training_rule.distances(curve, exact)}
        for arm, curve in losses.items()
    }  # fmt: skip


def run_of(*seeds: dict[str, dict]) -> list[dict]:
    return [line for arms in seeds for line in arms.values()]


def test_distances_are_of_losses_at_equal_steps() -> None:
    found = training_rule.distances([1.0] * 30 + [3.0] * 10, [1.5] * 40)
    assert found == {"loss_distance_early": 0.5, "loss_distance_mean": 0.75, "loss_distance_max": 1.5}


def test_one_wild_seed_of_five_is_no_fault() -> None:
    """After the arms have parted a seed may go anywhere: 2.5 times here, 1.3 in the mean."""
    seeds = [arms_of(seed, 0.5, 2.5 if seed == 3 else 1.0) for seed in range(5)]
    assert training_rule.faults(run_of(*seeds)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"early": 1.6}, "seed 2: mean distance over 30 steps"),
        ({"early": float("nan")}, "seed 2: mean distance over 30 steps"),
        ({"norm": 10.2}, "seed 2: first gradient norm 10.2"),
    ],
    ids=["early", "nan", "norm"],
)
def test_each_seed_counts_before_the_arms_part(change: dict, said: str) -> None:
    seeds = [arms_of(seed, **{"early": 0.5, "late": 1.0, **(change if seed == 2 else {})}) for seed in range(5)]
    assert any(fault.startswith(said) for fault in training_rule.faults(run_of(*seeds)))
    assert training_rule.faults_of_seed(seeds[2]) and not training_rule.faults_of_seed(seeds[1])


def test_means_over_all_seeds_count() -> None:
    found = training_rule.faults(run_of(*(arms_of(seed, 1.0, 1.7) for seed in range(5))))
    assert len(found) == 1 and found[0].startswith("loss_distance_mean")
    found = training_rule.faults(run_of(*(arms_of(seed, 1.0, 2.2) for seed in range(5))))
    assert [fault.partition(":")[0] for fault in found] == ["loss_distance_mean", "loss_distance_max"]


def test_few_seeds_prove_nothing() -> None:
    lines = run_of(*(arms_of(seed, 0.5, 1.0) for seed in range(5)))
    assert training_rule.faults(lines[:-1]) == ["only 4 of 5 seeds: too few to judge whole runs"]  # an arm is missing


def test_table_names_the_verdict_and_takes_the_newest_commit() -> None:
    old = [{**line, "commit": "old", "date": "2026-01-01", "loss_last": 99.0} for line in run_of(arms_of(0, 9, 9))]
    good = run_of(*(arms_of(seed, 0.5, 1.0) for seed in range(5)))
    table = gpu_tables.training([*good, *old])
    assert "The rule holds." in table and "99.0" not in table and "| fm3 | 1.01" in table
    assert "over seeds (5)" in table
    assert "against single ones: seed 0: mean distance" in gpu_tables.training(old)
    assert "the first steps of each are as they should" in gpu_tables.training(run_of(arms_of(0, 0.5, 1.0)))
    bad = run_of(*(arms_of(seed, 1.6, 1.0) for seed in range(5)))
    assert "The rule is broken: seed 0: mean distance" in gpu_tables.training(bad)
