# SPDX-License-Identifier: Apache-2.0
"""RankPlan: what one rank executes of a CpPlan. `plan.py` says what the parts mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask

Int32Array = NDArray[np.int32]
TRANSFER_FIELDS = ("stage", "hop", "src_rank", "dst_rank", "k_begin_global", "num_rows", "src_row", "dst_row")


@dataclass(frozen=True)
class Transfer:
    """K and V (or dK and dV) of rows [k_begin_global, k_begin_global + num_rows), from buffer row to buffer row."""

    stage: int
    hop: int
    src_rank: int
    dst_rank: int
    k_begin_global: int
    num_rows: int
    src_row: int
    dst_row: int


@dataclass(frozen=True)
class Step:
    """One attention call over buffer rows [k_begin, k_end), once the gather's `stage` is in. May be empty."""

    stage: int
    k_begin: int
    k_end: int


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's share of a CpPlan.

    Attributes:
        rank: the rank.
        num_q_rows: rows it owns, as queries and as keys.
        num_k_rows: rows of its key buffer.
        key_ranges: (k_begin_global, num_rows) of the buffer's consecutive parts.
        stage_rows: buffer row where each stage begins, and the end.
        fwd_steps, bwd_steps: the attention calls.
        gather_sends, gather_recvs, reduce_sends, reduce_recvs: int32 ``[n, 8]`` rows of TRANSFER_FIELDS in the
            order (stage, hop, src, dst, dst_row), the same on both ends of every message.
        mask: the mask of its rows over its key buffer; s_q = num_q_rows, s_k = num_k_rows.
    """

    rank: int
    num_q_rows: int
    num_k_rows: int
    key_ranges: tuple[tuple[int, int], ...]
    stage_rows: tuple[int, ...]
    fwd_steps: tuple[Step, ...]
    bwd_steps: tuple[Step, ...]
    gather_sends: Int32Array
    gather_recvs: Int32Array
    reduce_sends: Int32Array
    reduce_recvs: Int32Array
    mask: ColumnMask

    def step_mask(self, step: Step) -> ColumnMask:
        """The mask of one step's key rows. A mask with a block_mask allows only steps over whole tiles."""
        return select_columns(self.mask, step.k_begin, step.k_end)

    def key_rows_global(self) -> NDArray[np.int64]:
        """Global index of each buffer row."""
        return np.concatenate(
            [np.arange(begin, begin + rows) for begin, rows in self.key_ranges] or [np.empty(0, np.int64)]
        )


def select_columns(mask: ColumnMask, k_begin: int, k_end: int) -> ColumnMask:
    """The mask over key columns [k_begin, k_end) of a mask without a causal rule.

    Raises:
        ValueError: the causal rule is on (columns have lost their distance to rows), or the cut divides a tile
            of the block_mask.
    """
    if mask.is_causal:
        raise ValueError("select_columns: the mask has the causal rule; localise it first")
    if (k_begin, k_end) == (0, mask.s_k):
        return mask
    block_mask = None
    if mask.block_mask is not None:
        if k_begin % BLOCK_MASK_TILE or (k_end % BLOCK_MASK_TILE and k_end != mask.s_k):
            raise ValueError(f"select_columns: [{k_begin}, {k_end}) divides a tile of the block_mask")
        block_mask = mask.block_mask[:, :, :, k_begin // BLOCK_MASK_TILE : -(-k_end // BLOCK_MASK_TILE)]
    return ColumnMask(
        mask.lt_begin[:, :, k_begin:k_end],
        mask.lt_end[:, :, k_begin:k_end],
        mask.ut_begin[:, :, k_begin:k_end],
        mask.ut_end[:, :, k_begin:k_end],
        s_q=mask.s_q,
        is_causal=False,
        block_mask=block_mask,
    )
