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
from paddlenlp.transformers.refined_recompute import no_recompute

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planned import plan_attention
from paddle_fm3.distributed.prepared import state_of
from paddle_fm3.integration.paddlenlp.settings import PLANNED_STRATEGIES, FlashMask3Settings, RunState
from paddle_fm3.mask.converters import from_dense

Replacement = tuple[Any, str, Callable[[Any], Any]]
HIDDEN_BELOW = -1e4  # smallest magnitude that frameworks use for "hidden" in an additive mask (fp16)


def replacements(settings: FlashMask3Settings, state: RunState) -> list[Replacement]:
    """What `enable` replaces for attention: owner, attribute, original -> replacement."""
    return [
        (fusion_ops, "fusion_flash_attention", lambda original: _funnel(original, settings, state)),
        (LlamaAttention, "forward", _without_upstream_context_parallelism),
    ]


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
        else:
            bounds, causal = intervals_of(attn_mask_startend_row_indices)
        b, s_local, _, _ = query_states.shape
        options: dict[str, Any] = {"causal": causal, "deterministic": settings.deterministic or None}
        attend = flashmask_attention
        if reshard_layer is None and _is_split(bounds, s_local):
            _check_config(config)
            attend = flashmask_cp_attention
            options["deterministic"] = settings.deterministic
            options.update(timeout_s=settings.cp_timeout_s, reduce_dtype=settings.cp_reduce_dtype)
            if settings.cp_strategy in PLANNED_STRATEGIES:
                options["plan"] = _plan_of_split(bounds, causal, settings, state)
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


def intervals_of(indices: paddle.Tensor | None) -> tuple[paddle.Tensor | None, bool]:
    """PaddleNLP's indices [b, s], [b, h_mask, s] or [b, h_mask, s, n] -> ([b, h_mask, s, n] int32, causal)."""
    if indices is None:
        return None, True
    shape = list(indices.shape)
    if not 2 <= len(shape) <= 4:
        raise ValueError(
            f"paddle_fm3: attn_mask_startend_row_indices.shape is {shape}; expected [b, s], [b, h_mask, s] or "
            "[b, h_mask, s, n]"
        )
    if indices.dtype != paddle.int32:
        indices = indices.astype("int32")
    if len(shape) == 4:
        # A decoder's one or two bounds come with the causal rule; four bounds say everything themselves.
        return indices, shape[3] != 4
    return indices.reshape([shape[0], shape[1] if len(shape) == 3 else 1, shape[-1], 1]), True


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


def _plan_of_split(bounds: paddle.Tensor, causal: bool, settings: FlashMask3Settings, state: RunState) -> CpPlan:
    """The plan that the batch was cut by; found again by the mask's content, so it costs a hash a layer."""
    num_ranks = groups.group_size(groups.resolve_group())
    plan = plan_attention(bounds, causal=causal, num_ranks=num_ranks, strategy=settings.cp_strategy)
    if plan != state.plan:
        raise ValueError(
            f"paddle_fm3: cp_strategy={settings.cp_strategy!r}: attention got another mask than the one the batch was "
            "split by; a plan serves one mask"
        )
    return plan


def _check_config(config: Any) -> None:
    if getattr(config, "use_fused_linear_cross_entropy", False):
        raise ValueError(
            "paddle_fm3: use_fused_linear_cross_entropy averages the loss per rank, which context parallelism must "
            "not; turn it off"
        )


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
