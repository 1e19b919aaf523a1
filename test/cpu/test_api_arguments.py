# SPDX-License-Identifier: Apache-2.0
"""Every refusal with its message, in Python and behind it in the op itself; and Paddle's exact signature."""

from __future__ import annotations

import inspect
import re

import numpy as np
import paddle
import pytest
from paddle import _C_ops

from paddle_fm3 import ColumnMask, _native, flashmask_attention
from paddle_fm3.mask import causal, causal_document, expand, random_eviction


def tensors(b=2, s_q=6, s_k=8, h_q=4, h_kv=2, d_qk=8, d_v=8, dtype="float32"):
    return (
        paddle.zeros([b, s_q, h_q, d_qk], dtype),
        paddle.zeros([b, s_k, h_kv, d_qk], dtype),
        paddle.zeros([b, s_k, h_kv, d_v], dtype),
    )


def indices(b=2, h_mask=1, s_k=8, n=1, dtype="int32"):
    return paddle.zeros([b, h_mask, s_k, n], dtype)


def test_signature_is_paddles_plus_deterministic():
    ours = inspect.signature(flashmask_attention).parameters
    theirs = inspect.signature(paddle.nn.functional.flash_attention.flashmask_attention).parameters
    assert list(ours)[:-1] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    assert list(ours)[-1] == "deterministic" and ours["deterministic"].default is None


def test_return_types_are_paddles():
    q, k, v = tensors()
    assert isinstance(flashmask_attention(q, k, v), paddle.Tensor)
    both = flashmask_attention(q, k, v, return_softmax_lse=True)
    assert isinstance(both, list) and [list(x.shape) for x in both] == [[2, 6, 4, 8], [2, 4, 6]]


_MASK = causal(8, b=2)

