# SPDX-License-Identifier: Apache-2.0
"""Prepared schedules of the Hopper kernels, taken apart: as a GPU wrote them, as the same kernels write them on the
host thread by thread, and the lists alone as made one granule after the other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from host_library import compile_for_host

from paddle_fm3.testing.cases import AttentionCase, RawMask
from paddle_fm3.testing.native_call import NativeMask
from paddle_fm3.testing.reference import visible_plane

CUT_ALL_SIZES = "-DFM3_CUT_ALL_SIZES"  # query tiles of small masks, too, begin at documents
TILE_Q = 128
SHORT_COLS = 80  # of the last item of a list that ends short
PAIR_SHARE = 32  # of a mask with cuts a pair is walked that costs at most 1 / PAIR_SHARE more than its tiles
Spans = list[tuple[int, int, bool, bool]]  # (k_begin, count of items, is_full, ends_short)


def compile_library(folder: Path, *flags: str) -> ctypes.CDLL:
    """test/cpp/sm90_schedule.cc as a library in `folder`."""
    # Fibers jump between stacks, which the checked longjmp refuses.
    library = compile_for_host("sm90_schedule.cc", folder, "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", *flags)
    library.schedule_bytes.restype = ctypes.c_int64
    library.pair_is_walked.restype = library.pairs_are_walked.restype = ctypes.c_bool
    return library


def mask_of(case: AttentionCase) -> NativeMask:
    raw = case.build_mask()
    if raw.startend_row_indices is None:
        return NativeMask.without_bounds(raw.causal, case.b, case.s_q, case.s_k)
    return NativeMask.from_bounds(raw.startend_row_indices, raw.causal, case.s_q, raw.block_mask)


@dataclass(frozen=True, eq=False)
class Lists:
    """Of single query tiles, or of pairs of them."""

    order: np.ndarray  # int32 [b * h_mask, count, 4]: tile, head of its list, begin and counts of its rows
    costs: np.ndarray  # int32 [b * h_mask, count, 4]: halves of items, head of the list, rows
    spans: np.ndarray  # uint32 [b * h_mask, count, max_spans], packed
    begins: np.ndarray  # int32 [b * h_mask, count + 1]: first rows; s_q where a list has no more tiles
    middles: np.ndarray  # int32 [b * h_mask, count]: where a pair's second tile begins; of single tiles, their ends

    @property
    def num_spans(self) -> np.ndarray:
        return self.costs[:, :, 1] & (1 << 28) - 1

    @property
    def shifts(self) -> np.ndarray:
        """By how many columns a list's items begin later than its spans say."""
        return self.costs[:, :, 1] >> 28 & 15


def build(library: ctypes.CDLL, mask: NativeMask) -> np.ndarray:
    """A schedule's bytes, by the kernels on the host."""
    view = mask.view
    num_bytes = library.schedule_bytes(ctypes.byref(view))
    blob = np.full(num_bytes + 256, 0xA5, np.uint8)
    blob = blob[-blob.ctypes.data % 256 :][:num_bytes]
    library.build_schedule(ctypes.byref(view), ctypes.c_void_p(blob.ctypes.data))
    return blob


Counts = tuple[int, int]  # entries with a tile: of the order that has most of them, of the one that has fewest


@dataclass(frozen=True)
class Totals:
    halves: tuple[int, int]  # of items: of tiles, of pairs
    late: tuple[int, int]
    tiles: Counts
    pairs: Counts
    rest: Counts
    num_cuts: int  # of all lists


@dataclass(frozen=True, eq=False)
class Schedule:
    totals: Totals
    tiles: Lists
    pairs: Lists
    rest: np.ndarray | None  # as the order of tiles, of those that are in no pair; None if tiles are on the grid

    @property
    def lists(self) -> tuple[Lists, Lists]:
        return self.tiles, self.pairs

    @property
    def has_cuts(self) -> bool:
        return self.totals.num_cuts > 0


