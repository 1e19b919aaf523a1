# SPDX-License-Identifier: Apache-2.0
"""Unions of half-open row intervals, many at once. The arithmetic below masks and schedules.

A *family* is a pair ``(begin, end)`` of int32 arrays ``[slots, ...]``: for every position of the trailing
axes, up to ``slots`` intervals of rows in ``[0, s_q)``. An interval with begin >= end is empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Family = tuple[Int32Array, Int32Array]  # begin, end: each [slots, ...]

_MAX_NETWORK_SLOTS = 5  # up to here exchanging whole slots beats numpy's sort along a short axis


def gaps(family: Family, s_q: int) -> Family:
    """Rows that no interval of the family covers, as ascending, disjoint, maximal intervals.

    Returns ``slots + 1`` slots; unused ones (anywhere among them) are empty.
    """
    begin, end = _sorted_by_begin(family, s_q)  # [slots, ...]
    covered_until = np.maximum.accumulate(end, axis=0)  # [slots, ...]
    edge = np.zeros((1, *begin.shape[1:]), np.int32)
    gap_begin = np.concatenate([edge, covered_until])
    gap_end = np.concatenate([begin, edge + np.int32(s_q)])
    return gap_begin, gap_end


def union(family: Family, s_q: int) -> Family:
    """The same rows as ascending, disjoint, maximal intervals.

    As many slots, used ones first, the others [s_q, s_q).
    """
    begin, end = _sorted_by_begin(family, s_q)
    covered_until = np.maximum.accumulate(end, axis=0)
    starts_run = np.ones(begin.shape, bool)
    starts_run[1:] = begin[1:] > covered_until[:-1]
    ends_run = np.ones(begin.shape, bool)
    ends_run[:-1] = starts_run[1:]
    # Runs ascend and are disjoint, so the i-th smallest begin belongs to the i-th smallest end.
    return (
        _sorted(np.where(starts_run, begin, np.int32(s_q))),
        _sorted(np.where(ends_run, covered_until, np.int32(s_q))),
    )


def lengths(family: Family) -> NDArray[np.int64]:
    """Rows in each interval (0 if empty), ``[slots, ...]``."""
    begin, end = family
    return np.maximum(end.astype(np.int64) - begin, 0)


def is_empty(family: Family) -> NDArray[np.bool_]:
    begin, end = family
    return begin >= end


def _sorted_by_begin(family: Family, s_q: int) -> Family:
    """Clips to [0, s_q], writes empty intervals as [s_q, s_q), and sorts the slots by begin."""
    begin, end = np.clip(family[0], 0, s_q), np.clip(family[1], 0, s_q)
    empty = begin >= end
    begin = np.where(empty, np.int32(s_q), begin)
    end = np.where(empty, np.int32(s_q), end)
    if begin.shape[0] < 2:
        return begin, end
    packed = _sorted((begin.astype(np.int64) << 32) | end)
    return (packed >> 32).astype(np.int32), (packed & 0x7FFFFFFF).astype(np.int32)


def _sorted(values: NDArray[Any]) -> NDArray[Any]:
    """Ascending along axis 0."""
    if values.shape[0] > _MAX_NETWORK_SLOTS:
        return np.sort(values, axis=0)
    slots = list(values)
    for last in range(len(slots) - 1, 0, -1):
        for slot in range(last):
            low = np.minimum(slots[slot], slots[slot + 1])
            slots[slot + 1] = np.maximum(slots[slot], slots[slot + 1])
            slots[slot] = low
    return np.stack(slots)
