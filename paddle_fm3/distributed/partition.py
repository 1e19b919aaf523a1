# SPDX-License-Identifier: Apache-2.0
"""Partition: which rank owns which chunk of the sequence. Pure data; the whole of context parallelism reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Partition:
    """A cut of [0, s) into consecutive chunks, each owned by one rank.

    A rank's local row order is its chunks in ascending global order, whatever the assignment: Theorem 1
    (section 3.2) needs that order to keep every hidden interval one interval after localisation.

    Attributes:
        chunk_begins_global: ascending row indices, first 0, one per chunk plus the end s (exclusive).
        chunk_ranks: owner of each chunk, in [0, num_ranks).
        num_ranks: number of ranks; a rank may own no chunk.
    """

    chunk_begins_global: tuple[int, ...]  # [num_chunks + 1]
    chunk_ranks: tuple[int, ...]  # [num_chunks]
    num_ranks: int

    def __post_init__(self) -> None:
        begins, ranks = self.chunk_begins_global, self.chunk_ranks
        if self.num_ranks < 1:
            raise ValueError(f"Partition: num_ranks={self.num_ranks} must be >= 1")
        if len(begins) != len(ranks) + 1:
            raise ValueError(f"Partition: {len(ranks)} chunks need {len(ranks) + 1} begins, got {len(begins)}")
        if begins[0] != 0 or any(begin >= end for begin, end in zip(begins, begins[1:], strict=False)):
            raise ValueError(f"Partition: chunk_begins_global={begins} must ascend strictly from 0")
        for chunk_id, rank in enumerate(ranks):
            if not 0 <= rank < self.num_ranks:
                raise ValueError(f"Partition: chunk {chunk_id} has rank {rank}, not in [0, {self.num_ranks})")

    @property
    def s(self) -> int:
        """Rows in the whole sequence."""
        return self.chunk_begins_global[-1]

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_ranks)

    def chunks_of(self, rank: int) -> list[tuple[int, int]]:
        """``(begin_global, end_global)`` of the rank's chunks, ascending.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"Partition: rank={rank} is not in [0, {self.num_ranks})")
        begins = self.chunk_begins_global
        return [(begins[i], begins[i + 1]) for i, owner in enumerate(self.chunk_ranks) if owner == rank]

    def rows_of(self, rank: int) -> NDArray[np.int64]:
        """Global index of each local row of the rank, ascending."""
        chunks = self.chunks_of(rank)
        return np.concatenate([np.arange(begin, end) for begin, end in chunks] or [np.empty(0, np.int64)])

    def num_rows(self, rank: int) -> int:
        return sum(end - begin for begin, end in self.chunks_of(rank))


def contiguous_partition(s: int, num_ranks: int) -> Partition:
    """One chunk a rank, lengths as equal as possible (Megatron all-gather's layout)."""
    return _assigned(s, num_ranks, list(range(num_ranks)))


def dual_chunk_partition(s: int, num_ranks: int) -> Partition:
    """2P chunks; rank r owns r and 2P-1-r, which evens out a plain causal mask ("zigzag")."""
    return _assigned(s, num_ranks, list(range(num_ranks)) + list(reversed(range(num_ranks))))


# Cuts that do not depend on the mask: name -> rows of s cut for num_ranks ranks.
LAYOUTS = {"dual_chunk": dual_chunk_partition, "contiguous": contiguous_partition}


def _assigned(s: int, num_ranks: int, ranks: list[int]) -> Partition:
    for name, value in (("s", s), ("num_ranks", num_ranks)):
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"Partition: {name}={value!r} must be a whole number >= 1")
    s, num_ranks = int(s), int(num_ranks)
    begins = [s * chunk_id // len(ranks) for chunk_id in range(len(ranks) + 1)]
    kept = [chunk_id for chunk_id in range(len(ranks)) if begins[chunk_id] < begins[chunk_id + 1]]
    return Partition(tuple(begins[chunk_id] for chunk_id in kept) + (s,), tuple(ranks[c] for c in kept), num_ranks)
