# SPDX-License-Identifier: Apache-2.0
"""What the arguments mean, each against a dense mask written out from its own definition.

Meanings fixed by Paddle's public tests among them: causal is bottom-right aligned when s_q != s_k, a fully
hidden row gives exactly 0, mask heads broadcast over query heads, twelve kinds of mask.
"""

from __future__ import annotations

import numpy as np
import op_support
import paddle
import pytest

from paddle_fm3 import flashmask_attention, mask
from paddle_fm3.testing.cases import AttentionCase, RawMask

S = 200
DOCUMENTS = [70, 1, 129]
PREFIXES = [20, 1, 60]


def _document_of(s: int = S) -> np.ndarray:
    return np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)[:s]


def _same_document(row, key):
    document = _document_of()
    return document[row] == document[key]


def _share_question(row, key):
    """One sample: question [0, 80), answers [80, 140) and [140, 200)."""
    part = np.digitize(np.arange(S), [80, 140])
    return (key <= row) & ((part[key] == 0) | (part[key] == part[row]))


def _prefix_document(row, key):
    begin = np.concatenate([[0], np.cumsum(DOCUMENTS)])[_document_of()]
    prefix = np.asarray(PREFIXES)[_document_of()]
    return _same_document(row, key) & ((key <= row) | (key - begin[key] < prefix[key]))


# kind: (builder of paddle_fm3.mask, visible(row, key))
KINDS = {
    "full": (lambda: mask.full(S), lambda row, key: (row >= 0) & (key >= 0)),
    "causal": (lambda: mask.causal(S), lambda row, key: key <= row),
    "sliding_window": (lambda: mask.sliding_window(S, 50), lambda row, key: (key <= row) & (row - key < 50)),
    "causal_document": (lambda: mask.causal_document(DOCUMENTS), lambda row, key: (key <= row) & _same_document(row, key)),
    "document": (lambda: mask.document(DOCUMENTS), _same_document),
    "share_question": (lambda: mask.share_question([[80, 60, 60]]), _share_question),
    "global_window": (lambda: mask.global_sliding_window(S, 7, 30, 11),
                      lambda row, key: (key < 7) | (row < 7) | ((row - key <= 30) & (key - row <= 11))),
    "causal_blockwise": (lambda: mask.causal_blockwise(DOCUMENTS),
                         lambda row, key: (key <= row) & (_same_document(row, key) | (row >= 71))),
    "prefix_document": (lambda: mask.prefix_lm_document(DOCUMENTS, PREFIXES), _prefix_document),
    "prefix_causal": (lambda: mask.prefix_lm_causal(S, 90), lambda row, key: (key <= row) | (key < 90)),
    "qk_sparse": (lambda: mask.qk_sparse(S, [(40, 90)]), lambda row, key: (key <= row) & ~((key >= 40) & (key < 90) & (row < 90))),
    "causal_document_window": (lambda: mask.causal_document_sliding_window(DOCUMENTS, 33),
                               lambda row, key: (key <= row) & (row - key < 33) & _same_document(row, key)),
}  # fmt: skip


