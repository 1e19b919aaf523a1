# SPDX-License-Identifier: Apache-2.0
"""Every builder against the sentence that defines it, evaluated pair by pair on random sizes."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_fm3 import mask as masks

NUM_RANDOM = 40


def random_lengths(rng: np.random.Generator, s: int) -> list[int]:
    """Lengths >= 1 that sum to s."""
    cuts = (
        np.sort(rng.choice(np.arange(1, s), size=min(s - 1, int(rng.integers(0, 6))), replace=False)) if s > 1 else []
    )
    return np.diff([0, *cuts, s]).tolist()


def document_of(lengths: list[int]) -> list[int]:
    return [index for index, length in enumerate(lengths) for _ in range(length)]


def check(mask, definition) -> None:
    """definition(b_idx, q, k) -> visible; all heads alike."""
    table = mask.dense()
    for b_idx, h_idx, q, k in np.ndindex(table.shape):
        assert table[b_idx, h_idx, q, k] == definition(b_idx, q, k), (mask, b_idx, q, k)


@pytest.fixture(params=range(NUM_RANDOM))
def rng(request):
    return np.random.default_rng(request.param)


def test_full_and_causal(rng):
    s_q, s_k = (int(x) for x in rng.integers(1, 12, 2))
    check(masks.full(s_q, s_k, b=2), lambda b, q, k: True)
    check(masks.causal(s_q, s_k, b=2), lambda b, q, k: k <= q + s_k - s_q)


def test_sliding_window(rng):
    s, window = int(rng.integers(1, 14)), int(rng.integers(1, 16))
    check(masks.sliding_window(s, window, b=2), lambda b, q, k: q - window < k <= q)


def test_window_size_has_paddles_meaning(rng):
    s_q, s_k, left, right = (int(x) for x in rng.integers(0, 12, 4))
    s_k = s_q if rng.random() < 0.5 else s_k
    sizes = dict(s_q=s_q, s_k=s_k)
    shift = s_k - s_q
    both = masks.from_window_size((left, right), **sizes, is_causal=False, b=2)
    check(both, lambda b, q, k: q + shift - left <= k <= q + shift + right)
    causal = masks.from_window_size((left, right), **sizes, is_causal=True)
    check(causal, lambda b, q, k: q + shift - left <= k <= q + shift)
    assert masks.from_window_size(left, **sizes, is_causal=True) == masks.from_window_size(
        (left, left), **sizes, is_causal=True
    )


def test_window_of_w_keys_is_window_size_w_minus_one():
    assert masks.sliding_window(20, 5).same_visibility(masks.from_window_size(4, s_q=20, is_causal=True))


def test_documents(rng):
    s = int(rng.integers(1, 16))
    samples = [random_lengths(rng, s) for _ in range(2)]
    owner = [document_of(lengths) for lengths in samples]
    check(masks.causal_document(samples), lambda b, q, k: owner[b][q] == owner[b][k] and k <= q)
    check(masks.document(samples), lambda b, q, k: owner[b][q] == owner[b][k])
    window = int(rng.integers(1, 6))
    check(
        masks.causal_document_sliding_window(samples, window),
        lambda b, q, k: owner[b][q] == owner[b][k] and q - window < k <= q,
    )
    check(
        masks.causal_blockwise(samples),
        lambda b, q, k: k <= q and (owner[b][q] == owner[b][k] or owner[b][q] == owner[b][-1]),
    )
    assert masks.causal_document(samples[0]) == masks.causal_document([samples[0]])


def test_document_lengths_of_zero_own_no_token():
    assert masks.document([0, 3, 0, 2, 0]) == masks.document([3, 2])


def test_tail_beyond_the_documents():
    joined = masks.causal_document([3, 2], s=8)
    owner = [0] * 3 + [1] * 5
    check(joined, lambda b, q, k: owner[q] == owner[k] and k <= q)
    own = masks.document([3, 2], s=8)
    owner = [0] * 3 + [1] * 2 + [2] * 3
    check(own, lambda b, q, k: owner[q] == owner[k])
    check(masks.causal_document([], s=4), lambda b, q, k: k <= q)


def test_document_mask_shows_every_token_itself():
    """A well-known faulty generator adds the next document's length instead: diagonals vanish."""
    lengths = [1041, 2718, 1420, 1191, 1822]
    mask = masks.document(lengths)
    token = np.arange(8192)
    assert ((mask.ut_end[0, 0] <= token) & (token < mask.lt_begin[0, 0])).all()
    faulty_begin = np.repeat(np.cumsum([*lengths[1:], 0]), lengths)  # what that generator computes
    assert (faulty_begin > token).any()


