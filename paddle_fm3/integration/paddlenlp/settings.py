# SPDX-License-Identifier: Apache-2.0
"""Settings of the PaddleNLP integration, and the little state that its replacements share while enabled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddle_fm3.distributed.strategy import STRATEGIES as PLANNED_STRATEGIES
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.integration.paddlenlp.masks import LayerMasks

if TYPE_CHECKING:
    from paddle_fm3.integration.paddlenlp.metrics import StepMetrics
    from paddle_fm3.integration.paddlenlp.planning import BatchPlan

# Of these two all keys are gathered with Paddle's collectives; the others are the planner's.
COLLECTIVE_STRATEGIES = ("dual_chunk", "contiguous")
CP_STRATEGIES = (*PLANNED_STRATEGIES, *COLLECTIVE_STRATEGIES)
DEFAULT_CP_STRATEGY = "fm3"
DEFAULT_PLANS_AHEAD = 2


@dataclass(frozen=True)
class FlashMask3Settings:
    """What the flag was turned on with.

    Attributes:
        cp_strategy: how the sequence is cut over the context-parallel ranks and its keys moved.
        cp_timeout_s: longest wait for another rank.
        cp_reduce_dtype: "float32", or "input" to sum dK and dV of the ranks in the model's dtype.
        deterministic: bitwise repeatable gradients.
        cp_nodes: which context-parallel ranks share a node (see `topology_of`); empty: ranks of one host do.
        cp_timeline: folder for the timeline of the last batch before each log, a file a rank; empty: none.
        plans_ahead: batches that the planning thread may be ahead of training; 0 plans when the batch is used.
        masks: what the batches' masks mean and which layer uses which.
        moe_dispatch: "index" sends each expert its own tokens; "dense" is PaddleNLP's layer as it is.
        expert_parallel: ranks over which each layer's experts are split, consecutive ones; 1: every rank has all.
    """

    cp_strategy: str = DEFAULT_CP_STRATEGY
    cp_timeout_s: float = 60.0
    cp_reduce_dtype: str = "float32"
    deterministic: bool = False
    cp_nodes: str = ""
    cp_timeline: str = ""
    plans_ahead: int = DEFAULT_PLANS_AHEAD
    masks: LayerMasks = LayerMasks()
    moe_dispatch: str = "index"
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        if self.cp_strategy not in CP_STRATEGIES:
            raise ValueError(
                f"FlashMask3Settings: cp_strategy={self.cp_strategy!r} is unknown; known: {', '.join(CP_STRATEGIES)}"
            )
        if not 0 < self.cp_timeout_s < math.inf:
            raise ValueError(f"FlashMask3Settings: cp_timeout_s={self.cp_timeout_s} must be > 0 and finite")
        if self.cp_reduce_dtype not in ("float32", "input"):
            raise ValueError(
                f"FlashMask3Settings: cp_reduce_dtype={self.cp_reduce_dtype!r} must be 'float32' or 'input'"
            )
        if self.plans_ahead < 0:
            raise ValueError(f"FlashMask3Settings: plans_ahead={self.plans_ahead} must be >= 0")
        if self.moe_dispatch not in ("index", "dense"):
            raise ValueError(f"FlashMask3Settings: moe_dispatch={self.moe_dispatch!r} must be 'index' or 'dense'")
        if self.expert_parallel < 1 or (self.expert_parallel > 1 and self.moe_dispatch == "dense"):
            raise ValueError(
                f"FlashMask3Settings: expert_parallel={self.expert_parallel} with moe_dispatch="
                f"{self.moe_dispatch!r}; it must be >= 1, and above 1 experts get their tokens by 'index'"
            )
        parse_nodes(self.cp_nodes)

    @property
    def is_planned(self) -> bool:
        return self.cp_strategy in PLANNED_STRATEGIES


def parse_nodes(text: str) -> int | tuple[int, ...] | None:
    """The flag --cp_nodes: "" -> None, "8" -> ranks a node, "0,0,1,1" -> node of each context-parallel rank.

    Raises:
        ValueError: anything else.
    """
    if not text.strip():
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
        if len(numbers) > 1:
            return Topology(numbers).node_of_rank
        if numbers[0] < 1:
            raise ValueError(text)
    except ValueError as error:
        raise ValueError(
            f"cp_nodes={text!r}: expected the number of ranks a node (8), or the node of each rank, every node from 0 "
            "on (0,0,1,1)"
        ) from error
    return numbers[0]


def topology_of(text: str, num_ranks: int, hosts: list[str] | None = None) -> Topology:
    """The node map that --cp_nodes stands for.

    Args:
        text: the flag.
        num_ranks: ranks of the context-parallel group.
        hosts: host of each rank; used where the flag is empty: ranks of one host share a node. None: one node.

    Raises:
        ValueError: the flag is malformed, or names the nodes of another number of ranks.
    """
    nodes = parse_nodes(text)
    if nodes is None:
        order = {host: node for node, host in enumerate(dict.fromkeys(hosts or ()))}
        return Topology(tuple(order[host] for host in hosts) if hosts else (0,) * num_ranks)
    if isinstance(nodes, int):
        return Topology.uniform(num_ranks, nodes)
    if len(nodes) != num_ranks:
        raise ValueError(
            f"cp_nodes={text!r} names the nodes of {len(nodes)} ranks; the context-parallel group has {num_ranks}"
        )
    return Topology(nodes)


@dataclass
class RunState:
    """What one replacement must tell another during a step.

    Attributes:
        s_global: length of the sequence that was split last; 0 before the first split.
        batch_plan: what it was split by, with a planned strategy.
        indices, masks, is_causal: the mask tensor of the batch that was split last, and its masks one by one.
        layer_idx: layer whose attention runs; None outside of one.
        metrics: figures since the last log.
    """

    s_global: int = 0
    batch_plan: BatchPlan | None = None
    indices: Any = None
    masks: list[Any] = field(default_factory=list)
    is_causal: bool = True
    layer_idx: int | None = None
    metrics: StepMetrics | None = None
