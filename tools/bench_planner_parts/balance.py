# SPDX-License-Identifier: Apache-2.0
"""Table 3: the paper's three phases and ours on random weights, against the best found and against a proven bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from reproduce_parts import paper

from paddle_fm3.distributed.balance import THOROUGH, SearchEffort, balance_chunks
from paddle_fm3.distributed.balance_paper import ipo

COLUMNS = (
    "row", "algo", "instances", "subopt_vs_paper_best_pct", "paper_subopt_pct", "max_gap_vs_paper_best_pct",
    "paper_gap_pct",
    "max_gap_vs_lb_pct", "certified_optimal_pct", "ms_mean", "refcheck",
)  # fmt: skip
SEED = 1
PAPERS = ("lpt", "p2", "p3")


def algorithms(num_ranks: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    def paper_phase(phase: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda weights: ipo(weights, num_ranks, last_phase=phase)[0]

    def ours(effort: SearchEffort) -> Callable[[np.ndarray], np.ndarray]:
        return lambda weights: np.asarray(balance_chunks(weights, num_ranks, effort=effort).chunk_ranks)

    phases = {name: paper_phase(phase) for phase, name in enumerate(PAPERS, 1)}
    return phases | {"fm3": ours(SearchEffort()), "fm3_thorough": ours(THOROUGH)}


def run(*, is_quick: bool) -> Iterator[dict[str, Any]]:
    for row, (num_chunks, num_ranks, kappa, w_max, instances) in paper.TABLE_3_SETTINGS.items():
        instances = 10 if is_quick else instances
        all_weights = np.random.default_rng(SEED).integers(1, w_max + 1, (instances, num_chunks))
        bounds = np.array([balance_chunks(w, num_ranks, effort=SearchEffort()).lower_bound for w in all_weights])
        loads, ms, is_fine = {}, {}, {}
        for name, assign in algorithms(num_ranks).items():
            loads[name], ms[name], is_fine[name] = np.zeros(instances), 0.0, True
            for index, weights in enumerate(all_weights):
                begin_s = time.perf_counter()
                ranks = assign(weights)
                ms[name] += (time.perf_counter() - begin_s) * 1e3 / instances
                loads[name][index] = np.bincount(ranks, weights, minlength=num_ranks).max()
                is_fine[name] &= bool((np.bincount(ranks, minlength=num_ranks) == kappa).all())
                is_fine[name] &= bool(loads[name][index] >= bounds[index])
        paper_best = np.minimum.reduce([loads[name] for name in PAPERS])
        best = np.minimum.reduce(list(loads.values()))
        for name, load in loads.items():
            published = paper.TABLE_3[row].get(name, (None, None))
            yield {
                "impl": "paper" if name in PAPERS else "fm3", "row": row, "algo": name, "instances": instances,
                "subopt_vs_best_pct": 100 * float((load > best).mean()),
                "max_gap_vs_best_pct": 100 * float((load / best - 1).max()),
                "subopt_vs_paper_best_pct": 100 * float((load > paper_best).mean()),
                "max_gap_vs_paper_best_pct": 100 * float((load / paper_best - 1).max()),
                "max_gap_vs_lb_pct": 100 * float((load / bounds - 1).max()),
                "mean_gap_vs_lb_pct": 100 * float((load / bounds - 1).mean()),
                "certified_optimal_pct": 100 * float((load <= bounds).mean()),
                "p3_wins": int((loads["p3"] < loads["p2"]).sum()) if name == "p3" else None,
                "paper_subopt_pct": published[0], "paper_gap_pct": published[1],
                "ms_mean": ms[name], "refcheck": is_fine[name],
            }  # fmt: skip
