# SPDX-License-Identifier: Apache-2.0
"""BlockSchedule against brute force on dense tables, row by row and tile by tile."""

from __future__ import annotations

import time

import numpy as np
import pytest

from paddle_fm3 import mask as masks
from paddle_fm3.mask import BOUND_FORMS, ColumnMask
from paddle_fm3.schedule import MAX_RUNS, TileClass, build_schedule, visible_pairs_per_row

FORMS = list(BOUND_FORMS)


def runs_of(rows: np.ndarray) -> list[tuple[int, int]]:
    """Maximal runs of True, by a plain walk."""
    runs, begin = [], None
    for row, is_set in enumerate([*rows.tolist(), False]):
        if is_set and begin is None:
            begin = row
        if not is_set and begin is not None:
            runs.append((begin, row))
            begin = None
    return runs


def kept(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The rule of schedule.h: four longest, ties to the earlier, ascending, unused {0, 0}."""
    longest = sorted(runs, key=lambda run: (run[0] - run[1], run[0]))[:MAX_RUNS]
    return sorted(longest) + [(0, 0)] * (MAX_RUNS - len(longest))


def random_mask(rng: np.random.Generator, *, max_size: int = 40, has_block_mask: bool = False) -> ColumnMask:
    is_causal, n = FORMS[rng.integers(len(FORMS))]
    s_q, s_k = (int(x) for x in rng.integers(0, max_size, 2))
    bounds = rng.integers(-3, s_q + 5, (1, 2, s_k, n)).astype(np.int32)
    style = rng.integers(3)
    if style == 0:  # neighbours alike
        bounds = np.repeat(bounds[:, :, ::5], 5, axis=2)[:, :, :s_k]
    elif style == 1:  # drifting, as windows do
        bounds = np.sort(bounds, axis=2)
    tiles = rng.integers(0, 2, (1, 2, -(-s_q // 128), -(-s_k // 128))) if has_block_mask else None
    return ColumnMask.from_bounds(np.ascontiguousarray(bounds), is_causal=is_causal, s_q=s_q, block_mask=tiles)


@pytest.mark.parametrize("seed", range(20))
def test_runs_match_brute_force(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        mask = random_mask(rng)
        block_q, block_k = (int(x) for x in rng.integers(1, 10, 2))
        schedule = build_schedule(mask, block_q, block_k)
        table = mask.dense()
        for b_idx, h_idx, tile in np.ndindex(*schedule.hidden_runs.shape[:3]):
            columns = table[b_idx, h_idx, :, tile * block_k : (tile + 1) * block_k]
            expected_hidden, expected_clear = (
                kept(runs_of(~columns.any(axis=1))),
                kept(runs_of(columns.all(axis=1))),
            )
            assert schedule.hidden_runs[b_idx, h_idx, tile].tolist() == [list(run) for run in expected_hidden]
            assert schedule.clear_runs[b_idx, h_idx, tile].tolist() == [list(run) for run in expected_clear]
        np.testing.assert_array_equal(schedule.num_visible_pairs, table.sum(axis=(2, 3)))


def brute_classes(table: np.ndarray, block_q: int, block_k: int) -> np.ndarray:
    """[num_q_tiles, num_k_tiles] of a dense plane."""
    s_q, s_k = table.shape
    classes = np.zeros((-(-s_q // block_q), -(-s_k // block_k)), int)
    for q_tile, k_tile in np.ndindex(classes.shape):
        tile = table[q_tile * block_q : (q_tile + 1) * block_q, k_tile * block_k : (k_tile + 1) * block_k]
        classes[q_tile, k_tile] = TileClass.FULL if tile.all() else TileClass.PARTIAL if tile.any() else TileClass.SKIP
    return classes


def check_classes(mask: ColumnMask, block_q: int, block_k: int) -> None:
    schedule = build_schedule(mask, block_q, block_k)
    counts = schedule.counts()
    per_q, per_k = schedule.visible_tiles_per_q_block(), schedule.visible_tiles_per_k_tile()
    block_pairs = 0
    for plane in np.ndindex(mask.b, mask.h_mask):
        expected = brute_classes(mask.dense()[plane], block_q, block_k)
        shown = schedule.tile_classes(b_idx=plane[0], h_mask_idx=plane[1])
        np.testing.assert_array_equal(shown, expected)
        for q_tile, k_tile in np.ndindex(expected.shape):
            rows = q_tile * block_q, min((q_tile + 1) * block_q, mask.s_q)
            single = schedule.classify(*rows, k_tile, b_idx=plane[0], h_mask_idx=plane[1])
            assert single == expected[q_tile, k_tile]
            width = min((k_tile + 1) * block_k, mask.s_k) - k_tile * block_k
            block_pairs += (single != TileClass.SKIP) * (rows[1] - rows[0]) * width
        for tile_class in TileClass:
            assert counts[tile_class][plane] == (expected == tile_class).sum()
        np.testing.assert_array_equal(per_q[plane], (expected != TileClass.SKIP).sum(axis=1))
        np.testing.assert_array_equal(per_k[plane], (expected != TileClass.SKIP).sum(axis=0))
    assert schedule.num_block_pairs.sum() == block_pairs
    total = mask.b * mask.h_mask * mask.s_q * mask.s_k
    assert schedule.density == (mask.dense().sum() / total if total else 0)
    assert schedule.density_block == (block_pairs / total if total else 0)


@pytest.mark.parametrize("seed", range(10))
def test_classes_and_counts_match_brute_force(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        # Up to two columns a tile: four runs suffice, so that the classes are exact.
        block_q, block_k = int(rng.integers(1, 9)), int(rng.integers(1, 3))
        check_classes(random_mask(rng, max_size=24), block_q, block_k)


@pytest.mark.parametrize("blocks", [(128, 128), (64, 128), (128, 32), (96, 80), (256, 128), (100, 300)])
def test_block_mask_is_applied_on_top(blocks):
    rng = np.random.default_rng(sum(blocks))
    bounds = np.stack([np.full((1, 2, 390), 350), np.full((1, 2, 390), 20)], -1).astype(np.int32)
    tiles = rng.integers(0, 2, (1, 2, 3, 4))
    mask = ColumnMask.from_bounds(bounds, is_causal=False, s_q=370, block_mask=tiles)
    schedule = build_schedule(mask, *blocks)
    np.testing.assert_array_equal(schedule.num_visible_pairs, mask.dense().sum(axis=(2, 3)))
    if 128 % blocks[0] == 0 and 128 % blocks[1] == 0:
        check_classes(mask, *blocks)
        return
    # A tile over several entries may be hidden half by bounds, half by entries: PARTIAL is right, not tight.
    counts = schedule.counts()
    for plane in np.ndindex(1, 2):
        exact, shown = brute_classes(mask.dense()[plane], *blocks), schedule.tile_classes(h_mask_idx=plane[1])
        assert ((shown == exact) | (shown == TileClass.PARTIAL)).all()
        for tile_class in TileClass:
            assert counts[tile_class][plane] == (shown == tile_class).sum()
        for q_tile, k_tile in np.ndindex(shown.shape):
            q_end = min((q_tile + 1) * blocks[0], 370)
            single = schedule.classify(q_tile * blocks[0], q_end, k_tile, h_mask_idx=plane[1])
            assert single == shown[q_tile, k_tile]


def test_block_mask_pairs_on_random_bounds():
    rng = np.random.default_rng(0)
    for _ in range(10):
        s_q, s_k = (int(x) for x in rng.integers(1, 400, 2))
        bounds = rng.integers(-3, s_q + 5, (1, 1, s_k, 4)).astype(np.int32)
        tiles = rng.integers(0, 2, (1, 1, -(-s_q // 128), -(-s_k // 128)))
        mask = ColumnMask.from_bounds(bounds, is_causal=False, s_q=s_q, block_mask=tiles)
        assert build_schedule(mask).num_visible_pairs.sum() == mask.dense().sum()


def test_tile_covered_only_by_the_union_is_skipped():
    column = np.arange(256)
    even = column % 2 == 0
    bounds = [
        np.where(even, 32, 96),
        np.where(even, 100, 170),
        np.where(even, 90, 10),
        np.where(even, 160, 97),
    ]
    mask = ColumnMask.from_bounds(np.stack(bounds, -1).astype(np.int32)[None, None], is_causal=False, s_q=256)
    schedule = build_schedule(mask, 64, 128)
    assert schedule.hidden_runs[0, 0].tolist() == [[[32, 160], [0, 0], [0, 0], [0, 0]]] * 2
    assert schedule.classify(64, 128, 0) == TileClass.SKIP
    assert schedule.classify(128, 192, 0) == TileClass.PARTIAL


def test_fifth_run_is_dropped_shortest_first_then_latest():
    intervals = [(2, 4), (7, 9), (13, 15), (16, 18)]  # clear: [0,2) [4,7) [9,13) [15,16) [18,20)
    bounds = np.array([[begin, end, 0, 0] for begin, end in intervals], np.int32)[None, None]
    mask = ColumnMask.from_bounds(bounds, is_causal=False, s_q=20)
    schedule = build_schedule(mask, 1, 4)
    assert schedule.clear_runs[0, 0, 0].tolist() == [[0, 2], [4, 7], [9, 13], [18, 20]]
    assert schedule.classify(15, 16, 0) == TileClass.PARTIAL  # the dropped run costs work, not correctness
    intervals = [(2, 4), (6, 8), (10, 12), (14, 16)]  # five clear runs of two rows: the last goes
    bounds = np.array([[begin, end, 0, 0] for begin, end in intervals], np.int32)[None, None]
    schedule = build_schedule(ColumnMask.from_bounds(bounds, is_causal=False, s_q=18), 1, 4)
    assert schedule.clear_runs[0, 0, 0].tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]


@pytest.mark.parametrize(("s_q", "s_k", "b"), [(0, 5, 1), (5, 0, 1), (0, 0, 1), (4, 4, 0)])
def test_zero_sizes(s_q, s_k, b):
    schedule = build_schedule(masks.causal(s_q, s_k, b=b))
    assert schedule.hidden_runs.shape == (b, 1, -(-s_k // 128), 4, 2)
    if s_q == 0:
        assert not schedule.hidden_runs.any() and not schedule.clear_runs.any()
    assert schedule.density == schedule.density_block == 0 or (s_q and s_k and b)
    assert schedule.num_visible_pairs.sum() == schedule.num_block_pairs.sum() == 0
    assert sum(int(count.sum()) for count in schedule.counts().values()) == 0
    assert schedule.visible_tiles_per_q_block().sum() == 0


@pytest.mark.parametrize("seed", range(10))
def test_visible_pairs_per_row(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        mask = random_mask(rng)
        np.testing.assert_array_equal(visible_pairs_per_row(mask), mask.dense().sum(axis=3))
    with pytest.raises(ValueError, match="block_mask is not served"):
        visible_pairs_per_row(masks.full(4).with_block_mask(np.ones((1, 1, 1, 1))))


@pytest.mark.parametrize("chunk_columns", [1, 60, 120, 210, 400])
def test_many_heads_are_summed_up_in_parts(chunk_columns, monkeypatch):
    rng = np.random.default_rng(0)
    bounds = rng.integers(-3, 55, (3, 4, 50, 4)).astype(np.int32)
    tiles = rng.integers(0, 2, (3, 4, 1, 1))
    mask = ColumnMask.from_bounds(bounds, is_causal=False, s_q=50, block_mask=tiles)
    whole = build_schedule(mask, 8, 16)
    monkeypatch.setattr("paddle_fm3.schedule._CHUNK_COLUMNS", chunk_columns)
    parts = build_schedule(mask, 8, 16)
    for name in ("hidden_runs", "clear_runs", "num_visible_pairs"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_bad_blocks_are_named():
    with pytest.raises(ValueError, match="block_q=0, block_k=128 must be >= 1"):
        build_schedule(masks.full(4), 0)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(2**20),
        masks.sliding_window(2**20, 64),  # narrower than a tile: every tile is swept
        masks.document([2**14] * 64),
        masks.random_eviction(2**20, seed=0),
    ],
    ids=["causal", "narrow_window", "document", "eviction"],
)
def test_a_million_tokens_take_under_a_second_of_cpu(mask):
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        schedule = build_schedule(mask)
        schedule.visible_tiles_per_q_block()
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 1.0, f"{min(seconds):.2f} s"
