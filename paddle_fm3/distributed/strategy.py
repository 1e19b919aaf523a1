# SPDX-License-Identifier: Apache-2.0
"""Strategy: how a sequence is cut, moved and overlapped. Every row of the paper's comparisons is one value of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

LAYOUTS = ("balanced", "paper", "dual_chunk", "contiguous")
MOVES = ("gather", "ring")


@dataclass(frozen=True)
class Strategy:
    """Attributes:
    name: what results and errors call it.
    layout: who owns which chunk. "balanced": by work and traffic (balance.py); "paper": the paper's HCC-IPO
        (balance_paper.py); "dual_chunk": rank r owns chunks r and 2P-1-r of 2P; "contiguous": one chunk a rank.
    move: "gather": K/V rows go to the ranks that compute with them; "ring": every rank's rows pass all ranks,
        one neighbour a stage.
    is_pruned: move only rows that the mask needs; otherwise all.
    is_overlapped: compute starts with local rows while others are under way; otherwise it waits for all.
    is_hierarchical: a row crosses to a node once and spreads inside it; otherwise each rank fetches its own.
    """

    name: str
    layout: str = "balanced"
    move: str = "gather"
    is_pruned: bool = True
    is_overlapped: bool = True
    is_hierarchical: bool = True

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"Strategy {self.name!r}: layout={self.layout!r} is none of {LAYOUTS}")
        if self.move not in MOVES:
            raise ValueError(f"Strategy {self.name!r}: move={self.move!r} is none of {MOVES}")
        if self.move == "ring" and (self.is_pruned or self.is_hierarchical):
            raise ValueError(
                f"Strategy {self.name!r}: a ring moves every row to every neighbour; neither pruned nor hierarchical"
            )


FM3 = Strategy("fm3")

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        FM3,
        # Baselines. NCCL's all-gather is topology-aware: each row crosses to a node once.
        Strategy("dual_chunk_allgather", "dual_chunk", is_pruned=False, is_overlapped=False),
        Strategy("contiguous_allgather", "contiguous", is_pruned=False, is_overlapped=False),
        Strategy("ring", "dual_chunk", "ring", is_pruned=False, is_hierarchical=False),
        # The paper's own planner on our transport.
        Strategy("paper", "paper"),
        # One part left out (table 1's ablations).
        replace(FM3, name="fm3_no_balance", layout="dual_chunk"),
        replace(FM3, name="fm3_no_overlap", is_overlapped=False),
        replace(FM3, name="fm3_no_hierarchy", is_hierarchical=False),
        replace(FM3, name="fm3_no_pruning", is_pruned=False),
        # One part alone (table 1's additions to the baseline).
        Strategy("balance_only", "balanced", is_pruned=False, is_overlapped=False),
        Strategy("overlap_only", "dual_chunk"),
    )
}


def resolve_strategy(strategy: Strategy | str) -> Strategy:
    """The strategy itself, or the one of that name.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]