def test_share_question(rng):
    s = int(rng.integers(1, 18))
    samples = [[random_lengths(rng, size) for size in random_lengths(rng, s)] for _ in range(2)]
    group = [document_of([sum(g) for g in sample]) for sample in samples]
    part = [[index for g in sample for index in document_of(g)] for sample in samples]

    def definition(b, q, k):
        return group[b][q] == group[b][k] and k <= q and part[b][k] in (0, part[b][q])

    check(masks.share_question(samples), definition)
    assert masks.share_question(samples[0]) == masks.share_question(samples[:1])


def test_global_sliding_window(rng):
    s, g, left, right = int(rng.integers(1, 20)), *(int(x) for x in rng.integers(0, 7, 3))
    check(
        masks.global_sliding_window(s, g, left, right, b=2),
        lambda b, q, k: k < g or q < g or -right <= q - k <= left,
    )


def test_prefix_lm(rng):
    s = int(rng.integers(1, 16))
    samples = [random_lengths(rng, s) for _ in range(2)]
    prefixes = [[int(rng.integers(0, n + 1)) for n in lengths] for lengths in samples]
    owner = [document_of(lengths) for lengths in samples]
    begin = [np.cumsum([0, *lengths]).tolist() for lengths in samples]

    def definition(b, q, k):
        d = owner[b][k]
        return owner[b][q] == d and (k <= q or k - begin[b][d] < prefixes[b][d])

    check(masks.prefix_lm_document(samples, prefixes), definition)
    prefix = int(rng.integers(0, s + 2))
    check(masks.prefix_lm_causal(s, prefix, b=2), lambda b, q, k: k <= q or k < prefix)


def test_qk_sparse(rng):
    s = int(rng.integers(4, 18))
    edges = np.sort(rng.integers(0, s + 1, 4)).tolist()
    ranges = [(edges[0], edges[1]), (edges[2], edges[3])]

    def definition(b, q, k):
        return k <= q and all(q >= end for begin, end in ranges if begin <= k < end)

    check(masks.qk_sparse(s, ranges, b=2), definition)


