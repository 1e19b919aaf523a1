# SPDX-License-Identifier: Apache-2.0
"""Named cases of planned context parallelism: a mask, a strategy and a node map. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from cp_cases import CpCase

from paddle_fm3.distributed.cost import CPU_COST
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.prepared import global_mask
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.topology import Topology

# Small chunks, several stages and no filled holes: many messages of unequal length.
OPTIONS = PlanOptions(chunk_rows=16, num_stages=3, coalesce_rows=1, piece_rows=1)
NODES = {1: (0,), 2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1), 8: (0, 0, 1, 1, 2, 2, 3, 3)}


@dataclass(frozen=True)
class PlanCase:
    """`call` gives the mask and the tensors; its `split` is not used."""

    call: CpCase
    strategy: str = "fm3"
    options: PlanOptions = field(default=OPTIONS)
    is_one_node: bool = False
    idle_rank: int | None = None  # may own no chunk

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.call.name}"

    def plan(self, num_ranks: int) -> CpPlan:
        call = self.call
        mask = global_mask(call.bounds(), call.causal, Partition((0, call.s), (0,), 1), call.b, call.block_mask())
        topology = Topology((0,) * num_ranks if self.is_one_node else NODES[num_ranks])
        return build_plan(
            mask, num_ranks, topology=topology, strategy=self.strategy, cost=CPU_COST, options=self._options(num_ranks)
        )

    def _options(self, num_ranks: int) -> PlanOptions:
        if self.idle_rank is None or num_ranks == 1:
            return self.options
        num_chunks = -(-self.call.s // (self.options.chunk_rows or 1))
        capacities = tuple(0 if rank == self.idle_rank else num_chunks for rank in range(num_ranks))
        return PlanOptions(chunk_rows=self.options.chunk_rows, num_stages=2, capacities=capacities)


# 12 chunks of 16: the paper's balance wants as many a rank.
GQA = CpCase("causal documents, GQA", "causal_documents", 192, h_q=4, h_kv=2, seed=1)
EVEN_CHUNKS = CpCase("causal documents, 24 chunks", "causal_documents", 384, seed=19)
PADDED = CpCase("padded tail, uneven", "padded_causal_documents", 117, seed=6)

CASES = [
    *(PlanCase(GQA, strategy) for strategy in STRATEGIES),
    PlanCase(EVEN_CHUNKS, "paper"),
    *(PlanCase(PADDED, strategy) for strategy in ("fm3", "ring", "contiguous_allgather")),  # a rank sees nothing
    PlanCase(GQA, is_one_node=True),
    PlanCase(CpCase("causal documents, batch 2, own columns", "causal_documents", 96, b=2, frame="own", seed=2)),
    PlanCase(CpCase("documents, mask per kv head", "documents", 128, h_q=4, h_kv=2, h_mask=2, seed=3)),
    PlanCase(CpCase("no indices", "none_causal", 80, seed=4)),
    PlanCase(CpCase("no indices, full", "none_full", 61, seed=4), "ring"),
    PlanCase(CpCase("window, d_v != d_qk", "causal_window", 144, d_v=24, seed=5)),
    PlanCase(CpCase("two bounds, causal", "random_c2", 61, seed=8)),
    PlanCase(CpCase("two bounds", "random_nc2", 61, h_mask=2, seed=9), "fm3_no_hierarchy"),
    PlanCase(CpCase("four bounds, batch 2", "random_nc4", 90, b=2, seed=10)),
    PlanCase(CpCase("four bounds, batch 2", "random_nc4", 90, b=2, seed=10), "ring"),
    PlanCase(CpCase("global and window", "global_window", 160, seed=11)),
    PlanCase(CpCase("a rank without rows", "causal_documents", 90, seed=12), idle_rank=0),
    PlanCase(CpCase("a rank without rows, every row to all", "documents", 90, seed=12), "fm3_no_pruning", idle_rank=0),
    PlanCase(CpCase("shorter than the ranks", "none_causal", 3, seed=14), options=PlanOptions(chunk_rows=1)),
    PlanCase(CpCase("bf16", "causal_documents", 128, h_q=4, h_kv=1, d_qk=32, d_v=32, dtype="bfloat16", seed=15)),
    PlanCase(
        CpCase("bf16, sums travel in bf16", "documents", 96, dtype="bfloat16", reduce_dtype="input", seed=17), "ring"
    ),
    PlanCase(CpCase("fp16", "documents", 96, d_qk=32, d_v=32, dtype="float16", reduce_dtype="input", seed=16)),
    PlanCase(
        CpCase("block mask", "causal_documents", 1536, h_q=1, h_kv=1, has_block_mask=True, seed=18),
        options=PlanOptions(chunk_rows=128, num_stages=2),
    ),
]


def case_indices(num_ranks: int) -> list[int]:
    """All cases; on 8 ranks, four nodes of two, those of the first masks, uneven and idle ranks, and bf16."""
    if num_ranks < 8:
        return list(range(len(CASES)))
    # The paper's balance wants as many chunks a rank: of the 12 it cannot make that.
    wanted = [(call, strategy) for call in (GQA, PADDED) for strategy in STRATEGIES if strategy != "paper"]
    wanted += [(EVEN_CHUNKS, "paper")]
    return [
        at
        for at, case in enumerate(CASES)
        if (case.call, case.strategy) in wanted or case.idle_rank is not None or case.name == "fm3, bf16"
    ]


def expected_bytes(case: PlanCase, num_ranks: int, rank: int) -> dict[str, np.ndarray]:
    """What the plan says this rank sends to and receives from each rank; float32 sums unless the case says else."""
    plan, call = case.plan(num_ranks), case.call
    element_bytes = 4 if call.dtype == "float32" else 2
    per_row = call.b * call.h_kv * (call.d_qk + call.d_v)
    row_bytes = {
        "gather": per_row * element_bytes,
        "reduce": per_row * (4 if call.reduce_dtype == "float32" else element_bytes),
    }
    expected = {}
    for direction, one_row in row_bytes.items():
        sent, received = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
        for transfer in plan.transfers(direction):
            if transfer.src_rank == rank:
                sent[transfer.dst_rank] += transfer.num_rows * one_row
            if transfer.dst_rank == rank:
                received[transfer.src_rank] += transfer.num_rows * one_row
        expected[f"{direction}_sent"], expected[f"{direction}_received"] = sent, received
    return expected
