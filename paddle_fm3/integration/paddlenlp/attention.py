# SPDX-License-Identifier: Apache-2.0
"""The replacement of PaddleNLP's one attention funnel, `fusion_flash_attention`.

Upstream drops the document mask as soon as context_parallel_degree > 1; here it goes along.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddlenlp.transformers.llama import fusion_ops
from paddlenlp.transformers.llama.modeling import LlamaAttention
from paddlenlp.transformers.qwen2.modeling import Qwen2Attention
from paddlenlp.transformers.qwen2_moe.modeling import Qwen2MoeAttention
from paddlenlp.transformers.refined_recompute import no_recompute

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.prepared import state_of
from paddle_fm3.integration.paddlenlp.masks import masks_of_batch
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, RunState
from paddle_fm3.mask.converters import from_dense

Replacement = tuple[Any, str, Callable[[Any], Any]]
ATTENTION_LAYERS = (LlamaAttention, Qwen2Attention, Qwen2MoeAttention)
HIDDEN_BELOW = -1e4  # smallest magnitude that frameworks use for "hidden" in an additive mask (fp16)


def replacements(settings: FlashMask3Settings, state: RunState) -> list[Replacement]:
    """What `enable` replaces for attention: owner, attribute, original -> replacement."""
    return [
        (fusion_ops, "fusion_flash_attention", lambda original: _funnel(original, settings, state)),
        *((layer, "forward", lambda original: _with_layer_idx(original, state)) for layer in ATTENTION_LAYERS),
        (LlamaAttention, "forward", _without_upstream_context_parallelism),
    ]


def number_layers(model: paddle.nn.Layer) -> None:
    """Tells each attention layer its index, by which it picks its mask. The Trainer does it under the flag."""
    layers = [layer for layer in model.sublayers() if isinstance(layer, ATTENTION_LAYERS)]
    for layer_idx, layer in enumerate(layers):
        layer.fm3_layer_idx = layer_idx


def _funnel(original: Callable, settings: FlashMask3Settings, state: RunState) -> Callable:
    dense_masks = _DenseMasks()

    @functools.wraps(original)
    def fusion_flash_attention(
        query_states: paddle.Tensor,  # [b, s_local, h_q, d]
        config: Any,
        key_states: paddle.Tensor,  # [b, s_local, h_kv, d]
        value_states: paddle.Tensor,  # [b, s_local, h_kv, d]
        attention_mask: paddle.Tensor | None,
        output_attentions: bool,
        alibi: paddle.Tensor | None = None,
        attn_mask_startend_row_indices: paddle.Tensor | None = None,
        sequence_parallel: bool = False,
        reshard_layer: Any | None = None,
        npu_is_casual: bool = False,
        skip_recompute: bool = False,
    ) -> paddle.Tensor | tuple[paddle.Tensor, None]:
        if alibi is not None:
            raise ValueError("paddle_fm3: use_flashmask3 does not serve alibi: a bias has no interval form")
        if attention_mask is not None and attn_mask_startend_row_indices is None:
            bounds, causal = dense_masks.bounds(attention_mask, query_states.shape[1], key_states.shape[1])
            mask_idx = None
        else:
            bounds, causal, mask_idx = _mask_of_layer(attn_mask_startend_row_indices, settings, state)
        b, s_local, _, _ = query_states.shape
        options: dict[str, Any] = {"causal": causal, "deterministic": settings.deterministic or None}
        attend = flashmask_attention
        if reshard_layer is None and _is_split(bounds, s_local):
            _check_config(config)
            attend = flashmask_cp_attention
            options["deterministic"] = settings.deterministic
            options.update(timeout_s=settings.cp_timeout_s, reduce_dtype=settings.cp_reduce_dtype)
            if settings.is_planned:
                options["plan"] = _plan_of_split(mask_idx, settings, state)
                if query_states.place.is_cpu_place() or settings.cp_timeline:
                    options["trace"] = state.metrics.trace  # read each step, for which a GPU must be waited for
            else:
                options["strategy"] = settings.cp_strategy
        out = no_recompute(
            attend,
            query_states,
            key_states,
            value_states,
            startend_row_indices=bounds,
            enable=skip_recompute,
            **options,
        )  # [b, s_local, h_q, d]
        if reshard_layer is not None:
            out = reshard_layer(out, split_axis=1, concat_axis=2)  # heads gathered, sequence split
            s_local = out.shape[1]
        shape = [b * s_local, -1] if sequence_parallel else [b, s_local, -1]
        out = out.reshape([*shape[:-1], out.shape[-2] * out.shape[-1]])
        return (out, None) if output_attentions else out

    return fusion_flash_attention


def _mask_of_layer(
    indices: paddle.Tensor | None, settings: FlashMask3Settings, state: RunState
) -> tuple[paddle.Tensor | None, bool, int | None]:
    """(bounds int32 [b, h_mask, s, n], causal, its place among the batch that was split; None if it is another's)."""
    if indices is None:
        return None, True, None
    is_split_one = state.indices is not None and _is_same(indices, state.indices)
    # The same tensors for every layer: what is prepared for one serves all.
    masks, causal = (state.masks, state.is_causal) if is_split_one else masks_of_batch(indices)
    mask_idx = 0
    if len(masks) > 1:
        if len(masks) != settings.masks.num_masks:
            raise ValueError(
                f"paddle_fm3: the batch has {len(masks)} masks; --mask_layers {','.join(settings.masks.layers)} names "
                f"{settings.masks.num_masks}. Was the collator given the same masks?"
            )
        if state.layer_idx is None:
            raise ValueError(
                f"paddle_fm3: the batch has {len(masks)} masks and this attention layer has no index; call "
                "number_layers(model) first"
            )
        mask_idx = settings.masks.mask_idx(state.layer_idx)
    bounds = masks[mask_idx]
    if bounds.dtype != paddle.int32:
        bounds = bounds.astype("int32")
    return bounds, causal, mask_idx if is_split_one else None


def _is_same(indices: paddle.Tensor, of_split: paddle.Tensor) -> bool:
    """Recompute hands over another tensor object for the same memory. On a CPU the content is looked at as well."""
    if indices is of_split:
        return True
    if indices.shape != of_split.shape or indices.dtype != of_split.dtype:
        return False
    if indices.place.is_cpu_place():
        return np.array_equal(indices.numpy(), of_split.numpy())
    return indices.data_ptr() == of_split.data_ptr()


class _DenseMasks:
    """Dense masks as intervals, exactly; the last one is remembered, for the layers that follow.

    NOTE: upstream hands a dense mask to Paddle's scaled_dot_product_attention together with is_causal=True, which
    on a CPU ignores the mask without a word.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, ...] | None = None  # weak reference to the mask, its state, bounds, causal

    def bounds(self, mask: paddle.Tensor, s_q: int, s_k: int) -> tuple[paddle.Tensor, bool]:
        """[b, 1 or h, s_q, s_k] of bool or of 0 (visible) and large negative numbers -> (bounds, causal)."""
        shape = list(mask.shape)
        if len(shape) != 4 or shape[2:] != [s_q, s_k]:
            raise ValueError(
                f"paddle_fm3: attention_mask.shape is {shape}; expected [b, h, {s_q}, {s_k}]. A dense mask cannot be "
                "split over context-parallel ranks: pass attn_mask_startend_row_indices (PackedCollator builds them)"
            )
        state = state_of(mask)
        if self._last is not None and self._last[0]() is mask and self._last[1] == state:
            return self._last[2:]
        values = mask.numpy() if mask.dtype == paddle.bool else mask.astype("float32").numpy()
        visible = values if values.dtype == np.bool_ else values == 0
        if values.dtype != np.bool_ and (values[~visible] > HIDDEN_BELOW).any():
            raise ValueError(
                "paddle_fm3: attention_mask holds values that are neither 0 (visible) nor below "
                f"{HIDDEN_BELOW:g} (hidden): a bias has no interval form"
            )
        bounds, causal = from_dense(visible).to_bounds()
        self._last = (weakref.ref(mask), state, paddle.to_tensor(bounds), causal)
        return self._last[2:]


def _is_split(bounds: paddle.Tensor | None, s_local: int) -> bool:
    """Whether these rows are one rank's part of a longer sequence.

    The replaced batch split (`inputs.py`) always leaves the bounds of the whole sequence on every rank, so a split
    batch has more mask columns than rows. An unsplit batch (evaluation) is attended locally on every rank.
    """
    if bounds is None or groups.group_size(groups.resolve_group()) == 1:
        return False
    if bounds.shape[2] != s_local:
        return True
    if s_local > 0 and int(bounds.max()) > s_local:
        raise ValueError(
            f"paddle_fm3: mask bounds reach row {int(bounds.max())} but only {s_local} rows came with {s_local} mask "
            "columns: was the batch split by other code? The Trainer under use_flashmask3 splits it itself"
        )
    return False


def _plan_of_split(mask_idx: int | None, settings: FlashMask3Settings, state: RunState) -> CpPlan:
    """The plan that the batch was cut by."""
    if mask_idx is None or state.batch_plan is None:
        raise ValueError(
            f"paddle_fm3: cp_strategy={settings.cp_strategy!r}: attention got another mask than the one the batch was "
            "split by; a plan serves one mask"
        )
    return state.batch_plan.plans[mask_idx]


def _check_config(config: Any) -> None:
    if getattr(config, "use_fused_linear_cross_entropy", False):
        raise ValueError(
            "paddle_fm3: use_fused_linear_cross_entropy averages the loss per rank, which context parallelism must "
            "not; turn it off"
        )


def _with_layer_idx(original: Callable, state: RunState) -> Callable:
    """An attention layer's forward during which its index is known to the funnel."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state.layer_idx = getattr(self, "fm3_layer_idx", None)
        try:
            return original(self, *args, **kwargs)
        finally:
            state.layer_idx = None

    return forward


def _without_upstream_context_parallelism(original: Callable) -> Callable:
    """LlamaAttention.forward seen with context_parallel_degree=1.

    Upstream's degree > 1 overwrites the batch's position ids with those of an even zigzag split, which is wrong for
    any other split and for uneven lengths. The user's config object itself is left as it is.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if getattr(config, "context_parallel_degree", 1) <= 1:
            return original(self, *args, **kwargs)
        plain = copy.copy(config)
        plain.context_parallel_degree = 1
        self.config = plain
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config = config

    return forward
