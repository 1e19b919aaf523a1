# SPDX-License-Identifier: Apache-2.0
"""How much work each chunk of query rows is, in O(s) time and memory (section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.native import planner
from paddle_fm3.mask.column_mask import ColumnMask


@dataclass(frozen=True, eq=False)
class MaskScan:
    """One native pass over a mask, shared by workload, grouping and routing.

    Attributes:
        mask: the mask over the whole sequence.
        chunk_begins_global: int32 ``[num_chunks + 1]``.
        native: the compiled scan.
    """

    mask: ColumnMask
    chunk_begins_global: NDArray[np.int32]
    native: Any

    def chunk_tiles(self) -> NDArray[np.int64]:
        """``[num_chunks, 2]``: tiles of 128 x 128 that some pair of is visible, and of these the tiles that hide
        nothing; summed over batch entries and mask heads. Row tiles start at each chunk's first row, key tiles
        at multiples of 128."""
        return self.native.chunk_tiles()

    def chunk_weights(self, cost: CostModel, tiles: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Cost of each chunk, forward and backward together, in integer units. ``[num_chunks]``.

        tiles: `chunk_tiles()`, where they are known already.
        """
        tiles = self.chunk_tiles() if tiles is None else tiles
        partial_cost, full_cost = cost.weights(self.mask.h_mask)
        return (tiles[:, 0] - tiles[:, 1]) * partial_cost + tiles[:, 1] * full_cost

    def needs(self) -> NDArray[np.int32]:
        """``[n, 4]`` rectangles (chunk_begin, chunk_end, k_begin, k_end): a key row is seen by some row of a
        chunk iff one of them holds both."""
        return self.native.needs()


def native_mask(mask: ColumnMask) -> Any:
    """The mask as the compiled planner reads it; shares memory where the arrays are contiguous."""
    bounds = [np.ascontiguousarray(bound) for bound in (mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end)]
    block_mask = None if mask.block_mask is None else np.ascontiguousarray(mask.block_mask)
    return planner().Mask(*bounds, mask.s_q, mask.is_causal, block_mask)


def scan_mask(mask: ColumnMask, chunk_begins_global: NDArray[np.int32]) -> MaskScan:
    """Scans the mask for the given cut of its query rows.

    Raises:
        ValueError: the chunks do not cover ``[0, mask.s_q)`` in ascending order.
    """
    begins = np.ascontiguousarray(chunk_begins_global, np.int32)
    if len(begins) < 2 or begins[0] != 0 or begins[-1] != mask.s_q or (np.diff(begins) <= 0).any():
        raise ValueError(f"scan_mask: chunk begins {begins} must ascend strictly from 0 to s_q={mask.s_q}")
    return MaskScan(mask, begins, planner().Scan(native_mask(mask), begins))
