# SPDX-License-Identifier: Apache-2.0
"""Where the Hopper forward's query tiles begin: the kernels run on the host thread by thread, against the rule written
down once more from documents' lengths, and what the lists of such tiles visit, against dense masks."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from schedule_support import (
    CUT_ALL_SIZES,
    TILE_Q,
    Lists,
    build,
    check_begins,
    check_build,
    check_raw,
    compile_library,
    documents,
    halves_of,
    is_worth_a_pair,
    mask_of,
    plain_spans,
    planes,
    take_apart,
    unpack,
    windows,
)
from test_sm90_spans import CASES, FORM_IDS, FORMS, RAMPS, random_mask

from paddle_fm3.testing.cases import RawMask, benchmark_case
from paddle_fm3.testing.native_call import NativeMask

KINDS = ("causal", "bidirectional")
CUT_ROWS, MOST_BORDERS = 384, 1024  # cuts.h, cut_tiles.cuh
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("cuts"), CUT_ALL_SIZES)


def native(raw: RawMask, s_q: int) -> NativeMask:
    return NativeMask.from_bounds(raw.startend_row_indices, raw.causal, s_q, raw.block_mask)


def build_tiles(library: ctypes.CDLL, mask: NativeMask) -> Lists:
    return take_apart(library, mask, build(library, mask)).tiles


def begins_of(tiles: Lists, list_idx: int = 0) -> list[int]:
    """Of the tiles up to the last one with rows, and the end."""
    begins = tiles.begins[list_idx].tolist()
    return begins[: begins.index(begins[-1]) + 1]


def room(s: int) -> int:
    return -(-s // TILE_Q) + -(-s // TILE_Q) // 4 + 1


def even_tiles(rows: int) -> int:
    return -(-rows // (2 * TILE_Q)) * 2


def wanted_begins(lengths: list[int], *, causal: bool) -> list[int]:
    s, ends = sum(lengths), np.cumsum(lengths).tolist()
    cuts, num_tiles = [(0, causal and lengths[0] > 1)], 0
    for idx in range(min(len(lengths) - 1, MOST_BORDERS)):
        grows, border, behind = causal and lengths[idx] > 1, ends[idx], lengths[idx + 1]
        is_last = idx == MOST_BORDERS - 1 and idx < len(lengths) - 2  # that is looked at: all behind it is one to it
        behind = s - border if is_last else behind
        if lengths[idx] + (0 if grows else behind) < CUT_ROWS:
            continue
        num_before = num_tiles + even_tiles(border - cuts[-1][0])
        if num_before + even_tiles(s - border) > room(s):
            break
        cuts, num_tiles = [*cuts, (border, is_last or (causal and behind > 1))], num_before
    if len(cuts) == 1:
        return [*range(0, s, TILE_Q), s]
    begins = []
    for (begin, grows), end in zip(cuts, [*(cut for cut, _ in cuts[1:]), s], strict=True):
        rows = end - begin
        sizes = [TILE_Q] * (rows // TILE_Q) + ([rows % TILE_Q] if rows % TILE_Q else [])
        sizes += [0] * (len(sizes) % 2)  # the tiles of a document go in pairs
        sizes = sizes[::-1] if grows else sizes
        begins += [begin + sum(sizes[:idx]) for idx in range(len(sizes))]
    return [*begins[: begins.index(s) if s in begins else None], s]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [40, 200, 400, 900, 4000])
def test_tiles_begin_at_documents(library: ctypes.CDLL, kind: str, most: int) -> None:
    rng, num_cut = np.random.default_rng(most), 0
    for _ in range(6):
        lengths = rng.integers(1, most, int(rng.integers(2, 12000 // most + 3))).tolist()
        raw, s = documents(lengths, causal=kind == "causal")
        schedule = take_apart(library, native(raw, s), build(library, native(raw, s)))
        found, wanted = begins_of(schedule.tiles), wanted_begins(lengths, causal=kind == "causal")
        assert found == wanted and schedule.has_cuts == (found[:-1] != [*range(0, s, TILE_Q)])
        for cut in set(found) & set(np.cumsum(lengths).tolist()[:-1]):
            assert not schedule.has_cuts or cut in found[::2], "a pair lies in two documents"
        num_cut += found[:-1] != [*range(0, s, TILE_Q)]
    assert (num_cut > 2) == (most > 200)


@pytest.mark.parametrize(
    ("lengths", "kind", "is_cut"),
    [([384, 900], "causal", True), ([383, 900], "causal", False), ([200, 184], "bidirectional", True),
     ([200, 183], "bidirectional", False)],
)  # fmt: skip
def test_documents_long_enough_for_a_cut(library: ctypes.CDLL, lengths: list[int], kind: str, is_cut: bool) -> None:
    raw, s = documents(lengths, causal=kind == "causal")
    begins = begins_of(build_tiles(library, native(raw, s)))
    assert (begins != [*range(0, s, TILE_Q), s]) == is_cut
    assert begins == wanted_begins(lengths, causal=kind == "causal")


@pytest.mark.parametrize("kind", KINDS)
def test_forms_that_say_the_same_are_cut_alike(library: ctypes.CDLL, kind: str) -> None:
    lengths = [700, 130, 900, 384]
    raw, s = documents(lengths, causal=kind == "causal")
    bounds = raw.startend_row_indices
    assert bounds is not None
    end, none, rows = bounds[0, 0, :, 0], np.zeros(s, np.int32), np.full(s, s, np.int32)
    if kind == "causal":
        forms = [
            (True, [end, rows]),
            (False, [end, rows, none, np.arange(s)]),
            (False, [none, np.arange(s), end, rows]),
        ]
    else:
        begin = bounds[0, 0, :, 1]
        forms = [(False, [end, rows, none, begin]), (False, [none, begin, end, rows])]
    wanted = wanted_begins(lengths, causal=kind == "causal")
    for causal, columns in [(raw.causal, [*bounds[0, 0].T]), *forms]:
        one = np.ascontiguousarray(np.stack(columns, 1)[None, None], np.int32)
        assert begins_of(check_raw(library, RawMask(one, causal), s, s).tiles) == wanted, len(columns)


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_cut_tiles(library: ctypes.CDLL, kind: str) -> None:
    """Spans, order, totals and pairs, against the same lists made plainly and against the dense mask."""
    rng, num_cut = np.random.default_rng(7), 0
    for _ in range(8):
        lengths = rng.choice([1, 15, 100, 384, 385, 700, 1000], 5) + rng.integers(0, 17, 5)
        raw, s = documents(lengths.tolist(), causal=kind == "causal")
        num_cut += begins_of(check_raw(library, raw, s, s).tiles) != [*range(0, s, TILE_Q), s]
        bounds = raw.startend_row_indices
        assert bounds is not None
        for hidden in (rng.random(s) < 0.02, np.arange(s) // 40 % 7 == 3):  # these keys nobody sees
            holes = np.where(hidden[:, None], 0 if kind == "causal" else [s, s], bounds[0, 0])[None, None]
            check_raw(library, RawMask(holes.astype(np.int32), raw.causal), s, s)
    assert num_cut > 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_masks(library: ctypes.CDLL, case) -> None:
    check_tiles(check_build(library, mask_of(case)).tiles, case.s_q)


@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_random_masks(library: ctypes.CDLL, form: tuple[bool, int]) -> None:
    rng = np.random.default_rng(100 + form[1] + 10 * form[0])
    for idx in range(30):
        mask = random_mask(rng, form, idx)
        check_tiles(check_build(library, mask).tiles, mask.s_q)


def check_tiles(tiles: Lists, s_q: int) -> None:
    """All rows, each once, at most 128 a tile; no pair of tiles is empty but behind the last one."""
    for begins in tiles.begins:
        sizes = np.diff(begins)
        assert begins[0] == 0 and begins[-1] == s_q
        assert (sizes >= 0).all() and (sizes <= TILE_Q).all()
        pairs = sizes[: len(sizes) // 2 * 2].reshape(-1, 2).sum(1)
        num_pairs = np.count_nonzero(pairs)
        assert (pairs[:num_pairs] > 0).all()


def test_rows_and_keys_need_not_be_as_many(library: ctypes.CDLL) -> None:
    """Where keys of a document are more than its rows, and where it has rows only behind some that see nothing."""
    keys, rows = np.array([500, 900, 700]), [400, 800, 600]
    begin = np.repeat(np.cumsum([0, *rows[:-1]]), keys)
    end = np.repeat(np.cumsum(rows), keys)
    for first in (0, 77):
        bounds = np.stack([end, begin], 1)[None, None] + first
        s_q = sum(rows) + first
        tiles = check_raw(library, RawMask(bounds.astype(np.int32), False), s_q, int(keys.sum())).tiles
        for cut in (400, 1200):
            assert cut + first in begins_of(tiles)


@pytest.mark.parametrize("again", [(0, 600), (0, 400)])
def test_rows_of_borders_that_do_not_ascend(library: ctypes.CDLL, again: tuple[int, int]) -> None:
    """Keys whose rows begin from the first one again: no cut at a row twice, nor before another one."""
    rows = [(0, 600), (600, 1200), again, (again[1], again[1] + 600)]
    bounds = np.repeat([(end, begin) for begin, end in rows], 500, axis=0)[None, None].astype(np.int32)
    begins = begins_of(check_raw(library, RawMask(bounds, False), 1200, 2000).tiles)
    assert begins == [0, 128, 256, 384, 512, 600, 600, 728, 856, 984, 1112, 1200]


def test_no_row_sees_both_sides_of_a_cut(library: ctypes.CDLL) -> None:
    """Keys whose rows lie apart by chance, or a few keys before a border that the rows behind it see."""
    lengths = [1000, 900]
    raw, s = documents(lengths, causal=True)
    assert 1000 in begins_of(build_tiles(library, native(raw, s)))
    assert raw.startend_row_indices is not None
    for key, is_cut in ((1000 - 128, False), (1000 - 129, True)):
        shared = raw.startend_row_indices.copy()
        shared[0, 0, key] = s
        assert (1000 in begins_of(build_tiles(library, native(RawMask(shared, True), s)))) == is_cut
    for key, is_cut in ((1127, False), (1128, True)):
        bidirectional, _ = documents(lengths, causal=False)
        assert bidirectional.startend_row_indices is not None
        bidirectional.startend_row_indices[0, 0, key, 1] = 999
        assert (1000 in begins_of(build_tiles(library, native(bidirectional, s)))) == is_cut


def test_cuts_end_where_the_room_ends(library: ctypes.CDLL) -> None:
    lengths = [385] * 200 + [16_464]  # some of the last borders would cost no tile
    raw, s = documents(lengths, causal=True)
    mask = native(raw, s)
    assert library.room_of_tiles(ctypes.byref(mask.view)) == room(s)
    begins = begins_of(build_tiles(library, mask))
    assert begins == wanted_begins(lengths, causal=True) and len(begins) - 1 == room(s)


@pytest.mark.parametrize("num_short", [MOST_BORDERS - 2, MOST_BORDERS - 1, MOST_BORDERS, 5000])
def test_so_many_borders_are_looked_at(library: ctypes.CDLL, num_short: int) -> None:
    lengths = [1] * num_short + [700, 900]
    raw, s = documents(lengths, causal=False)
    begins = begins_of(build_tiles(library, native(raw, s)))
    assert begins == wanted_begins(lengths, causal=False)
    assert (num_short in begins) == (num_short <= MOST_BORDERS)
    assert (num_short + 700 in begins) == (num_short < MOST_BORDERS)


def test_borders_far_apart(library: ctypes.CDLL) -> None:
    """More keys than the threads of a CTA look at at a time."""
    lengths = [70_001, 65_003, 3000]
    raw, s = documents(lengths, causal=False)
    mask = NativeMask.from_bounds(raw.startend_row_indices, False, s, None)
    assert begins_of(build_tiles(library, mask)) == wanted_begins(lengths, causal=False)


def test_masks_that_stay_on_the_grid(library: ctypes.CDLL, tmp_path: Path) -> None:
    raw, s = documents([1100, 900], causal=True)
    bounds = raw.startend_row_indices
    assert bounds is not None
    masks = {
        "cut": native(raw, s),
        "block_mask": NativeMask.from_bounds(bounds, True, s, np.ones((1, 1, 16, 16), np.int32)),
        "no bounds": NativeMask.without_bounds(True, 1, s, s),
        "a window": NativeMask.from_bounds(
            np.minimum(np.arange(s) + 500, s).astype(np.int32)[None, None, :, None], True, s
        ),
    }
    for name, mask in masks.items():
        schedule = check_build(library, mask)
        assert (begins_of(schedule.tiles) != [*range(0, s, TILE_Q), s]) == (name == "cut"), name
        assert schedule.totals.num_cuts == (1 if name == "cut" else 0)
    # Of the sizes of real calls three sequences of 8K do, four do not, whether of entries or of heads.
    sized = compile_library(tmp_path)
    raw, s = documents([5000, 3192], causal=False)
    for b, h_mask, is_cut in ((3, 1, False), (4, 1, True), (2, 2, True)):
        bounds = np.broadcast_to(raw.startend_row_indices, (b, h_mask, s, 2))
        mask = NativeMask.from_bounds(np.ascontiguousarray(bounds), False, s)
        assert sized.room_of_tiles(ctypes.byref(mask.view)) == (room(s) if is_cut else s // TILE_Q)


def test_entries_are_cut_apart(library: ctypes.CDLL) -> None:
    parts = [documents(lengths, causal=True)[0] for lengths in ([1100, 900], [2000], [500, 500, 1000])]
    alone = [begins_of(build_tiles(library, native(raw, 2000))) for raw in parts]
    bounds = np.concatenate([raw.startend_row_indices for raw in parts])
    mask = NativeMask.from_bounds(bounds.astype(np.int32), True, 2000)
    schedule = check_build(library, mask)
    assert [begins_of(schedule.tiles, idx) for idx in range(3)] == alone
    with_rows = [np.count_nonzero(np.diff(begins)) for begins in alone]
    assert schedule.totals.num_cuts == 1 + 2 and schedule.totals.tiles == (max(with_rows), 16) and max(with_rows) > 16


# Of each entry the lengths of its documents; whether they are causal; how many pairs and how many other tiles it has.
ENTRIES = {
    "both": ([[1300, 900, 872], [3072], [350, 384, 600, 1738]], False, [12, 12, 11], [2, 0, 3]),
    "pairs alone": ([[1024, 1536, 512], [1280, 1792]], False, [12, 12], [0, 0]),
    "rest alone": ([[1030, 523, 60, 1387], [989, 367, 659, 24, 961]], True, [0, 0], [26, 25]),
    "one without pairs": ([[4100], [1270, 2042, 788], [1300, 900, 1900]], True, [8, 0, 2], [17, 33, 30]),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_pairs_and_tiles_in_none(library: ctypes.CDLL, name: str) -> None:
    """Lists of one mask with different numbers of both. Pairs have the steps of single tiles, shifted and short ones, too."""
    entries, causal, num_pairs, num_rest = ENTRIES[name]
    bounds = np.concatenate([documents(lengths, causal=causal)[0].startend_row_indices for lengths in entries])
    schedule = check_raw(library, RawMask(bounds.astype(np.int32), causal), *[sum(entries[0])] * 2)
    assert schedule.has_cuts and schedule.rest is not None
    chosen = schedule.pairs.order[:, :, 1] != 0
    assert chosen.sum(1).tolist() == num_pairs and (schedule.rest[:, :, 1] != 0).sum(1).tolist() == num_rest
    assert schedule.totals.pairs == (max(num_pairs), min(num_pairs))
    assert schedule.totals.rest == (max(num_rest), min(num_rest))
    if name == "both":
        pairs, (list_idx, pair) = schedule.pairs, np.nonzero(schedule.pairs.num_spans)
        lasts = pairs.spans[list_idx, pair, pairs.num_spans[list_idx, pair] - 1]
        assert np.count_nonzero(pairs.shifts) > 10 and np.count_nonzero(lasts & 2) > 10, "shifted, short"


@pytest.mark.parametrize("kind", KINDS)
def test_windows_within_documents(library: ctypes.CDLL, kind: str) -> None:
    """Pairs, too, begin ahead where it spares a masked item."""
    rng, num_ahead = np.random.default_rng(11), np.zeros(2, int)
    for _ in range(16):
        lengths = (rng.choice([700, 1100, 1700], 3) + rng.integers(0, 100, 3)).tolist()
        raw, s = windows(rng, lengths, causal=kind == "causal")
        schedule = check_raw(library, raw, s, s)
        assert schedule.has_cuts
        num_ahead += check_begins(schedule, planes(raw, s, s))
    assert num_ahead[0] > 10 and num_ahead[1] > 5, num_ahead


def test_pairs_begin_ahead_by_what_both_tiles_see(library: ctypes.CDLL) -> None:
    """The first tile's rows see all of every key."""
    s_q, s_k, bounds = 512, 1200, np.zeros((1, len(RAMPS), 1200, 2), np.int32)
    for head, (left, full, right, _) in enumerate(RAMPS):
        rows = [(200, 0)] * left + [(256, 0)] * full + [(200, 0)] * right + [(512, 256)] * 20  # LTS, UTE
        bounds[0, head, 10 * 16 :][: 16 * len(rows)] = np.repeat(rows, 16, axis=0)
    schedule = check_raw(library, RawMask(bounds, False), s_q, s_k)
    assert schedule.has_cuts and (schedule.tiles.begins[:, :5] == np.arange(0, 513, 128)).all()
    for lists, aheads in ((schedule.pairs, [ahead for *_, ahead in RAMPS]), (schedule.tiles, [0] * len(RAMPS))):
        assert [10 - unpack(own[0, :1])[0][0] // 16 for own in lists.spans] == aheads


def test_which_masks_with_cuts_are_walked_in_pairs(library: ctypes.CDLL) -> None:
    """Pairs are 3/4 of what tiles visit, two of which a step of a pair counts for."""
    for tile_halves in (0, 1, 7, 8, 9, 4952, 9565, 3 << 40, (3 << 40) + 5):
        edge = 3 * tile_halves // 8
        for pair_halves in (0, *range(max(edge - 2, 0), edge + 3), tile_halves // 2):
            is_walked = library.pairs_are_walked(ctypes.c_uint64(tile_halves), ctypes.c_uint64(pair_halves), 1)
            assert is_walked == (Fraction(2 * pair_halves) >= Fraction(3, 4) * tile_halves)


def test_when_masks_without_cuts_are_walked_in_pairs(library: ctypes.CDLL) -> None:
    """Pairs visit at most 1/32 more columns than single tiles do; theirs are 88 a half, of single tiles 80."""
    for tile_halves in (1, 7, 64, 4952, 9565, 3 << 40, (3 << 40) + 5):
        edge = tile_halves * 80 * 33 // (2 * 88 * 32)
        for pair_halves in (0, *range(max(edge - 2, 0), edge + 3), tile_halves):
            is_walked = library.pairs_are_walked(ctypes.c_uint64(tile_halves), ctypes.c_uint64(pair_halves), 0)
            more = Fraction(2 * 88 * pair_halves, 80 * tile_halves) - 1
            assert is_walked == (more <= Fraction(1, 32))


def test_which_pairs_are_walked(library: ctypes.CDLL) -> None:
    """The rule by itself, at its edge for lists of any length."""
    num_walked = 0
    for first, second in itertools.product([0, 1, 2, 63, 64, 65, 128, 4000, 200_000], repeat=2):
        for pair in {0, 1, *range((first + second) // 2 - 3, (first + second) // 2 + 70), 209_716}:
            is_walked = library.pair_is_walked(pair, first, second)
            assert is_walked == is_worth_a_pair(pair, first, second)
            num_walked += is_walked
    assert num_walked > 400


def cost(library: ctypes.CDLL, mask: NativeMask, begins: list[int]) -> tuple[int, int]:
    """Halves of steps of the first list's tiles, and how many steps have a mask."""
    halves, masked = 0, 0
    for rows in itertools.pairwise(begins):
        if rows[0] == rows[1]:
            continue
        spans = unpack(plain_spans(library, mask, 0, rows)[0])
        halves += halves_of(spans, has_short=True)
        masked += sum(count for _, count, is_full, _ in spans if not is_full)
    return halves, masked


@pytest.mark.parametrize(
    ("name", "tiles", "on_grid", "cut", "pairs", "rest"),
    [
        ("8k_causal_document", 68, (870, 150), (832, 116), (7, 128), (54, 581)),
        ("32k_causal_document", 261, (5076, 637), (4952, 468), (41, 1209), (179, 2584)),
        ("8k_document", 68, (1584, 146), (1585, 68), (33, 774), (2, 37)),
        ("32k_document", 261, (9788, 634), (9565, 261), (129, 4732), (3, 101)),
        ("32k_share_question", 269, (3713, 882), (3629, 764), (20, 430), (229, 2789)),
        ("32k_prefix_document", 261, (5259, 639), (5112, 438), (59, 1359), (143, 2444)),
        ("32k_causal_blockwise", 261, (10471, 800), (10371, 644), (47, 3999), (167, 2434)),
        ("32k_window", 256, (6944, 507), (6944, 507), (128, 3472), None),
        ("8k_random_eviction", 64, (3337, 1298), (3337, 1298), (32, 1564), None),
    ],
)  # fmt: skip
def test_benchmark_masks(
    library: ctypes.CDLL, name: str, tiles: int, on_grid: tuple[int, int], cut: tuple[int, int],
    pairs: tuple[int, int], rest: tuple[int, int] | None,
) -> None:  # fmt: skip
    """on_grid, cut: cost() of tiles. pairs, rest: how many there are, and halves of their steps; of masks without cuts all
    pairs, in steps of 176."""
    raw = benchmark_case(name).build_mask()
    assert raw.startend_row_indices is not None
    one = np.ascontiguousarray(raw.startend_row_indices[:1])
    mask, s = NativeMask.from_bounds(one, raw.causal, one.shape[2]), one.shape[2]
    schedule = check_build(library, mask)
    assert schedule.totals.tiles == (tiles, tiles)
    assert cost(library, mask, begins_of(schedule.tiles)) == cut and schedule.totals.halves[0] == cut[0]
    assert cost(library, mask, [*range(0, s, TILE_Q), s]) == on_grid
    assert (schedule.totals.pairs[0], schedule.totals.halves[1]) == pairs
    assert schedule.has_cuts == (rest is not None)
    if rest is not None:
        assert schedule.rest is not None
        in_rest = schedule.rest[0, schedule.rest[0, :, 1] != 0, 0]
        assert (len(in_rest), schedule.tiles.costs[0, in_rest, 0].sum()) == rest
        assert schedule.totals.rest[0] == rest[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [300, 700, 3000])
def test_cuts_save_cycles(library: ctypes.CDLL, kind: str, most: int) -> None:
    """By the model of cuts.h."""
    rng, ratios = np.random.default_rng(most), []
    for _ in range(3):
        lengths = rng.integers(1, most, 12000 // most).tolist()
        raw, s = documents(lengths, causal=kind == "causal")
        mask = native(raw, s)
        cycles = []
        for begins in (begins_of(build_tiles(library, mask)), [*range(0, s, TILE_Q), s]):
            halves, masked = cost(library, mask, begins)
            cycles.append(1500 * halves + 600 * masked + 1250 * np.count_nonzero(np.diff(begins)))
        ratios.append(cycles[0] / cycles[1])
    assert max(ratios) <= 1.01 and np.mean(ratios) <= (1 if most == 300 else 0.97), ratios
