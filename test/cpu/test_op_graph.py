# SPDX-License-Identifier: Apache-2.0
"""The op inside to_static (whole graph and SOT), saved programs, recompute and AMP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import op_support
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute
from paddle.static import InputSpec

from paddle_fm3 import ColumnMask, flashmask_attention
from paddle_fm3.testing.cases import hostile_case, make_inputs

CASE = hostile_case("random_nc2_83x210_h4_2_hm2_d(16,48)")


class Block(paddle.nn.Layer):
    """A projection before the op, so that a gradient must flow through it into a parameter."""

    def __init__(self, d: int, has_lse: bool, **options) -> None:
        super().__init__()
        self.project = paddle.nn.Linear(d, d)
        self.has_lse = has_lse
        self.options = options

    def forward(self, q, k, v, indices=None):
        q = self.project(q)
        result = flashmask_attention(q, k, v, indices, return_softmax_lse=self.has_lse, **self.options)
        if not self.has_lse:
            return result
        out, lse = result
        seen = paddle.where(paddle.isfinite(lse), lse, paddle.zeros_like(lse))
        return out + seen.transpose([0, 2, 1]).unsqueeze(-1)


def _outputs(call, block: Block, arrays, indices) -> list[np.ndarray]:
    """The result and the gradients of q, k, v and of the parameters."""
    tensors = [op_support.to_tensor(array, stop_gradient=False) for array in arrays]
    for parameter in block.parameters():
        parameter.clear_grad()
    result = call(*tensors, *([] if indices is None else [indices]))
    (result * result).sum().backward()
    leaves = [*tensors, *block.parameters()]
    return [result.numpy(), *(leaf.grad.numpy().copy() for leaf in leaves)]


def _setting(has_indices: bool):
    inputs = make_inputs(CASE, np.float32)
    indices = op_support.call_arguments(CASE)["startend_row_indices"] if has_indices else None
    return (inputs.q, inputs.k, inputs.v), indices


def _assert_same(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Same kernels on the same numbers; only the surrounding matmul may round otherwise in a graph."""
    assert len(got) == len(expected)
    for idx, (left, right) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5, err_msg=f"output {idx}")


@pytest.mark.parametrize("is_full_graph", [True, False], ids=["full_graph", "sot"])
@pytest.mark.parametrize("has_lse", [True, False], ids=["lse", "out"])
@pytest.mark.parametrize("has_indices", [True, False], ids=["indices", "plain"])
def test_to_static(is_full_graph, has_lse, has_indices):
    arrays, indices = _setting(has_indices)
    block = Block(CASE.d_qk, has_lse)
    expected = _outputs(block, block, arrays, indices)
    static = paddle.jit.to_static(block.forward, full_graph=is_full_graph)
    _assert_same(_outputs(static, block, arrays, indices), expected)
    _assert_same(_outputs(static, block, arrays, indices), expected)  # from the program cache


@pytest.mark.parametrize("is_full_graph", [True, False], ids=["full_graph", "sot"])
def test_to_static_with_window_and_column_mask(is_full_graph):
    arrays, _ = _setting(False)
    mask = ColumnMask.from_bounds(CASE.build_mask().startend_row_indices, is_causal=False, s_q=CASE.s_q)

    def call(q, k, v):
        by_window = flashmask_attention(q, k, v, window_size=(9, 4))
        return by_window + flashmask_attention(q, k, v, mask)

    tensors = [op_support.to_tensor(array) for array in arrays]
    static = paddle.jit.to_static(call, full_graph=is_full_graph)
    np.testing.assert_allclose(static(*tensors).numpy(), call(*tensors).numpy(), rtol=1e-6, atol=1e-6)


def _specs(has_indices: bool) -> list[InputSpec]:
    """Batch and lengths unknown."""
    q = InputSpec([None, None, CASE.h_q, CASE.d_qk], "float32")
    k = InputSpec([None, None, CASE.h_kv, CASE.d_qk], "float32")
    v = InputSpec([None, None, CASE.h_kv, CASE.d_v], "float32")
    return [q, k, v, *([InputSpec([None, CASE.h_kv, None, 2], "int32")] if has_indices else [])]


_LOAD_AND_RUN = """
import sys
import numpy as np, paddle, paddle_fm3
paddle_fm3.load_op()
folder, num_inputs = sys.argv[1], int(sys.argv[2])
layer = paddle.jit.load(folder + "/saved")
inputs = [paddle.to_tensor(np.load(f"{folder}/input{idx}.npy")) for idx in range(num_inputs)]
np.save(folder + "/output.npy", layer(*inputs).numpy())
if num_inputs == 4:  # an error is raised, it does not end the process
    try:
        layer(*inputs[:3], inputs[3][:, :, 1:])
    except ValueError as error:
        assert "startend_row_indices.shape is [" in str(error) and "its third axis must be s_k=" in str(error)
    else:
        raise AssertionError("indices of another length were taken")
"""


