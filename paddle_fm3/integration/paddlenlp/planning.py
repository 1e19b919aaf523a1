# SPDX-License-Identifier: Apache-2.0
"""Plans for a batch: one cut of the sequence, and for each of its masks what travels under that cut. NumPy only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.cache import PlanCache
from paddle_fm3.distributed.cost import DEFAULT_COST, CostModel
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planner import build_plan
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.integration.paddlenlp.masks import LayerMasks, masks_of_batch
from paddle_fm3.mask.column_mask import ColumnMask

_plans = PlanCache()


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """How one batch is cut and moved.

    Attributes:
        plans: one a mask, all with the same partition.
        imbalance: latest rank over the mean rank, minus 1, by the work of all layers together.
        plan_ms: what making it took.
    """

    plans: tuple[CpPlan, ...]
    imbalance: float
    plan_ms: float

    @property
    def partition(self) -> Partition:
        return self.plans[0].partition


def plan_batch(
    indices: NDArray[np.int32],
    masks: LayerMasks,
    num_ranks: int,
    strategy: str,
    topology: Topology,
    cost: CostModel = DEFAULT_COST,
) -> BatchPlan:
    """The plan of a batch. Pure: every rank that has the same batch gets the same plan.

    The cut balances the summed work of the masks, each counted as often as layers use it. The transfers are each
    mask's own: a layer with a window fetches no row that only full layers see.

    Args:
        indices: int32 ``attn_mask_startend_row_indices`` of the batch.
        masks: which layer uses which of them.
        cost: rates that the plan is made for.

    Raises:
        ValueError: another number of masks than `masks` has; as `build_plan`.
    """
    began = time.perf_counter()
    bounds, causal = masks_of_batch(indices)
    if len(bounds) != masks.num_masks:
        raise ValueError(
            f"paddle_fm3: the batch has {len(bounds)} masks; --mask_layers {','.join(masks.layers)} names "
            f"{masks.num_masks}. Was the collator given the same masks?"
        )
    columns = [ColumnMask.from_bounds(each, is_causal=causal, s_q=each.shape[2]) for each in bounds]
    shares = masks.shares()
    whole = _plans.get(_stacked(columns, shares), num_ranks, topology=topology, strategy=strategy, cost=cost)
    if len(columns) == 1:
        plans: tuple[CpPlan, ...] = (whole,)
    else:
        plans = tuple(
            build_plan(each, num_ranks, topology=topology, strategy=strategy, cost=cost, partition=whole.partition)
            for each in columns
        )
    return BatchPlan(plans, whole.imbalance, (time.perf_counter() - began) * 1e3)


def _stacked(masks: Sequence[ColumnMask], shares: Sequence[int]) -> ColumnMask:
    """The masks, each as often as its share, as batch entries of one: the planner adds up the work of a batch."""
    repeated = [mask for mask, share in zip(masks, shares, strict=True) for _ in range(share)]
    if len(repeated) == 1:
        return repeated[0]
    names = ("lt_begin", "lt_end", "ut_begin", "ut_end")
    bounds = {name: np.concatenate([getattr(mask, name) for mask in repeated]) for name in names}
    return replace(masks[0], **bounds)