def test_eviction(rng):
    s = int(rng.integers(1, 14))
    rows = rng.integers(0, s + 3, (2, 1, s))
    check(masks.eviction(rows), lambda b, q, k: k <= q < rows[b, 0, k])
    mask = masks.random_eviction(s, seed=3, first_row=s // 2, b=2, h_mask=3)
    assert mask.lt_begin.shape == (2, 3, s) and (mask.lt_begin >= np.maximum(np.arange(s) + 1, s // 2)).all()
    assert mask == masks.random_eviction(s, seed=3, first_row=s // 2, b=2, h_mask=3)


def test_bucketed(rng):
    s_q, s_k = (int(x) for x in rng.integers(1, 14, 2))
    q_bucket = np.sort(rng.integers(0, 4, (2, 1, s_q)))
    k_bucket = np.sort(rng.integers(0, 5, (2, 1, s_k)))
    check(masks.bucketed(q_bucket, k_bucket), lambda b, q, k: q_bucket[b, 0, q] == k_bucket[b, 0, k])


def test_bucketed_causal(rng):
    """Sort random tokens by hash, as hash-sparse attention does, and check in original positions."""
    s = int(rng.integers(1, 14))
    hashes = rng.integers(0, 3, s)
    order = np.argsort(hashes, kind="stable")
    bucket, position = hashes[order][None, None], order[None, None]
    mask = masks.bucketed(bucket, bucket, q_position=position, k_position=position)
    check(mask, lambda b, q, k: hashes[order[q]] == hashes[order[k]] and order[k] <= order[q])


def test_key_padding(rng):
    s_q, s_k = (int(x) for x in rng.integers(1, 12, 2))
    valid = rng.integers(0, 2, (2, s_k)).astype(bool)
    check(masks.key_padding(valid, s_q=s_q), lambda b, q, k: valid[b, k])
    check(masks.key_padding(valid, s_q=s_q, is_causal=True), lambda b, q, k: valid[b, k] and k <= q + s_k - s_q)


def test_block_sparse():
    mask = masks.block_sparse(masks.causal(300, b=2), lambda q_tile, k_tile: (q_tile + k_tile) % 2 == 0)
    table = mask.dense()
    q, k = np.arange(300)[:, None], np.arange(300)[None, :]
    np.testing.assert_array_equal(table, np.broadcast_to((k <= q) & ((q // 128 + k // 128) % 2 == 0), table.shape))
    same = masks.block_sparse(masks.causal(300, b=2), mask.block_mask)
    assert same == mask


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.sliding_window(5, 0), "window=0 must be >= 1"),
        (lambda: masks.causal_document_sliding_window([5], 0), "window=0 must be >= 1"),
        (lambda: masks.from_window_size(-1, s_q=5, is_causal=True), "window_size=-1 must not be negative"),
        (lambda: masks.causal_document([3, -1]), r"lengths \[3, -1\] must be >= 0"),
        (lambda: masks.document([3, 4], s=6), "sum to 7, more than s=6"),
        (lambda: masks.document([[3], [4]]), r"equally long, got \[3, 4\]"),
        (lambda: masks.prefix_lm_document([3, 4], [1, 5]), r"prefixes \[1, 5\] of sample 0"),
        (lambda: masks.prefix_lm_document([3, 4], [1]), r"prefixes \[1\] of sample 0"),
        (lambda: masks.qk_sparse(8, [(4, 9)]), r"\(4, 9\) must lie in \[0, 8\]"),
        (lambda: masks.global_sliding_window(8, 1, -1, 2), "must be >= 0"),
        (lambda: masks.eviction(np.zeros((2, 3))), r"shape is \(2, 3\)"),
        (lambda: masks.share_question([[2, 3], []]), "needs lengths >= 0"),
        (lambda: masks.bucketed([[[1, 0]]], [[[0, 1]]]), "q_bucket .* must ascend"),
        (lambda: masks.bucketed([[[0, 1]]], [[0, 1]]), r"must be \[b, h_mask, s\]"),
        (
            lambda: masks.bucketed([[[0, 1]]], [[[0, 1]]], q_position=[[[0, 1]]]),
            "both q_position and k_position",
        ),
        (lambda: masks.key_padding([1, 0]), r"shape is \(2,\)"),
        # Floats, of which a conversion to integers would make another mask.
        (lambda: masks.causal_document([4.5, 3]), r"document lengths \[4.5, 3.0\] must be integers"),
        (lambda: masks.document([[4.5, 3.5]]), r"document lengths \[4.5, 3.5\] must be integers"),
        (lambda: masks.prefix_lm_document([[4, 4]], [[1.5, 2]]), r"prefixes \[1.5, 2.0\] must be integers"),
        (lambda: masks.share_question([[4.5, 3]]), r"group \[4.5, 3.0\] must be integers"),
        (lambda: masks.eviction(np.full((1, 1, 3), 2.5)), "dtype is float64; expected integers"),
        (
            lambda: masks.eviction([[[1, 2], [2]]]),
            r"eviction: evict_row=\[\[\[1, 2\], \[2\]\]\] .* must be equally long",
        ),
        (lambda: masks.bucketed([[[0.5, 1.5]]], [[[0, 1]]]), "bucketed: q_bucket.dtype is float64; expected integers"),
        (lambda: masks.bucketed([[[0, 1]]], [[[0, 1.5]]]), "bucketed: k_bucket.dtype is float64; expected integers"),
        (
            lambda: masks.bucketed([[[0, 1]]], [[[0, 1]]], q_position=[[[0.5, 1]]], k_position=[[[0, 1]]]),
            "bucketed: q_position.dtype is float64; expected integers",
        ),
        (
            lambda: masks.bucketed([[[0, 1]]], [[[0, 1]]], q_position=[[[0, 1]]], k_position=[[[0, 1.5]]]),
            "bucketed: k_position.dtype is float64; expected integers",
        ),
        (lambda: masks.bucketed([[[0, 1], [1]]], [[[0, 1]]]), r"bucketed: q_bucket=.* its lists must be equally long"),
        (lambda: masks.from_padding([2.5], 8), r"valid_lengths=\[2.5\] must be integers"),
        (lambda: masks.sliding_window(8, 2.5), "window=2.5 must be an integer"),
        (lambda: masks.sliding_window(1e3, 2), "s=1000.0 must be an integer"),
        (lambda: masks.causal_document_sliding_window([8], 2.5), "window=2.5 must be an integer"),
        (lambda: masks.from_window_size((2.5, 1), s_q=8, is_causal=True), "left=2.5 must be an integer"),
        (lambda: masks.global_sliding_window(8, 1.5, 1, 1), "num_global=1.5 must be an integer"),
        (lambda: masks.prefix_lm_causal(8, 2.5), "prefix=2.5 must be an integer"),
        (lambda: masks.prefix_lm_causal(8, -1), "prefix=-1 must not be negative"),
        (lambda: masks.qk_sparse(8.0, []), "s=8.0 must be an integer"),
        (lambda: masks.random_eviction(8, seed=0, first_row=1.5), "first_row=1.5 must be an integer"),
        (lambda: masks.full(8.0), "full: s_q=8.0 must be an integer"),
        (lambda: masks.causal(-3), "causal: s_q=-3 must be >= 0"),
        (lambda: masks.causal_document(7), "documents=7 must be a list of token counts"),
        (lambda: masks.causal_document("3, 4"), "documents='3, 4' must be a list of token counts"),
        (lambda: masks.causal_document({3, 4}), r"documents=\{3, 4\} must be a list of token counts"),
        (lambda: masks.causal_document({0: [3]}), r"documents=\{0: \[3\]\} must be a list of token counts"),
        (lambda: masks.causal_document([3, 4], s=8.5), "causal_document: s=8.5 must be an integer"),
        # Lists among counts, or nested unevenly: numpy says "inhomogeneous shape".
        (
            lambda: masks.causal_document([3, [4, 5]]),
            r"causal_document: documents=\[3, \[4, 5\]\] mixes token counts and",
        ),
        (lambda: masks.document([[3, 4], 7]), r"document: documents=\[\[3, 4\], 7\] mixes token counts and lists"),
        (
            lambda: masks.causal_document([[3, [4]], [7]]),
            r"document lengths \[3, \[4\]\] must be integers, .* not lists",
        ),
        (lambda: masks.causal_blockwise([[[3], [4, 5]]]), r"document lengths \[\[3\], \[4, 5\]\] must be integers"),
        (
            lambda: masks.causal_document_sliding_window([3, [4]], 2),
            r"documents=\[3, \[4\]\] mixes token counts and lists",
        ),
        (lambda: masks.prefix_lm_document([3, [4]], [1, 1]), r"documents=\[3, \[4\]\] mixes token counts and lists"),
        (lambda: masks.prefix_lm_document([3, 4], [1, [1]]), r"prefixes=\[1, \[1\]\] mixes token counts and lists"),
        (lambda: masks.prefix_lm_document([3, 4], 1), "prefixes=1 must be a list of token counts"),
        (lambda: masks.prefix_lm_document([[3, 4], [7]], [1, 1]), "prefixes have b=1, documents b=2; give both"),
        (lambda: masks.share_question(7), "groups 7 must hold a list"),
        (lambda: masks.share_question([[4], 2]), r"groups \[\[4\], 2\] must hold a list"),
        (lambda: masks.share_question([[]]), r"group \[\] needs lengths >= 0"),
        (lambda: masks.share_question([[[4, 2], 3]]), "groups .* must hold a list .* group 3 is no list"),
        (
            lambda: masks.share_question([[4, [2]]]),
            r"share_question: group \[4, \[2\]\] must be integers, .* not lists",
        ),
        (lambda: masks.share_question([["4", "2"]]), r"group \['4', '2'\] must be integers"),
        (lambda: masks.key_padding([[1, 0], [1]]), r"is_key_valid=.* its lists must be equally long"),
        (lambda: masks.share_question([4, 2]), r"groups \[4, 2\] must hold a list \[question, answer, ...\]"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_lengths_come_as_arrays_and_tensors_too():
    paddle = pytest.importorskip("paddle")
    for kind in (np.array, paddle.to_tensor):
        assert masks.causal_document(kind([3, 5])) == masks.causal_document([3, 5])
        assert masks.causal_document(kind([[3, 5], [1, 7]])) == masks.causal_document([[3, 5], [1, 7]])
        assert masks.causal_document([kind([3, 5]), [8]]) == masks.causal_document([[3, 5], [8]])
        assert masks.share_question(kind([[3, 5], [1, 7]])) == masks.share_question([[3, 5], [1, 7]])
        assert masks.share_question(kind([[[3, 5]], [[1, 7]]])) == masks.share_question([[[3, 5]], [[1, 7]]])
