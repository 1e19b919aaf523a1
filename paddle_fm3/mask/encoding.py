# SPDX-License-Identifier: Apache-2.0
"""From hidden intervals back to the input format: the most compact `startend_row_indices` of a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask import intervals
from paddle_fm3.mask.intervals import Family

Int32Array = NDArray[np.int32]


def causal_ends(s_q: int, s_k: int) -> Int32Array:
    """First row that the causal rule lets see each key, ``[s_k]`` in ``[0, s_q]``: it hides rows before."""
    return np.clip(np.arange(s_k, dtype=np.int64) - (s_k - s_q), 0, s_q).astype(np.int32)


def interval_text(family: Family, column: tuple[int, ...]) -> str:
    """``[3, 7), [9, 12)`` of one column of a family, for messages."""
    index: Any = (slice(None), *column)
    begin, end = (x[index] for x in family)
    shown = [f"[{low}, {high})" for low, high in zip(begin.tolist(), end.tolist(), strict=True) if low < high]
    return ", ".join(shown) or "nothing"


def encode_hidden(hidden: Family, s_q: int, *, prefers_causal: bool, who: str) -> tuple[Int32Array, bool]:
    """``(startend_row_indices [b, h_mask, s_k, n], causal)`` that hide exactly the rows of `hidden`.

    Args:
        hidden: all hidden intervals of each column, ``[slots >= 2, b, h_mask, s_k]`` each, in any order.
        s_q: number of query rows.
        prefers_causal: which form wins when n = 2 is possible both with and without the causal rule.
        who: the caller's name, for the message.

    Raises:
        ValueError: more than two separate intervals in some column, whether or not the causal rule takes one
            of them; the message names the first such column and shows what it hides.
    """
    begin, end = intervals.union(hidden, s_q)  # [slots, b, h_mask, s_k] each, ascending
    below = _below_diagonal((begin, end), s_q)
    if below is not None and (below[1] == s_q).all():  # an empty interval is [s_q, s_q)
        return below[0][..., None].copy(), True
    if below is not None and prefers_causal:
        return np.stack(below, axis=-1), True
    outer = _head_and_tail((begin, end), s_q)
    if outer is not None:
        return outer, False
    if below is not None:
        return np.stack(below, axis=-1), True
    too_many = (begin[2:] < end[2:]).any(axis=0)  # [b, h_mask, s_k]
    if too_many.any():
        column = tuple(int(i) for i in np.argwhere(too_many)[0])
        raise ValueError(
            f"{who}: column (b, h_mask, k) = {column} hides rows {interval_text((begin, end), column)} "
            f"of {s_q}; the mask format carries two intervals a column, or the causal rule and one "
            f"({int(too_many.sum())} of {too_many.size} columns need more)"
        )
    return np.stack([begin[0], end[0], begin[1], end[1]], axis=-1), False


def _below_diagonal(every: Family, s_q: int) -> Family | None:
    """The one interval each column hides besides the causal rule, or None if some column hides otherwise."""
    begin, end = every
    ends = np.broadcast_to(causal_ends(s_q, begin.shape[-1]), begin.shape[1:])
    hides_all_the_rule_does = (ends == 0) | ((begin[0] <= 0) & (end[0] >= ends))
    if not hides_all_the_rule_does.all():
        return None
    begin, end = intervals.union((np.maximum(begin, ends), end), s_q)
    if (begin[1:] < end[1:]).any():
        return None
    return begin[0], end[0]


def _head_and_tail(every: Family, s_q: int) -> Int32Array | None:
    """[LTS, UTE] if each column hides nothing but rows [0, UTE) and [LTS, s_q), else None."""
    begin, end = every
    is_used = begin < end
    is_head = is_used & (begin == 0)
    is_tail = is_used & (end == s_q) & ~is_head
    if not (is_head | is_tail | ~is_used).all():
        return None
    lt_begin = np.where(is_tail, begin, np.int32(s_q)).min(axis=0)
    ut_end = np.where(is_head, end, np.int32(0)).max(axis=0)
    return np.stack([lt_begin, ut_end], axis=-1)
