# SPDX-License-Identifier: Apache-2.0
"""What a step shows of its transfers, from what the ranks measured of it beside itself with parts left out: a step
takes as long as its slowest rank, and what counts is its difference from its neighbours (`testing/gpu_cp_pairs.py`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

PHASES = ("fwd", "bwd")
_CUT = 0.1  # share of the differences, at either end, that a mean leaves out: a turn that something disturbed
Times = dict[str, dict[str, list[list[float]]]]  # way -> phase -> by turn: ms still, in that way, still again


def shown_fields(ranks: list[Times], transfers_ms: float) -> dict[str, Any]:
    """Fields of a record. Times in us are [mean, its standard error], of a phase beside the same one "still":

        <phase>_shown_us   as it is: what its transfers cost
        <phase>_paced_us   without copies: what waiting for each other costs
        <phase>_beside_us  with copies that nobody waits for: what they take of memory and links beside kernels

    `comm_hidden_pct`: of transfers_ms, the time that transfers take alone, what does not show; `copies_hidden_pct`:
    what does not show beside "paced".
    """
    fields: dict[str, Any] = {"num_turns": len(ranks[0]["moving"]["fwd"])}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for phase in PHASES:
        stills = []
        for name, way in (("shown", "moving"), ("paced", "paced"), ("beside", "beside")):
            before, itself, after = np.array([rank[way][phase] for rank in ranks]).max(axis=0).T  # ms, by turn
            stills += [before, after]
            mean, error = robust_mean(1e3 * (itself - (before + after) / 2))
            fields[f"{phase}_{name}_us"] = [round(mean, 2), round(error, 2)]
            found.setdefault(name, {})[phase] = mean, error
        fields[f"{phase}_still_ms"] = round(float(np.median(stills)), 4)
    shown, shown_error = _of_step(found["shown"])
    paced, paced_error = _of_step(found["paced"])
    for name, time_us, error_us in (
        ("comm", shown, shown_error),
        ("copies", shown - paced, math.hypot(shown_error, paced_error)),
    ):
        hidden, error = hidden_pct(time_us, error_us, transfers_ms)
        fields |= {f"{name}_hidden_pct": hidden, f"{name}_hidden_pct_error": error}
    return fields


def _of_step(phases: dict[str, tuple[float, float]]) -> tuple[float, float]:
    return sum(mean for mean, _ in phases.values()), math.hypot(*(error for _, error in phases.values()))


def hidden_pct(shown_us: float, error_us: float, transfers_ms: float) -> tuple[float, float]:
    """Percent, between 0 and 100, and its standard error."""
    if transfers_ms == 0:
        return 100.0, 0.0
    hidden = 1 - shown_us / (1e3 * transfers_ms)
    return round(100 * min(1.0, max(0.0, hidden)), 1), round(100 * error_us / (1e3 * transfers_ms), 1)


def robust_mean(x: NDArray[np.float64]) -> tuple[float, float]:
    """A trimmed mean and its standard error, from the variance of what takes the trimmed ends' place (Yuen, "The
    two-sample trimmed t for unequal population variances", 1974)."""
    ordered = np.sort(x)
    num_cut = int(_CUT * len(x))
    kept = ordered[num_cut : len(x) - num_cut]
    winsorized = np.clip(ordered, kept[0], kept[-1])
    spread = float(winsorized.std(ddof=1)) if len(x) > 1 else math.inf
    return float(kept.mean()), spread / ((1 - 2 * num_cut / len(x)) * math.sqrt(len(x)))
