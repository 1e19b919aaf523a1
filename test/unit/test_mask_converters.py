# SPDX-License-Identifier: Apache-2.0
"""Converters against the plain meaning of what they convert."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fm3 import mask as masks

SEEDS = range(25)


def table_of(shape: tuple[int, ...], definition) -> np.ndarray:
    return np.array([definition(*index) for index in np.ndindex(shape)], bool).reshape(shape)


def same(mask, definition) -> None:
    """definition(b, q, k); one mask head."""
    expected = table_of((mask.b, mask.s_q, mask.s_k), definition)
    np.testing.assert_array_equal(mask.dense()[:, 0], expected)


def random_edges(rng: np.random.Generator, count: int, total: int) -> np.ndarray:
    return np.concatenate([[0], np.sort(rng.integers(0, total + 1, count - 1)), [total]]) if count else np.array([0])


@pytest.mark.parametrize("seed", SEEDS)
def test_cu_seqlens(seed):
    rng = np.random.default_rng(seed)
    edges = random_edges(rng, int(rng.integers(1, 5)), int(rng.integers(0, 14)))
    s = int(edges[-1] + rng.integers(0, 3))
    owner = np.searchsorted(edges, np.arange(s), "right") - 1  # the last edge on: no sequence
    num = len(edges) - 1
    for is_causal in (True, False):
        mask = masks.from_cu_seqlens(edges, is_causal=is_causal, s_q=s, s_k=s)
        same(mask, lambda b, q, k, c=is_causal: owner[q] == owner[k] < num and (k <= q or not c))


@pytest.mark.parametrize("seed", SEEDS)
def test_cu_seqlens_with_other_key_lengths(seed):
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 4))
    q_edges, k_edges = (random_edges(rng, num, int(rng.integers(0, 14))) for _ in range(2))
    q_owner = np.searchsorted(q_edges, np.arange(q_edges[-1]), "right") - 1
    k_owner = np.searchsorted(k_edges, np.arange(k_edges[-1]), "right") - 1

    def is_visible(q, k, is_causal):
        d = q_owner[q]
        if d != k_owner[k]:
            return False
        num_q, num_k = q_edges[d + 1] - q_edges[d], k_edges[d + 1] - k_edges[d]
        return not is_causal or k - k_edges[d] <= q - q_edges[d] + num_k - num_q

    for is_causal in (True, False):
        mask = masks.from_cu_seqlens(q_edges, k_edges, is_causal=is_causal)
        assert (mask.s_q, mask.s_k) == (q_edges[-1], k_edges[-1])
        same(mask, lambda b, q, k, c=is_causal: is_visible(q, k, c))


def test_cu_seqlens_of_packed_documents_is_compact():
    assert masks.from_cu_seqlens([0, 3, 8]).same_visibility(masks.causal_document([3, 5]))
    assert masks.from_cu_seqlens([0, 3, 8]).is_causal  # the causal rule is not spelled out
    assert masks.from_cu_seqlens([0, 3, 8], is_causal=False) == masks.document([3, 5])


@pytest.mark.parametrize("seed", SEEDS)
def test_position_ids(seed):
    rng = np.random.default_rng(seed)
    s = int(rng.integers(1, 14))
    position_ids, owner = np.zeros((2, s), np.int64), np.zeros((2, s), int)
    for b in range(2):
        position = document = 0
        for k in range(s):
            if k and rng.random() < 0.3:
                position, document = int(rng.integers(0, position + 1)), document + 1
            position_ids[b, k], owner[b, k] = position, document
            position += 1
        if position_ids[b].max(initial=0) == 0 and s > 1:
            continue
    # A restart at the next position cannot be told from a continuation; such draws count as one document.
    owner = np.concatenate([np.zeros((2, 1), int), np.cumsum(np.diff(position_ids, axis=1) != 1, axis=1)], axis=1)
    for is_causal in (True, False):
        mask = masks.from_position_ids(position_ids.astype(np.int32), is_causal=is_causal)
        same(mask, lambda b, q, k, c=is_causal: owner[b, q] == owner[b, k] and (k <= q or not c))


def test_position_ids_of_packed_documents():
    packed = masks.from_position_ids([[0, 1, 2, 0, 1, 0, 0], [5, 6, 7, 8, 0, 1, 2]])
    assert packed == masks.causal_document([[3, 2, 1, 1], [4, 3]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(seed, side):
    rng = np.random.default_rng(seed)
    s = int(rng.integers(1, 12))
    lengths = rng.integers(0, s + 1, 3).tolist()
    valid = np.array([[k < n if side == "right" else k >= s - n for k in range(s)] for n in lengths])
    for is_causal in (True, False):
        for hides_rows in (True, False):

            def is_visible(b, q, k, c=is_causal, h=hides_rows):
                return valid[b, k] and (k <= q or not c) and (valid[b, q] or not h)

            arguments = dict(is_causal=is_causal, hides_rows=hides_rows)
            same(masks.from_padding(lengths, s, side=side, **arguments), is_visible)
            same(masks.from_padding_mask(valid.astype(int), **arguments), is_visible)


def test_scattered_padding():
    valid = np.array([[1, 0, 1, 1, 0]])
    same(masks.from_padding_mask(valid), lambda b, q, k: valid[0, k] and k <= q)
    with pytest.raises(ValueError, match="sample 0 are not contiguous"):
        masks.from_padding_mask(valid, hides_rows=True)


@settings(max_examples=200)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 14),
    st.integers(0, 14),
    st.sampled_from([(True, 1), (True, 2), (False, 2), (False, 4)]),
)
def test_dense_round_trip(seed, s_q, s_k, form):
    """Any table that came from bounds is converted back, with no more bounds than it came from."""
    is_causal, n = form
    bounds = np.random.default_rng(seed).integers(-1, s_q + 2, (1, 2, s_k, n)).astype(np.int32)
    table = masks.ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q).dense()
    mask = masks.from_dense(table)
    np.testing.assert_array_equal(mask.dense(), table)
    assert mask.to_bounds()[0].shape[3] <= n


def test_dense_uses_the_causal_rule_where_it_saves_an_interval():
    for mask in (masks.causal(9), masks.causal(5, 9), masks.causal(9, 5), masks.causal_document([4, 5])):
        assert masks.from_dense(mask.dense()).same_visibility(mask) and masks.from_dense(mask.dense()).is_causal
    dropped = masks.from_dense(masks.qk_sparse(9, [(2, 5)]).dense())
    assert not dropped.is_causal and dropped.to_bounds()[0].shape[3] == 2  # two bounds either way
    assert masks.from_dense(masks.causal(6).dense()[0, 0]).is_causal  # [s_q, s_k] is taken too
    assert not masks.from_dense(masks.document([2, 4]).dense()).is_causal
    holed = masks.causal(9).dense()
    holed[0, 0, 6, 2] = False  # hidden: [0, 2), [6, 7): the causal rule and one interval
    assert masks.from_dense(holed).is_causal


def test_dense_names_the_first_column_with_too_many_intervals():
    table = np.ones((1, 2, 9, 5), bool)
    table[0, 1, [1, 4, 5, 8], 3] = False
    table[0, 1, [1, 3, 7], 4] = False
    with pytest.raises(
        ValueError,
        match=r"from_dense: column \(b, h_mask, k\) = \(0, 1, 3\) hides rows \[1, 2\), \[4, 6\), \[8, 9\)",
    ):
        masks.from_dense(table)
    table[0, 1, :, 4] = True
    with pytest.raises(ValueError, match=r"1 of 10 columns need more"):
        masks.from_dense(table)


@pytest.mark.parametrize("seed", range(5))
def test_predicate(seed):
    rng = np.random.default_rng(seed)
    s_q, s_k, w = (int(x) for x in rng.integers(1, 8, 3))
    mask = masks.from_predicate(lambda b, h, q, k: (b + h + q - k) % 50 < w, s_q, s_k, b=2, h_mask=3)
    expected = table_of((2, 3, s_q, s_k), lambda b, h, q, k: (b + h + q - k) % 50 < w)
    np.testing.assert_array_equal(mask.dense(), expected)


def test_predicate_on_squares_by_default():
    assert masks.from_predicate(lambda b, h, q, k: k <= q, 6) == masks.from_dense(masks.causal(6).dense())


@pytest.mark.parametrize("is_causal", [True, False])
def test_block_mask(is_causal):
    tiles = np.random.default_rng(0).integers(0, 2, (2, 3, 2, 3))
    mask = masks.from_block_mask(tiles, 200, 300, is_causal=is_causal)
    assert (mask.b, mask.h_mask, mask.s_q, mask.s_k) == (2, 3, 200, 300)
    q, k = np.arange(200)[:, None], np.arange(300)[None, :]
    kept = tiles[:, :, q // 128, k // 128].astype(bool)
    np.testing.assert_array_equal(mask.dense(), kept & ((k <= q + 100) | (not is_causal)))


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: masks.from_cu_seqlens([[0, 3]]), r"cu_seqlens_q is int64 \(1, 2\)"),
        (lambda: masks.from_cu_seqlens([0.0, 3.0]), "cu_seqlens_q is float64"),
        (lambda: masks.from_cu_seqlens([]), "cu_seqlens_q is float64"),
        (lambda: masks.from_cu_seqlens([1, 3]), r"cu_seqlens_q=\[1, 3\] must ascend from 0"),
        (lambda: masks.from_cu_seqlens([0, 3, 2]), "must ascend from 0"),
        (lambda: masks.from_cu_seqlens([0, 3], [0, 1, 2]), "has 2 entries, cu_seqlens_k 3"),
        (lambda: masks.from_cu_seqlens([0, 9], s_q=8), "cu_seqlens_q ends at 9, past the length 8"),
        (lambda: masks.from_cu_seqlens([0, 3], [0, 9], s_k=8), "cu_seqlens_k ends at 9, past the length 8"),
        (lambda: masks.from_position_ids([0, 1]), r"position_ids is int64 \(2,\)"),
        (lambda: masks.from_position_ids([[0.0, 1.0]]), "position_ids is float64"),
        (lambda: masks.from_position_ids([[0, 1], [0, 2]]), r"position_ids\[1\] goes from 0 to 2 at token 1"),
        (lambda: masks.from_padding([5], 4), r"valid_lengths=\[5\] must each be in \[0, 4\]"),
        (lambda: masks.from_padding([-1], 4), "must each be in"),
        (lambda: masks.from_padding([1], 4, side="both"), "side='both' must be"),
        (lambda: masks.from_padding_mask([1, 0]), r"shape is \(2,\)"),
        (lambda: masks.from_dense(np.ones((2, 2))), "dtype is float64; expected bool"),
        (lambda: masks.from_dense(np.ones((2, 2, 2), bool)), r"shape is \(2, 2, 2\)"),
        (lambda: masks.from_predicate(lambda *x: True, 4096), "needs 16777216 calls"),
        (lambda: masks.from_block_mask(np.ones((2, 2)), 4, 4), r"shape is \(2, 2\)"),
        (lambda: masks.from_block_mask(np.ones((1, 1, 2, 1)), 4, 4), r"expected .* = \[1, 1, 1, 1\]"),
    ],
)
def test_bad_input_is_named(convert, message):
    with pytest.raises(ValueError, match=message):
        convert()
