# SPDX-License-Identifier: Apache-2.0
"""ColumnMask: an attention mask stored as at most two hidden query intervals a key column.

Storage is O(s_k) integers instead of an s_q x s_k table (FlashMask-3, section 2.2). Every input format is
expanded here, once, to four named half-open bounds plus `is_causal`; nothing after this file looks at a
bound count again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paddle_fm3.mask import intervals
from paddle_fm3.mask.encoding import causal_ends, encode_hidden, interval_text

Int32Array = NDArray[np.int32]

# (is_causal, number of bounds) -> what the last axis of startend_row_indices means.
BOUND_FORMS = {
    (True, 1): "[LTS]: rows [LTS, s_q) hidden, plus the causal rule",
    (True, 2): "[LTS, LTE]: rows [LTS, LTE) hidden, plus the causal rule",
    (False, 2): "[LTS, UTE]: rows [LTS, s_q) and [0, UTE) hidden",
    (False, 4): "[LTS, LTE, UTS, UTE]: rows [LTS, LTE) and [UTS, UTE) hidden",
}

MAX_LENGTH = 2**31 - 256  # rows and tile ends stay int32
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
        if not 0 <= self.s_q <= MAX_LENGTH:
            raise ValueError(f"ColumnMask: s_q={self.s_q} must be in [0, {MAX_LENGTH}]")
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
            raise ValueError(f"ColumnMask: startend_row_indices.shape is {bounds.shape}; expected [b, h_mask, s_k, n]")
        num_bounds = bounds.shape[3]
        if (is_causal, num_bounds) not in BOUND_FORMS:
            legal = "; ".join(f"causal={c}, n={n} is {text}" for (c, n), text in BOUND_FORMS.items())
            raise ValueError(
                f"ColumnMask: startend_row_indices has n={num_bounds} bounds with causal={is_causal}; legal: {legal}"
            )
        columns = [np.ascontiguousarray(bounds[..., bound_idx]) for bound_idx in range(num_bounds)]
        zeros = np.zeros(bounds.shape[:3], np.int32)
        ends = np.full(bounds.shape[:3], s_q, np.int32)
        lt_begin, lt_end, ut_begin, ut_end = columns[0], ends, zeros, zeros
        if num_bounds == 4:
            lt_end, ut_begin, ut_end = columns[1:]
        elif num_bounds == 2 and is_causal:
            lt_end = columns[1]
        elif num_bounds == 2:
            ut_end = columns[1]
        tiles = None if block_mask is None else np.asarray(block_mask)
        return cls(lt_begin, lt_end, ut_begin, ut_end, s_q=s_q, is_causal=is_causal, block_mask=tiles)

    def hidden_intervals(self) -> intervals.Family:
        """Rows hidden from each column, causal rule included and block_mask not, as they are stored.

        Returns ``(begin, end)``, int32 ``[3, b, h_mask, s_k]``: causal, lt, ut. They may overlap or be empty.
        """
        causal_end = np.zeros(self.lt_begin.shape, np.int32)
        if self.is_causal:
            causal_end[:] = causal_ends(self.s_q, self.s_k)
        zeros = np.zeros(self.lt_begin.shape, np.int32)
        return np.stack([zeros, self.lt_begin, self.ut_begin]), np.stack([causal_end, self.lt_end, self.ut_end])

    def visible(self, q_idx: int, k_idx: int, *, b_idx: int = 0, h_mask_idx: int = 0) -> bool:
        """Whether query row ``q_idx`` sees key ``k_idx``."""
        if not (0 <= q_idx < self.s_q and 0 <= k_idx < self.s_k):
            raise IndexError(f"ColumnMask: (q_idx, k_idx) = {(q_idx, k_idx)} outside {(self.s_q, self.s_k)}")
        column = (b_idx, h_mask_idx, k_idx)
        if self.is_causal and k_idx > q_idx + (self.s_k - self.s_q):
            return False
        if self.lt_begin[column] <= q_idx < self.lt_end[column]:
            return False
        if self.ut_begin[column] <= q_idx < self.ut_end[column]:
            return False
        if self.block_mask is None:
            return True
        tile = (b_idx, h_mask_idx, q_idx // BLOCK_MASK_TILE, k_idx // BLOCK_MASK_TILE)
        return bool(self.block_mask[tile])

    def dense(self) -> NDArray[np.bool_]:
        """Boolean table ``[b, h_mask, s_q, s_k]``, True where visible. For small sizes.

        Raises:
            ValueError: the table would exceed 2**30 entries.
        """
        size = self.b * self.h_mask * self.s_q * self.s_k
        if size > 2**30:
            raise ValueError(f"ColumnMask.dense: {size} entries for {self!r}; the limit is 2**30, use slices")
        begin, end = self.hidden_intervals()
        q_idx = np.arange(self.s_q, dtype=np.int32)[:, None]  # [s_q, 1]
        visible = np.ones((self.b, self.h_mask, self.s_q, self.s_k), bool)
        for slot in range(3):
            visible &= (q_idx < begin[slot, :, :, None, :]) | (q_idx >= end[slot, :, :, None, :])
        if self.block_mask is not None:
            kept = self.block_mask.astype(bool).repeat(BLOCK_MASK_TILE, axis=2).repeat(BLOCK_MASK_TILE, axis=3)
            visible &= kept[:, :, : self.s_q, : self.s_k]
        return visible

    def to_bounds(self) -> tuple[Int32Array, bool]:
        """The most compact ``(startend_row_indices [b, h_mask, s_k, n], causal)`` with this meaning.

        ``block_mask`` is no part of it: pass it beside. Forms are tried by rising n; at n = 2 the causal form
        comes first if the mask is causal. Rows that the causal rule hides may be dropped from the bounds, so
        only the visible pairs survive the round trip, not the stored numbers.

        Raises:
            ValueError: no input format carries the mask (the causal rule and two more intervals that neither
                merge with it nor with each other); the message names the first such column.
        """
        return encode_hidden(
            self.hidden_intervals(), self.s_q, prefers_causal=self.is_causal, who="ColumnMask.to_bounds"
        )

    def to_noncausal(self) -> ColumnMask:
        """The same mask with the causal rule written into the intervals (``is_causal`` False).

        Context parallelism needs this: a permuted sequence has no diagonal.

        Raises:
            ValueError: a column then needs three intervals; the message names it.
        """
        if not self.is_causal:
            return self
        begin, end = intervals.union(self.hidden_intervals(), self.s_q)
        needs_third = begin[2] < end[2]
        if needs_third.any():
            column = tuple(int(i) for i in np.argwhere(needs_third)[0])
            raise ValueError(
                f"ColumnMask.to_noncausal: column (b, h_mask, k) = {column} hides "
                f"{interval_text((begin, end), column)} "
                "with the causal rule written out; a column holds two intervals"
            )
        # The head, if any, goes to the upper interval, which by custom stands for "before the diagonal".
        is_head = (begin[0] < end[0]) & (begin[0] == 0)
        upper = np.where(is_head, begin[0], begin[1]), np.where(is_head, end[0], end[1])
        lower = np.where(is_head, begin[1], begin[0]), np.where(is_head, end[1], end[0])
        return ColumnMask(
            lower[0], lower[1], upper[0], upper[1], s_q=self.s_q, is_causal=False, block_mask=self.block_mask
        )

    def mapped(self, function: Callable[[Int32Array], Int32Array]) -> ColumnMask:
        """The mask with ``function`` applied to each stored array; their axes 0 and 1 are b and h_mask."""
        return ColumnMask(
            function(self.lt_begin),
            function(self.lt_end),
            function(self.ut_begin),
            function(self.ut_end),
            s_q=self.s_q,
            is_causal=self.is_causal,
            block_mask=None if self.block_mask is None else function(self.block_mask),
        )

    def select(self, *, b: slice | None = None, h_mask: slice | None = None) -> ColumnMask:
        """The mask of some batch entries and mask heads (slices, so that the axes stay)."""
        for name, wanted in (("b", b), ("h_mask", h_mask)):
            if not isinstance(wanted, slice | None):
                raise TypeError(f"ColumnMask.select: {name}={wanted!r} is no slice; for one: slice(i, i + 1)")
        return self.mapped(lambda stored: stored[b or slice(None), h_mask or slice(None)])

    def with_block_mask(self, block_mask: ArrayLike | None) -> ColumnMask:
        """This mask with another ``block_mask`` (int 0/1 ``[b, h_mask, ceil(s_q/128), ceil(s_k/128)]``)."""
        return replace(self, block_mask=None if block_mask is None else np.asarray(block_mask))

    def content_hash(self) -> str:
        """Hexadecimal digest of everything stored: equal masks have equal digests, in any process."""
        digest = hashlib.blake2b(digest_size=16)
        has_block_mask = self.block_mask is not None
        digest.update(
            np.array([self.b, self.h_mask, self.s_k, self.s_q, self.is_causal, has_block_mask], "<i8").tobytes()
        )
        for bound in (self.lt_begin, self.lt_end, self.ut_begin, self.ut_end):
            digest.update(np.ascontiguousarray(bound, "<i4").data)
        if has_block_mask:
            digest.update(np.ascontiguousarray(self.block_mask, "<i4").data)
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Same stored content. Masks that hide the same pairs may differ here: see `same_visibility`."""
        if not isinstance(other, ColumnMask):
            return NotImplemented
        if (self.s_q, self.is_causal, self.lt_begin.shape) != (
            other.s_q,
            other.is_causal,
            other.lt_begin.shape,
        ):
            return False
        names = ("lt_begin", "lt_end", "ut_begin", "ut_end")
        if not all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names):
            return False
        if self.block_mask is None or other.block_mask is None:
            return self.block_mask is other.block_mask
        return np.array_equal(self.block_mask, other.block_mask)

    def __hash__(self) -> int:
        return hash(self.content_hash())

    def same_visibility(self, other: ColumnMask) -> bool:
        """Whether every column hides the same rows and the block masks are equal; O(s_k)."""
        if (self.s_q, self.lt_begin.shape) != (other.s_q, other.lt_begin.shape):
            return False
        mine = intervals.union(self.hidden_intervals(), self.s_q)
        theirs = intervals.union(other.hidden_intervals(), self.s_q)
        same_blocks = (self.block_mask is None and other.block_mask is None) or np.array_equal(
            self._block_mask_or_ones(), other._block_mask_or_ones()
        )
        return np.array_equal(mine[0], theirs[0]) and np.array_equal(mine[1], theirs[1]) and same_blocks

    def _block_mask_or_ones(self) -> Int32Array:
        tiles = (-(-self.s_q // BLOCK_MASK_TILE), -(-self.s_k // BLOCK_MASK_TILE))
        return np.ones((self.b, self.h_mask, *tiles), np.int32) if self.block_mask is None else self.block_mask

    def __repr__(self) -> str:
        block = "" if self.block_mask is None else ", block_mask"
        rule = ", causal" if self.is_causal else ""
        return f"ColumnMask(b={self.b}, h_mask={self.h_mask}, s_q={self.s_q}, s_k={self.s_k}{rule}{block})"


def holds_integers(array: NDArray[Any]) -> bool:
    """Whether a conversion to integers changes nothing: of floats it would keep the whole parts, in silence. True of an
    empty array, whose dtype says nothing."""
    return array.size == 0 or bool(np.issubdtype(array.dtype, np.integer))


def check_is_mask(where: str, mask: object) -> None:
    """Raises a TypeError unless it is a ColumnMask. A tensor of bounds does not say how many rows there are, nor the
    causal rule beside them."""
    if not isinstance(mask, ColumnMask):
        raise TypeError(
            f"{where}: mask is a {type(mask).__name__}; expected a ColumnMask (ColumnMask.from_bounds makes one of "
            "startend_row_indices)"
        )
