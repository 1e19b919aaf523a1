# SPDX-License-Identifier: Apache-2.0
"""Intersection, repetition and folding of block masks: exact on dense tables, or a named refusal."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fm3 import mask as masks
from paddle_fm3.mask import BOUND_FORMS, ColumnMask, intervals


def random_mask(rng: np.random.Generator, s_q: int, s_k: int, *, b: int = 1, h_mask: int = 1) -> ColumnMask:
    is_causal, n = list(BOUND_FORMS)[rng.integers(4)]
    bounds = rng.integers(-1, s_q + 2, (b, h_mask, s_k, n)).astype(np.int32)
    return ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q)


def is_representable(table: np.ndarray) -> bool:
    """Whether two intervals a column, or the causal rule and one, carry the table; counted row by row."""
    s_q, s_k = table.shape[2:]
    hidden = ~table.reshape(-1, s_q, s_k)
    q, k = np.arange(s_q)[:, None], np.arange(s_k)[None, :]
    diagonal = k > q + s_k - s_q

    def num_runs(columns: np.ndarray) -> int:  # [planes, s_q, s_k]
        edges = np.diff(np.pad(columns, ((0, 0), (1, 1), (0, 0))).astype(int), axis=1)
        return int((edges == 1).sum(axis=1).max(initial=0))

    hides_all_the_rule_does = bool((hidden | ~diagonal).all())
    return num_runs(hidden) <= 2 or (hides_all_the_rule_does and num_runs(hidden & ~diagonal) <= 1)


@settings(max_examples=400)
@given(st.integers(0, 2**32 - 1))
def test_intersection_is_exact_or_refused_rightly(seed):
    rng = np.random.default_rng(seed)
    s_q, s_k = (int(x) for x in rng.integers(0, 7, 2))
    one, two = (random_mask(rng, s_q, s_k) for _ in range(2))
    expected = one.dense() & two.dense()
    try:
        mask = masks.intersect(one, two)
    except ValueError:
        assert not is_representable(expected)
        return
    np.testing.assert_array_equal(mask.dense(), expected)


def test_named_masks_intersect():
    window = masks.sliding_window(40, 7)
    documents = masks.causal_document([9, 1, 30])
    assert masks.intersect(window, documents) == masks.causal_document_sliding_window([9, 1, 30], 7)
    assert masks.intersect(masks.document([9, 1, 30]), masks.causal(40)) == documents
    padded = masks.intersect(documents, masks.key_padding(np.arange(40)[None] < 35))
    np.testing.assert_array_equal(padded.dense(), documents.dense() & (np.arange(40) < 35))
    assert masks.intersect(window) == window
    three = masks.intersect(window, documents, masks.key_padding(np.arange(40)[None] < 35))
    np.testing.assert_array_equal(three.dense(), window.dense() & padded.dense())


def test_batch_and_heads_are_repeated():
    rng = np.random.default_rng(0)
    evicted = masks.random_eviction(8, seed=0, b=3, h_mask=6)
    shared = masks.eviction(rng.integers(1, 9, (1, 2, 8)))
    both = masks.intersect(evicted, shared)
    assert (both.b, both.h_mask) == (3, 6)
    for head in range(6):
        np.testing.assert_array_equal(both.dense()[:, head], evicted.dense()[:, head] & shared.dense()[:, head // 3])
    np.testing.assert_array_equal(masks.expand(shared, b=2, h_mask=4).dense()[1, 1], shared.dense()[0, 0])
    assert masks.expand(shared) == shared


def test_block_masks_are_combined():
    rng = np.random.default_rng(0)
    tiles = [rng.integers(0, 2, (1, h, 2, 3)) for h in (1, 2)]
    full = masks.full(200, 300)
    one, two = full.with_block_mask(tiles[0]), masks.expand(full, h_mask=2).with_block_mask(tiles[1])
    np.testing.assert_array_equal(masks.intersect(one, two, masks.causal(200, 300)).block_mask, tiles[0] & tiles[1])
    np.testing.assert_array_equal(masks.intersect(one, masks.causal(200, 300)).block_mask, tiles[0])


@pytest.mark.parametrize("seed", range(20))
def test_block_mask_folds_into_intervals(seed):
    rng = np.random.default_rng(seed)
    s_q, s_k = (int(x) for x in rng.integers(1, 500, 2))
    base = [masks.causal(s_q, s_k), masks.full(s_q, s_k)][seed % 2]
    tiles = rng.integers(0, 2, (1, 1, -(-s_q // 128), -(-s_k // 128)))
    mask = base.with_block_mask(tiles)
    try:
        folded = masks.without_block_mask(mask)
    except ValueError:
        assert not is_representable(mask.dense())
        return
    assert folded.block_mask is None
    np.testing.assert_array_equal(folded.dense(), mask.dense())


def test_mask_without_block_mask_is_returned_as_it_is():
    mask = masks.causal(5)
    assert masks.without_block_mask(mask) is mask


def test_refusals_are_named():
    window = masks.from_window_size((2, 2), s_q=12, is_causal=False)  # column 6 hides [0, 4) and [9, 12)
    hole = ColumnMask.from_bounds(np.tile(np.array([5, 6, 0, 0], np.int32), (1, 1, 12, 1)), is_causal=False, s_q=12)
    with pytest.raises(
        ValueError, match=r"intersect: column .* = \(0, 0, 4\) hides rows \[0, 2\), \[5, 6\), \[7, 12\) of 12"
    ):
        masks.intersect(window, hole)
    with pytest.raises(ValueError, match="needs at least one mask"):
        masks.intersect()
    with pytest.raises(ValueError, match="differ in s_q or s_k"):
        masks.intersect(masks.full(4), masks.full(5))
    with pytest.raises(ValueError, match=r"b of the masks is \[2, 3\]; they must be 1 or equal"):
        masks.intersect(masks.full(4, b=2), masks.full(4, b=3))
    with pytest.raises(ValueError, match=r"h_mask of the masks is \[2, 3\]"):
        masks.intersect(masks.random_eviction(4, seed=0, h_mask=2), masks.random_eviction(4, seed=0, h_mask=3))
    with pytest.raises(ValueError, match="only 1 is repeated"):
        masks.expand(masks.full(4, b=2), b=4)
    with pytest.raises(ValueError, match="must divide 3"):
        masks.expand(masks.random_eviction(4, seed=0, h_mask=2), h_mask=3)


# --- the interval arithmetic below ---------------------------------------------------------------


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(0, 12))
def test_gaps_and_union_match_row_sets(seed, slots, s_q):
    rng = np.random.default_rng(seed)
    begin, end = rng.integers(-3, s_q + 4, (2, slots, 5)).astype(np.int32)
    rows = np.arange(s_q)[:, None]
    covered = ((begin[:, None] <= rows) & (rows < end[:, None])).any(axis=0)  # [s_q, 5]
    for family, expected in (
        (intervals.gaps((begin, end), s_q), ~covered),
        (intervals.union((begin, end), s_q), covered),
    ):
        low, high = family
        is_used = low < high
        shown = ((low[:, None] <= rows) & (rows < high[:, None])).sum(axis=0)
        np.testing.assert_array_equal(shown, expected.astype(int))  # disjoint: no row twice
        np.testing.assert_array_equal(intervals.lengths(family).sum(axis=0), expected.sum(axis=0))
        np.testing.assert_array_equal(intervals.is_empty(family), ~is_used)
        for column in range(5):
            used = [(int(x), int(y)) for x, y in zip(low[:, column], high[:, column], strict=True) if x < y]
            assert all(first[1] < second[0] for first, second in pairwise(used))  # ascending, maximal
    low, high = intervals.union((begin, end), s_q)
    assert (np.diff((low < high).astype(int), axis=0) <= 0).all()  # used slots first
    assert ((low == s_q) & (high == s_q) | (low < high)).all()
