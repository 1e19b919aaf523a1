# SPDX-License-Identifier: Apache-2.0
"""Which key columns the Hopper forward visits: the kernels that prepare a schedule, run on the host thread by thread,
against dense masks and against the same lists made one granule after the other."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from schedule_support import (
    SHORT_COLS,
    TILE_Q,
    check_begins,
    check_build,
    check_raw,
    check_spans,
    compile_library,
    documents,
    mask_of,
    planes,
    unpack,
    windows,
)

from paddle_fm3.testing.cases import RawMask, benchmark_case
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES
from paddle_fm3.testing.native_call import NativeMask
from paddle_fm3.testing.reference import visible_plane

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]
FORM_IDS = ["c1", "c2", "nc2", "nc4"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("schedule"))


CASES = [case for case in HOSTILE_CASES if case.s_q > 0 and case.s_k > 0 and case.b > 0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_masks(library: ctypes.CDLL, case) -> None:
    raw = case.build_mask()
    if raw.startend_row_indices is None:
        visible = np.repeat(visible_plane(None, raw.causal, case.s_q, case.s_k)[None], case.b, axis=0)
    else:
        visible = planes(raw, case.s_q, case.s_k)
    mask = mask_of(case)
    for is_pair, one in enumerate(check_build(library, mask).lists):
        rows = TILE_Q * (1 + is_pair)
        for (list_idx, entry), num_spans in np.ndenumerate(one.num_spans):
            seen, shift = visible[list_idx, entry * rows : (entry + 1) * rows], int(one.shifts[list_idx, entry])
            check_spans(unpack(one.spans[list_idx, entry, :num_spans]), seen, library.item_cols(is_pair, 0), shift)


def random_mask(rng: np.random.Generator, form: tuple[bool, int], idx: int) -> NativeMask:
    """Bounds near each other or far apart, alike in runs of keys or not, meeting or not, at times a block mask."""
    causal, n = form
    s_q, s_k = (int(x) for x in rng.integers(1, 1400, 2))
    centre, spread = rng.integers(-5, s_q + 6, n), int(rng.choice([1, 5, 100, 1000]))
    bounds = centre + rng.integers(0, spread, (1, 1, s_k, n))
    if idx % 3 == 0:
        bounds = np.repeat(bounds[:, :, ::64], 64, axis=2)[:, :, :s_k]
    if idx % 5 == 0:
        bounds[rng.random((1, 1, s_k)) < 0.1] = 0
    if n == 4 and idx % 3 != 0:  # the two intervals meet, at another row for each key
        first, meet, _, last = np.moveaxis(np.sort(bounds, axis=3), 3, 0)
        both = [first, meet, meet, last] if idx % 3 == 1 else [meet, last, first, meet]
        bounds = np.stack(both, axis=3)
    tiles = None
    if idx % 4 == 0:
        tiles = (rng.random((1, 1, -(-s_q // 128), -(-s_k // 128))) < 0.6).astype(np.int32)
    return NativeMask.from_bounds(bounds.astype(np.int32), causal, s_q, tiles)


@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_random_masks(library: ctypes.CDLL, form: tuple[bool, int]) -> None:
    rng = np.random.default_rng(form[1] + 10 * form[0])
    for idx in range(40):
        check_build(library, random_mask(rng, form, idx))


@pytest.mark.parametrize("causal", [True, False])
def test_items_begin_where_documents_do(library: ctypes.CDLL, causal: bool) -> None:
    """At every offset modulo 16: no step is masked for the columns before a document alone."""
    lengths = [433] * 17  # each begins a column later than the one before
    raw, s = documents(lengths, causal=causal)
    tiles, begins, ends = check_raw(library, raw, s, s).tiles, set(), np.cumsum(lengths)
    for begin, end in zip(ends - lengths, ends, strict=True):
        for entry in range(-(-begin // TILE_Q), end // TILE_Q):  # tiles that lie in the document
            assert tiles.shifts[0, entry] == begin % 16
            shown = (entry * TILE_Q if causal else end) - begin  # to all rows
            if shown >= 160 + 16:
                assert unpack(tiles.spans[0, entry])[0][0] == begin // 16 * 16 and unpack(tiles.spans[0, entry])[0][2]
                begins.add(int(begin) % 16)
    assert begins == set(range(16))


@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_any_length(library: ctypes.CDLL, causal: bool) -> None:
    """One key or a thousand, keys no multiple of 16; then the same with gaps and with a block mask."""
    rng, num_shifted = np.random.default_rng(causal), 0
    for _ in range(12):
        lengths = rng.choice([1, 2, 15, 100, 300, 1000], 6) + rng.integers(0, 17, 6)
        raw, s = documents(lengths.tolist(), causal=causal)
        num_shifted += np.count_nonzero(check_raw(library, raw, s, s).tiles.shifts)
        bounds = raw.startend_row_indices
        assert bounds is not None
        for hidden in (rng.random(s) < 0.02, np.arange(s) // 40 % 7 == 3):  # these keys nobody sees
            holes = np.where(hidden[:, None], 0 if causal else [s, s], bounds[0, 0])[None, None].astype(np.int32)
            check_raw(library, RawMask(holes, causal), s, s)
        kept = (rng.random((1, 1, -(-s // 128), -(-s // 128))) < 0.7).astype(np.int32)
        tiles = check_raw(library, RawMask(bounds, causal, kept), s, s).tiles
        assert not tiles.shifts.any(), "not with a block mask"
    assert num_shifted > 20


@pytest.mark.parametrize(("end", "is_short"), [(320 + 80 + 13, True), (320 + 80 + 14, False)])
def test_the_last_item_is_short_by_columns(library: ctypes.CDLL, end: int, is_short: bool) -> None:
    """Also where a shifted one ends in the middle of a granule; a list with a gap is not shifted."""
    key = np.arange(600)
    is_seen = (key >= 13) & (key < end)  # by all rows
    for gap, shift, wanted in (
        (slice(0), 13, [(0, 2, True, False), (320, 1, False, is_short)]),
        (slice(208, 224), 0, [(0, 3, False, False)]),
    ):
        shown = is_seen.copy()
        shown[gap] = False
        bounds = np.where(shown, 130, 0)[None, None, :, None].astype(np.int32)
        tiles = check_raw(library, RawMask(np.concatenate([bounds, 0 * bounds], axis=3), False), 130, 600).tiles
        for entry in range(2):
            assert tiles.shifts[0, entry] == shift
            assert unpack(tiles.spans[0, entry, : tiles.num_spans[0, entry]]) == wanted


@pytest.mark.parametrize("causal", [True, False])
def test_windows_begin_ahead_where_it_spares_a_masked_item(library: ctypes.CDLL, causal: bool) -> None:
    rng, num_ahead = np.random.default_rng(5 + causal), 0
    for idx in range(30):
        raw, s = windows(rng, [int(rng.integers(1000, 3000))], causal=causal)
        num_ahead += check_begins(check_raw(library, raw, s, s), planes(raw, s, s))[0]
        if idx % 6 == 0:  # not with a block mask
            tiles = np.ones((1, 1, -(-s // 128), -(-s // 128)), np.int32)
            check_raw(library, RawMask(raw.startend_row_indices, causal, tiles), s, s)
    assert num_ahead > 10


# Granules that some rows see, that all see, that others see; how many come ahead. The last item is short or not.
RAMPS = [
    (6, 13, 5, 1), (6, 12, 5, 2), (6, 11, 5, 3), (6, 10, 5, 4), (6, 10, 10, 4), (6, 13, 7, 1), (7, 9, 5, 0), (6, 2, 10, 0),
    (6, 9, 5, 0), (1, 4, 1, 0), (1, 9, 2, 0), (1, 15, 6, 0), (1, 18, 6, 0),
]  # fmt: skip


def ramps(s_k: int, granule: int) -> RawMask:
    """A head each, from that granule on."""
    bounds = np.zeros((1, len(RAMPS), s_k, 2), np.int32)
    for head, (left, full, right, _) in enumerate(RAMPS):
        rows = [(left + 1, 0)] * left + [(128, 0)] * full + [(128, right)] * right
        bounds[0, head, granule * 16 :][: 16 * len(rows)] = np.repeat(rows, 16, axis=0)
    return RawMask(bounds, False)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("place", range(6))
def test_a_list_begins_in_the_block_of_its_first_key(library: ctypes.CDLL, block: int, place: int) -> None:
    """Granules ahead are none of the 1,024 before, which are made at once if all are hidden, nor before the first key."""
    granule = 1024 * block + place
    s_k = granule * 16 + 600
    tiles = check_raw(library, ramps(s_k, granule), 128, s_k).tiles
    for head, (*_, ahead) in enumerate(RAMPS):
        wanted = granule - (ahead if ahead <= place else 0)
        assert unpack(tiles.spans[head, 0, :1])[0][0] == 16 * wanted, RAMPS[head]


def test_only_lists_of_one_section_begin_ahead(library: ctypes.CDLL) -> None:
    for s_k, is_ahead in ((131_072, True), (131_073, False)):
        mask = NativeMask.from_bounds(ramps(s_k, 7000).startend_row_indices, False, 128)
        tiles = check_build(library, mask).tiles
        begins = [7000 - is_ahead * ahead for *_, ahead in RAMPS]
        assert [unpack(own[0, :1])[0][0] // 16 for own in tiles.spans] == begins


@pytest.mark.parametrize("is_island", [True, False], ids=["islands", "holes"])
@pytest.mark.parametrize("place", range(4))
def test_blocks_that_are_alike_but_for_one_hull(library: ctypes.CDLL, is_island: bool, place: int) -> None:
    """One 128 columns among 4,096 differ: a block of granules is taken for hidden or full only as a whole."""
    s_q, s_k, hull = 300, 12288, 4 * 17 + place
    is_inside = np.arange(s_k) // 128 == hull
    bounds = np.where(is_inside == is_island, s_q, 0).astype(np.int32)[None, None, :, None]
    check_build(library, NativeMask.from_bounds(np.concatenate([bounds, 0 * bounds], 3), False, s_q, None))


@pytest.mark.parametrize("kind", ["causal_document", "global_window", "qk_sparse", "random_eviction"])
def test_long_masks(library: ctypes.CDLL, kind: str) -> None:
    """Some tiles of a 128K mask: all 32 lanes of a warp have a stretch of a list."""
    mask = mask_of(benchmark_case(f"128k_{kind}"))
    check_build(library, mask, [0, 1, 63, 200, 511, 512, 777, 1022, 1023])


@pytest.mark.parametrize("form", [*FORMS, None], ids=[*FORM_IDS, "none"])
@pytest.mark.parametrize("s_k", [262221, 300000])
def test_lists_of_several_sections(library: ctypes.CDLL, form: tuple[bool, int] | None, s_k: int) -> None:
    """More columns than a CTA works on at a time, and spans longer than one entry can count."""
    if form is None:
        check_build(library, NativeMask.without_bounds(False, 1, 200, s_k))
        return
    bounds = np.random.default_rng(form[1]).integers(0, 257, (1, 1, s_k // 200 + 1, form[1]))
    bounds = np.repeat(bounds, 200, axis=2)[:, :, :s_k].astype(np.int32)
    check_build(library, NativeMask.from_bounds(bounds, form[0], 256, None))


def test_causal_list_is_as_short_as_can_be(library: ctypes.CDLL) -> None:
    tiles = check_build(library, NativeMask.without_bounds(True, 1, 4096, 4096)).tiles
    for q_tile_idx in range(32):
        spans = unpack(tiles.spans[0, q_tile_idx, : tiles.num_spans[0, q_tile_idx]])
        columns = (q_tile_idx + 1) * TILE_Q
        assert sum(span[1] for span in spans) == -(-columns // library.item_cols(0, 0))
        assert sum(count for _, count, is_full, _ in spans if not is_full) <= 2
        assert spans[-1][3] == (columns > 160 and 0 < columns % 160 <= SHORT_COLS), (
            "the last item shows half its columns"
        )


def test_a_lost_or_moved_span_is_noticed(library: ctypes.CDLL) -> None:
    raw = benchmark_case("8k_causal_document").build_mask()
    bounds = np.ascontiguousarray(raw.startend_row_indices[:1])
    mask = NativeMask.from_bounds(bounds, raw.causal, 8192)
    visible = visible_plane(bounds[0, 0], raw.causal, 8192, 8192)[5 * TILE_Q : 6 * TILE_Q]
    tiles = check_build(library, mask).tiles
    spans = unpack(tiles.spans[0, 5, : tiles.num_spans[0, 5]])
    check_spans(spans, visible, library.item_cols(0, 0))
    k_begin, count, *_ = spans[0]
    for broken in (
        spans[:-1],
        [(k_begin + 16, count, False, False), *spans[1:]],
        [(k, n, True, is_short) for k, n, _, is_short in spans],
        [(k, n, is_full, True) for k, n, is_full, _ in spans],
    ):
        with pytest.raises(AssertionError):
            check_spans(broken, visible, library.item_cols(0, 0))
