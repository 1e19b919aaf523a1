# SPDX-License-Identifier: Apache-2.0
"""What the demo says at its end: statistics of the packed masks, the comparison with one rank, table and picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3 import viz
from paddle_fm3.distributed.cost import CPU_COST
from paddle_fm3.distributed.localize import localize_mask
from paddle_fm3.distributed.partition import LAYOUTS, Partition
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.integration.paddlenlp.collator import PackedCollator
from paddle_fm3.integration.paddlenlp.masks import LayerMasks
from paddle_fm3.integration.paddlenlp.planning import plan_batch
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.schedule import build_schedule

# Runs on 1 and on several ranks add the same numbers in another order: fp32 rounding, about 1e-7 from the same weights.
# The rest is room for a token whose two best experts tie, and for weights that are handed over every few steps only. A
# wrong loss scale would show as a factor, a lost document mask as several per cent.
LOSS_TOLERANCE = 1e-4  # relative, every step
GRADIENT_TOLERANCE = 1e-3  # relative, every step


@dataclass(frozen=True)
class MaskStatistics:
    """Means over the sequences of a run."""

    documents_per_sequence: float
    density: float  # visible pairs / all pairs
    skipped_tiles: float  # share of all 128 x 128 tiles
    rank_load_tiles: list[float]  # [num_ranks], visible tiles a sequence


def indices_of(pack: list[list[int]], s: int) -> NDArray[np.int32]:
    """What the collator hands to the model for a pack, int32 [1, s]."""
    return PackedCollator(s)([{"documents": pack}])["attn_mask_startend_row_indices"]


def mask_of(pack: list[list[int]], s: int) -> ColumnMask:
    return ColumnMask.from_bounds(indices_of(pack, s)[:, None, :, None], is_causal=True, s_q=s)


def partition_of(pack: list[list[int]], s: int, strategy: str, num_ranks: int) -> Partition:
    """How the Trainer splits the pack, the ranks being processes of one machine."""
    if strategy in LAYOUTS:
        return LAYOUTS[strategy](s, num_ranks)
    one_node = Topology((0,) * num_ranks)
    return plan_batch(indices_of(pack, s), LayerMasks(), num_ranks, strategy, one_node, CPU_COST).partition


def mask_statistics(packs: list[list[list[int]]], s: int, strategy: str, num_ranks: int) -> MaskStatistics:
    densities, skipped, loads = [], [], []
    for pack in packs:
        mask = mask_of(pack, s)
        schedule = build_schedule(mask)
        densities.append(schedule.density)
        num_tiles = schedule.num_q_tiles * schedule.num_k_tiles
        skipped.append(1 - int(schedule.num_visible_tiles.sum()) / num_tiles)
        ranks, partition = range(num_ranks), partition_of(pack, s, strategy, num_ranks)
        loads.append([int(build_schedule(localize_mask(mask, partition, r)).num_visible_tiles.sum()) for r in ranks])
    return MaskStatistics(
        documents_per_sequence=float(np.mean([len(pack) for pack in packs])),
        density=float(np.mean(densities)),
        skipped_tiles=float(np.mean(skipped)),
        rank_load_tiles=[float(load) for load in np.mean(loads, axis=0)],
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def largest_differences(run: list[dict[str, Any]], single: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """field -> (largest relative difference, its step). Refuses to compare runs that saw different batches."""
    if len(run) != len(single) or any(a["batch"] != b["batch"] for a, b in zip(run, single, strict=True)):
        raise RuntimeError(f"the two runs saw different batches ({len(run)} and {len(single)} steps)")
    result = {}
    for field in ("loss", "gradient_norm"):
        relative = [abs(a[field] - b[field]) / max(abs(b[field]), 1e-12) for a, b in zip(run, single, strict=True)]
        # NaN must not pass as the smallest number.
        worst = int(np.argmax(np.nan_to_num(relative, nan=np.inf)))
        result[field] = (relative[worst], run[worst]["step"])
    return result


def steady_rates(metrics: list[dict[str, Any]]) -> tuple[float, float]:
    """(tokens a second, attention's share of the step) over all steps but the first, which warms up."""
    steady = metrics[1:] or metrics
    step_s = sum(record["step_s"] for record in steady)
    tokens = sum(record["tokens_per_s"] * record["step_s"] for record in steady)
    return tokens / step_s, sum(record["attention_s"] for record in steady) / step_s


def save_picture(
    path: Path, curves: dict[str, list[float]], mask: ColumnMask, load: list[float], strategy: str
) -> None:
    """Loss curve, the first packed mask, and visible tiles by rank."""
    figure, (left, middle, right) = viz.new_figure(3)
    viz.draw_loss(left, curves)
    viz.draw_mask(middle, mask, title="first packed sequence")
    viz.draw_rank_load(right, load, title=f"{strategy}: load by rank")
    viz.save(figure, path)


def table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name.ljust(width)}   {value}" for name, value in rows)
