# SPDX-License-Identifier: Apache-2.0
"""ColumnMask: meaning against the independent dense oracle, forms, errors, identity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fm3.mask import ColumnMask, causal, document, full, sliding_window
from paddle_fm3.mask.column_mask import BOUND_FORMS
from paddle_fm3.testing.reference import visible_plane

FORMS = list(BOUND_FORMS)


@st.composite
def raw_masks(draw, max_size: int = 24):
    """(bounds [b, h_mask, s_k, n], causal, s_q): any form, bounds out of range, empty and inverted too."""
    is_causal, n = draw(st.sampled_from(FORMS))
    b, h_mask = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    s_q, s_k = draw(st.integers(0, max_size)), draw(st.integers(0, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bounds = rng.integers(-3, s_q + 4, (b, h_mask, s_k, n)).astype(np.int32)
    if draw(st.booleans()):  # columns alike, as documents make them
        bounds = np.repeat(bounds[:, :, ::3], 3, axis=2)[:, :, :s_k]
    return np.ascontiguousarray(bounds), is_causal, s_q


def oracle_table(bounds, is_causal, s_q, block_mask=None):
    b, h_mask, s_k, _ = bounds.shape
    table = np.empty((b, h_mask, s_q, s_k), bool)
    for plane in np.ndindex(b, h_mask):
        tiles = None if block_mask is None else block_mask[plane]
        table[plane] = visible_plane(bounds[plane], is_causal, s_q, s_k, tiles)
    return table


@settings(max_examples=300, deadline=None)
@given(raw_masks())
def test_dense_matches_the_independent_definition(raw):
    bounds, is_causal, s_q = raw
    mask = ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q)
    np.testing.assert_array_equal(mask.dense(), oracle_table(bounds, is_causal, s_q))


@settings(max_examples=60, deadline=None)
@given(raw_masks(max_size=8))
def test_visible_matches_the_table(raw):
    bounds, is_causal, s_q = raw
    mask = ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q)
    table = mask.dense()
    for b_idx, h_idx, q_idx, k_idx in np.ndindex(table.shape):
        shown = mask.visible(q_idx, k_idx, b_idx=b_idx, h_mask_idx=h_idx)
        assert shown == table[b_idx, h_idx, q_idx, k_idx]


def test_block_mask_hides_whole_tiles():
    rng = np.random.default_rng(0)
    bounds = rng.integers(0, 300, (2, 1, 270, 4)).astype(np.int32)
    block_mask = rng.integers(0, 2, (2, 1, 3, 3)).astype(np.int32)
    mask = ColumnMask.from_bounds(bounds, is_causal=False, s_q=290, block_mask=block_mask)
    np.testing.assert_array_equal(mask.dense(), oracle_table(bounds, False, 290, block_mask))
    for q_idx, k_idx in [(0, 0), (127, 128), (128, 127), (289, 269), (256, 0)]:
        assert mask.visible(q_idx, k_idx, b_idx=1) == mask.dense()[1, 0, q_idx, k_idx]


@settings(max_examples=300, deadline=None)
@given(raw_masks())
def test_to_bounds_round_trip(raw):
    bounds, is_causal, s_q = raw
    mask = ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q)
    again, causal_again = mask.to_bounds()  # every mask that came from bounds can go back to bounds
    assert again.dtype == np.int32 and again.shape[3] <= bounds.shape[3]
    np.testing.assert_array_equal(oracle_table(again, causal_again, s_q), mask.dense())


@settings(max_examples=200, deadline=None)
@given(raw_masks())
def test_to_noncausal_keeps_the_pairs_or_names_the_column(raw):
    bounds, is_causal, s_q = raw
    mask = ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q)
    plain = mask.to_noncausal()  # one interval besides the causal rule: always representable
    assert not plain.is_causal
    np.testing.assert_array_equal(plain.dense(), mask.dense())


@pytest.mark.parametrize(
    ("mask", "n", "is_causal"),
    [
        (full(9), 2, False),
        (causal(9), 1, True),
        (causal(5, 9), 1, True),
        (causal(9).to_noncausal(), 1, True),  # the causal rule is recognised in plain intervals
        (sliding_window(9, 3).to_noncausal(), 1, True),
        (document([4, 5]), 2, False),
    ],
)
def test_to_bounds_is_compact(mask, n, is_causal):
    bounds, causal_form = mask.to_bounds()
    assert (bounds.shape[3], causal_form) == (n, is_causal)


def three_intervals() -> ColumnMask:
    column = [np.full((1, 1, 10), value, np.int32) for value in (5, 6, 8, 9)]
    return ColumnMask(*column, s_q=10, is_causal=True)


@pytest.mark.parametrize("method", ["to_bounds", "to_noncausal"])
def test_three_intervals_are_refused_with_the_column(method):
    with pytest.raises(ValueError, match=r"\(0, 0, 1\) hides .*\[0, 1\), \[5, 6\), \[8, 9\)"):
        getattr(three_intervals(), method)()


def test_bounds_are_clipped_and_owned():
    bounds = np.array([[-(2**31), 2**31 - 1], [3, 2**31 - 1]], np.int32)[None, None]
    mask = ColumnMask.from_bounds(bounds, is_causal=True, s_q=7)
    assert mask.lt_begin.tolist() == [[[0, 3]]] and mask.lt_end.tolist() == [[[7, 7]]]
    bounds[:] = 0
    assert mask.lt_begin.tolist() == [[[0, 3]]]
    with pytest.raises(ValueError, match="read-only"):
        mask.lt_begin[0, 0, 0] = 1


def indices(*shape: int, dtype=np.int32) -> dict:
    return dict(startend_row_indices=np.zeros(shape, dtype))


BAD = {
    "dtype": (indices(1, 1, 4, 1, dtype=np.int64), "dtype is int64; expected int32"),
    "rank": (indices(1, 4, 1), r"shape is \(1, 4, 1\); expected \[b, h_mask"),
    "n=3": (indices(1, 1, 4, 3), "n=3 bounds with causal=True; legal:"),
    "n=4 causal": (indices(1, 1, 4, 4), "n=4 bounds with causal=True"),
    "s_q": (dict(s_q=-1), r"s_q=-1 must be in \[0, "),
    "block shape": (dict(block_mask=np.ones((1, 1, 1, 2), np.int32)), r"block_mask.shape is \(1, 1, 1, 2\)"),
    "block values": (dict(block_mask=np.full((1, 1, 1, 1), 2, np.int32)), "values other than 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    arguments, message = BAD[name]
    good = dict(startend_row_indices=np.zeros((1, 1, 4, 1), np.int32), is_causal=True, s_q=4, block_mask=None)
    with pytest.raises(ValueError, match=message):
        ColumnMask.from_bounds(**(good | arguments))


def test_bad_fields_are_named():
    good = np.zeros((1, 1, 4), np.int32)
    with pytest.raises(ValueError, match=r"lt_end.shape is \(1, 1, 5\)"):
        ColumnMask(good, np.zeros((1, 1, 5), np.int32), good, good, s_q=4, is_causal=False)
    with pytest.raises(ValueError, match=r"ut_end\.dtype is int64"):
        ColumnMask(good, good, good, good.astype(np.int64), s_q=4, is_causal=False)
    with pytest.raises(ValueError, match=r"expected \[b, h_mask, s_k\]"):
        ColumnMask(good[0], good[0], good[0], good[0], s_q=4, is_causal=False)
    with pytest.raises(IndexError, match="outside"):
        full(4).visible(4, 0)
    with pytest.raises(ValueError, match="limit is"):
        full(2**20).dense()
    with pytest.raises(TypeError, match="no slice"):
        full(4).select(b=0)


def test_equality_and_hash_follow_the_content():
    one, same = document([3, 5]), document([3, 5])
    assert one == same and hash(one) == hash(same) and one.content_hash() == same.content_hash()
    tiles = np.ones((1, 1, 1, 1), np.int32)
    others = [
        document([4, 4]),
        document([[3, 5], [3, 5]]),
        one.with_block_mask(tiles),
        ColumnMask(one.lt_begin, one.lt_end, one.ut_begin, one.ut_end, s_q=8, is_causal=True),
        ColumnMask(one.lt_begin, one.lt_end, one.ut_begin, one.ut_end, s_q=9, is_causal=False),
        causal(8),
    ]
    for other in others:
        assert one != other and one.content_hash() != other.content_hash()
    assert one.with_block_mask(tiles) == same.with_block_mask(tiles) != same.with_block_mask(0 * tiles)
    assert one.with_block_mask(tiles).content_hash() != one.with_block_mask(0 * tiles).content_hash()
    assert one != "mask" and len({one, same, *others}) == 7


def test_same_visibility_sees_through_storage():
    assert causal(9).to_noncausal() != causal(9)
    assert causal(9).to_noncausal().same_visibility(causal(9))
    assert not causal(9).same_visibility(full(9))
    assert not causal(9).same_visibility(causal(8))
    tiles = np.ones((1, 1, 1, 1), np.int32)
    assert full(9).same_visibility(full(9).with_block_mask(tiles))
    assert not full(9).same_visibility(full(9).with_block_mask(0 * tiles))


def test_select_takes_batch_entries_and_heads():
    rng = np.random.default_rng(1)
    bounds = rng.integers(0, 9, (3, 4, 9, 2)).astype(np.int32)
    mask = ColumnMask.from_bounds(
        bounds, is_causal=False, s_q=9, block_mask=rng.integers(0, 2, (3, 4, 1, 1)).astype(np.int32)
    )
    part = mask.select(b=slice(1, 3), h_mask=slice(2, 3))
    np.testing.assert_array_equal(part.dense(), mask.dense()[1:3, 2:3])
    assert mask.select() == mask
