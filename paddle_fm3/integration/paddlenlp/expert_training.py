# SPDX-License-Identifier: Apache-2.0
"""Training with split experts: gradients, clipping, and optimizer states sharded over replicas.

What fleet does with a parameter (broadcast, average, shard) takes for granted that every rank has it. Split experts
are left out of all that here, and get what they need of it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelClipGrad
from paddlenlp.trainer import TrainerCallback
from paddlenlp.trainer.trainer import Trainer
from paddlenlp.utils.log import logger

from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.integration.paddlenlp.experts import ExpertGroups, expert_groups
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, RunState


def replacements(settings: FlashMask3Settings, state: RunState) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What `enable` replaces for training with split experts: owner, attribute, original -> replacement."""
    if settings.expert_parallel == 1:
        return []
    return [
        (Trainer, "_inner_training_loop", lambda original: _with_synced_experts(original, settings)),
        (HybridParallelClipGrad, "_dygraph_clip", lambda original: _norm_of_all_experts(original, settings)),
        (HybridParallelClipGrad, "_comm_and_clip", _with_remote_squares),
        (DygraphShardingOptimizer, "_partition_parameters", _experts_stay),
        (DygraphShardingOptimizer, "reduce_gradients", _without_experts_reduced),
        (DygraphShardingOptimizer, "_sharding_sync_parameters", _without_experts_broadcast),
        (DygraphShardingOptimizerV2, "__init__", _refuse_split_parameters),
    ]


def is_split(parameter: paddle.Tensor) -> bool:
    """Whether only some ranks hold the parameter."""
    return getattr(parameter, "expert", False)


class ExpertGradients(TrainerCallback):
    """Makes gradients of split experts what those of whole ones are: summed over copies, a mean over replicas.

    A rank's gradient holds the tokens of all ranks that its experts are split over. fleet, which leaves these
    parameters alone, averages all others over the replicas, the groups that work on different sequences.
    """

    def __init__(self, model: nn.Layer, found: ExpertGroups, num_replicas: int, timeout_s: float) -> None:
        self.parameters = [parameter for parameter in model.parameters() if is_split(parameter)]
        self.copies = None if found.copies is None else Communicator(found.copies, timeout_s)
        self.num_replicas = num_replicas

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with paddle.no_grad():
            for parameter in self.parameters:
                grad = parameter.grad if getattr(parameter, "main_grad", None) is None else parameter.main_grad
                if self.copies is not None:
                    grad.set_value(self.copies.post_all_reduce(grad, "gradients of experts").wait())
                grad.scale_(1.0 / self.num_replicas)


