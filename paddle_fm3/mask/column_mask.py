# SPDX-License-Identifier: Apache-2.0
"""ColumnMask: an attention mask stored as at most two hidden query intervals a key column.

Storage is O(s_k) integers instead of an s_q x s_k table (FlashMask-3, section 2.2). Every input format is
expanded here, once, to four named half-open bounds plus `is_causal`; nothing after this file looks at a
bound count again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32Array = NDArray[np.int32]

# (is_causal, number of bounds) -> what the last axis of startend_row_indices means.
BOUND_FORMS = {
    (True, 1): "[LTS]: rows [LTS, s_q) hidden, plus the causal rule",
    (True, 2): "[LTS, LTE]: rows [LTS, LTE) hidden, plus the causal rule",
    (False, 2): "[LTS, UTE]: rows [LTS, s_q) and [0, UTE) hidden",
    (False, 4): "[LTS, LTE, UTS, UTE]: rows [LTS, LTE) and [UTS, UTE) hidden",
}

BLOCK_MASK_TILE = 128  # side of one block_mask entry, in rows and columns


@dataclass(frozen=True, eq=False)
class ColumnMask:
    """Which query rows each key column is hidden from.

    Row q is hidden from key k iff ``lt_begin <= q < lt_end`` or ``ut_begin <= q < ut_end`` or
    (``is_causal`` and ``k > q + (s_k - s_q)``, the bottom-right aligned causal rule) or the
    ``block_mask`` entry of (q // 128, k // 128) is 0.

    Attributes:
        lt_begin, lt_end, ut_begin, ut_end: int32 ``[b, h_mask, s_k]``, each in ``[0, s_q]``.
            An interval with begin >= end is empty. Mask head of query head h is h // (h_q // h_mask).
        s_q: number of query rows.
        is_causal: whether the causal rule hides as well.
        block_mask: int32 ``[b, h_mask, ceil(s_q/128), ceil(s_k/128)]`` of 0 (hide) and 1, or None.
    """

    lt_begin: Int32Array  # [b, h_mask, s_k]
    lt_end: Int32Array  # [b, h_mask, s_k]
    ut_begin: Int32Array  # [b, h_mask, s_k]
    ut_end: Int32Array  # [b, h_mask, s_k]
    s_q: int
    is_causal: bool
    block_mask: Int32Array | None = None  # [b, h_mask, ceil(s_q/128), ceil(s_k/128)]

    def __post_init__(self) -> None:
        if self.s_q < 0:
            raise ValueError(f"ColumnMask: s_q={self.s_q} must be >= 0")
        shape = self.lt_begin.shape
        if len(shape) != 3:
            raise ValueError(f"ColumnMask: lt_begin.shape is {shape}; expected [b, h_mask, s_k]")
        for name in ("lt_begin", "lt_end", "ut_begin", "ut_end"):
            bound = getattr(self, name)
            if bound.shape != shape:
                raise ValueError(f"ColumnMask: {name}.shape is {bound.shape}; lt_begin has {shape}")
            if bound.dtype != np.int32:
                raise ValueError(f"ColumnMask: {name}.dtype is {bound.dtype}; expected int32")
            clipped = np.clip(bound, 0, self.s_q)
            clipped.setflags(write=False)
            object.__setattr__(self, name, clipped)
        if self.block_mask is not None:
            object.__setattr__(self, "block_mask", self._checked_block_mask(self.block_mask))

    def _checked_block_mask(self, block_mask: ArrayLike) -> Int32Array:
        block_mask = np.asarray(block_mask)
        tiles = (-(-self.s_q // BLOCK_MASK_TILE), -(-self.s_k // BLOCK_MASK_TILE))
        if block_mask.shape != (self.b, self.h_mask, *tiles):
            raise ValueError(
                f"ColumnMask: block_mask.shape is {block_mask.shape}; expected [b, h_mask, ceil(s_q/128), "
                f"ceil(s_k/128)] = {[self.b, self.h_mask, *tiles]}"
            )
        if not np.isin(block_mask, (0, 1)).all():
            raise ValueError("ColumnMask: block_mask holds values other than 0 (hide) and 1 (keep)")
        checked = block_mask.astype(np.int32)
        checked.setflags(write=False)
        return checked

    @property
    def b(self) -> int:
        return self.lt_begin.shape[0]

    @property
    def h_mask(self) -> int:
        return self.lt_begin.shape[1]

    @property
    def s_k(self) -> int:
        return self.lt_begin.shape[2]

    @classmethod
    def from_bounds(
        cls,
        startend_row_indices: ArrayLike,
        *,
        is_causal: bool,
        s_q: int,
        block_mask: ArrayLike | None = None,
    ) -> ColumnMask:
        """Expands ``startend_row_indices``, the format of ``paddle.nn.functional.flashmask_attention``.

        Args:
            startend_row_indices: int32 ``[b, h_mask, s_k, n]``; (is_causal, n) must be one of
                (True, 1), (True, 2), (False, 2), (False, 4). Values outside [0, s_q] are clipped.
            is_causal: whether keys after the query are hidden as well (bottom-right aligned).
            s_q: number of query rows.
            block_mask: optional 0/1 int ``[b, h_mask, ceil(s_q/128), ceil(s_k/128)]``; 0 hides the tile.

        Raises:
            ValueError: wrong dtype, rank, bound count or block_mask; the message names the value.
        """
        bounds = np.asarray(startend_row_indices)
        if bounds.dtype != np.int32:
            raise ValueError(f"ColumnMask: startend_row_indices.dtype is {bounds.dtype}; expected int32")
        if bounds.ndim != 4:
            raise ValueError(
                f"ColumnMask: startend_row_indices.shape is {bounds.shape}; expected [b, h_mask, s_k, n]"
            )
        num_bounds = bounds.shape[3]
        if (is_causal, num_bounds) not in BOUND_FORMS:
            legal = "; ".join(f"causal={c}, n={n} is {text}" for (c, n), text in BOUND_FORMS.items())
            raise ValueError(
                f"ColumnMask: startend_row_indices has n={num_bounds} bounds with causal={is_causal}; legal: {legal}"
            )
        columns = [np.ascontiguousarray(bounds[..., bound_idx]) for bound_idx in range(num_bounds)]
        zeros = np.zeros(bounds.shape[:3], np.int32)
        ends = np.full(bounds.shape[:3], s_q, np.int32)
        if num_bounds == 1:
            named = (columns[0], ends, zeros, zeros)
        elif num_bounds == 4:
            named = tuple(columns)
        elif is_causal:
            named = (columns[0], columns[1], zeros, zeros)
        else:
            named = (columns[0], ends, zeros, columns[1])
        return cls(*named, s_q=s_q, is_causal=is_causal, block_mask=block_mask)

    def to_bounds(self) -> tuple[Int32Array, bool]:
        """The most compact ``(startend_row_indices [b, h_mask, s_k, n], causal)`` with this meaning.

        Raises:
            ValueError: the causal rule together with a non-empty second interval, which no input
                format carries, where the two cannot be merged; the message names the first column.
        """
        raise NotImplementedError
