# SPDX-License-Identifier: Apache-2.0
"""Replacements in the Trainer: plans made ahead, a batch split over context-parallel ranks, figures in the log."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddlenlp.trainer import trainer as trainer_module

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import make_partition
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.planned import device_cost
from paddle_fm3.distributed.shard import shard_rows
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.integration.paddlenlp.attention import number_layers
from paddle_fm3.integration.paddlenlp.collator import INDICES
from paddle_fm3.integration.paddlenlp.masks import masks_of_batch
from paddle_fm3.integration.paddlenlp.metrics import StepMetrics
from paddle_fm3.integration.paddlenlp.planning import BatchPlan, plan_batch
from paddle_fm3.integration.paddlenlp.prefetch import PlanAheadLoader, PlannedBatch
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, RunState, topology_of


def replacements(settings: FlashMask3Settings, state: RunState) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What `enable` replaces in the Trainer: owner, attribute, original -> replacement."""

    def split(inputs: dict[str, Any]) -> dict[str, Any]:
        return split_batch(inputs, settings, state)

    trainer_class = trainer_module.Trainer
    return [
        (trainer_module, "split_inputs_sequence_dim", lambda original: split),
        (trainer_module, "split_inputs_sequence_dim_load_balance", lambda original: split),
        (trainer_class, "_wrap_model", lambda original: _checked_wrap(original, settings)),
        (trainer_class, "_inner_training_loop", lambda original: _with_plans_ahead(original, settings)),
        (trainer_class, "log", lambda original: _with_figures(original, state)),
    ]


def split_batch(inputs: dict[str, Any], settings: FlashMask3Settings, state: RunState) -> dict[str, Any]:
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
    batch_plan, wait_ms = (inputs.batch_plan, inputs.wait_ms) if isinstance(inputs, PlannedBatch) else (None, 0.0)
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
    inputs[INDICES] = inputs[INDICES].astype("int32")
    state.s_global, state.batch_plan = s, None
    state.indices = inputs[INDICES]
    state.masks, state.is_causal = masks_of_batch(state.indices)
    if settings.is_planned:
        if batch_plan is None:
            batch_plan = plan_of_indices(inputs[INDICES], settings, group)
            wait_ms = batch_plan.plan_ms
        state.batch_plan = batch_plan
        state.metrics = state.metrics or StepMetrics(settings.cp_timeline)
        state.metrics.begin_batch(batch_plan, wait_ms, group)
        partition = batch_plan.partition
        _check_rows(partition)
    else:
        partition = make_partition(settings.cp_strategy, s, group.nranks)
    return {
        name: shard_rows(x, partition, group.rank) if name != INDICES and _is_tokenwise(x, s) else x
        for name, x in inputs.items()
    }


def plan_of_indices(indices: paddle.Tensor, settings: FlashMask3Settings, group: Any) -> BatchPlan:
    """The plan of a batch's masks (see `masks.py`) for a context-parallel group."""
    array = np.asarray(indices.numpy(), np.int32)
    topology = topology_of_group(settings, group)
    return plan_batch(array, settings.masks, group.nranks, settings.cp_strategy, topology, device_cost())


def topology_of_group(settings: FlashMask3Settings, group: Any) -> Topology:
    """--cp_nodes, or, without it, which of the group's ranks share a host."""
    endpoints = dist.ParallelEnv().trainer_endpoints  # [world size] of host:port
    hosts = [endpoints[rank].rsplit(":", 1)[0] for rank in group.ranks] if len(endpoints) > max(group.ranks) else None
    return topology_of(settings.cp_nodes, group.nranks, hosts)


def _check_rows(partition: Partition) -> None:
    rows = [partition.num_rows(rank) for rank in range(partition.num_ranks)]
    if 0 in rows:
        raise ValueError(
            f"paddle_fm3: s={partition.s} is too short for {partition.num_ranks} ranks: rows by rank would be {rows}, "
            "and a model needs some"
        )


def _is_tokenwise(x: Any, s: int) -> bool:
    return isinstance(x, paddle.Tensor) and len(x.shape) >= 2 and x.shape[1] == s


def _checked_wrap(original: Callable, settings: FlashMask3Settings) -> Callable:
    """Trainer._wrap_model that first refuses a model which would bypass the attention funnel."""

    @functools.wraps(original)
    def _wrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(model, "config", None)
        if config is not None and not getattr(config, "use_flash_attention", False):
            raise ValueError(
                "paddle_fm3: use_flashmask3 needs the model's use_flash_attention=True; otherwise PaddleNLP's dense "
                "attention runs, without the document mask"
            )
        if settings.masks.num_masks > 1:
            if self.args.pipeline_parallel_degree > 1:
                raise ValueError(
                    "paddle_fm3: --mask_layers with several masks and pipeline_parallel_degree "
                    f"{self.args.pipeline_parallel_degree}: a stage does not know which layers it holds"
                )
            number_layers(model)
        return original(self, model, *args, **kwargs)

    return _wrap_model


def _with_plans_ahead(original: Callable, settings: FlashMask3Settings) -> Callable:
    """Trainer._inner_training_loop over batches that come with their plan.

    Only a plain DataLoader is read ahead: others (PaddleNLP's DistDataLoader) talk to other ranks when they are
    asked for a batch, which must stay in order with the training's own collectives.
    """

    @functools.wraps(original)
    def _inner_training_loop(self: Any, args: Any, model: Any, train_dataloader: Any, *rest: Any, **kwargs: Any) -> Any:
        group = groups.resolve_group() if settings.is_planned and settings.plans_ahead else None
        if group is None or type(train_dataloader) is not paddle.io.DataLoader:
            return original(self, args, model, train_dataloader, *rest, **kwargs)
        loader = PlanAheadLoader(
            train_dataloader, lambda indices: plan_of_indices(indices, settings, group), settings.plans_ahead
        )
        try:
            return original(self, args, model, loader, *rest, **kwargs)
        finally:
            loader.close()

    return _inner_training_loop


def _with_figures(original: Callable, state: RunState) -> Callable:
    """Trainer.log that adds the figures of context parallelism to those logged with the loss."""

    @functools.wraps(original)
    def log(self: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs and state.metrics is not None:
            logs.update(state.metrics.take(groups.resolve_group()))
        return original(self, logs, **kwargs)

    return log
