# SPDX-License-Identifier: Apache-2.0
"""Row tiles of the Hopper backward that begin at documents: where they may not, what is written of them for the kernels
that follow, and which key tiles visit them. The rule itself: test_sm90_bwd_cuts.py."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from bwd_lists_support import BLOCK_Q, CUT_ALL_SIZES, Lists, build, compile_library
from test_sm90_bwd_cuts import borders_of, documents, draw_lengths, row_begins, row_room, wanted_row_cuts
from test_sm90_bwd_steps import check_classes, check_tiles

from paddle_fm3.testing.native_call import NativeMask
from paddle_fm3.testing.reference import visible_plane

LONG = ([2150, 1850, 1000], [700, 1300, 64, 1240, 1696], [5000], [1089, 1984, 1927])  # all of 5000 rows

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("lists"), CUT_ALL_SIZES)


def check_places(lists: Lists, s_q: int) -> None:
    """Each row stands in its own tile, and a cut says how many rows the tile before it lacks."""
    assert lists.row_places is not None
    np.testing.assert_array_equal(lists.visits[:, :, 1], lists.q_rows[:, :, 0])  # where the kernel's loader reads it
    for idx, places in enumerate(lists.row_places):
        rows = lists.q_rows[idx][: lists.num_q_tiles[idx]]
        sizes = rows[:, 1] - rows[:, 0]
        wanted = np.repeat(np.arange(len(rows)) * BLOCK_Q - rows[:, 0], sizes) + np.arange(s_q)
        shift, cut, cut_shift, _ = places[np.arange(s_q) // BLOCK_Q].T
        np.testing.assert_array_equal(np.arange(s_q) + np.where(np.arange(s_q) < cut, shift, cut_shift), wanted)
        cuts = places[places[:, 1] < s_q]
        assert cuts[:, 1].tolist() == row_begins(lists, idx)
        np.testing.assert_array_equal(cuts[:, 2] - cuts[:, 0], (BLOCK_Q - sizes[:-1])[sizes[:-1] < BLOCK_Q])


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_rows_find_their_places(library: ctypes.CDLL, kind: str) -> None:
    draw, num_cuts = np.random.default_rng(2), 0
    for idx in range(24):
        s = int(draw.integers(600, 9000))
        lists = build(library, documents(draw_lengths(draw, s, int(draw.choice([900, 1500, 4000]))), kind, s)[0], 128)
        check_tiles(lists, s, s, 128)
        check_places(lists, s)
        num_cuts += len(row_begins(lists))
        assert idx > 0 or build(library, documents([s], kind, s)[0], 128).row_places is not None
    assert num_cuts > 20


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_entries_have_their_own(library: ctypes.CDLL, kind: str) -> None:
    parts = [documents(lengths, kind, 5000)[1] for lengths in LONG]
    lists = build(library, NativeMask.from_bounds(np.stack(parts)[:, None], kind == "causal", 5000, None), 128)
    check_tiles(lists, 5000, 5000, 128)
    check_places(lists, 5000)
    for idx, bounds in enumerate(parts):
        visible = visible_plane(bounds, kind == "causal", 5000, 5000)
        check_classes(lists.classes[idx], lists.k_begins[idx], lists.q_rows[idx], visible, 128)
        alone = build(library, NativeMask.from_bounds(bounds[None, None], kind == "causal", 5000, None), 128)
        np.testing.assert_array_equal(lists.q_rows[idx], alone.q_rows[0])
    begins = [row_begins(lists, idx) for idx in range(len(LONG))]
    assert begins[0] and not begins[2] and len(set(lists.num_q_tiles.tolist())) > 1


def test_both_sizes_of_key_tile_have_the_same_rows(library: ctypes.CDLL) -> None:
    mask = documents(LONG[0], "causal", 5000)[0]
    np.testing.assert_array_equal(build(library, mask, 128).q_rows, build(library, mask, 64).q_rows)


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_a_cut_saves_a_tile_of_every_key_tile(library: ctypes.CDLL, kind: str) -> None:
    """Or there is none. The second document begins `inside` rows behind a tile's begin; four key tiles are the least."""
    for inside in (1, 17, 32, 63):
        over = BLOCK_Q - inside
        lengths = {1024 + over + 1: True, 1024 + over: False, 511: False, 512: True}
        for length, is_cut in lengths.items():
            mask = documents([640 + inside, length, 200], kind, 840 + inside + length)[0]
            assert row_begins(build(library, mask, 128)) == [640 + inside] * is_cut, (inside, length)


def test_answers_to_a_shared_question(library: ctypes.CDLL) -> None:
    """There the keys between two borders, a question and its first answer, do not all end at the same row."""
    draw, num_cuts = np.random.default_rng(4), 0
    for _ in range(30):
        ends, s = [], 0
        for _ in range(2):
            parts = draw.integers(100, 900, 3).tolist()
            s += sum(parts)
            ends += [s] * parts[0] + [s - parts[2]] * parts[1] + [s] * parts[2]
        bounds = np.array(ends, np.int32)[:, None]
        visible = visible_plane(bounds, True, s, s)
        wanted = wanted_row_cuts(borders_of(visible), visible.argmax(0), visible.sum(0), s)
        lists = build(library, NativeMask.from_bounds(bounds[None, None], True, s, None), 128)
        assert row_begins(lists) == list(wanted.values())
        num_cuts += len(wanted)
    assert num_cuts > 15


