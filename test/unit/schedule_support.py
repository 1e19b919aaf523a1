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
Spans = list[tuple[int, int, bool, bool]]  # (k_begin, count of items, is_full, ends_short)


def compile_library(folder: Path, *flags: str) -> ctypes.CDLL:
    """test/cpp/sm90_schedule.cc as a library in `folder`."""
    # Fibers jump between stacks, which the checked longjmp refuses.
    library = compile_for_host("sm90_schedule.cc", folder, "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", *flags)
    library.schedule_bytes.restype = ctypes.c_int64
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
    costs: np.ndarray  # int32 [b * h_mask, count, 4]: items, head of the list, rows
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


@dataclass(frozen=True)
class Totals:
    items: tuple[int, int]  # of tiles, of pairs
    most_tiles: int  # of a list
    fewest_tiles: int
    num_cuts: int  # of all lists


def take_apart(library: ctypes.CDLL, mask: NativeMask, blob: np.ndarray) -> tuple[Totals, list[Lists]]:
    """Totals, and lists of tiles and of pairs, in a schedule's bytes."""
    view = mask.view
    offsets = (ctypes.c_int64 * 9)()
    library.schedule_offsets(ctypes.byref(view), offsets)

    def part(offset: int, dtype: type, *shape: int) -> np.ndarray:
        return blob[offset : offset + 4 * int(np.prod(shape))].view(dtype).reshape(shape)

    room, num_lists = library.room_of_tiles(ctypes.byref(view)), mask.b * mask.h_mask
    if offsets[8] < 0:
        begins = np.repeat(np.minimum(np.arange(room + 1) * TILE_Q, mask.s_q)[None], num_lists, axis=0)
    else:
        begins = part(offsets[8], np.int32, num_lists, room + 1)
    with_second = np.concatenate([begins, begins[:, -1:]], axis=1)  # a last pair may lack its second tile
    lists = []
    for idx, count in enumerate((room, -(-room // 2))):
        order, costs, spans = offsets[1 + 3 * idx : 4 + 3 * idx]
        shape = (num_lists, count)
        lists.append(Lists(part(order, np.int32, *shape, 4), part(costs, np.int32, *shape, 4),
                           part(spans, np.uint32, *shape, offsets[7]), with_second[:, :: 1 + idx][:, : count + 1],
                           with_second[:, 1 :: 1 + idx][:, :count]))  # fmt: skip
    totals = part(offsets[0], np.uint32, 9).tolist()
    return Totals((totals[0], totals[2]), *totals[6:9]), lists


def unpack(packed: np.ndarray) -> Spans:
    return [(int(x >> 12) * 16, int(x >> 2 & 1023), bool(x & 1), bool(x & 2)) for x in packed]


def plain_spans(library: ctypes.CDLL, mask: NativeMask, list_idx: int, rows: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Spans of a list, packed, and its head. `rows`: where its tile begins and ends, or its pair's tiles, one behind the
    other."""
    packed = np.empty(mask.s_k // library.item_cols(0) + 3, np.uint32)
    view, begins = mask.view, (ctypes.c_int32 * len(rows))(*rows)
    address = packed.ctypes.data_as(ctypes.c_void_p)
    is_pair = int(len(rows) == 3)
    head = library.plain_spans(ctypes.byref(view), list_idx, begins, is_pair, address, len(packed))  # int32
    return packed[: head & (1 << 28) - 1], head


def check_build(library: ctypes.CDLL, mask: NativeMask, entries: list[int] | None = None) -> list[Lists]:
    """Compares the kernels' product with the plain lists (of `entries`, default: all)."""
    totals, lists = take_apart(library, mask, build(library, mask))
    for is_pair, one in enumerate(lists):
        num_lists, count, max_spans = one.spans.shape
        has_rows = one.begins[:, :-1] < mask.s_q
        for list_idx in range(num_lists):
            for entry in range(count) if entries is None else [entry for entry in entries if entry < count]:
                begin, middle, end = (int(x[list_idx, at]) for x, at in
                                      ((one.begins, entry), (one.middles, entry), (one.begins, entry + 1)))  # fmt: skip
                where = f"list {list_idx}, {'pair' if is_pair else 'tile'} {entry}"
                rows = [begin, (end - middle) << 16 | (middle - begin)]
                assert 0 <= middle - begin <= TILE_Q and 0 <= end - middle <= TILE_Q, where
                if not has_rows[list_idx, entry]:
                    assert one.costs[list_idx, entry].tolist() == [0, 0, mask.s_q, 0], where
                    continue
                wanted, head = plain_spans(library, mask, list_idx, (begin, middle, end)[: 2 + is_pair])
                assert len(wanted) < max_spans, "no room for the end"
                found = one.spans[list_idx, entry, : len(wanted)]
                assert unpack(found) == unpack(wanted), where
                assert one.spans[list_idx, entry, len(wanted)] == 0, f"{where}: the end is missing"
                items = sum(span[1] for span in unpack(wanted))
                assert one.costs[list_idx, entry].tolist() == [items, head, *rows], where
            items = one.costs[list_idx, :, 0]
            dearest_first = np.lexsort((np.arange(count), -items))
            assert one.order[list_idx, :, 0].tolist() == dearest_first.tolist()
            assert one.order[list_idx, :, 1:].tolist() == one.costs[list_idx, dearest_first, 1:].tolist()
        assert totals.items[is_pair] == one.costs[:, :, 0].sum()
    num_tiles = (lists[0].begins[:, :-1] < mask.s_q).sum(1)
    assert (totals.most_tiles, totals.fewest_tiles) == (num_tiles.max(), num_tiles.min())
    return lists


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


def check_raw(library: ctypes.CDLL, raw: RawMask, s_q: int, s_k: int) -> Lists:
    """Compares with the plain lists and with the dense mask; returns the lists of single tiles."""
    visible = planes(raw, s_q, s_k)
    mask = NativeMask.from_bounds(raw.startend_row_indices, raw.causal, s_q, raw.block_mask)
    tiles, pairs = check_build(library, mask)
    for is_pair, one in enumerate((tiles, pairs)):
        for list_idx, entry in np.ndindex(one.num_spans.shape):
            spans = unpack(one.spans[list_idx, entry, : one.num_spans[list_idx, entry]])
            seen = visible[list_idx, one.begins[list_idx, entry] : one.begins[list_idx, entry + 1]]
            if len(seen) == 0:
                continue
            shift = int(one.shifts[list_idx, entry])
            check_spans(spans, seen, library.item_cols(is_pair), shift)
            if shift:
                first = int(seen.any(0).argmax())
                assert first == spans[0][0] + shift and seen[:, first : first // 16 * 16 + 16].all()
                with pytest.raises(AssertionError):
                    check_spans(spans, seen, library.item_cols(0), shift + 1)
    return tiles


def documents(lengths: list[int], *, causal: bool) -> tuple[RawMask, int]:
    """Documents of `lengths` tokens, one behind the other, and their sum."""
    ends = np.cumsum(lengths)
    end, begin = np.repeat(ends, lengths), np.repeat(ends - lengths, lengths)
    bounds = np.stack([end] if causal else [end, begin], axis=1)[None, None]
    return RawMask(bounds.astype(np.int32), causal), int(ends[-1])
