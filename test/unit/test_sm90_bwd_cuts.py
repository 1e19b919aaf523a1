# SPDX-License-Identifier: Apache-2.0
"""Where the Hopper backward's tiles begin: its own kernels on the host against the rule in plain words, on what dense
masks and lengths of documents say. More of row tiles: test_sm90_bwd_row_cuts.py."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from bwd_lists_support import BLOCK_KS, BLOCK_Q, CUT_ALL_SIZES, Lists, build, compile_library

from paddle_fm3.testing.cases import benchmark_case
from paddle_fm3.testing.native_call import NativeMask
from paddle_fm3.testing.reference import visible_plane

BORDER_KEYS, CUT_STEPS, MOST_BORDERS = 128, 4, 496
KINDS = ("causal", "bidirectional")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("lists"), CUT_ALL_SIZES)


def room(s_k: int, block_k: int) -> int:
    on_grid = -(-s_k // block_k)
    return on_grid + on_grid // 16 + 1


def row_room(s_q: int) -> int:
    on_grid = -(-s_q // BLOCK_Q)
    return on_grid + on_grid // 32 + 1


def borders_of(visible: np.ndarray) -> list[int]:
    """Keys before which nothing is shared: neither by the two neighbours nor by the 128 keys on either side."""
    rows = [np.flatnonzero(column) for column in visible.T]
    found = []
    for key in range(1, len(rows)):
        if len(rows[key - 1]) + len(rows[key]) == 0:
            continue
        sides = (rows[key - 1 : key], rows[key : key + 1]), (
            rows[max(key - BORDER_KEYS, 0) : key], rows[key : key + BORDER_KEYS])  # fmt: skip
        if all(are_apart(np.concatenate(one), np.concatenate(other)) for one, other in sides):
            found.append(key)
    return found


def are_apart(one: np.ndarray, other: np.ndarray) -> bool:
    return not len(one) or not len(other) or one.max() < other.min() or other.max() < one.min()


def wanted_row_cuts(borders: list[int], first: np.ndarray, num_rows: np.ndarray, s_q: int) -> dict[int, int]:
    """Rows at which row tiles begin anew, by the border that each stands for."""
    cuts, begin, num_tiles = {}, 0, 0
    for border, end in list(zip(borders, [*borders, len(first)][1:], strict=True))[:MOST_BORDERS]:
        row, last_before = int(first[border]), int(first[border - 1] + num_rows[border - 1])
        is_behind = num_rows[border - 1] == 0 or last_before <= row
        if not is_behind or num_rows[border] < CUT_STEPS * BLOCK_Q or row < begin + BLOCK_Q:
            continue
        saved = 0  # tiles that the first key and the last one of these visit less
        for key in (border, end - 1):
            if num_rows[key] > 0:
                behind = int(first[key] + num_rows[key])
                uncut = (behind - 1 - begin) // BLOCK_Q - (row - begin) // BLOCK_Q + 1
                saved += uncut - -(-(behind - row) // BLOCK_Q)
        num_before = num_tiles + -(-(row - begin) // BLOCK_Q)
        if saved / 2 * (end - border) / 128 < CUT_STEPS or num_before + -(-(s_q - row) // BLOCK_Q) > row_room(s_q):
            continue
        cuts[border], begin, num_tiles = row, row, num_before
    return cuts


def wanted_begins(
    borders: list[int], first: np.ndarray, num_rows: np.ndarray, block_k: int, row_cuts: dict[int, int]
) -> list[int]:
    """`first`, `num_rows`: of the one run of rows that each key shows."""
    s_k = len(first)
    begins, begin, row_begin = [], 0, 0
    for border, end in list(zip(borders, [*borders, s_k][1:], strict=True))[:MOST_BORDERS]:
        row_begin = row_cuts.get(border, row_begin)
        cut, row_tile = border, first[border] - max(first[border] - row_begin, 0) % BLOCK_Q
        earlier = border - (first[border] - row_tile)
        is_falling = first[min(border + BLOCK_Q - 1, s_k - 1)] > first[border]
        if earlier > 0 and is_falling and first[earlier] >= row_tile:
            cut = earlier
        before, length = list(range(begin, cut, block_k)), end - cut
        over = before[-1] + block_k - cut if before else 0  # keys beyond the cut in the tile that holds it
        if over == 0 or over >= length:
            continue
        if len(begins) + len(before) + -(-(s_k - cut) // block_k) > room(s_k, block_k):
            continue
        fewer = max(int(num_rows[border]) - int(num_rows[end - 1]), 0) / length  # rows from key to key
        rows_at = [num_rows[border] - fewer * key for key in range(length)]
        saved = num_rows[border] + sum(rows_at[over::block_k]) - sum(rows_at[::block_k])
        if saved < CUT_STEPS * BLOCK_Q - 1e-3:
            continue
        begins += before
        begin = cut
    return begins + list(range(begin, s_k, block_k))


def row_begins(lists: Lists, mask_idx: int = 0) -> list[int]:
    """Rows at which row tiles begin anew: behind a short one."""
    rows = lists.q_rows[mask_idx][: lists.num_q_tiles[mask_idx]]
    return rows[1:, 0][rows[:-1, 1] - rows[:-1, 0] < BLOCK_Q].tolist()


def documents(lengths: list[int], kind: str, s_k: int) -> tuple[NativeMask, np.ndarray]:
    """Packed documents, keys behind them hidden; the mask and its bounds [s_k, n]."""
    begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    ends = np.repeat(np.cumsum(lengths), lengths)
    hidden = s_k - len(ends)
    ends, begins = np.append(ends, [0] * hidden), np.append(begins, [s_k] * hidden)
    columns = [ends] if kind == "causal" else [ends, begins]
    bounds = np.stack(columns, -1).astype(np.int32)
    return NativeMask.from_bounds(bounds[None, None], kind == "causal", s_k, None), bounds


def draw_lengths(draw: np.random.Generator, s: int, most: int) -> list[int]:
    lengths = []
    while sum(lengths) < s:
        lengths.append(min(int(draw.integers(1, most)), s - sum(lengths)))
    return lengths


def test_begins_follow_the_rule(library: ctypes.CDLL) -> None:
    draw, num_cuts, num_row_cuts = np.random.default_rng(5), 0, 0
    for idx in range(48):
        s, kind, block_k = int(draw.integers(1, 2600)), KINDS[idx % 2], BLOCK_KS[idx // 2 % 2]
        lengths = draw_lengths(draw, s - min(s - 1, idx % 3 * 100), int(draw.choice([40, 700, 1500])))
        mask, bounds = documents(lengths, kind, s)
        lists = build(library, mask, block_k)
        visible = visible_plane(bounds, kind == "causal", s, s)
        first = np.where(visible.any(0), visible.argmax(0), s)
        borders, num_rows = borders_of(visible), visible.sum(0)
        row_cuts = wanted_row_cuts(borders, first, num_rows, s)
        wanted = wanted_begins(borders, first, num_rows, block_k, row_cuts)
        assert lists.k_begins[0, : lists.num_tiles[0]].tolist() == wanted
        assert row_begins(lists) == list(row_cuts.values())
        num_cuts += sum(begin % block_k > 0 for begin in wanted)
        num_row_cuts += len(row_cuts)
    assert num_cuts > 40 and num_row_cuts > 8


@pytest.mark.parametrize(("kind", "block_k"), [("causal", 128), ("bidirectional", 128), ("bidirectional", 64)])
def test_more_borders_than_a_warp_has_lanes(library: ctypes.CDLL, kind: str, block_k: int) -> None:
    """Documents a little shorter than their tiles: most borders are worth a cut, far behind the first 31 of them, too."""
    draw = np.random.default_rng(3)
    lengths = (draw.integers(5, 14, 120) * 64 - draw.integers(1, 9, 120)).tolist()
    ends, s = np.cumsum(lengths), sum(lengths)
    mask, bounds = documents(lengths, kind, s)
    first = np.arange(s) if kind == "causal" else bounds[:, 1]
    row_cuts = wanted_row_cuts(ends[:-1].tolist(), first, bounds[:, 0] - first, s)
    wanted = wanted_begins(ends[:-1].tolist(), first, bounds[:, 0] - first, block_k, row_cuts)
    lists = build(library, mask, block_k)
    assert row_begins(lists) == list(row_cuts.values()) and sum(border > ends[64] for border in row_cuts) > 5
    assert lists.k_begins[0, : lists.num_tiles[0]].tolist() == wanted
    assert sum(np.diff(wanted[np.searchsorted(wanted, ends[64]) :]) < block_k) > 5


@pytest.mark.parametrize("num_short", [100, MOST_BORDERS - 1, MOST_BORDERS, MOST_BORDERS + 1, 9080])
def test_so_many_borders_are_looked_at(library: ctypes.CDLL, num_short: int) -> None:
    """Behind documents of one key by the thousand a long one is not found: lists must not take ever longer."""
    mask, bounds = documents([1] * num_short + [700], "bidirectional", num_short + 700)
    borders = list(range(1, num_short + 1))
    wanted = wanted_begins(borders, bounds[:, 1], bounds[:, 0] - bounds[:, 1], 128, {})
    lists = build(library, mask, 128)
    assert lists.k_begins[0, : lists.num_tiles[0]].tolist() == wanted
    assert (num_short in wanted) == (num_short <= MOST_BORDERS)


def steps_on_grid(bounds: np.ndarray, is_causal: bool, s: int, block_k: int) -> int:
    first, last = np.arange(s) if is_causal else bounds[:, 1], bounds[:, 0] - 1
    tiles = [slice(begin, begin + block_k) for begin in range(0, s, block_k)]
    return int(sum(last[tile].max() // BLOCK_Q - first[tile].min() // BLOCK_Q + 1 for tile in tiles))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [60, 500, 4000])
def test_cuts_save_steps(library: ctypes.CDLL, kind: str, most: int) -> None:
    draw = np.random.default_rng(most)
    for _ in range(4):
        mask, bounds = documents(draw_lengths(draw, 16384, most), kind, 16384)
        lists, on_grid = build(library, mask, 128), steps_on_grid(bounds, kind == "causal", 16384, 128)
        steps = int(lists.steps.sum())
        assert steps <= on_grid
        if most == 60:
            assert lists.num_tiles[0] == 128  # short documents share tiles
        if most == 4000:
            assert steps < 0.99 * on_grid


def test_cuts_end_where_the_room_ends(library: ctypes.CDLL) -> None:
    s = 65_536
    mask, _ = documents([321] * (s // 321) + [s % 321], "bidirectional", s)
    lists = build(library, mask, 128)
    assert lists.num_tiles[0] == room(s, 128) == lists.visited.shape[1]
    sizes = np.diff(lists.k_begins[0])
    assert (sizes[:100] < 128).any() and (sizes[-100:-1] == 128).all()


def test_masks_that_stay_on_the_grid(library: ctypes.CDLL) -> None:
    _, bounds = documents([1100, 900], "causal", 2000)
    tiles = np.ones((1, 1, 16, 16), np.int32)
    on_grid = np.minimum(np.arange(17) * 128, 2000)
    shared = bounds.copy()
    shared[1080] = 2000
    masks = {
        "a key of the first document shows the second one": NativeMask.from_bounds(
            shared[None, None], True, 2000, None
        ),
        "cut": NativeMask.from_bounds(bounds[None, None], True, 2000, None),
        "two masks of an entry": NativeMask.from_bounds(np.stack([bounds, bounds])[None], True, 2000, None),
        "block_mask": NativeMask.from_bounds(bounds[None, None], True, 2000, tiles),
        "no bounds": NativeMask.without_bounds(True, 1, 2000, 2000),
    }
    for name, mask in masks.items():
        lists = build(library, mask, 128)
        is_cut = not np.array_equal(lists.k_begins[0, : lists.num_tiles[0] + 1], on_grid)
        assert is_cut == (name == "cut"), name


def test_small_masks_stay_on_the_grid(tmp_path: Path) -> None:
    """Three sequences of 8K do, four do not, nor does one of 16K."""
    library = compile_library(tmp_path)
    for b, s, is_cut in ((3, 8192, False), (4, 8192, True), (1, 16_384, True), (1, 16_320, False)):
        bounds = documents([321] * (s // 321) + [s % 321], "bidirectional", s)[1]
        mask = NativeMask.from_bounds(np.stack([bounds[None]] * b), False, s, None)
        lists = build(library, mask, 128)
        assert lists.visited.shape[1] == (room(s, 128) if is_cut else -(-s // 128))
        assert (lists.num_tiles > -(-s // 128)).all() == is_cut
        if not is_cut:
            np.testing.assert_array_equal(lists.k_begins, [[*range(0, s, 128), s]] * b)


def test_entries_are_cut_apart(library: ctypes.CDLL) -> None:
    parts = [documents(lengths, "causal", 2000)[1] for lengths in ([1100, 900], [2000], [1000, 100, 900])]
    lists = build(library, NativeMask.from_bounds(np.stack(parts)[:, None], True, 2000, None), 128)
    for idx, bounds in enumerate(parts):
        alone = build(library, NativeMask.from_bounds(bounds[None, None], True, 2000, None), 128)
        np.testing.assert_array_equal(lists.k_begins[idx], alone.k_begins[0])
        np.testing.assert_array_equal(lists.visited[idx], alone.visited[0])
    assert len(set(lists.num_tiles.tolist())) > 1


@pytest.mark.parametrize("name", ["32k_causal_document", "32k_document", "32k_share_question"])
def test_benchmark_masks_take_fewer_steps(library: ctypes.CDLL, name: str) -> None:
    """On the grid: 6444, 12264 and 4721; with row tiles there 6268, 11981 and 4529."""
    raw = benchmark_case(name).build_mask()
    one = np.ascontiguousarray(raw.startend_row_indices[:1, :1])
    lists = build(library, NativeMask.from_bounds(one, raw.causal, one.shape[2], None), 128)
    wanted = {"32k_causal_document": 6114, "32k_document": 11829, "32k_share_question": 4318}[name]
    assert lists.steps.sum() == wanted
