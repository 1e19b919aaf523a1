# SPDX-License-Identifier: Apache-2.0
"""Tables 2, 3 and 8: localisation, balance and scheduling latency, run for real on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from paddle_fm3.commands._progress import Progress
from paddle_fm3.distributed.balance import SearchEffort, balance_chunks
from paddle_fm3.distributed.balance_paper import ipo
from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.localize import local_rows_before, localize_mask
from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import mask_digest
from paddle_fm3.distributed.planner import build_plan, default_chunk_rows
from paddle_fm3.distributed.timing import simulate_time
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.schedule import build_schedule
from reproduce_parts import paper, samples

Fields = dict[str, Any]


def timed_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin_s) * 1e3)
    return median(times)


def table_2(*, is_quick: bool) -> list[Fields]:
    """Localisation time over n_r chunks a rank and N_K keys: linear in keys, and its growth with chunks."""
    lengths = (32768, 262144) if is_quick else (32768, 65536, 131072, 262144, 524288)
    found = []
    with Progress("table 2", len(lengths) * 3) as progress:
        for s in lengths:
            rng = np.random.default_rng(s)
            lt_begin = np.sort(rng.integers(0, s + 1, s)).astype(np.int32)
            mask = samples.builders.eviction(np.maximum(lt_begin, np.arange(s) + 1)[None, None].clip(0, s))
            for num_chunks in (1, 4, 16):
                progress.step(f"s={s}, {num_chunks} chunks")
                partition = interleaved(s, num_chunks)
                ms = timed_ms(lambda: localize_mask(mask, partition, 1), 5 if is_quick else 15)  # noqa: B023
                local = localize_mask(mask, partition, 1)
                found.append(
                    {
                        "bench": "plan", "mask": "eviction", "p": 16, "s": s, "chunk": s // (16 * num_chunks),
                        "chunks_a_rank": num_chunks, "ms_median": ms, "parts_ms": {"localize": ms},
                        "bytes_communicated": 0, "result_bytes": 4 * local.lt_begin.nbytes,
                        "refcheck": is_localised_right(mask, partition, local),
                    }
                )  # fmt: skip
    return found


def interleaved(s: int, chunks_a_rank: int, num_ranks: int = 16) -> Partition:
    num_chunks = chunks_a_rank * num_ranks
    begins = tuple(s * i // num_chunks for i in range(num_chunks + 1))
    return Partition(begins, tuple(i % num_ranks for i in range(num_chunks)), num_ranks)


def is_localised_right(mask: Any, partition: Partition, local: Any) -> bool:
    """64 random columns, row by row: hidden locally iff hidden globally."""
    rows = partition.rows_of(1)
    local_row = np.arange(len(rows))
    for k_idx in np.random.default_rng(0).integers(0, mask.s_k, 64).tolist():
        hidden = (mask.lt_begin[0, 0, k_idx] <= rows) & (rows < mask.lt_end[0, 0, k_idx]) | (rows < k_idx)
        bounds = [getattr(local, name)[0, 0, k_idx] for name in ("lt_begin", "lt_end", "ut_begin", "ut_end")]
        found = (bounds[0] <= local_row) & (local_row < bounds[1]) | (bounds[2] <= local_row) & (local_row < bounds[3])
        if not np.array_equal(hidden, found):
            return False
    return len(rows) == local.s_q == int(local_rows_before(partition, 1)[-1])


def table_3(*, is_quick: bool) -> list[Fields]:
    """The balance ablation on random weights, uniform in [1, w_max], with gaps to a proven bound besides."""
    found = []
    algorithms = {"lpt": 1, "p2": 2, "p3": 3, "fm3": None}
    for row, (num_chunks, num_ranks, kappa, w_max, instances) in paper.TABLE_3_SETTINGS.items():
        instances = 20 if is_quick else instances
        rng = np.random.default_rng(1)
        weights = rng.integers(1, w_max + 1, (instances, num_chunks)).astype(np.int64)
        capacity, speed = np.full(num_ranks, kappa, np.int32), np.ones(num_ranks)
        bounds = np.array([planner().lower_bound(one, capacity, speed) for one in weights])
        loads, ms, is_fine = {}, {}, {}
        with Progress(f"table 3, {row}", len(algorithms) * instances) as progress:
            for name, last_phase in algorithms.items():
                loads[name], ms[name], is_fine[name] = np.zeros(instances), 0.0, True
                for index, one in enumerate(weights):
                    progress.step(name)
                    begin_s = time.perf_counter()
                    if last_phase is None:
                        result = balance_chunks(one, num_ranks, capacities=[kappa] * num_ranks, effort=SearchEffort())
                        ranks = np.asarray(result.chunk_ranks)
                    else:
                        ranks = np.asarray(ipo(one, num_ranks, last_phase=last_phase)[0])
                    ms[name] += (time.perf_counter() - begin_s) * 1e3 / instances
                    loads[name][index] = np.bincount(ranks, one, minlength=num_ranks).max()
                    is_fine[name] &= bool((np.bincount(ranks, minlength=num_ranks) == kappa).all())
                    is_fine[name] &= bool(loads[name][index] >= bounds[index] - 1e-9)
        best_of_paper = np.minimum.reduce([loads[name] for name in ("lpt", "p2", "p3")])
        best = np.minimum(best_of_paper, loads["fm3"])
        for name in algorithms:
            found.append(
                {
                    "bench": "balance", "row": row, "algo": name, "instances": instances,
                    "subopt_vs_best_pct": 100 * float((loads[name] > best).mean()),
                    "max_gap_vs_best_pct": 100 * float((loads[name] / best - 1).max()),
                    "subopt_vs_paper_best_pct": 100 * float((loads[name] > best_of_paper).mean()),
                    "max_gap_vs_paper_best_pct": 100 * float((loads[name] / best_of_paper - 1).max()),
                    "max_gap_vs_lb_pct": 100 * float((loads[name] / bounds - 1).max()),
                    "certified_optimal_pct": 100 * float((loads[name] <= bounds + 1e-9).mean()),
                    "ms_mean": ms[name], "refcheck": is_fine[name],
                }
            )  # fmt: skip
    return found


def table_8(*, is_quick: bool) -> list[Fields]:
    """Scheduling latency at P = 32, 256K tokens, the planner's own chunks, beside the predicted attention time."""
    s, num_ranks = 262144, 32
    topology, cost = Topology.uniform(num_ranks, 8), CostModel()
    num_samples = 1 if is_quick else 5
    found = []
    with Progress("table 8", len(samples.MASKS) * num_samples) as progress:
        for kind in samples.MASKS:
            times, attention_ms, is_fine = [], [], True
            for seed in range(num_samples):
                progress.step(f"{kind}, sample {seed}")
                mask = samples.sample_mask(kind, s, seed)

                digest = mask_digest(mask)  # the plan cache's part

                def build(mask: Any = mask, digest: str = digest) -> Any:
                    return build_plan(mask, num_ranks, topology=topology, cost=cost, digest=digest)

                times.append(timed_ms(build, 3 if is_quick else 7))
                plan = build()
                attention_ms.append(simulate_time(plan, mask, cost).total_us / 1e3)
                is_fine &= plan.plan_hash == build().plan_hash and counts_every_tile(plan, mask)
            found.append(
                {
                    "bench": "plan", "mask": kind, "p": num_ranks, "s": s, "chunk": default_chunk_rows(s, num_ranks),
                    "strategy": "fm3",
                    "ms_median": median(times), "ms_max": max(times), "parts_ms": {},
                    "simulated_attention_ms": median(attention_ms), "refcheck": is_fine,
                }
            )  # fmt: skip
    return found


def counts_every_tile(plan: Any, mask: Any) -> bool:
    """The plan's chunks hold every visited 128 x 128 tile of the mask once, and every chunk has an owner."""
    expected = int(build_schedule(mask).num_visible_tiles.sum())
    is_whole = all(begin % 128 == 0 for begin in plan.partition.chunk_begins_global[:-1])
    return not is_whole or int(plan.chunk_tiles[:, 0].sum()) == expected
