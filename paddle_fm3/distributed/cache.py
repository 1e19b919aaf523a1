# SPDX-License-Identifier: Apache-2.0
"""PlanCache: plans by mask content, and plans for the next batch built while this one trains."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

from paddle_fm3.distributed.cost import DEFAULT_COST, CostModel
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import CpPlan, mask_digest
from paddle_fm3.distributed.planner import DEFAULT_OPTIONS, PlanOptions, build_plan
from paddle_fm3.distributed.strategy import FM3, Strategy, resolve_strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask.column_mask import ColumnMask


class PlanCache:
    """The last plans by (mask content, ranks, topology, strategy, cost, options, partition). Thread-safe.

    `get` builds what is missing. `prefetch` starts building on one background thread; the native planner
    releases the interpreter lock, so training goes on. A later `get` waits for it or takes it.
    """

    def __init__(self, max_plans: int = 16) -> None:
        if max_plans < 1:
            raise ValueError(f"PlanCache: max_plans={max_plans} must be >= 1")
        self._max_plans = max_plans
        self._plans: OrderedDict[Hashable, Future[CpPlan]] = OrderedDict()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self.num_hits = 0
        self.num_misses = 0

    def get(
        self,
        mask: ColumnMask,
        num_ranks: int,
        *,
        topology: Topology | None = None,
        strategy: Strategy | str = FM3,
        cost: CostModel = DEFAULT_COST,
        options: PlanOptions = DEFAULT_OPTIONS,
        partition: Partition | None = None,
    ) -> CpPlan:
        """The plan, from the cache or built now. Raises what `build_plan` raises; failures are not kept."""
        topology, strategy = topology or Topology.uniform(num_ranks), resolve_strategy(strategy)
        key = (mask_digest(mask), num_ranks, topology, strategy, cost, options, partition)
        future, is_mine = self._claim(key)
        if is_mine:
            _fulfil(future, mask, *key)
        return self._result(key if future.exception() else None, future)

    def prefetch(
        self,
        mask: ColumnMask,
        num_ranks: int,
        *,
        topology: Topology | None = None,
        strategy: Strategy | str = FM3,
        cost: CostModel = DEFAULT_COST,
        options: PlanOptions = DEFAULT_OPTIONS,
        partition: Partition | None = None,
    ) -> Future[CpPlan]:
        """Starts building in the background unless the plan is there; errors surface in `get` or `result()`."""
        topology, strategy = topology or Topology.uniform(num_ranks), resolve_strategy(strategy)
        key = (mask_digest(mask), num_ranks, topology, strategy, cost, options, partition)
        future, is_mine = self._claim(key)
        if is_mine:
            with self._lock:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, thread_name_prefix="paddle_fm3-plan")
            self._executor.submit(_fulfil, future, mask, *key)
        return future

    def __len__(self) -> int:
        return len(self._plans)

    def _claim(self, key: Hashable) -> tuple[Future[CpPlan], bool]:
        """The key's future, and whether the caller has to fulfil it."""
        with self._lock:
            if key in self._plans:
                self.num_hits += 1
                self._plans.move_to_end(key)
                return self._plans[key], False
            self.num_misses += 1
            future = self._plans[key] = Future()
            while len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
            return future, True

    def _result(self, failed_key: Hashable | None, future: Future[CpPlan]) -> CpPlan:
        if failed_key is not None:
            with self._lock:
                if self._plans.get(failed_key) is future:
                    del self._plans[failed_key]
        return future.result()


def _fulfil(
    future: Future[CpPlan],
    mask: ColumnMask,
    digest: str,
    num_ranks: int,
    topology: Topology,
    strategy: Strategy,
    cost: CostModel,
    options: PlanOptions,
    partition: Partition | None,
) -> None:
    try:
        plan = build_plan(
            mask, num_ranks, topology=topology, strategy=strategy, cost=cost, options=options, partition=partition,
            digest=digest,
        )  # fmt: skip
    except BaseException as error:  # noqa: BLE001  handed to whoever asks for the plan
        future.set_exception(error)
    else:
        future.set_result(plan)
