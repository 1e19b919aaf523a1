# SPDX-License-Identifier: Apache-2.0
"""flashmask_attention: the operator on one device, and the only caller of the compiled op."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddle_fm3 import _arguments, _native, _paddle
from paddle_fm3.mask.column_mask import ColumnMask

if TYPE_CHECKING:
    from paddle import Tensor

# Names a user may have put on an AMP list with this operator in mind.
_AMP_NAMES = frozenset(("fm3_attention", "flashmask_attention", "flashmask_attention_v2", "flash_attn"))


@paddle.jit.not_to_static  # runs as it is while a whole graph is built; nothing here needs rewriting
def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | ColumnMask | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor | list[Tensor]:
    """Attention in which each key column is hidden from at most two intervals of query rows.

    Signature and meaning are those of ``paddle.nn.functional.flashmask_attention`` in Paddle 3.3.1
    (FlashMask-3, section 2.2), plus ``deterministic``. Where that function is narrower (dtypes, head
    dimensions, ``softmax_scale`` without indices, ``window_size`` with s_q != s_k), this one does what
    the arguments say.

    Args:
        query: ``[b, s_q, h_q, d_qk]``; float32, bfloat16 or float16. Paddle makes strided tensors dense first.
        key: ``[b, s_k, h_kv, d_qk]``, same dtype; h_kv divides h_q (grouped-query attention).
        value: ``[b, s_k, h_kv, d_v]``, same dtype.
        startend_row_indices: int32 ``[b, h_mask, s_k, n]`` with h_mask in {1, h_kv, h_q}: the half-open
            row intervals hidden from each key column, clipped to [0, s_q].
            n=1, causal: [LTS, s_q). n=2, causal: [LTS, LTE). n=2, not causal: [LTS, s_q) and [0, UTE).
            n=4, not causal: [LTS, LTE) and [UTS, UTE). None hides nothing beyond the causal rule.
            A :class:`~paddle_fm3.mask.ColumnMask` is taken too, with its own causal rule and block mask.
        causal: hide keys after the query; bottom-right aligned, k visible iff k <= q + (s_k - s_q).
        window_size: w or (left, right), only without ``startend_row_indices``: row q sees keys
            [q - left, q + right] (causal: [q - left, q]), shifted by s_k - s_q as the causal rule is.
        return_softmax_lse: also return lse.
        training, name, rng_name: accepted; without dropout they change nothing.
        dropout: must be 0 while training.
        fixed_seed_offset, return_seed_offset: belong to dropout; not supported.
        softmax_scale: factor of the scores; default d_qk ** -0.5.
        block_mask: int32 ``[b, h_mask, ceil(s_q/128), ceil(s_k/128)]``; 0 hides the 128 x 128 tile.
        deterministic: bitwise repeatable gradients. None follows FLAGS_cudnn_deterministic on GPU. The CPU
            kernels always are, for any number of threads.

    Returns:
        out ``[b, s_q, h_q, d_v]``, exactly 0 in a row that sees no key. With ``return_softmax_lse`` the
        list [out, lse]: lse float32 ``[b, h_q, s_q]``, natural logarithm, -inf in such a row. Gradients
        flow through both.

    Under AMP (O1 and O2) q, k, v are cast to the AMP dtype, unless this operator is on the black list.

    Raises:
        ValueError: a shape, bound count or option breaks the contract; the message names the values.
        TypeError: a dtype does.
        NativeLibraryError: the compiled op is missing; the message says how to build it.
    """
    _arguments.check_flags(causal=causal, return_softmax_lse=return_softmax_lse, training=training)
    if deterministic is not None:
        _arguments.check_flags(deterministic=deterministic)
    _arguments.check_options(dropout, training, fixed_seed_offset, return_seed_offset)
    _arguments.check_sizes(query, key, value)
    if isinstance(startend_row_indices, ColumnMask):
        mask = startend_row_indices
        startend_row_indices, causal, block_mask = _mask_tensors(mask, query, key, causal, window_size, block_mask)
    if window_size is not None:
        left, right = _arguments.window_sides(window_size, startend_row_indices)
        h_mask = 1 if block_mask is None or len(block_mask.shape) != 4 else _size(block_mask, 1)
        startend_row_indices = _window_indices(query, key, left, right, causal, h_mask)
    if startend_row_indices is not None:
        _arguments.check_indices(startend_row_indices, query, key, causal)
    if block_mask is not None:
        _arguments.check_block_mask(block_mask, query, key, startend_row_indices)

    query, key, value = _autocast(query, key, value)
    _arguments.check_dtypes(query, key, value)
    indices = _absent() if startend_row_indices is None else startend_row_indices
    block_mask = _absent() if block_mask is None else block_mask
    _native.load_op()
    out, lse = _run_op(
        *_on_one_mesh(query, key, value, indices, block_mask),
        float(_arguments.default_scale(query) if softmax_scale is None else softmax_scale),
        bool(causal),
        _is_deterministic(deterministic),
    )
    if paddle.in_dynamic_mode():
        if not paddle.is_grad_enabled() or all(x.stop_gradient for x in (query, key, value)):
            # NOTE: Paddle leaves the outputs of a custom op differentiable here.
            out.stop_gradient = lse.stop_gradient = True
        elif out.is_dist():
            out, lse = _BothGradients.apply(out, lse)
    return [out, lse] if return_softmax_lse else out


@_paddle.unified  # one call for SOT, which otherwise breaks the graph at a function it does not know
def _run_op(*arguments):
    return _paddle.run_custom_op(_native.OP_NAME, *arguments)


@_paddle.backward_once
class _BothGradients(PyLayer):
    """Hands the op a gradient of out and of lse, zero where nobody asked for one.

    NOTE: with dist tensors a missing gradient ends the process inside Paddle's custom-op call; a PyLayer
    fills it in. The price is one copy of out.
    """

    @staticmethod
    def forward(ctx, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return paddle.assign(out), paddle.assign(lse)

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
        return dout, dlse


def _absent() -> Tensor:
    """Stands for a mask that is not given: None together with dist tensors would end the process."""
    return paddle.empty([0], dtype="int32")  # [0]


def _on_one_mesh(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With a dist tensor among them, the plain ones become replicated dist tensors of its mesh.

    NOTE: left to itself the custom op converts the caller's own plain tensors in place.
    """
    meshes = [tensor.process_mesh for tensor in tensors if tensor.is_dist()]
    if not meshes or len(meshes) == len(tensors):
        return tensors
    from paddle.distributed.auto_parallel.api import dtensor_from_local

    replicated = [paddle.distributed.Replicate()] * meshes[0].ndim
    return tuple(
        tensor if tensor.is_dist() else dtensor_from_local(tensor, meshes[0], replicated) for tensor in tensors
    )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as Paddle does for its own attention op. NOTE: AMP never casts the inputs of a custom op."""
    dtype = _paddle.amp_dtype()
    if dtype is None:
        return tensors
    if _AMP_NAMES & _paddle.amp_black_list():
        dtype = "float32"
    return tuple(tensor.astype(dtype) for tensor in tensors)


def _is_deterministic(deterministic: bool | None) -> bool:
    if deterministic is not None:
        return bool(deterministic)
    flag = "FLAGS_cudnn_deterministic"  # a CPU build of Paddle does not have it
    return paddle.is_compiled_with_cuda() and bool(paddle.get_flags([flag])[flag])


def _size(tensor: Tensor, axis: int):
    """A size as an int, or as a 0-D tensor where a graph being built does not know it yet."""
    size = tensor.shape[axis]
    return size if size >= 0 else paddle.shape(tensor)[axis].astype("int32")


def _window_indices(query: Tensor, key: Tensor, left: int, right: int, causal: bool, h_mask: int = 1) -> Tensor:
    """The window as [b, h_mask, s_k, n]: key k is seen by rows k - shift - right ... k - shift + left."""
    # NOTE: Paddle 2.6 may be on a GPU that it has no kernels for, and then says nothing: computed on the host there.
    xp = np if _paddle.IS_PADDLE_2 and paddle.in_dynamic_mode() else paddle
    b, s_q, s_k = _size(query, 0), _size(query, 1), _size(key, 1)  # int, or 0-D int32
    diagonal = xp.arange(s_k, dtype="int32") - (s_k - s_q)  # [s_k] row that key k is the last key of
    zero, end = xp.zeros_like(diagonal), xp.zeros_like(diagonal) + s_q  # [s_k], [s_k]
    begin = xp.minimum(xp.maximum(diagonal + (left + 1), zero), end)  # [s_k]
    columns = [begin] if causal else [begin, xp.minimum(xp.maximum(diagonal - right, zero), end)]
    indices = xp.stack(columns, axis=-1).astype("int32").reshape([1, 1, s_k, len(columns)])
    indices = xp.tile(indices, [b, h_mask, 1, 1])  # [b, h_mask, s_k, n]
    return paddle.to_tensor(indices, place=query.place) if xp is np else indices


# A mask is reused by every layer and step; its tensors are made once a place.
_tensors_of_mask: weakref.WeakKeyDictionary[ColumnMask, dict] = weakref.WeakKeyDictionary()


@_paddle.force_dynamic
def _mask_tensors(
    mask: ColumnMask, query: Tensor, key: Tensor, causal: bool, window_size, block_mask
) -> tuple[Tensor, bool, Tensor | None]:
    """(startend_row_indices, causal, block_mask) of a ColumnMask on query's device."""
    _paddle.break_graph()  # NOTE: SOT cannot look into a frozen dataclass of arrays
    _arguments.check_column_mask(mask, query, key, causal, window_size, block_mask)
    in_graph = not paddle.in_dynamic_mode()
    place = None if in_graph else str(query.place)
    cached = _tensors_of_mask.setdefault(mask, {})
    if in_graph or place not in cached:
        bounds, causal = mask.to_bounds()  # [b, h_mask, s_k, n]
        to_place = {} if in_graph else {"place": query.place}
        indices = paddle.to_tensor(bounds, dtype="int32", **to_place)
        block_mask = mask.block_mask
        if block_mask is not None:
            block_mask = paddle.to_tensor(block_mask, dtype="int32", **to_place)
        if in_graph:
            return indices, causal, block_mask
        cached[place] = (indices, causal, block_mask)
    return cached[place]
