# SPDX-License-Identifier: Apache-2.0
"""Which query tiles the Hopper forward begins with while keys are on their way: the kernel that orders them, run on the
host, against the rule tile by tile."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from schedule_support import CUT_ALL_SIZES, Schedule, build, compile_library, documents, mask_of, take_apart, unpack

from paddle_fm3._device_api import LocalFirst
from paddle_fm3.testing.cases import benchmark_case, resized
from paddle_fm3.testing.native_call import NativeMask

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
ENOUGH = 1 << 30
ENDS = [(8192,), (4000, 4096), (100, 2000, 6000, 8000), (1024, 2048, 3072, 4096, 5120, 6144, 7168, 8191)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("schedule"))


def ordered(library: ctypes.CDLL, mask: NativeMask, ends: tuple[int, ...], num_cols: int) -> tuple[Schedule, Schedule]:
    """Before and after."""
    blob = build(library, mask)
    before = take_apart(library, mask, blob.copy())
    first = LocalFirst(len(ends), num_cols)
    first.k_ends[: len(ends)] = ends
    view = mask.view
    library.order_local_first(ctypes.byref(view), ctypes.c_void_p(blob.ctypes.data), ctypes.byref(first))
    return before, take_apart(library, mask, blob)


def wanted_order(
    schedule: Schedule, list_idx: int, ends: tuple[int, ...], num_cols: int, is_pair: bool
) -> tuple[list[int], int]:
    """The entries in order, and how many come first."""
    lists, item_cols = schedule.lists[is_pair], 176 if is_pair and not schedule.has_cuts else 160
    entries = lists.order[list_idx, :, 0].tolist()
    heads = dict(lists.order[list_idx, :, :2].tolist())  # of those that the order has

    def part(entry: int) -> int:
        num_spans, shift = heads[entry] & (1 << 28) - 1, heads[entry] >> 28 & 15
        if num_spans == 0:  # no tile
            return len(ends)
        k_begin, count, _, _ = unpack(lists.spans[list_idx, entry, :num_spans])[-1]
        k_end = k_begin + shift + count * item_cols
        return next((at for at, end in enumerate(ends) if k_end <= end), len(ends))

    first, visited = [], 0
    for at in range(len(ends)):
        for entry in entries:
            if part(entry) == at and visited < num_cols:
                first.append(entry)
                visited += int(lists.costs[list_idx, entry, 0]) * item_cols // 2 * (2 if is_pair else 1)
    return first + [entry for entry in entries if entry not in first], len(first)


@pytest.mark.parametrize("num_cols", [0, 1, 20_000, 60_000, ENOUGH])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", ["8k_causal", "8k_document", "8k_causal_document", "8k_full"])
def test_tiles_come_first_by_what_they_wait_for_until_there_are_enough(
    library: ctypes.CDLL, name: str, ends: tuple[int, ...], num_cols: int
) -> None:
    mask = mask_of(resized(benchmark_case(name), b=1))
    before, after = ordered(library, mask, ends, num_cols)
    for is_pair, (old, new) in enumerate(zip(before.lists, after.lists, strict=True)):
        wanted, num_first = wanted_order(before, 0, ends, num_cols, bool(is_pair))
        assert new.order[0, :, 0].tolist() == wanted
        assert after.totals.late[is_pair] == len(wanted) - num_first
        others = {entry: rest for entry, *rest in old.order[0].tolist()}
        assert [others[entry] for entry in wanted] == new.order[0, :, 1:].tolist()
        assert np.array_equal(old.spans, new.spans)


def test_what_comes_first_comes_first_in_every_list(library: ctypes.CDLL) -> None:
    """Two lists of which one has more such tiles."""
    rows = 40 * 128
    bounds = np.empty((2, 1, rows, 2), np.int32)
    for at, edges in enumerate(([0, 900, 2000, rows], [0, 3000, rows])):
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            bounds[at, :, begin:end] = end, begin
    mask = NativeMask.from_bounds(bounds, False, rows, None)
    ends, num_cols = (2100, 3200), 30_000
    before, after = ordered(library, mask, ends, num_cols)
    counts = []
    for list_idx in range(2):
        wanted, num_first = wanted_order(before, list_idx, ends, num_cols, False)
        assert after.tiles.order[list_idx, :, 0].tolist() == wanted
        counts.append(num_first)
    assert counts[0] != counts[1] and after.totals.late[0] == 40 - min(counts)


def test_a_tile_whose_last_step_reaches_over_an_end_waits_for_the_next_part(library: ctypes.CDLL) -> None:
    """It copies those keys, hidden or not."""
    bounds = np.empty((1, 1, 1024, 2), np.int32)
    bounds[..., :512, :], bounds[..., 512:, :] = (512, 0), (1024, 512)
    mask = NativeMask.from_bounds(bounds, False, 1024, None)
    for end, num_first in ((639, 0), (640, 4)):
        _, after = ordered(library, mask, (end,), ENOUGH)
        assert after.totals.late[0] == 8 - num_first


@pytest.fixture(scope="module")
def cutting(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("cuts"), CUT_ALL_SIZES)


@pytest.mark.parametrize("num_cols", [6400, 20_000, ENOUGH])
@pytest.mark.parametrize("ends", [(1000, 2300), (800, 1820)])  # the last: where steps of 160 columns end
def test_entries_without_a_tile_come_last(cutting: ctypes.CDLL, ends: tuple[int, ...], num_cols: int) -> None:
    """Where tiles begin at documents: of two lists one has more of them; only some pairs are in the order of pairs. The order
    of the tiles that are in none stays."""
    parts = [documents(lengths, causal=False)[0] for lengths in ([700, 1000, 900, 1500], [4100])]
    bounds = np.concatenate([raw.startend_row_indices for raw in parts])
    mask = NativeMask.from_bounds(bounds, False, 4100, None)
    before, after = ordered(cutting, mask, ends, num_cols)
    assert before.has_cuts and after.rest is not None and np.array_equal(before.rest, after.rest)
    for is_pair, (old, new) in enumerate(zip(before.lists, after.lists, strict=True)):
        num_entries, counts = np.count_nonzero(old.order[:, :, 1], axis=1), []
        most = num_entries.max()
        assert (num_entries.min() < most or is_pair) and most < old.order.shape[1]
        for list_idx in range(2):
            wanted, num_first = wanted_order(before, list_idx, ends, num_cols, bool(is_pair))
            counts.append(num_first)
            assert new.order[list_idx, :most, 0].tolist() == wanted[:most]
            others = {entry: rest for entry, *rest in old.order[list_idx].tolist()}
            assert [others[entry] for entry in wanted[:most]] == new.order[list_idx, :most, 1:].tolist()
        assert after.totals.late[is_pair] == most - min(counts)
