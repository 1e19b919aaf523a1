# SPDX-License-Identifier: Apache-2.0
"""Whether training through the kernels stays as near to exact attention as rounding lets it.

Every arm starts from the same parameters and sees the same batches; what is compared is the distance of its losses to
those of fp32 attention, beside the distance that dense attention with bf16 rounding has. Over the first steps that
distance is rounding, and each seed is judged. Later all arms go ways of their own (also the two dense ones), one seed
says nothing, and only means over several are judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
EARLY_STEPS = 30
MEAN_FACTOR, MAX_FACTOR = 1.5, 2.0  # of dense_bf16's distances
NORM_TOLERANCE = 0.01  # of the first step's gradient norm, before any parameter has moved
MIN_SEEDS = 5
FIELDS = ("loss_distance_early", "loss_distance_mean", "loss_distance_max")


def distances(losses: list[float], exact: list[float]) -> Record:
    """`loss_distance_early`, `_mean` and `_max`: of the first steps, of all, and of the worst."""
    apart = [abs(x - y) for x, y in zip(losses, exact, strict=True)]
    early = apart[:EARLY_STEPS]
    return dict(zip(FIELDS, (sum(early) / len(early), sum(apart) / len(apart), max(apart)), strict=True))


def faults_of_seed(arms: dict[str, Record]) -> list[str]:
    """What one seed says against fm3, before the arms part. `arms`: arm -> its line."""
    ours, allowed, exact = arms["fm3"], arms["dense_bf16"], arms["dense_fp32"]
    faults = []
    if not ours["loss_distance_early"] <= MEAN_FACTOR * allowed["loss_distance_early"]:  # also if it is NaN
        faults.append(
            f"seed {ours['seed']}: mean distance over {EARLY_STEPS} steps {ours['loss_distance_early']:.2e}, dense "
            f"bf16 {allowed['loss_distance_early']:.2e}"
        )
    if not abs(ours["grad_norm_first"] / exact["grad_norm_first"] - 1) <= NORM_TOLERANCE:
        faults.append(
            f"seed {ours['seed']}: first gradient norm {ours['grad_norm_first']}, fp32 {exact['grad_norm_first']}"
        )
    return faults


def by_seed(lines: Iterable[Record]) -> dict[int, dict[str, Record]]:
    """seed -> arm -> line, of seeds that have all three arms."""
    found: dict[int, dict[str, Record]] = {}
    for line in lines:
        found.setdefault(line["seed"], {})[line["impl"]] = line
    return {seed: arms for seed, arms in sorted(found.items()) if len(arms) == 3}


def faults(lines: Iterable[Record]) -> list[str]:
    """Everything that speaks against fm3 in a run; empty if nothing does."""
    seeds = by_seed(lines)
    found = [fault for arms in seeds.values() for fault in faults_of_seed(arms)]
    if len(seeds) < MIN_SEEDS:
        return [*found, f"only {len(seeds)} of {MIN_SEEDS} seeds: too few to judge whole runs"]
    for field, factor in (("loss_distance_mean", MEAN_FACTOR), ("loss_distance_max", MAX_FACTOR)):
        ours, allowed = (statistics.fmean(a[arm][field] for a in seeds.values()) for arm in ("fm3", "dense_bf16"))
        if not ours <= factor * allowed:
            found.append(f"{field}: {ours:.2e} over {len(seeds)} seeds, dense bf16 {allowed:.2e}; factor {factor}")
    return found
