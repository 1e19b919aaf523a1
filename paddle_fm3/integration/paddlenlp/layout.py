# SPDX-License-Identifier: Apache-2.0
"""Layout: which GPU does what in a training run, as fleet must be told. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOPOLOGIES = ("hybrid", "expert")


@dataclass(frozen=True)
class Layout:
    """How the GPUs are used.

    Attributes:
        topology: "hybrid": fleet's usual grid, num_gpus = dp x sharding x cp x tp x pp, as PaddleNLP 3.0.0b4's flags
            set it; experts may be split over any consecutive ranks (--moe_expert_parallel).
            "expert": fleet's grid for expert parallelism (`ep_degree` > 1 in its hybrid_configs), where the
            context-parallel ranks are part of the sharding ranks: num_gpus = sharding x tp x pp and
            sharding = moe_sharding x ep; dp is 1.
        num_gpus, gpus_per_node: the cluster.
        gpu_memory_gib: memory of one GPU, which the estimate is held against.
        sharding_stage: 1 optimizer states, 2 gradients too, 3 weights too; 0 with sharding 1.
        expert_parallel_degree: ranks over which each layer's experts are split.
        moe_sharding_degree: topology "expert": ranks over which one expert's optimizer states are split.
    """

    topology: str
    num_gpus: int
    gpus_per_node: int
    gpu_memory_gib: float
    context_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    sharding_parallel_degree: int = 1
    sharding_stage: int = 0
    expert_parallel_degree: int = 1
    moe_sharding_degree: int = 1

    def __post_init__(self) -> None:
        check_choice("Layout", "topology", self.topology, TOPOLOGIES)
        for name, value in vars(self).items():
            if name.endswith("_degree") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Layout: {name}={value!r} must be a whole number >= 1")
        model_ranks = self.tensor_parallel_degree * self.pipeline_parallel_degree
        if self.topology == "hybrid":
            if self.moe_sharding_degree != 1:
                raise ValueError(
                    f"Layout: moe_sharding_degree={self.moe_sharding_degree} belongs to topology 'expert', not 'hybrid'"
                )
            self._check_split_experts(model_ranks)
            used = model_ranks * self.sharding_parallel_degree * self.context_parallel_degree
            if self.num_gpus % used:
                raise ValueError(
                    f"Layout: sharding {self.sharding_parallel_degree} x cp {self.context_parallel_degree} x tp "
                    f"{self.tensor_parallel_degree} x pp {self.pipeline_parallel_degree} = {used} must divide "
                    f"num_gpus={self.num_gpus}"
                )
        else:
            self._check_expert_topology(model_ranks)
        if (self.sharding_parallel_degree > 1) != (self.sharding_stage > 0):
            raise ValueError(
                f"Layout: sharding_stage={self.sharding_stage} with "
                f"sharding_parallel_degree={self.sharding_parallel_degree}; "
                "a stage (1, 2, 3) belongs to a degree above 1"
            )
        if self.num_gpus % self.gpus_per_node and self.num_gpus > self.gpus_per_node:
            raise ValueError(f"Layout: num_gpus={self.num_gpus} is no multiple of gpus_per_node={self.gpus_per_node}")

    def _check_split_experts(self, model_ranks: int) -> None:
        degree = self.expert_parallel_degree
        if self.num_gpus % degree:
            raise ValueError(f"Layout: expert_parallel_degree={degree} must divide num_gpus={self.num_gpus}")
        if degree > 1 and (model_ranks > 1 or self.sharding_stage > 1):
            raise ValueError(
                f"Layout: expert_parallel_degree={degree} in topology 'hybrid' is served with tensor and pipeline "
                f"degree 1 and sharding stage 0 or 1; got tp {self.tensor_parallel_degree}, pp "
                f"{self.pipeline_parallel_degree}, stage {self.sharding_stage}"
            )

    def _check_expert_topology(self, model_ranks: int) -> None:
        if self.sharding_parallel_degree * model_ranks != self.num_gpus:
            raise ValueError(
                f"Layout: topology 'expert' needs sharding {self.sharding_parallel_degree} x tp "
                f"{self.tensor_parallel_degree} "
                f"x pp {self.pipeline_parallel_degree} = num_gpus={self.num_gpus}"
            )
        if self.moe_sharding_degree * self.expert_parallel_degree != self.sharding_parallel_degree:
            raise ValueError(
                f"Layout: moe_sharding {self.moe_sharding_degree} x ep {self.expert_parallel_degree} must equal "
                "sharding "
                f"{self.sharding_parallel_degree}"
            )
        if self.sharding_parallel_degree % self.context_parallel_degree:
            raise ValueError(
                f"Layout: context_parallel_degree={self.context_parallel_degree} must divide sharding "
                f"{self.sharding_parallel_degree}: topology 'expert' takes its ranks from there"
            )
        if self.expert_parallel_degree == 1:
            raise ValueError("Layout: topology 'expert' needs expert_parallel_degree > 1; fleet builds it for no other")

    @property
    def num_replicas(self) -> int:
        """Groups that work on different sequences: data parallel x sharding, context parallelism taken out."""
        return self.num_gpus // (
            self.context_parallel_degree * self.tensor_parallel_degree * self.pipeline_parallel_degree
        )

    @property
    def data_parallel_degree(self) -> int:
        """What fleet is told as dp_degree."""
        if self.topology == "expert":
            return 1
        return self.num_replicas // self.sharding_parallel_degree

    @property
    def context_ranks_per_node(self) -> int:
        """Context-parallel ranks of one group that share a node, its ranks being neighbours (--cp_nodes)."""
        return min(self.context_parallel_degree, max(1, self.gpus_per_node // self.tensor_parallel_degree))

    @property
    def nodes_per_context_group(self) -> int:
        """Nodes a context-parallel group spans, its ranks being neighbours (the planner's --nodes)."""
        ranks = self.context_parallel_degree * self.tensor_parallel_degree
        return max(1, -(-ranks // self.gpus_per_node))

    def fleet_hybrid_configs(self) -> dict[str, Any]:
        """What `fleet.init` takes as ``strategy.hybrid_configs`` (Paddle 3.3.1)."""
        common = {
            "dp_degree": self.data_parallel_degree,
            "mp_degree": self.tensor_parallel_degree,
            "pp_degree": self.pipeline_parallel_degree,
            "sharding_degree": self.sharding_parallel_degree,
        }
        if self.topology == "hybrid":
            return {
                **common,
                "sep_degree": self.context_parallel_degree,
                "order": ["dp", "pp", "sharding", "sep", "mp"],
            }
        return {
            **common,
            "sep_degree": 1,
            "cp_degree": self.context_parallel_degree,
            "ep_degree": self.expert_parallel_degree,
            "moe_sharding_degree": self.moe_sharding_degree,
            "order": ["pp", "moe_sharding", "ep", "dp", "sharding", "sep", "cp", "mp"],
        }


def check_choice(who: str, name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{who}: {name}={value!r} is unknown; known: {', '.join(legal)}")
