# SPDX-License-Identifier: Apache-2.0
"""BlockSchedule: which tiles of the score matrix must be visited, and how, from O(s_k) numbers.

The Python twin of ops/include/fm3/schedule.h. Each key tile (block_k columns of one batch entry and mask
head) is summed up by two short lists of row runs:

* hidden runs: rows that *every* column of the tile hides, whichever interval hides them in which column,
  the causal rule included; a row tile inside one is SKIP;
* clear runs: rows that *no* column of the tile hides; a row tile inside one is FULL.

Both are exact at row granularity: disjoint, ascending and maximal. The C++ builder must give identical
numbers, so the rule for more than four runs is part of the definition: **the four longest runs are kept, of
equally long ones those that begin earlier; the kept runs stay ascending; unused slots hold {0, 0}.** A
dropped run only turns SKIP or FULL into PARTIAL, which is slower and still exact.

Columns beyond s_k in the last tile do not exist: they neither hide nor show a row. With s_q = 0 there are no
runs. `block_mask` is not in the runs; it is applied on top, per tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask import intervals
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask

MAX_RUNS = 4  # fm3::kMaxRuns
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_CHUNK_COLUMNS = 2**18  # columns summed up at once: they stay in cache, and the temporary memory is bounded
_SWEEP_CHUNK_TILES = 1024  # key tiles swept at once: bounds the temporary memory


class TileClass(IntEnum):
    SKIP = 0  # every pair is hidden: never loaded
    PARTIAL = 1  # some are: computed with the mask
    FULL = 2  # none is: computed without mask code


@dataclass(frozen=True, eq=False)
class BlockSchedule:
    """What every key tile says about rows, with counts derived from it.

    Attributes:
        hidden_runs, clear_runs: int32 ``[b, h_mask, num_k_tiles, 4, 2]`` (begin, end).
        s_q, s_k: rows and keys. block_q, block_k: sides of a tile.
        block_mask: the mask's ``[b, h_mask, ceil(s_q/128), ceil(s_k/128)]``, or None.
        num_visible_pairs: exact count of visible (q, k), int64 ``[b, h_mask]``.
    """

    hidden_runs: Int32Array
    clear_runs: Int32Array
    s_q: int
    s_k: int
    block_q: int
    block_k: int
    block_mask: Int32Array | None
    num_visible_pairs: Int64Array

    @property
    def b(self) -> int:
        return self.hidden_runs.shape[0]

    @property
    def h_mask(self) -> int:
        return self.hidden_runs.shape[1]

    @property
    def num_q_tiles(self) -> int:
        return -(-self.s_q // self.block_q)

    @property
    def num_k_tiles(self) -> int:
        return self.hidden_runs.shape[2]

    def classify(self, q_begin: int, q_end: int, k_tile_idx: int, *, b_idx: int = 0, h_mask_idx: int = 0) -> TileClass:
        """Class of rows [q_begin, q_end) against one key tile: fm3::classify, then block_mask."""
        tile = (b_idx, h_mask_idx, k_tile_idx)
        if _is_inside(self.hidden_runs[tile], q_begin, q_end):
            return TileClass.SKIP
        is_clear = _is_inside(self.clear_runs[tile], q_begin, q_end)
        if self.block_mask is not None and q_begin < q_end:
            k_end = min((k_tile_idx + 1) * self.block_k, self.s_k)
            kept = self.block_mask[
                b_idx,
                h_mask_idx,
                q_begin // BLOCK_MASK_TILE : -(-q_end // BLOCK_MASK_TILE),
                k_tile_idx * self.block_k // BLOCK_MASK_TILE : -(-k_end // BLOCK_MASK_TILE),
            ]
            if not kept.any():
                return TileClass.SKIP
            is_clear = is_clear and bool(kept.all())
        return TileClass.FULL if is_clear else TileClass.PARTIAL

    def tile_classes(self, *, b_idx: int = 0, h_mask_idx: int = 0) -> NDArray[np.int8]:
        """Table ``[num_q_tiles, num_k_tiles]`` of TileClass. Its size is s_q s_k / (block_q block_k)."""
        chunks = [chunk for _, chunk in self._class_chunks(b_idx, h_mask_idx)]
        return np.concatenate(chunks or [np.empty((0, self.num_q_tiles), np.int8)]).T

    def counts(self) -> dict[TileClass, Int64Array]:
        """Number of tiles of each class, ``[b, h_mask]``; O(s) memory."""
        if self.block_mask is not None:
            return self._counts_from_tables()
        skip = self._num_whole_tiles(self.hidden_runs).sum(axis=(2, 3))
        full = self._num_whole_tiles(self.clear_runs).sum(axis=(2, 3))
        total = self.num_q_tiles * self.num_k_tiles
        return {TileClass.SKIP: skip, TileClass.PARTIAL: total - skip - full, TileClass.FULL: full}

    def visible_tiles_per_q_block(self) -> Int64Array:
        """Not-SKIP tiles in each row block, ``[b, h_mask, num_q_tiles]``; O(s) memory, no tile table."""
        visible = np.empty((self.b, self.h_mask, self.num_q_tiles), np.int64)
        for plane in np.ndindex(self.b, self.h_mask):
            if self.block_mask is not None:
                visible[plane] = sum(
                    ((chunk != TileClass.SKIP).sum(axis=0) for _, chunk in self._class_chunks(*plane)),
                    np.zeros(self.num_q_tiles, np.int64),
                )
                continue
            first, last = self._whole_tiles(self.hidden_runs[plane])  # [num_k_tiles, 4] each
            is_used = first < last
            size = self.num_q_tiles + 1
            edges = np.bincount(first[is_used], minlength=size) - np.bincount(last[is_used], minlength=size)
            visible[plane] = self.num_k_tiles - np.cumsum(edges)[: self.num_q_tiles]
        return visible

    def visible_tiles_per_k_tile(self) -> Int64Array:
        """Not-SKIP tiles in each key tile, ``[b, h_mask, num_k_tiles]``."""
        if self.block_mask is None:
            return self.num_q_tiles - self._num_whole_tiles(self.hidden_runs).sum(axis=3)
        visible = np.empty((self.b, self.h_mask, self.num_k_tiles), np.int64)
        for plane in np.ndindex(self.b, self.h_mask):
            for tiles, chunk in self._class_chunks(*plane):
                visible[plane][tiles] = (chunk != TileClass.SKIP).sum(axis=1)
        return visible

    @property
    def num_visible_tiles(self) -> Int64Array:
        """Not-SKIP tiles, ``[b, h_mask]``."""
        return self.visible_tiles_per_k_tile().sum(axis=2)

    @property
    def num_block_pairs(self) -> Int64Array:
        """(q, k) pairs in visited tiles (edge tiles count what exists of them), ``[b, h_mask]``."""
        k_width = np.full(self.num_k_tiles, self.block_k, np.int64)
        if self.num_k_tiles:
            k_width[-1] = self.s_k - (self.num_k_tiles - 1) * self.block_k
        pairs = (self.visible_tiles_per_k_tile() * k_width).sum(axis=2) * self.block_q
        missing_rows = self.num_q_tiles * self.block_q - self.s_q
        if missing_rows:
            last_rows = np.empty((self.b, self.h_mask, self.num_k_tiles), bool)  # is the last row tile visited?
            for index in np.ndindex(last_rows.shape):
                begin = (self.num_q_tiles - 1) * self.block_q
                last_rows[index] = self.classify(begin, self.s_q, index[2], b_idx=index[0], h_mask_idx=index[1]) != 0
            pairs = pairs - (last_rows * k_width).sum(axis=2) * missing_rows
        return pairs

    @property
    def density(self) -> float:
        """Visible pairs / all pairs, over the whole mask (0 if there are none)."""
        total = self.b * self.h_mask * self.s_q * self.s_k
        return float(self.num_visible_pairs.sum() / total) if total else 0.0

    @property
    def density_block(self) -> float:
        """Pairs in visited tiles / all pairs: what a perfect kernel of this tile size computes."""
        total = self.b * self.h_mask * self.s_q * self.s_k
        return float(self.num_block_pairs.sum() / total) if total else 0.0

    def _whole_tiles(self, runs: Int32Array) -> tuple[Int64Array, Int64Array]:
        """Row tiles [first, last) that lie wholly in each run; shapes of runs[..., 0]."""
        begin, end = runs[..., 0].astype(np.int64), runs[..., 1].astype(np.int64)
        first = -(-begin // self.block_q)
        last = np.where((end == self.s_q) & (begin < end), self.num_q_tiles, end // self.block_q)
        return first, np.maximum(first, last)

    def _num_whole_tiles(self, runs: Int32Array) -> Int64Array:
        first, last = self._whole_tiles(runs)
        return last - first

    def _counts_from_tables(self) -> dict[TileClass, Int64Array]:
        counts = {tile_class: np.zeros((self.b, self.h_mask), np.int64) for tile_class in TileClass}
        for plane in np.ndindex(self.b, self.h_mask):
            for _, chunk in self._class_chunks(*plane):
                for tile_class in TileClass:
                    counts[tile_class][plane] += np.count_nonzero(chunk == tile_class)
        return counts

    def _class_chunks(self, b_idx: int, h_mask_idx: int) -> Iterator[tuple[slice, NDArray[np.int8]]]:
        """Yields (key tiles, classes ``[tiles, num_q_tiles]``), a bounded number of tiles at a time."""
        step = max(1, 2**22 // max(1, self.num_q_tiles))
        for begin in range(0, self.num_k_tiles, step):
            tiles = slice(begin, min(begin + step, self.num_k_tiles))
            is_skip = self._covered(self.hidden_runs[b_idx, h_mask_idx, tiles])
            is_full = self._covered(self.clear_runs[b_idx, h_mask_idx, tiles])
            if self.block_mask is not None:
                any_kept, all_kept = self._kept(self.block_mask[b_idx, h_mask_idx], tiles)
                is_skip |= ~any_kept
                is_full &= all_kept
            classes = np.full(is_skip.shape, TileClass.PARTIAL, np.int8)
            classes[is_full] = TileClass.FULL
            classes[is_skip] = TileClass.SKIP
            yield tiles, classes

    def _covered(self, runs: Int32Array) -> NDArray[np.bool_]:
        """Which row tiles lie in one of the runs ``[tiles, 4, 2]``: ``[tiles, num_q_tiles]``."""
        first, last = self._whole_tiles(runs)  # [tiles, 4] each
        q_tile = np.arange(self.num_q_tiles)
        return ((first[..., None] <= q_tile) & (q_tile < last[..., None])).any(axis=1)

    def _kept(self, block_mask: Int32Array, tiles: slice) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether block_mask keeps any, and all, of each tile: ``[tiles, num_q_tiles]`` each."""
        q_first, q_last = _touched_entries(np.arange(self.num_q_tiles), self.block_q, self.s_q)
        k_first, k_last = _touched_entries(np.arange(tiles.start, tiles.stop), self.block_k, self.s_k)
        area = np.zeros((block_mask.shape[0] + 1, block_mask.shape[1] + 1), np.int64)  # summed-area table
        area[1:, 1:] = block_mask.cumsum(axis=0, dtype=np.int64).cumsum(axis=1)
        kept = area[q_last][:, k_last] - area[q_first][:, k_last] - area[q_last][:, k_first] + area[q_first][:, k_first]
        size = (q_last - q_first)[:, None] * (k_last - k_first)[None, :]
        return (kept > 0).T, (kept == size).T


