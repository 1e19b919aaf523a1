# SPDX-License-Identifier: Apache-2.0
"""PaddleFormers: registers this package's attention under a name that a model's config can choose.

    from paddle_fm3.integration import paddleformers
    paddleformers.register()
    config._attn_implementation = "flashmask3"

Tested with PaddleFormers 0.3.2, on one process.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from typing import Any

import numpy as np
import paddle

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed.prepared import state_of
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.mask.converters import from_dense

DEFAULT_NAME = "flashmask3"
LAYOUTS = ("blhd", "bhld")
TESTED_SERIES = "0.3."
# An additive mask hides with about -1e6 or the dtype's minimum; anything between that and 0 is a bias.
_HIDDEN_BELOW = -1e4


def register(name: str = DEFAULT_NAME, layout: str | None = None) -> None:
    """Makes ``config._attn_implementation = name`` use `flashmask_attention`.

    Args:
        name: the name in PaddleFormers' AttentionInterface.
        layout: how q, k, v arrive, "blhd" or "bhld". None takes "blhd" for PaddleFormers 0.3.x.

    Raises:
        ImportError: PaddleFormers is not installed.
        ValueError: an unknown layout, or none given with a PaddleFormers other than 0.3.x.
    """
    from paddleformers.nn.attention.interface import AttentionInterface

    if layout is None:
        version = importlib.metadata.version("paddleformers")
        if not version.startswith(TESTED_SERIES):
            raise ValueError(
                f"paddleformers.register: version {version} is not one this adapter was tested with "
                f"({TESTED_SERIES}x); pass "
                f"layout={' or '.join(map(repr, LAYOUTS))}, the order in which its models hand over q, k, v"
            )
        layout = "blhd"
    if layout not in LAYOUTS:
        raise ValueError(f"paddleformers.register: layout={layout!r} is unknown; known: {', '.join(LAYOUTS)}")
    AttentionInterface.register(name, _BhldAttention() if layout == "bhld" else attention_forward)


def attention_forward(
    module: Any,
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    attention_mask: paddle.Tensor | None = None,
    attn_mask_startend_row_indices: paddle.Tensor | None = None,
    dropout: float = 0.0,
    sink: paddle.Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[paddle.Tensor, None]:
    """One attention of a PaddleFormers model.

    Args:
        module: the calling layer; its training state decides whether dropout counts.
        query: [b, s_q, h_q, d_qk].
        key: [b, s_k, h_kv, d_qk]; heads are grouped here, not repeated.
        value: [b, s_k, h_kv, d_v].
        attention_mask: dense, bool or additive, [b, 1 or h_q, s_q, s_k]; converted exactly, which costs O(s_q s_k)
            once a mask and not once a layer. Ignored if attn_mask_startend_row_indices is given, as PaddleFormers says.
        attn_mask_startend_row_indices: int32 [b, h_mask, s_k] or [b, h_mask, s_k, n]; n = 1 and 2 are causal, 4 is not.
        dropout: must be 0 while training.
        sink: attention sinks; not supported.
        scaling: factor of the scores; None is d_qk ** -0.5.
        is_causal: used when neither mask is given; None is causal.

    Returns:
        (out [b, s_q, h_q * d_v], None): no attention weights exist.

    Raises:
        NotImplementedError: sinks, or a context-parallel group of more than one rank.
        ValueError: an additive mask with values that neither show nor hide, or that two intervals a column cannot hold.
    """
    if sink is not None:
        raise NotImplementedError("flashmask3: attention sinks are not supported; choose another _attn_implementation")
    _refuse_context_parallel()
    options: dict[str, Any] = {"dropout": dropout, "training": module.training, "softmax_scale": scaling}
    if attn_mask_startend_row_indices is not None:
        indices = attn_mask_startend_row_indices
        indices = indices.unsqueeze(-1) if indices.ndim == 3 else indices  # [b, h_mask, s_k, n]
        out = flashmask_attention(query, key, value, indices, causal=indices.shape[3] != 4, **options)
    elif attention_mask is not None:
        out = flashmask_attention(query, key, value, _column_mask(attention_mask), **options)
    else:
        out = flashmask_attention(query, key, value, causal=is_causal is not False, **options)
    return out.flatten(2), None  # [b, s_q, h_q * d_v]


class _BhldAttention:
    """`attention_forward` for models that hand over [b, h, s, d]."""

    def __call__(
        self, module: Any, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[paddle.Tensor, None]:
        query, key, value = (x.transpose([0, 2, 1, 3]) for x in (query, key, value))
        return attention_forward(module, query, key, value, *args, **kwargs)


_converted: dict[int, tuple[Any, Any, ColumnMask]] = {}


def _column_mask(attention_mask: paddle.Tensor) -> ColumnMask:
    """The dense mask as intervals; remembered while the tensor lives and is not written to."""
    key = id(attention_mask)
    entry = _converted.get(key)
    state = state_of(attention_mask)
    if entry is not None and entry[0]() is attention_mask and entry[1] == state:
        return entry[2]
    table = attention_mask
    if table.dtype != paddle.bool:
        is_visible, is_hidden = table == 0, table < _HIDDEN_BELOW
        if not bool((is_visible | is_hidden).all()):
            raise ValueError(
                "flashmask3: attention_mask holds values that neither show (0) nor hide a key (below -1e4), such as "
                "a position "
                "bias; this operator takes no bias"
            )
        table = is_visible
    converted = from_dense(np.ascontiguousarray(table.numpy()))
    _converted.clear()  # one mask a step: earlier ones are not needed any more
    _converted[key] = (weakref.ref(attention_mask), state, converted)
    return converted


def _refuse_context_parallel() -> None:
    from paddle_fm3.distributed import groups

    try:
        size = groups.group_size(groups.resolve_group())
    except RuntimeError:  # several processes without a context-parallel group: each has whole sequences
        return
    if size > 1:
        raise NotImplementedError(
            f"flashmask3: a context-parallel group of {size} ranks; this adapter attends within one rank only. "
            "paddle_fm3.distributed.attention.flashmask_cp_attention serves split sequences"
        )