def with_a_gap(begin: int, end: int) -> NativeMask:
    """Two causal documents, of 600 and 1400; no key shows rows [begin, end) of the second one."""
    bounds = np.tile(np.array([600, 2000], np.int32), (2000, 1))
    bounds[600:] = begin, end
    return NativeMask.from_bounds(bounds[None, None], True, 2000, None)


def test_no_cut_before_rows_that_see_nothing(library: ctypes.CDLL) -> None:
    """A tile that ends at a cut reads the BLOCK_Q rows behind its begin; what sees no key may hold anything."""
    assert row_begins(build(library, with_a_gap(0, 0), 128)) == [600]
    for begin, end in ((610, 620), (663, 670), (655, 700)):
        assert row_begins(build(library, with_a_gap(begin, end), 128)) == [], (begin, end)
    for begin, end in ((664, 670), (590, 600), (1500, 1600)):
        assert row_begins(build(library, with_a_gap(begin, end), 128)) == [600], (begin, end)


def test_no_cut_before_rows_that_the_upper_interval_hides(library: ctypes.CDLL) -> None:
    """As above, of documents whose bounds have two intervals: a gap is the lower one or the upper one."""
    for (begin, end), row_cuts in (((610, 620), []), ((663, 670), []), ((664, 670), [600]), ((1500, 1600), [600])):
        for gap in ([begin, end, 0, 600], [0, 600, begin, end]):
            bounds = np.tile(np.array([600, 2000, 0, 0], np.int32), (2000, 1))
            bounds[600:] = gap
            mask = NativeMask.from_bounds(bounds[None, None], False, 2000, None)
            assert row_begins(build(library, mask, 128)) == row_cuts, gap


@pytest.mark.parametrize("third", [1100, 2170, 2200, 2230])
def test_cuts_stand_apart_where_documents_do_not(library: ctypes.CDLL, third: int) -> None:
    """Keys that show nothing lie before the third document, so its rows may begin anywhere beside those of the second one.
    RowPlaces has room for one cut in BLOCK_Q rows."""
    bounds = np.zeros((3500, 2), np.int32)
    for keys, begin, end in (((0, 1000), 0, 1000), ((1000, 2200), 2200, 3400), ((2400, 3500), third, third + 1190)):
        bounds[slice(*keys)] = end, begin
    lists = build(library, NativeMask.from_bounds(bounds[None, None], False, 3420, None), 128)
    check_tiles(lists, 3420, 3500, 128)
    check_places(lists, 3420)
    assert row_begins(lists) == [2200]


def test_rows_behind_short_tiles_see_some_key(library: ctypes.CDLL) -> None:
    draw, num_cuts = np.random.default_rng(7), 0
    for _ in range(40):
        begin = 600 + int(draw.integers(-20, 100))
        end = begin + int(draw.integers(0, 60))
        row_cuts = row_begins(build(library, with_a_gap(begin, end), 128))
        sees = np.ones(2000, bool)
        sees[max(begin, 600) : max(end, 600)] = False
        assert all(sees[row : row + BLOCK_Q].all() for row in row_cuts)
        num_cuts += len(row_cuts)
    assert 8 < num_cuts < 32


def test_documents_whose_rows_come_in_another_order_stay_on_the_grid(library: ctypes.CDLL) -> None:
    lengths = LONG[0]
    begins = 5000 - np.cumsum(lengths)  # the last rows first
    bounds = np.stack([np.repeat(begins + lengths, lengths), np.repeat(begins, lengths)], -1).astype(np.int32)
    lists = build(library, NativeMask.from_bounds(bounds[None, None], False, 5000, None), 128)
    assert row_begins(lists) == []
    check_places(lists, 5000)


def test_cuts_end_where_the_room_ends(library: ctypes.CDLL) -> None:
    """Documents of more keys than rows, each of which would be cut."""
    rows = [257, 256] * 60
    ends = np.repeat(np.cumsum(rows), 512)
    bounds = np.stack([ends, np.repeat(np.cumsum([0, *rows[:-1]]), 512)], -1).astype(np.int32)
    lists = build(library, NativeMask.from_bounds(bounds[None, None], False, sum(rows), None), 128)
    check_tiles(lists, sum(rows), len(bounds), 128)
    check_places(lists, sum(rows))
    assert lists.num_q_tiles[0] == row_room(sum(rows)) == lists.visited.shape[2]
    assert 5 < len(row_begins(lists)) < 40


def test_where_lists_have_no_table(library: ctypes.CDLL) -> None:
    bounds = documents(LONG[0], "causal", 5000)[1]
    tiles = np.ones((1, 1, 40, 40), np.int32)
    masks = (
        NativeMask.from_bounds(np.stack([bounds, bounds])[None], True, 5000, None),
        NativeMask.from_bounds(bounds[None, None], True, 5000, tiles),
        NativeMask.without_bounds(True, 1, 5000, 5000),
    )
    for mask in masks:
        lists = build(library, mask, 128)
        assert lists.row_places is None and lists.visited.shape[2] == -(-5000 // BLOCK_Q)


def test_a_wrong_place_is_noticed(library: ctypes.CDLL) -> None:
    lists = build(library, documents(LONG[0], "causal", 5000)[0], 128)
    assert lists.row_places is not None
    for column in range(3):
        lists.row_places[0, 2150 // BLOCK_Q, column] += 1
        with pytest.raises(AssertionError):
            check_places(lists, 5000)
        lists.row_places[0, 2150 // BLOCK_Q, column] -= 1
    check_places(lists, 5000)
