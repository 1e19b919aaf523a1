# SPDX-License-Identifier: Apache-2.0
"""Runs flashmask_attention on a case's arrays through Paddle and compares with the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import c_abi_support
import ml_dtypes
import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_fm3 import flashmask_attention
from paddle_fm3.testing.cases import AttentionCase, AttentionInputs
from paddle_fm3.testing.compare import assert_close_to_oracle

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def to_tensor(array: NDArray, *, stop_gradient: bool = True) -> paddle.Tensor:
    """A tensor with the array's values and dtype; bfloat16 goes through float32, exactly."""
    if array.dtype == ml_dtypes.bfloat16:
        tensor = paddle.to_tensor(array.astype(np.float32)).astype("bfloat16")
    else:
        tensor = paddle.to_tensor(array)
    tensor.stop_gradient = stop_gradient
    return tensor


def to_array(tensor: paddle.Tensor) -> NDArray:
    array = tensor.detach().numpy()
    return array.view(ml_dtypes.bfloat16) if tensor.dtype == paddle.bfloat16 else array


@dataclass
class Result:
    out: NDArray  # [b, s_q, h_q, d_v]
    lse: NDArray  # [b, h_q, s_q]
    dq: NDArray  # [b, s_q, h_q, d_qk]
    dk: NDArray  # [b, s_k, h_kv, d_qk]
    dv: NDArray  # [b, s_k, h_kv, d_v]


def call_arguments(case: AttentionCase) -> dict[str, object]:
    """The case's keyword arguments with its masks as tensors."""
    return {
        name: to_tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in case.call_arguments().items()
    }


def run_op(case: AttentionCase, inputs: AttentionInputs, attention_fn=flashmask_attention, **options) -> Result:
    """out, lse and, from both output gradients, dq, dk, dv."""
    q, k, v = (to_tensor(x, stop_gradient=False) for x in (inputs.q, inputs.k, inputs.v))
    out, lse = attention_fn(q, k, v, **call_arguments(case), return_softmax_lse=True, **options)
    paddle.autograd.backward([out, lse], [to_tensor(inputs.dout), to_tensor(inputs.dlse)])
    return Result(*(to_array(x) for x in (out, lse, q.grad, k.grad, v.grad)))


def check_against_oracle(case: AttentionCase, dtype: str, run=run_op) -> None:
    """Asserts that all five outputs of ``run(case, inputs)`` are as good as the arithmetic allows."""
    inputs, exact, naive = c_abi_support.expected(case, dtype)
    actual = run(case, inputs)
    for name in OUTPUTS:
        got = getattr(actual, name)
        assert got.dtype == (np.float32 if name == "lse" else np.dtype(DTYPES[dtype])), name
        assert_close_to_oracle(got, exact[name], naive[name], name, case)