def take_apart(library: ctypes.CDLL, mask: NativeMask, blob: np.ndarray) -> Schedule:
    """What is in a schedule's bytes."""
    view = mask.view
    offsets = (ctypes.c_int64 * 10)()
    library.schedule_offsets(ctypes.byref(view), offsets)

    def part(offset: int, dtype: type, *shape: int) -> np.ndarray:
        return blob[offset : offset + 4 * int(np.prod(shape))].view(dtype).reshape(shape)

    room, num_lists = library.room_of_tiles(ctypes.byref(view)), mask.b * mask.h_mask
    rest = None
    if offsets[8] < 0:
        begins = np.repeat(np.minimum(np.arange(room + 1) * TILE_Q, mask.s_q)[None], num_lists, axis=0)
    else:
        begins = part(offsets[8], np.int32, num_lists, room + 1)
        rest = part(offsets[9], np.int32, num_lists, room, 4)
    with_second = np.concatenate([begins, begins[:, -1:]], axis=1)  # a last pair may lack its second tile
    lists = []
    for idx, count in enumerate((room, -(-room // 2))):
        order, costs, spans = offsets[1 + 3 * idx : 4 + 3 * idx]
        shape = (num_lists, count)
        lists.append(Lists(part(order, np.int32, *shape, 4), part(costs, np.int32, *shape, 4),
                           part(spans, np.uint32, *shape, offsets[7]), with_second[:, :: 1 + idx][:, : count + 1],
                           with_second[:, 1 :: 1 + idx][:, :count]))  # fmt: skip
    of_tiles, _, of_pairs, _, *words = part(offsets[0], np.uint32, 13).tolist()
    late, tiles, pairs, rest_counts = (tuple(words[at : at + 2]) for at in range(0, 8, 2))
    return Schedule(Totals((of_tiles, of_pairs), late, tiles, pairs, rest_counts, words[8]), *lists, rest)


def unpack(packed: np.ndarray) -> Spans:
    return [(int(x >> 12) * 16, int(x >> 2 & 1023), bool(x & 1), bool(x & 2)) for x in packed]


def plain_spans(
    library: ctypes.CDLL, mask: NativeMask, list_idx: int, rows: tuple[int, ...], *, has_cuts: bool = False
) -> tuple[np.ndarray, int]:
    """Spans of a list, packed, and its head. `rows`: where its tile begins and ends, or its pair's tiles, one behind the
    other. has_cuts: of the mask; single tiles do not depend on it."""
    packed = np.empty(mask.s_k // library.item_cols(0, 0) + 3, np.uint32)
    view, begins = mask.view, (ctypes.c_int32 * len(rows))(*rows)
    address = packed.ctypes.data_as(ctypes.c_void_p)
    is_pair = int(len(rows) == 3)
    head = library.plain_spans(ctypes.byref(view), list_idx, begins, is_pair, int(has_cuts), address, len(packed))
    return packed[: head & (1 << 28) - 1], head  # int32


def check_build(library: ctypes.CDLL, mask: NativeMask, entries: list[int] | None = None) -> Schedule:
    """Compares the kernels' product with the plain lists (of `entries`, default: all)."""
    schedule = take_apart(library, mask, build(library, mask))
    for is_pair, one in enumerate(schedule.lists):
        num_lists, count, max_spans = one.spans.shape
        for list_idx in range(num_lists):
            for entry in range(count) if entries is None else [entry for entry in entries if entry < count]:
                begin, middle, end = (int(x[list_idx, at]) for x, at in
                                      ((one.begins, entry), (one.middles, entry), (one.begins, entry + 1)))  # fmt: skip
                where = f"list {list_idx}, {'pair' if is_pair else 'tile'} {entry}"
                rows = [begin, (end - middle) << 16 | (middle - begin)]
                assert 0 <= middle - begin <= TILE_Q and 0 <= end - middle <= TILE_Q, where
                if begin == middle or (is_pair and schedule.has_cuts and middle == end):
                    assert one.costs[list_idx, entry].tolist() == [0, 0, *rows], where
                    continue
                begins = (begin, middle, end)[: 2 + is_pair]
                wanted, head = plain_spans(library, mask, list_idx, begins, has_cuts=schedule.has_cuts)
                assert len(wanted) < max_spans, "no room for the end"
                found = one.spans[list_idx, entry, : len(wanted)]
                assert unpack(found) == unpack(wanted), where
                assert one.spans[list_idx, entry, len(wanted)] == 0, f"{where}: the end is missing"
                halves = halves_of(unpack(wanted), has_short=not is_pair or schedule.has_cuts)
                assert one.costs[list_idx, entry].tolist() == [halves, head, *rows], where
    check_orders(schedule)
    return schedule


def halves_of(spans: Spans, *, has_short: bool) -> int:
    """What a list costs."""
    return sum(2 * count - (has_short and ends_short) for _, count, _, ends_short in spans)


def is_worth_a_pair(pair: int, first: int, second: int) -> bool:
    """Of a mask with cuts; costs of three lists, 0: there is none."""
    num_more = 2 * pair - (first + second)
    return pair > 0 and num_more * PAIR_SHARE <= first + second


def chosen_pairs(schedule: Schedule) -> np.ndarray:
    """bool [b * h_mask, pairs]: those that are walked. Of a mask with cuts."""
    tiles = np.pad(schedule.tiles.costs[:, :, 0], ((0, 0), (0, 1)))
    chosen = np.zeros(schedule.pairs.costs.shape[:2], bool)
    for list_idx, pair in np.ndindex(chosen.shape):
        first, second = tiles[list_idx, 2 * pair : 2 * pair + 2].tolist()
        chosen[list_idx, pair] = is_worth_a_pair(int(schedule.pairs.costs[list_idx, pair, 0]), first, second)
    return chosen


def check_orders(schedule: Schedule) -> None:
    """Of tiles, of pairs and of the rest: what is in them, by falling cost; and the totals."""
    tiles, pairs, totals = schedule.tiles, schedule.pairs, schedule.totals
    in_pairs = np.ones(pairs.costs.shape[:2], bool)
    orders = {"tiles": (tiles.order, tiles.costs, tiles.costs[:, :, 0])}
    if schedule.has_cuts:
        in_pairs = chosen_pairs(schedule)
        in_rest = ~np.repeat(in_pairs, 2, axis=1)[:, : tiles.costs.shape[1]]
        assert schedule.rest is not None
        orders["rest"] = (schedule.rest, tiles.costs, np.where(in_rest, tiles.costs[:, :, 0], 0))
        check_each_tile_is_there_once(schedule)
    orders["pairs"] = (pairs.order, pairs.costs, np.where(in_pairs, pairs.costs[:, :, 0], 0))
    for name, (order, costs, halves) in orders.items():
        for list_idx, own in enumerate(halves):
            by_cost = np.lexsort((np.arange(len(own)), -own))
            assert order[list_idx, :, 0].tolist() == by_cost.tolist(), name
            heads = np.where(own > 0, costs[list_idx, :, 1], 0)
            assert order[list_idx, :, 1].tolist() == heads[by_cost].tolist(), name
            assert order[list_idx, :, 2:].tolist() == costs[list_idx, by_cost, 2:].tolist(), name
        num_entries = np.count_nonzero(halves, axis=1)
        assert getattr(totals, name) == (num_entries.max(), num_entries.min()), name
    assert totals.halves == (orders["tiles"][2].sum(), orders["pairs"][2].sum())
    assert totals.late == (0, 0)


def check_each_tile_is_there_once(schedule: Schedule) -> None:
    """In one of two orders, alone or in a pair: what the forward walks, if tiles begin at documents."""
    assert schedule.rest is not None
    for begins, pairs, rest in zip(schedule.tiles.begins, schedule.pairs.order, schedule.rest, strict=True):
        walked = np.repeat(2 * pairs[pairs[:, 1] != 0, 0], 2)
        walked[1::2] += 1
        walked = [*walked.tolist(), *rest[rest[:, 1] != 0, 0].tolist()]
        assert sorted(walked) == np.flatnonzero(np.diff(begins)).tolist()


def planes(raw: RawMask, s_q: int, s_k: int) -> np.ndarray:
    """Visible pairs, [b * h_mask, s_q, s_k]."""
    bounds = raw.startend_row_indices
    assert bounds is not None
    lists = bounds.reshape(-1, *bounds.shape[2:])  # [b * h_mask, s_k, n]
    tiles = None if raw.block_mask is None else raw.block_mask.reshape(len(lists), *raw.block_mask.shape[2:])
    return np.stack(
        [
            visible_plane(one, raw.causal, s_q, s_k, None if tiles is None else tiles[idx])
            for idx, one in enumerate(lists)
        ]
    )


def check_spans(spans: Spans, visible: np.ndarray, item_cols: int, shift: int = 0) -> None:
    """`visible`: rows of one query tile or of a pair of them, [rows, s_k]."""
    assert spans, "a tile needs at least one span"
    covered = np.zeros(visible.shape[1] + item_cols, bool)
    end = 0
    for idx, (granule_begin, count, is_full, ends_short) in enumerate(spans):
        k_begin = granule_begin + shift
        assert count >= 1 and k_begin >= end, f"spans overlap or descend: {spans}"
        end = k_begin + count * item_cols
        if ends_short:
            assert idx == len(spans) - 1 and (count > 1 or len(spans) > 1), (
                f"SHORT, but not the last of several: {spans}"
            )
            end -= item_cols - SHORT_COLS
        covered[k_begin : min(end, len(covered))] = True
        if is_full:
            assert end <= visible.shape[1] and visible[:, k_begin:end].all(), f"FULL but something is hidden: {spans}"
    missed = visible.any(0) & ~covered[: visible.shape[1]]
    assert not missed.any(), f"visible columns {np.flatnonzero(missed)[:5]} are not visited: {spans}"


def check_raw(library: ctypes.CDLL, raw: RawMask, s_q: int, s_k: int) -> Schedule:
    """Compares with the plain lists and with the dense mask."""
    visible = planes(raw, s_q, s_k)
    schedule = check_build(library, NativeMask.from_bounds(raw.startend_row_indices, raw.causal, s_q, raw.block_mask))
    for is_pair, one in enumerate(schedule.lists):
        item_cols = library.item_cols(is_pair, int(schedule.has_cuts))
        for list_idx, entry in np.ndindex(one.num_spans.shape):
            spans = unpack(one.spans[list_idx, entry, : one.num_spans[list_idx, entry]])
            seen = visible[list_idx, one.begins[list_idx, entry] : one.begins[list_idx, entry + 1]]
            if len(spans) == 0:
                continue
            shift = int(one.shifts[list_idx, entry])
            check_spans(spans, seen, item_cols, shift)
            if shift:
                first = int(seen.any(0).argmax())
                assert first == spans[0][0] + shift and seen[:, first : first // 16 * 16 + 16].all()
                with pytest.raises(AssertionError):
                    check_spans(spans, seen, item_cols, shift + 1)
    return schedule


def documents(lengths: list[int], *, causal: bool) -> tuple[RawMask, int]:
    """Documents of `lengths` tokens, one behind the other, and their sum."""
    ends = np.cumsum(lengths)
    end, begin = np.repeat(ends, lengths), np.repeat(ends - lengths, lengths)
    bounds = np.stack([end] if causal else [end, begin], axis=1)[None, None]
    return RawMask(bounds.astype(np.int32), causal), int(ends[-1])


def windows(rng: np.random.Generator, lengths: list[int], *, causal: bool) -> tuple[RawMask, int]:
    """documents() of which a key's rows begin and end at most so far before and behind it."""
    raw, s = documents(lengths, causal=causal)
    bounds, key = raw.startend_row_indices, np.arange(s)
    assert bounds is not None
    before, behind = (int(rng.choice([20, 300, 450, 600]) + rng.integers(0, 161)) for _ in range(2))
    bounds[0, 0, :, 0] = np.minimum(bounds[0, 0, :, 0], key + behind + 1)
    if not causal:
        bounds[0, 0, :, 1] = np.maximum(bounds[0, 0, :, 1], key - before)
    return raw, s


def check_begin(spans: Spans, visible: np.ndarray) -> int:
    """Of a list that is not shifted, of a window: how many granules it begins ahead of its first visible one. From the dense
    mask: with as many steps, short ones, too, as without, fewer of them masked than nearer to it, none fewer than farther."""
    granules = np.flatnonzero(np.pad(visible.any(0), (0, -visible.shape[1] % 16)).reshape(-1, 16).any(1))
    first, end = int(granules[0]), int(granules[-1]) + 1

    def cost(begin: int) -> tuple[int, int]:
        steps = range(begin, end, 10)
        halves = 2 * len(steps) - (len(steps) > 1 and end - steps[-1] <= 5)
        full = [
            (step + 10) * 16 <= visible.shape[1] and visible[:, step * 16 : step * 16 + 160].all() for step in steps
        ]
        return halves, len(full) - sum(full)

    begin, halves = spans[0][0] // 16, cost(first)[0]
    found = sum(2 * count - ends_short for _, count, _, ends_short in spans)
    assert first // 1024 * 1024 <= begin <= first and found == cost(begin)[0] == halves
    masked = sum(count for _, count, is_full, _ in spans if not is_full)
    assert masked == cost(begin)[1]
    assert all(cost(nearer)[1] > masked for nearer in range(begin + 1, first + 1))
    for farther in range(max(first - 10, first // 1024 * 1024), begin):
        assert cost(farther)[0] > halves or cost(farther)[1] >= masked
    return first - begin


def check_begins(schedule: Schedule, visible: np.ndarray) -> tuple[int, int]:
    """check_begin of all lists without a shift; how many tiles' and how many pairs' of them begin ahead."""
    num_ahead = [0, 0]
    for is_pair, one in enumerate(schedule.lists if schedule.has_cuts else (schedule.tiles,)):
        for (list_idx, entry), num_spans in np.ndenumerate(one.num_spans):
            seen = visible[list_idx, one.begins[list_idx, entry] : one.begins[list_idx, entry + 1]]
            if num_spans > 0 and one.shifts[list_idx, entry] == 0 and seen.any():
                ahead = check_begin(unpack(one.spans[list_idx, entry, :num_spans]), seen)
                num_ahead[is_pair] += ahead > 0
    return num_ahead[0], num_ahead[1]