@pytest.mark.parametrize("has_indices", [True, False], ids=["indices", "plain"])
def test_saved_program_runs_in_another_process(tmp_path, has_indices):
    arrays, indices = _setting(has_indices)
    block = Block(CASE.d_qk, has_lse=True)
    block.eval()
    static = paddle.jit.to_static(block, input_spec=_specs(has_indices), full_graph=True)
    paddle.jit.save(static, str(tmp_path / "saved"))
    inputs = [*arrays, *([indices.numpy()] if has_indices else [])]
    for idx, array in enumerate(inputs):
        np.save(tmp_path / f"input{idx}.npy", array)
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", _LOAD_AND_RUN, str(tmp_path), str(len(inputs))], check=True, cwd=root)
    expected = block(*(op_support.to_tensor(array) for array in inputs)).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "output.npy"), expected, rtol=1e-6, atol=1e-6)


def test_unknown_sizes_with_window():
    class Windowed(paddle.nn.Layer):
        def forward(self, q, k, v):
            return flashmask_attention(q, k, v, window_size=(5, 3))

    arrays, _ = _setting(False)
    tensors = [op_support.to_tensor(array) for array in arrays]
    static = paddle.jit.to_static(Windowed(), input_spec=_specs(False), full_graph=True)
    np.testing.assert_array_equal(static(*tensors).numpy(), Windowed()(*tensors).numpy())


def test_unknown_head_dimension():
    specs = [InputSpec([None] * 4, "float32")] * 3

    def call(q, k, v):
        return flashmask_attention(q, k, v)

    static = paddle.jit.to_static(call, input_spec=specs, full_graph=True)
    with pytest.raises(ValueError, match="d_qk not known while the graph is built; pass softmax_scale"):
        static.concrete_program  # noqa: B018


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute(use_reentrant):
    arrays, indices = _setting(True)
    block = Block(CASE.d_qk, has_lse=True)
    expected = _outputs(block, block, arrays, indices)

    def call(*tensors):
        return recompute(block, *tensors, use_reentrant=use_reentrant)

    _assert_same(_outputs(call, block, arrays, indices), expected)


class _Autocast:
    """AMP state as ``paddle.amp.auto_cast`` sets it on a GPU; on CPU that call refuses to do anything."""

    def __init__(self, level: str, dtype: str, black_list: set[str] = frozenset()) -> None:
        self.level, self.dtype, self.black_list = level, dtype, set(black_list)

    def __enter__(self) -> None:
        self.tracer = paddle.base.framework._dygraph_tracer()
        self.saved = self.tracer._amp_level, self.tracer._amp_dtype, self.tracer._get_amp_op_list()
        self.tracer._amp_level = getattr(paddle.base.core.AmpLevel, self.level)
        self.tracer._amp_dtype = self.dtype
        self.tracer._set_amp_op_list(set(), self.black_list)

    def __exit__(self, *_) -> None:
        self.tracer._amp_level, self.tracer._amp_dtype, lists = self.saved
        self.tracer._set_amp_op_list(*lists)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast(level, dtype):
    arrays, indices = _setting(True)
    q, k, v = (op_support.to_tensor(array, stop_gradient=False) for array in arrays)
    with _Autocast(level, dtype):
        out = flashmask_attention(q, k, v, indices)
        black_listed = []
        for name in ("flashmask_attention", "fm3_attention"):
            with _Autocast(level, dtype, {name}):
                black_listed.append(flashmask_attention(q.astype(dtype), k, v, indices))
    assert out.dtype == getattr(paddle, dtype)
    assert [x.dtype for x in black_listed] == [paddle.float32] * 2
    cast = [x.detach().astype(dtype) for x in (q, k, v)]
    expected = flashmask_attention(*cast, indices)
    np.testing.assert_array_equal(op_support.to_array(out), op_support.to_array(expected))
    out.astype("float32").sum().backward()
    assert q.grad.dtype == paddle.float32  # of the cast's own input


@pytest.mark.parametrize("is_full_graph", [True, False], ids=["full_graph", "sot"])
def test_autocast_in_a_graph(is_full_graph):
    arrays, indices = _setting(True)
    tensors = [*(op_support.to_tensor(array) for array in arrays), indices]

    def call(q, k, v, indices):
        return flashmask_attention(q, k, v, indices)

    static = paddle.jit.to_static(call, full_graph=is_full_graph)
    with _Autocast("O1", "bfloat16"):
        out = static(*tensors)
        expected = flashmask_attention(*tensors)
    assert out.dtype == expected.dtype == paddle.bfloat16
    np.testing.assert_array_equal(op_support.to_array(out), op_support.to_array(expected))
