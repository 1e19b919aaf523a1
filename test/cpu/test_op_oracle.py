# SPDX-License-Identifier: Apache-2.0
"""The op in dygraph against the float64 oracle: out, lse, dq, dk, dv on every hostile case, in each dtype."""

from __future__ import annotations

import numpy as np
import op_support
import paddle
import pytest

from paddle_fm3 import flashmask_attention
from paddle_fm3.testing.cases import HOSTILE_CASES, hostile_case, make_inputs


@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", op_support.DTYPES)
def test_hostile_case(case, dtype):
    op_support.check_against_oracle(case, dtype)


def test_lse_gradient_agrees_with_finite_differences():
    """The oracle could share a mistake in the dlse term; a difference quotient of lse cannot."""
    case = hostile_case("random_nc4_257x129_h2_2_hm1_d32")
    inputs = make_inputs(case, np.float32)
    arguments = op_support.call_arguments(case)
    tensors = [op_support.to_tensor(x) for x in (inputs.q, inputs.k, inputs.v)]
    weight = op_support.to_tensor(inputs.dlse)  # [b, h_q, s_q]

    def weighted_lse(q, k):
        _, lse = flashmask_attention(q, k, tensors[2], **arguments, return_softmax_lse=True)
        seen = paddle.isfinite(lse)
        return paddle.where(seen, lse, paddle.zeros_like(lse)) * weight

    q, k = (op_support.to_tensor(x, stop_gradient=False) for x in (inputs.q, inputs.k))
    weighted_lse(q, k).sum().backward()
    rng = np.random.default_rng(1)
    for tensor, other_first in ((q, False), (k, True)):
        direction = rng.standard_normal(tensor.shape).astype(np.float32)
        slope = float((tensor.grad.numpy().astype(np.float64) * direction).sum())
        step = 1e-2
        values = []
        for sign in (1, -1):
            moved = tensor.detach() + sign * step * paddle.to_tensor(direction)
            parts = weighted_lse(q.detach(), moved) if other_first else weighted_lse(moved, k.detach())
            values.append(parts.numpy().astype(np.float64).sum())
        quotient = (values[0] - values[1]) / (2 * step)
        assert quotient == pytest.approx(slope, rel=2e-3), (slope, quotient)


@pytest.mark.parametrize("which", ["out", "lse"])
def test_gradient_through_one_output_only(which):
    """An output nobody differentiates has no gradient tensor at all inside the op."""
    case = hostile_case("documents_mixed")
    inputs = make_inputs(case, np.float32)
    if which == "out":
        inputs.dlse[:] = 0
    else:
        inputs.dout[:] = 0
    both = op_support.run_op(case, inputs)
    q, k, v = (op_support.to_tensor(x, stop_gradient=False) for x in (inputs.q, inputs.k, inputs.v))
    out, lse = flashmask_attention(q, k, v, **op_support.call_arguments(case), return_softmax_lse=True)
    output, grad = (out, inputs.dout) if which == "out" else (lse, inputs.dlse)
    paddle.autograd.backward([output], [op_support.to_tensor(grad)])
    for name, tensor in (("dq", q), ("dk", k), ("dv", v)):
        np.testing.assert_array_equal(tensor.grad.numpy(), getattr(both, name), err_msg=name)


def _strided(array: np.ndarray, kind: str) -> paddle.Tensor:
    """A non-contiguous tensor with the array's values."""
    tensor = op_support.to_tensor(array)
    if kind == "heads_first":  # stored [b, h, s, d]
        return tensor.transpose([0, 2, 1, 3]).contiguous().transpose([0, 2, 1, 3])
    if kind == "sliced":  # a part of a packed qkv
        packed = paddle.concat([tensor, tensor + 1.0], axis=2)
        return packed[:, :, : array.shape[2]]
    if kind == "last_axis_strided":
        return tensor.transpose([0, 1, 3, 2]).contiguous().transpose([0, 1, 3, 2])
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["heads_first", "sliced", "last_axis_strided"])
def test_strided_inputs_and_output_gradients(kind):
    case = hostile_case("random_nc2_83x210_h4_2_hm2_d(16,48)")
    inputs = make_inputs(case, np.float32)
    expected = op_support.run_op(case, inputs)
    q, k, v, dout = (_strided(x, kind) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    assert not any(x.is_contiguous() for x in (q, k, v, dout))
    for tensor in (q, k, v):
        tensor.stop_gradient = False
    out, lse = flashmask_attention(q, k, v, **op_support.call_arguments(case), return_softmax_lse=True)
    paddle.autograd.backward([out, lse], [dout, op_support.to_tensor(inputs.dlse)])
    got = op_support.Result(*(op_support.to_array(x) for x in (out, lse, q.grad, k.grad, v.grad)))
    for name in op_support.OUTPUTS:
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)


def test_strided_indices():
    case = hostile_case("random_nc4_257x129_h2_2_hm1_d32")
    inputs = make_inputs(case, np.float32)
    arguments = op_support.call_arguments(case)
    q, k, v = (op_support.to_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    expected = flashmask_attention(q, k, v, **arguments)
    indices = arguments["startend_row_indices"]
    wide = paddle.concat([indices, indices + 7], axis=-1)[..., : indices.shape[-1]]
    assert not wide.is_contiguous()
    got = flashmask_attention(q, k, v, **{**arguments, "startend_row_indices": wide})
    np.testing.assert_array_equal(got.numpy(), expected.numpy())


def test_stopped_gradients():
    case = hostile_case("causal_two_tiles")
    inputs = make_inputs(case, np.float32)
    q, k, v = (op_support.to_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    assert flashmask_attention(q, k, v, causal=True).stop_gradient
    full = op_support.run_op(case, inputs)
    k.stop_gradient = False
    out, lse = flashmask_attention(q, k, v, causal=True, return_softmax_lse=True)
    paddle.autograd.backward([out, lse], [op_support.to_tensor(inputs.dout), op_support.to_tensor(inputs.dlse)])
    assert q.grad is None and v.grad is None
    np.testing.assert_array_equal(k.grad.numpy(), full.dk)
    with paddle.no_grad():
        assert flashmask_attention(q, k, v, causal=True).stop_gradient


def test_second_backward_says_what_to_do():
    q = paddle.randn([1, 4, 1, 8])
    q.stop_gradient = False
    out, lse = flashmask_attention(q, q, q, return_softmax_lse=True)
    out.sum().backward()
    with pytest.raises(Exception, match="retain_graph=True"):
        lse.sum().backward()
