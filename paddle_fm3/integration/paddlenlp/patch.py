# SPDX-License-Identifier: Apache-2.0
"""enable() / disable(): every place where PaddleNLP is changed, in one list, and its way back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, RunState

SUPPORTED_PADDLENLP = "3.0.0b4"
# What the replaced funnel must look like; a PaddleNLP that differs would call it with other arguments.
FUNNEL_ARGUMENTS = (
    "query_states config key_states value_states attention_mask output_attentions alibi "
    "attn_mask_startend_row_indices sequence_parallel reshard_layer npu_is_casual skip_recompute"
).split()

_replaced: list[tuple[Any, str, Any]] = []  # owner, attribute, original


def is_enabled() -> bool:
    return bool(_replaced)


def enable(settings: FlashMask3Settings | None = None) -> None:
    """Routes PaddleNLP's attention here and corrects what context parallelism gets wrong in it.

    Replaced, for llama, qwen2 and qwen2_moe: the attention funnel, the Trainer's split of a batch over ranks, its
    training loop's loader (plans ahead) and its log, the rope tables' length, the losses' mean over ranks, and the
    gate's position count (an int32 cumsum that Paddle 3.3 widens). See `attention.py`, `inputs.py` and
    `corrections.py`. Also gives gloo groups made from now on their own store. Call it before `TrainingArguments` is
    made. Enabling again replaces the settings.

    Raises:
        RuntimeError: another PaddleNLP version than 3.0.0b4, or one whose attention funnel was changed.
        NativeLibraryError: the compiled op is missing; nothing is replaced then.
    """
    settings = settings or FlashMask3Settings()
    check_versions()
    disable()

    from paddle_fm3.distributed import groups
    from paddle_fm3.integration.paddlenlp import (
        attention,
        corrections,
        expert_checkpoint,
        expert_training,
        experts,
        inputs,
    )

    state = RunState()
    replacements = [
        *attention.replacements(settings, state),
        *inputs.replacements(settings, state),
        *corrections.replacements(settings, state),
        *experts.replacements(settings, state),
        *expert_training.replacements(settings, state),
        *expert_checkpoint.replacements(settings, state),
    ]
    groups.enable_gloo_subgroups()
    for owner, name, make in replacements:
        _replace(owner, name, make)


def disable() -> None:
    """Restores everything that `enable` replaced; harmless when nothing is enabled."""
    from paddle_fm3.distributed import groups

    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)
    groups.disable_gloo_subgroups()


def check_versions() -> None:
    """Raises RuntimeError unless this is the PaddleNLP that the replacements were written for."""
    import paddlenlp
    from paddlenlp.transformers.llama import fusion_ops

    if paddlenlp.__version__ != SUPPORTED_PADDLENLP:
        raise RuntimeError(
            f"paddle_fm3: use_flashmask3 works with paddlenlp {SUPPORTED_PADDLENLP}; found {paddlenlp.__version__}"
        )
    funnel = fusion_ops.fusion_flash_attention
    if is_enabled():
        return
    found = list(inspect.signature(funnel).parameters)
    if found != FUNNEL_ARGUMENTS:
        raise RuntimeError(
            f"paddle_fm3: paddlenlp's fusion_flash_attention takes {found}; expected {FUNNEL_ARGUMENTS}. Has another "
            "package replaced it?"
        )


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = inspect.getattr_static(owner, name)
    _replaced.append((owner, name, original))
    setattr(owner, name, make(original))