def _with_synced_experts(original: Callable, settings: FlashMask3Settings) -> Callable:
    @functools.wraps(original)
    def _inner_training_loop(self: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        found = expert_groups(settings.expert_parallel)
        if found is None or not any(map(is_split, self.model.parameters())):
            return original(self, args, *rest, **kwargs)
        if not args.use_hybrid_parallel:
            raise ValueError(
                f"paddle_fm3: expert_parallel={settings.expert_parallel} needs context_parallel_degree or "
                "sep_parallel_degree > 1: without them Paddle's DataParallel would average the experts' gradients"
            )
        stages = [str(getattr(option, "value", option)) for option in args.sharding]
        if any(stage in ("stage2", "stage3") for stage in stages):
            raise ValueError(
                f"paddle_fm3: moe_expert_parallel={settings.expert_parallel} with sharding={','.join(stages)}: stages "
                "2 and 3 cut gradients or weights over ranks that must all hold them; use stage1"
            )
        sync = ExpertGradients(self.model, found, args.dataset_world_size, settings.cp_timeout_s)
        self.callback_handler.callbacks.insert(0, sync)  # before any that looks at gradients
        logger.logger.addFilter(_is_news)
        try:
            return original(self, args, *rest, **kwargs)
        finally:
            logger.logger.removeFilter(_is_news)
            self.callback_handler.callbacks.remove(sync)

    return _inner_training_loop


def _is_news(record: logging.LogRecord) -> bool:
    """Not the warning, at every step, that there are parameters which upstream does not synchronise."""
    return "found `no sync` param" not in record.getMessage()


def _norm_of_all_experts(original: Callable, settings: FlashMask3Settings) -> Callable:
    """Gradient clipping by the norm of the whole model. Upstream's rank would leave remote experts out of it, and
    each rank would scale the weights that all share by another factor."""

    @functools.wraps(original)
    def _dygraph_clip(self: Any, params_grads: list[tuple[Any, Any]]) -> Any:
        own = [grad for parameter, grad in params_grads if is_split(parameter) and grad is not None]
        found = expert_groups(settings.expert_parallel) if own else None
        if found is None:
            return original(self, params_grads)
        square = sum((grad.astype("float32") ** 2).sum() for grad in own)
        communicator = Communicator(found.split, settings.cp_timeout_s)
        squares = communicator.post_all_gather(square.reshape([1]), "norms of experts").wait()
        # Added before upstream sums over the sharding group, where every rank adds it.
        self.fm3_square = paddle.concat(squares).sum() / self._hcg.get_sharding_parallel_world_size()
        self.fm3_clipped = params_grads
        try:
            return original(self, [pair for pair in params_grads if not is_split(pair[0])])
        finally:
            self.fm3_clipped = None

    return _dygraph_clip


def _with_remote_squares(original: Callable) -> Callable:
    @functools.wraps(original)
    def _comm_and_clip(self: Any, params_grads: Any, is_distributed: Any, is_not: Any) -> Any:
        if self.__dict__.get("fm3_clipped") is None:
            return original(self, params_grads, is_distributed, is_not)
        square = self.fm3_square.reshape(is_distributed.shape)
        return original(self, self.fm3_clipped, is_distributed + square, is_not)

    return _comm_and_clip


# --- optimizer states sharded over replicas (stage 1) --------------------------------------------


def _experts_stay(original: Callable) -> Callable:
    """DygraphShardingOptimizer's distribution of parameters: experts stay with the rank that holds them."""

    @functools.wraps(original)
    def _partition_parameters(self: Any) -> dict[int, list[Any]]:
        everything = self._parameter_list
        experts = [parameter for parameter in everything if is_split(parameter)]
        if experts and (self.tensor_fusion or self.comm_overlap):
            raise ValueError(
                "paddle_fm3: moe_expert_parallel with enable_stage1_tensor_fusion or enable_stage1_overlap in "
                "sharding_parallel_config: fused buffers would mix split experts with what all ranks hold"
            )
        self._parameter_list = [parameter for parameter in everything if not is_split(parameter)]
        try:
            by_rank = original(self)
        finally:
            self._parameter_list = everything
        by_rank[self._sharding_rank] += experts
        return by_rank

    return _partition_parameters


def _without_experts_reduced(original: Callable) -> Callable:
    @functools.wraps(original)
    def reduce_gradients(self: Any, parameter_list: list[Any], hcg: Any) -> None:
        original(self, [parameter for parameter in parameter_list if not is_split(parameter)], hcg)

    return reduce_gradients


def _without_experts_broadcast(original: Callable) -> Callable:
    @functools.wraps(original)
    def _sharding_sync_parameters(self: Any) -> None:
        by_rank, in_order = self._rank2params, self._broadcast_order_params
        self._rank2params = {rank: [p for p in params if not is_split(p)] for rank, params in by_rank.items()}
        self._broadcast_order_params = in_order and [p for p in in_order if not is_split(p)]
        try:
            original(self)
        finally:
            self._rank2params, self._broadcast_order_params = by_rank, in_order

    return _sharding_sync_parameters


def _refuse_split_parameters(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, optimizer: Any, hcg: Any) -> None:
        if any(is_split(parameter) for parameter in optimizer._parameter_list):
            raise ValueError(
                "paddle_fm3: moe_expert_parallel with split_param in sharding_parallel_config: that optimizer cuts "
                "every parameter over ranks that must all hold it"
            )
        original(self, optimizer, hcg)

    return __init__
