# SPDX-License-Identifier: Apache-2.0
"""The replacement of the Trainer's split of a batch over context-parallel ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddlenlp.trainer import trainer as trainer_module

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import make_partition
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.planned import plan_attention
from paddle_fm3.distributed.shard import shard_rows
from paddle_fm3.integration.paddlenlp.attention import intervals_of
from paddle_fm3.integration.paddlenlp.settings import PLANNED_STRATEGIES, FlashMask3Settings, RunState

INDICES = "attn_mask_startend_row_indices"


def replacements(settings: FlashMask3Settings, state: RunState) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What `enable` replaces in the Trainer: owner, attribute, original -> replacement."""

    def split(inputs: dict[str, Any]) -> dict[str, Any]:
        return split_batch(inputs, settings.cp_strategy, state)

    trainer_class = trainer_module.Trainer
    return [
        (trainer_module, "split_inputs_sequence_dim", lambda original: split),
        (trainer_module, "split_inputs_sequence_dim_load_balance", lambda original: split),
        (trainer_class, "_wrap_model", _checked_wrap),
    ]


def split_batch(inputs: dict[str, Any], strategy: str, state: RunState) -> dict[str, Any]:
    """This rank's rows of a batch that every rank of the group holds in whole.

    Token-wise entries [b, s] are cut by the strategy. Mask bounds stay whole on every rank: they are small, and the
    attention rewrites them for the rank's rows. Missing position ids and bounds are filled in first, because the
    model's own defaults would count from 0 on every rank.

    Raises:
        ValueError: no input_ids; a dense attention_mask, which has no rows-by-rank form.
    """
    group = groups.resolve_group()
    if group is None:
        return inputs
    if inputs.get("input_ids") is None:
        raise ValueError(f"paddle_fm3: cannot split a batch without input_ids; it has {sorted(inputs)}")
    b, s = inputs["input_ids"].shape
    inputs = dict(inputs)
    if inputs.get(INDICES) is None:
        if inputs.get("attention_mask") is not None:
            raise ValueError(
                f"paddle_fm3: attention_mask {list(inputs['attention_mask'].shape)} cannot be split over "
                f"context-parallel ranks; pass {INDICES} (PackedCollator builds them)"
            )
        inputs[INDICES] = paddle.full([b, s], s, "int32")
    inputs.pop("attention_mask", None)
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = paddle.arange(s, dtype="int64").expand([b, s])
    state.s_global, state.plan = s, None
    if strategy in PLANNED_STRATEGIES:
        bounds, causal = intervals_of(inputs[INDICES])
        state.plan = plan_attention(bounds, causal=causal, num_ranks=group.nranks, strategy=strategy)
        partition = state.plan.partition
        _check_rows(partition)
    else:
        partition = make_partition(strategy, s, group.nranks)
    return {
        name: shard_rows(x, partition, group.rank) if name != INDICES and _is_tokenwise(x, s) else x
        for name, x in inputs.items()
    }


def _check_rows(partition: Partition) -> None:
    rows = [partition.num_rows(rank) for rank in range(partition.num_ranks)]
    if 0 in rows:
        raise ValueError(
            f"paddle_fm3: s={partition.s} is too short for {partition.num_ranks} ranks: rows by rank would be {rows}, "
            "and a model needs some"
        )


def _is_tokenwise(x: Any, s: int) -> bool:
    return isinstance(x, paddle.Tensor) and len(x.shape) >= 2 and x.shape[1] == s


def _checked_wrap(original: Callable) -> Callable:
    """Trainer._wrap_model that first refuses a model which would bypass the attention funnel."""

    @functools.wraps(original)
    def _wrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(model, "config", None)
        if config is not None and not getattr(config, "use_flash_attention", False):
            raise ValueError(
                "paddle_fm3: use_flashmask3 needs the model's use_flash_attention=True; otherwise PaddleNLP's dense "
                "attention runs, without the document mask"
            )
        return original(self, model, *args, **kwargs)

    return _wrap_model