def build_schedule(mask: ColumnMask, block_q: int = 128, block_k: int = 128) -> BlockSchedule:
    """Sums up each key tile of ``mask``; O(s_k) time and memory a (batch entry, mask head).

    Raises:
        ValueError: a block side below 1.
    """
    if block_q < 1 or block_k < 1:
        raise ValueError(f"build_schedule: block_q={block_q}, block_k={block_k} must be >= 1")
    num_k_tiles = -(-mask.s_k // block_k)
    hidden_runs, clear_runs = np.empty((2, mask.b, mask.h_mask, num_k_tiles, MAX_RUNS, 2), np.int32)
    num_visible_pairs = np.empty((mask.b, mask.h_mask), np.int64)
    for planes in _plane_chunks(mask):
        part = mask.select(b=planes[0], h_mask=planes[1])
        hidden = part.hidden_intervals()  # [3, planes of this part, s_k] each
        visible = intervals.gaps(hidden, mask.s_q)  # [4, ...] each
        # Rows hidden by all columns are those that no visible interval of any column covers, and vice versa.
        hidden_runs[planes] = _tile_gaps(visible, mask.s_q, num_k_tiles, block_k)
        clear_runs[planes] = _tile_gaps(hidden, mask.s_q, num_k_tiles, block_k)
        num_visible_pairs[planes] = _count_visible_pairs(visible, part)
    return BlockSchedule(
        hidden_runs=hidden_runs,
        clear_runs=clear_runs,
        s_q=mask.s_q,
        s_k=mask.s_k,
        block_q=block_q,
        block_k=block_k,
        block_mask=mask.block_mask,
        num_visible_pairs=num_visible_pairs,
    )


def visible_pairs_per_row(mask: ColumnMask) -> Int64Array:
    """Keys that each query row sees, int64 ``[b, h_mask, s_q]``; by difference arrays, without a dense table.

    Raises:
        ValueError: the mask has a block_mask (ask the tile counts instead).
    """
    if mask.block_mask is not None:
        raise ValueError("visible_pairs_per_row: a mask with block_mask is not served; use BlockSchedule's tile counts")
    begin, end = intervals.gaps(mask.hidden_intervals(), mask.s_q)  # [4, b, h_mask, s_k] each
    counts = np.empty((mask.b, mask.h_mask, mask.s_q), np.int64)
    for plane in np.ndindex(mask.b, mask.h_mask):
        index: Any = (slice(None), *plane)
        first, last = begin[index], end[index]
        is_used = first < last
        size = mask.s_q + 1
        edges = np.bincount(first[is_used], minlength=size) - np.bincount(last[is_used], minlength=size)
        counts[plane] = np.cumsum(edges)[: mask.s_q]
    return counts


# --- parts ---------------------------------------------------------------------------------------


def _plane_chunks(mask: ColumnMask) -> Iterator[tuple[slice, slice]]:
    """(batch entries, mask heads) slices that hold about `_CHUNK_COLUMNS` columns, or one plane if that is more."""
    heads = max(1, min(mask.h_mask, _CHUNK_COLUMNS // max(1, mask.s_k)))
    entries = max(1, _CHUNK_COLUMNS // max(1, mask.s_k * mask.h_mask)) if heads == mask.h_mask else 1
    for b_begin in range(0, mask.b, entries):
        for h_begin in range(0, mask.h_mask, heads):
            yield slice(b_begin, b_begin + entries), slice(h_begin, h_begin + heads)


def _tile_gaps(family: intervals.Family, s_q: int, num_k_tiles: int, block_k: int) -> Int32Array:
    """Rows covered by no interval of any column of a tile: runs ``[b, h_mask, num_k_tiles, 4, 2]``.

    Claim:      the fast path below gives the same runs as the sweep.
    Because:    if the latest begin of a slot's non-empty intervals does not pass their earliest end, they all
                touch one row border, so their union is the single interval [earliest begin, latest end).
    Breaks if:  an empty interval counts in the earliest begin or the latest end.
    Tested by:  test/unit/test_schedule.py::test_runs_match_brute_force
    """
    slots, b, h_mask, s_k = family[0].shape
    padding = num_k_tiles * block_k - s_k
    begin, end = (
        np.pad(x, ((0, 0),) * 3 + ((0, padding),)).reshape(slots, b * h_mask * num_k_tiles, block_k) for x in family
    )  # [slots, tiles, block_k]; a padded column's intervals are empty
    empty = begin >= end
    low, high = np.int32(0), np.int32(s_q)
    first_begin = np.where(empty, high, begin).min(axis=2)  # [slots, tiles]
    last_begin = np.where(empty, low, begin).max(axis=2)
    first_end = np.where(empty, high, end).min(axis=2)
    last_end = np.where(empty, low, end).max(axis=2)
    runs = _longest_runs(intervals.gaps((first_begin, last_end), s_q))  # [tiles, 4, 2]
    needs_sweep = np.flatnonzero((last_begin > first_end).any(axis=0))
    for chunk_begin in range(0, len(needs_sweep), _SWEEP_CHUNK_TILES):
        tiles = needs_sweep[chunk_begin : chunk_begin + _SWEEP_CHUNK_TILES]
        every = tuple(x[:, tiles].transpose(0, 2, 1).reshape(slots * block_k, len(tiles)) for x in (begin, end))
        runs[tiles] = _longest_runs(intervals.gaps(every, s_q))  # type: ignore[arg-type]
    return runs.reshape(b, h_mask, num_k_tiles, MAX_RUNS, 2)


def _longest_runs(family: intervals.Family) -> Int32Array:
    """The kept ``[tiles, 4, 2]`` of ascending runs ``[slots, tiles]``: longest, then earliest; ascending."""
    begin, end = family
    if begin.shape[0] < MAX_RUNS:
        missing = ((0, MAX_RUNS - begin.shape[0]), (0, 0))
        begin, end = np.pad(begin, missing), np.pad(end, missing)
    length = np.maximum(end - begin, 0)  # [slots, tiles]
    # Slots ascend by begin, so a stable sort lets the earlier of equally long runs win.
    kept = np.argsort(-length, axis=0, kind="stable")[:MAX_RUNS]
    is_used = np.take_along_axis(length, kept, axis=0) > 0
    slot = np.where(is_used, kept, begin.shape[0])  # unused last
    order = np.sort(slot, axis=0)  # [4, tiles]
    is_used = order < begin.shape[0]
    order = np.where(is_used, order, 0)
    runs = [np.where(is_used, np.take_along_axis(x, order, axis=0), 0).T for x in (begin, end)]  # [tiles, 4] each
    return np.stack(runs, axis=-1).astype(np.int32)


def _count_visible_pairs(visible: intervals.Family, mask: ColumnMask) -> Int64Array:
    """Exact visible pairs ``[b, h_mask]`` from the visible intervals of each column."""
    if mask.block_mask is None:
        return intervals.lengths(visible).sum(axis=(0, 3))
    counts = np.zeros((mask.b, mask.h_mask), np.int64)
    tile_of_column = np.arange(mask.s_k) // BLOCK_MASK_TILE
    for plane in np.ndindex(mask.b, mask.h_mask):
        kept = mask.block_mask[plane].astype(np.int64)  # [q entries, k entries]
        kept_above = np.concatenate([np.zeros((1, kept.shape[1]), np.int64), kept.cumsum(axis=0)])
        kept_padded = np.concatenate([kept, np.zeros((1, kept.shape[1]), np.int64)])

        def kept_rows_before(row: Int64Array) -> Int64Array:
            entry = row // BLOCK_MASK_TILE
            whole = kept_above[entry, tile_of_column] * BLOCK_MASK_TILE  # noqa: B023 - used in this turn only
            return whole + kept_padded[entry, tile_of_column] * (row % BLOCK_MASK_TILE)  # noqa: B023

        index: Any = (slice(None), *plane)
        for begin, end in zip(*(x[index].astype(np.int64) for x in visible), strict=True):
            is_used = begin < end
            counts[plane] += (kept_rows_before(end) - kept_rows_before(begin))[is_used].sum()
    return counts


def _touched_entries(tile_idx: Int64Array, block: int, s: int) -> tuple[Int64Array, Int64Array]:
    """block_mask entries [first, last) that each tile of side `block` touches."""
    begin = tile_idx * block
    end = np.minimum(begin + block, s)
    return begin // BLOCK_MASK_TILE, -(-end // BLOCK_MASK_TILE)


def _is_inside(runs: Int32Array, q_begin: int, q_end: int) -> bool:
    return bool(((runs[:, 0] <= q_begin) & (q_end <= runs[:, 1])).any())