# name: (error type, exact parts of the message, positional arguments, keyword arguments)
REFUSALS = {
    "dropout": (ValueError, "dropout=0.1 while training is not supported; pass dropout=0.0", tensors(), {"dropout": 0.1}),
    "seed offset": (ValueError, "return_seed_offset belong to dropout", tensors(), {"return_seed_offset": True}),
    "fixed seed": (ValueError, "belong to dropout", tensors(), {"fixed_seed_offset": paddle.zeros([2])}),
    "no query": (TypeError, "query is a NoneType; expected a paddle.Tensor", (None, *tensors()[1:]), {}),
    "NumPy key": (TypeError, "key is a ndarray; expected a paddle.Tensor", (tensors()[0], tensors()[1].numpy(), tensors()[2]), {}),
    "NumPy indices": (TypeError, "startend_row_indices is a ndarray; expected a paddle.Tensor",
                      (*tensors(), indices().numpy()), {"causal": True}),
    "number for block_mask": (TypeError, "block_mask is a int; expected a paddle.Tensor", tensors(), {"block_mask": 1}),
    "fractional window": (ValueError, "window_size=2.5; expected an int >= 0", tensors(), {"window_size": 2.5}),
    "scale": (ValueError, "softmax_scale=nan; must be finite", tensors(), {"softmax_scale": float("nan")}),
    "q rank": (ValueError, "query.shape is [6, 4, 8]; expected [b, s_q, h_q, d_qk]", (tensors()[0][0], *tensors()[1:]), {}),
    "v rank": (ValueError, "value.shape is [8, 2, 8]; expected [b, s_k, h_kv, d_v]", (*tensors()[:2], tensors()[2][0]), {}),
    "batch": (ValueError, "have b=[2, 3, 3]", (tensors()[0], *tensors(b=3)[1:]), {}),
    "d_qk": (ValueError, "key.shape is [2, 8, 2, 16]; its last axis must be query's d_qk=8",
             (tensors()[0], tensors(d_qk=16)[1], tensors()[2]), {}),
    "v length": (ValueError, "value.shape is [2, 9, 2, 8]; expected [b, s_k, h_kv, d_v] with s_k=8 and h_kv=2",
                 (*tensors()[:2], tensors(s_k=9)[2]), {}),
    "heads": (ValueError, "h_kv=3 must divide h_q=4", tensors(h_kv=3), {}),
    "mixed dtypes": (TypeError, "['float32', 'bfloat16', 'float32']; they must be the same",
                     (tensors()[0], tensors(dtype="bfloat16")[1], tensors()[2]), {}),
    "float64": (TypeError, "query.dtype is float64; expected one of ['float32', 'bfloat16', 'float16']",
                tensors(dtype="float64"), {}),
    "indices dtype": (TypeError, "startend_row_indices.dtype is int64; expected int32",
                      (*tensors(), indices(dtype="int64")), {"causal": True}),
    "indices rank": (ValueError, "startend_row_indices.shape is [2, 8]; expected [b, h_mask, s_k, n]",
                     (*tensors(), paddle.zeros([2, 8], "int32")), {"causal": True}),
    "indices batch": (ValueError, "startend_row_indices.shape is [1, 1, 8, 1]; its first axis must be b=2; one for every sample: "
                      "startend_row_indices.expand([2, -1, -1, -1])", (*tensors(), indices(b=1)), {"causal": True}),
    "indices length": (ValueError, "its third axis must be s_k=8", (*tensors(), indices(s_k=6)), {"causal": True}),
    "indices heads": (ValueError, "h_mask=3 must be 1, h_kv=2 or h_q=4; 1 is for every head",
                      (*tensors(), indices(h_mask=3)), {"causal": True}),
    "indices heads, fewer": (ValueError, "h_mask=2 must be 1, h_kv=4 or h_q=8; each for several heads: "
                             "paddle.repeat_interleave(startend_row_indices, 2, axis=1)",
                             (*tensors(h_q=8, h_kv=4), indices(h_mask=2)), {"causal": True}),
    "indices heads, between": (ValueError, "h_mask=4 must be 1, h_kv=2 or h_q=8; each for several heads: "
                               "paddle.repeat_interleave(startend_row_indices, 2, axis=1)",
                               (*tensors(h_q=8), indices(h_mask=4)), {"causal": True}),
    "block_mask batch": (ValueError, "its first axis must be b=2; one for every sample: block_mask.expand([2, -1, -1, -1])",
                         tensors(), {"block_mask": paddle.zeros([1, 1, 1, 1], "int32")}),
    "1 bound, not causal": (ValueError, "n=1 bounds with causal=False; legal: causal=True, n=1 is [LTS]",
                            (*tensors(), indices(n=1)), {}),
    "4 bounds, causal": (ValueError, "n=4 bounds with causal=True", (*tensors(), indices(n=4)), {"causal": True}),
    "3 bounds": (ValueError, "n=3 bounds with causal=False", (*tensors(), indices(n=3)), {}),
    "window and indices": (ValueError, "window_size and startend_row_indices exclude each other",
                           (*tensors(), indices()), {"window_size": 3, "causal": True}),
    "causal by a word": (TypeError, "causal='yes' is a str; expected True or False", tensors(), {"causal": "yes"}),
    "causal by a number": (TypeError, "causal=1 is a int; expected True or False", tensors(), {"causal": 1}),
    "no causal": (TypeError, "causal=None is a NoneType; expected True or False", tensors(), {"causal": None}),
    "deterministic by a word": (TypeError, "deterministic='no' is a str; expected True or False", tensors(), {"deterministic": "no"}),
    "training by a number": (TypeError, "training=0 is a int; expected True or False", tensors(), {"training": 0}),
    "lse by a word": (TypeError, "return_softmax_lse='lse' is a str", tensors(), {"return_softmax_lse": "lse"}),
    "window by a flag": (ValueError, "window_size=True; expected an int >= 0", tensors(), {"window_size": True}),
    "window side by a flag": (ValueError, "window_size=(3, False); expected an int >= 0", tensors(), {"window_size": (3, False)}),
    "negative window": (ValueError, "window_size=-1; expected an int >= 0", tensors(), {"window_size": -1}),
    "three window sides": (ValueError, "window_size=(1, 2, 3); expected", tensors(), {"window_size": (1, 2, 3)}),
    "block_mask dtype": (TypeError, "block_mask.dtype is bool; expected int32", tensors(),
                         {"block_mask": paddle.zeros([2, 1, 1, 1], "bool")}),
    "block_mask heads": (ValueError, "its second axis must be h_mask=1 as in startend_row_indices", (*tensors(), indices()),
                         {"causal": True, "block_mask": paddle.zeros([2, 2, 1, 1], "int32")}),
    "block_mask tiles": (ValueError, "block_mask.shape is [2, 1, 2, 1]; expected [b, h_mask, 1, 1], one entry a 128 x 128 tile",
                         tensors(), {"block_mask": paddle.zeros([2, 1, 2, 1], "int32")}),
    "ColumnMask and block_mask": (ValueError, "a ColumnMask excludes window_size and block_mask",
                                  (*tensors(s_q=8), _MASK), {"block_mask": paddle.zeros([2, 1, 1, 1], "int32")}),
    "ColumnMask size": (ValueError, "ColumnMask has b=2, s_q=8, s_k=8; the tensors have b=2, s_q=6, s_k=8",
                        (*tensors(), _MASK), {}),
    "ColumnMask batch": (ValueError, "the tensors have b=2, s_q=8, s_k=8; one for every sample: paddle_fm3.mask.expand(mask, b=2)",
                         (*tensors(s_q=8), causal(8)), {}),
    "ColumnMask heads": (ValueError, "ColumnMask has h_mask=3; must be 1, h_kv=2 or h_q=4; 1 is for every head",
                         (*tensors(s_q=8), expand(_MASK, h_mask=3)), {}),
    "ColumnMask heads, fewer": (ValueError, "ColumnMask has h_mask=2; must be 1, h_kv=4 or h_q=8; each for several heads: "
                                "paddle_fm3.mask.expand(mask, h_mask=4)",
                                (*tensors(s_q=8, h_q=8, h_kv=4), expand(_MASK, h_mask=2)), {}),
    "ColumnMask not causal": (ValueError, "causal=True with a ColumnMask of is_causal=False",
                              (*tensors(s_q=8), ColumnMask.from_bounds(np.zeros((2, 1, 8, 2), np.int32), is_causal=False, s_q=8)),
                              {"causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    error, message, arguments, options = REFUSALS[name]
    with pytest.raises(error, match=re.escape(message)):
        flashmask_attention(*arguments, **options)


def test_a_mask_of_one_sample_is_not_advised_to_be_repeated_to_one():
    with pytest.raises(ValueError, match="the tensors have b=1, s_q=6, s_k=8$"):
        flashmask_attention(*tensors(b=1), causal(8))


def test_what_the_refusals_advise_is_the_mask_meant():
    """One mask for two samples, and a mask head for two heads each, against masks that say it themselves."""
    paddle.seed(0)
    q, k, v = (paddle.randn(x.shape) for x in tensors(s_q=8, h_q=8, h_kv=4))
    mask = causal_document([3, 5])
    shared = paddle.to_tensor(mask.to_bounds()[0])
    wanted = flashmask_attention(q, k, v, causal_document([[3, 5], [3, 5]])).numpy()
    np.testing.assert_array_equal(
        flashmask_attention(q, k, v, shared.expand([2, -1, -1, -1]), causal=True).numpy(), wanted
    )
    np.testing.assert_array_equal(flashmask_attention(q, k, v, expand(mask, b=2)).numpy(), wanted)
    two_heads = random_eviction(8, seed=1, b=2, h_mask=2)
    bounds = two_heads.to_bounds()[0]  # [2, 2, 8, 1]
    wanted = flashmask_attention(q, k, v, paddle.to_tensor(bounds[:, [0, 0, 1, 1]]), causal=True).numpy()
    repeated = paddle.repeat_interleave(paddle.to_tensor(bounds), 2, axis=1)
    np.testing.assert_array_equal(flashmask_attention(q, k, v, repeated, causal=True).numpy(), wanted)
    np.testing.assert_array_equal(flashmask_attention(q, k, v, expand(two_heads, h_mask=4)).numpy(), wanted)


_ABSENT = paddle.empty([0], "int32")

# name: (part of the message, the five tensors of the op, causal)
OP_REFUSALS = {
    "q rank": ("q.shape is [6, 4, 8]; expected [b, s_q, h_q, d_qk]", (tensors()[0][0], *tensors()[1:], _ABSENT, _ABSENT), False),
    "batch": ("q, k, v have b=2, 3, 3", (tensors()[0], *tensors(b=3)[1:], _ABSENT, _ABSENT), False),
    "heads": ("h_kv=3 must divide h_q=4", (*tensors(h_kv=3), _ABSENT, _ABSENT), False),
    "dtype": ("q.dtype is float64; expected float32, bfloat16 or float16", (*tensors(dtype="float64"), _ABSENT, _ABSENT), False),
    "mixed dtypes": ("they must be the same", (tensors()[0], *tensors(dtype="float16")[1:], _ABSENT, _ABSENT), False),
    "indices dtype": ("startend_row_indices.dtype is int64; expected int32", (*tensors(), indices(dtype="int64"), _ABSENT), True),
    "indices batch": ("its first axis must be b=2", (*tensors(), indices(b=1), _ABSENT), True),
    "indices length": ("its third axis must be s_k=8", (*tensors(), indices(s_k=9), _ABSENT), True),
    "indices heads": ("h_mask=3 must be 1, h_kv=2 or h_q=4", (*tensors(), indices(h_mask=3), _ABSENT), True),
    "bounds": ("with causal=True its last axis must be 1 or 2", (*tensors(), indices(n=4), _ABSENT), True),
    "tiles of other heads": ("its second axis must be h_mask=1 as in startend_row_indices",
                             (*tensors(), indices(), paddle.zeros([2, 2, 1, 1], "int32")), True),
    "tiles": ("expected [b, h_mask, 1, 1], one entry a 128 x 128 tile of s_q=6 by s_k=8",
              (*tensors(), _ABSENT, paddle.zeros([2, 1, 1, 2], "int32")), False),
}  # fmt: skip


@pytest.mark.parametrize("name", OP_REFUSALS)
def test_refusal_of_the_op_itself(name):
    """A graph built with unknown sizes meets the values only here."""
    message, arguments, causal = OP_REFUSALS[name]
    with pytest.raises(ValueError, match="fm3_attention: .*" + re.escape(message)) as raised:
        _C_ops._run_custom_op(_native.load_op(), *arguments, 1.0, causal, False)
    assert "ops/binding" in str(raised.value) and "/ops/binding" not in str(raised.value), "names the build folder"


def test_options_without_effect_are_accepted():
    q, k, v = (x + 1 for x in tensors())
    expected = flashmask_attention(q, k, v)
    for options in ({"training": False}, {"dropout": 0.5, "training": False}, {"name": "x"}, {"rng_name": "y"}):
        np.testing.assert_array_equal(flashmask_attention(q, k, v, **options).numpy(), expected.numpy())


def test_window_of_each_block_mask_head():
    q, k, v = (paddle.randn(x.shape) for x in tensors())
    tiles = paddle.to_tensor([[[[1]], [[0]]]] * 2, "int32")  # [b, h_kv, 1, 1]: the second K/V head is hidden
    out = flashmask_attention(q, k, v, window_size=(np.int64(2), 1), block_mask=tiles)  # [b, s_q, h_q, d_v]
    seen = flashmask_attention(q, k, v, window_size=(2, 1))
    np.testing.assert_array_equal(out[:, :, :2].numpy(), seen[:, :, :2].numpy())
    assert not out[:, :, 2:].numpy().any() and seen[:, :, 2:].numpy().any()


def test_no_features():
    q, k, v = tensors(d_qk=0)
    np.testing.assert_allclose(flashmask_attention(q, k, v + 1).numpy(), 1)  # every key weighs the same


@pytest.mark.parametrize("deterministic", [None, True, False])
def test_deterministic(deterministic):
    q, k, v = (paddle.randn(x.shape) for x in tensors(s_q=200, s_k=200))
    grads = []
    for _ in range(2):
        q.stop_gradient = False
        flashmask_attention(q, k, v, causal=True, deterministic=deterministic).sum().backward()
        grads.append(q.grad.numpy().tobytes())
        q.clear_gradient()
    assert grads[0] == grads[1]
