# SPDX-License-Identifier: Apache-2.0
"""The replacement of PaddleNLP's one attention funnel, `fusion_flash_attention`.

Upstream drops the document mask as soon as context_parallel_degree > 1; here it goes along.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddlenlp.transformers.llama import fusion_ops
from paddlenlp.transformers.llama.modeling import LlamaAttention
from paddlenlp.transformers.refined_recompute import no_recompute

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings

Replacement = tuple[Any, str, Callable[[Any], Any]]


def replacements(settings: FlashMask3Settings) -> list[Replacement]:
    """What `enable` replaces for attention: owner, attribute, original -> replacement."""
    return [
        (fusion_ops, "fusion_flash_attention", lambda original: _funnel(original, settings)),
        (LlamaAttention, "forward", _without_upstream_context_parallelism),
    ]


def _funnel(original: Callable, settings: FlashMask3Settings) -> Callable:
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
        if alibi is not None or (attention_mask is not None and attn_mask_startend_row_indices is None):
            # A dense bias or mask has no interval form: Paddle's own attention, which knows no ranks, serves it.
            if groups.group_size(groups.resolve_group()) > 1:
                raise ValueError(
                    "paddle_fm3: a dense attention_mask or alibi cannot be split over context-parallel ranks; pass "
                    "attn_mask_startend_row_indices (PackedCollator builds them)"
                )
            return original(
                query_states, config, key_states, value_states, attention_mask, output_attentions, alibi,
                attn_mask_startend_row_indices, sequence_parallel, reshard_layer, npu_is_casual, skip_recompute,
            )  # fmt: skip
        bounds, causal = _bounds(attn_mask_startend_row_indices)
        b, s_local, _, _ = query_states.shape
        options: dict[str, Any] = {"causal": causal, "deterministic": settings.deterministic or None}
        attend = flashmask_attention
        if reshard_layer is None and _is_split(bounds, s_local):
            _check_config(config)
            attend = flashmask_cp_attention
            options["deterministic"] = settings.deterministic
            options.update(
                strategy=settings.cp_strategy, timeout_s=settings.cp_timeout_s, reduce_dtype=settings.cp_reduce_dtype
            )
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


def _bounds(indices: paddle.Tensor | None) -> tuple[paddle.Tensor | None, bool]:
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
