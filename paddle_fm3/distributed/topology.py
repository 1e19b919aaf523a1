# SPDX-License-Identifier: Apache-2.0
"""Topology: which ranks share a node, that is, a fast link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Topology:
    """Attributes:
    node_of_rank: node index of each rank; nodes are numbered from 0 without gaps and may differ in size.
    """

    node_of_rank: tuple[int, ...]  # [num_ranks]

    def __post_init__(self) -> None:
        nodes = sorted(set(self.node_of_rank))
        if not nodes or nodes != list(range(len(nodes))):
            raise ValueError(f"Topology: node_of_rank={self.node_of_rank} must use every node index from 0 on")

    @classmethod
    def uniform(cls, num_ranks: int, ranks_per_node: int = 8) -> Topology:
        """Consecutive ranks fill nodes of the given size; the last node may be smaller."""
        if num_ranks < 1 or ranks_per_node < 1:
            raise ValueError(f"Topology: num_ranks={num_ranks} and ranks_per_node={ranks_per_node} must be >= 1")
        return cls(tuple(rank // ranks_per_node for rank in range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    def as_array(self) -> NDArray[np.int32]:
        return np.asarray(self.node_of_rank, np.int32)

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, owner in enumerate(self.node_of_rank) if owner == node]