def _dense_attention(q, k, v, visible: np.ndarray):
    """float64, [s_q, s_k] visible shared by all heads; a row that sees nothing gives 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2).astype(np.float64), np.repeat(v, group, 2).astype(np.float64)
    score = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) * q.shape[-1] ** -0.5
    weight = np.where(visible, np.exp(score), 0.0)
    total = weight.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0])
    return np.einsum("bhqk,bkhd->bqhd", weight / np.where(total == 0, 1, total), v), lse


def _arrays(s_q=S, s_k=S, h_q=4, h_kv=2, d=32, b=2):
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(shape, np.float32) for shape in ((b, s_q, h_q, d), (b, s_k, h_kv, d), (b, s_k, h_kv, d))
    ]


def _check(visible: np.ndarray, arrays, *arguments, **options) -> None:
    out, lse = flashmask_attention(
        *(paddle.to_tensor(x) for x in arrays), *arguments, **options, return_softmax_lse=True
    )
    expected_out, expected_lse = _dense_attention(*arrays, visible)
    np.testing.assert_allclose(out.numpy(), expected_out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=0, atol=2e-6)


def _pairs(s_q=S, s_k=S):
    return np.arange(s_q)[:, None], np.arange(s_k)[None, :]


@pytest.mark.parametrize("kind", KINDS)
def test_mask_kind(kind):
    """As a ColumnMask and as the tensor it stands for."""
    build, visible = KINDS[kind]
    column_mask = build()
    dense = visible(*np.broadcast_arrays(*_pairs()))
    _check(dense, _arrays(b=1), column_mask)
    bounds, causal = column_mask.to_bounds()
    _check(dense, _arrays(b=2), paddle.to_tensor(np.repeat(bounds, 2, axis=0)), causal=causal)


@pytest.mark.parametrize("s_q, s_k", [(50, 130), (130, 50), (1, 40), (40, 1)])
def test_causal_is_bottom_right_aligned(s_q, s_k):
    row, key = _pairs(s_q, s_k)
    arrays = _arrays(s_q, s_k)
    visible = key <= row + (s_k - s_q)
    _check(visible, arrays, causal=True)
    all_rows = paddle.full([2, 1, s_k, 1], s_q, "int32")
    _check(visible, arrays, all_rows, causal=True)


def test_hidden_rows_are_exactly_zero():
    arrays = _arrays(130, 50)
    q, k, v = (op_support.to_tensor(x, stop_gradient=False) for x in arrays)
    out, lse = flashmask_attention(q, k, v, causal=True, return_softmax_lse=True)
    assert (out.numpy()[:, :80] == 0).all() and (out.numpy()[:, 80:] != 0).any(-1).all()
    assert np.isneginf(lse.numpy()[:, :, :80]).all() and np.isfinite(lse.numpy()[:, :, 80:]).all()
    (out.sum() + lse[:, :, 80:].sum()).backward()
    assert (q.grad.numpy()[:, :80] == 0).all() and np.isfinite(q.grad.numpy()).all()


def test_hidden_columns_have_zero_gradient():
    hidden = np.arange(S) % 3 == 0
    bounds = np.where(hidden, 0, S).astype(np.int32)[None, None, :, None]
    q, k, v = (op_support.to_tensor(x, stop_gradient=False) for x in _arrays(b=1))
    flashmask_attention(q, k, v, paddle.to_tensor(bounds), causal=True).sum().backward()
    for grad in (k.grad.numpy(), v.grad.numpy()):
        assert (grad[:, hidden] == 0).all() and (grad[:, ~hidden][:, 0] != 0).any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 5, (3, 17), (500, 2), 199, (2**31 - 1, 2**40)])
@pytest.mark.parametrize("s_q, s_k", [(S, S), (60, S), (S, 60)])
def test_window_size(causal, window, s_q, s_k):
    left, right = (window, window) if isinstance(window, int) else window
    row, key = _pairs(s_q, s_k)
    row = row + (s_k - s_q)
    visible = (key >= row - left) & (key <= (row if causal else row + right))
    _check(visible, _arrays(s_q, s_k), window_size=window, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_window_size_gives_paddles_indices(causal, monkeypatch):
    """For s_q = s_k the indices are those that Paddle 3.3.1's own function makes."""
    captured = {}

    def capture(query, key, value, indices, *_):
        captured["indices"] = indices.numpy()
        raise StopIteration

    flash_attention = __import__("sys").modules["paddle.nn.functional.flash_attention"]
    monkeypatch.setattr(flash_attention._C_ops, "flashmask_attention_v2", capture)
    monkeypatch.setattr(flash_attention._C_ops, "flashmask_attention", capture)
    monkeypatch.setattr(paddle, "get_flags", lambda names: {name: 0 for name in names})
    monkeypatch.setattr(flash_attention.paddle.base.framework, "get_flags", lambda names: {name: 3 for name in names})
    q = paddle.zeros([2, 20, 1, 8])
    with pytest.raises(StopIteration):
        flash_attention.flashmask_attention(q, q, q, window_size=(4, 6), causal=causal)
    from paddle_fm3 import attention

    ours = attention._window_indices(q, q, 4, 6, causal).numpy()
    np.testing.assert_array_equal(ours, captured["indices"])


@pytest.mark.parametrize("h_mask", [1, 2, 4])
def test_mask_heads(h_mask):
    """Mask head of query head h is h // (h_q / h_mask): each query head against its own one-head call."""
    rng = np.random.default_rng(5)
    bounds = rng.integers(0, S, (2, h_mask, S, 2)).astype(np.int32)
    q, k, v = (paddle.to_tensor(x) for x in _arrays(h_q=4, h_kv=2))
    out = flashmask_attention(q, k, v, paddle.to_tensor(bounds)).numpy()
    for head in range(4):
        one = flashmask_attention(
            q[:, :, head : head + 1],
            k[:, :, head // 2 : head // 2 + 1],
            v[:, :, head // 2 : head // 2 + 1],
            paddle.to_tensor(bounds[:, head // (4 // h_mask)][:, None]),
        ).numpy()
        np.testing.assert_array_equal(out[:, :, head], one[:, :, 0])


def test_block_mask_without_indices():
    """Paddle asks for indices beside a block mask; here a block mask alone is a mask too."""
    tiles = np.array([[1, 0], [1, 1]], np.int32)[None, None]
    row, key = _pairs()
    visible = tiles[0, 0][row // 128, key // 128] == 1
    _check(visible, _arrays(b=1), block_mask=paddle.to_tensor(tiles))
    _check(visible & (key <= row), _arrays(b=1), block_mask=paddle.to_tensor(tiles), causal=True)


def test_softmax_scale_counts_without_indices():
    """Paddle 3.3.1 drops softmax_scale when there are no indices."""
    arrays = _arrays()
    scaled = flashmask_attention(*(paddle.to_tensor(x) for x in arrays), softmax_scale=0.5).numpy()
    as_default = [arrays[0] * 0.5 * np.float32(32**0.5), *arrays[1:]]
    expected = flashmask_attention(*(paddle.to_tensor(x) for x in as_default)).numpy()
    np.testing.assert_allclose(scaled, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_head_dims_in_low_precision(dtype, d):
    bounds = np.repeat(np.cumsum(DOCUMENTS), DOCUMENTS).astype(np.int32)[None, None, :, None]
    case = AttentionCase(f"documents_d{d}", 1, S, S, 2, 1, d, d, build_mask=lambda: RawMask(bounds, True))
    op_support.check_against_oracle(case, dtype)
