# SPDX-License-Identifier: Apache-2.0
"""Corrections of PaddleNLP 3.0.0b4 that context parallelism and Paddle 3.3 need, each with what it repairs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddle.autograd import PyLayer
from paddlenlp.transformers import moe_gate
from paddlenlp.transformers.llama.modeling import LlamaPretrainingCriterion, LlamaRotaryEmbedding
from paddlenlp.transformers.qwen2.modeling import Qwen2PretrainingCriterion, Qwen2RotaryEmbedding
from paddlenlp.transformers.qwen2_moe import modeling as qwen2_moe_modeling
from paddlenlp.transformers.qwen2_moe.modeling import Qwen2MoePretrainingCriterion, Qwen2MoeRotaryEmbedding

from paddle_fm3 import _paddle
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, RunState


def replacements(settings: FlashMask3Settings, state: RunState) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What `enable` corrects: owner, attribute, original -> replacement."""
    criteria = (LlamaPretrainingCriterion, Qwen2PretrainingCriterion, Qwen2MoePretrainingCriterion)
    rotaries = (LlamaRotaryEmbedding, Qwen2RotaryEmbedding, Qwen2MoeRotaryEmbedding)
    return [
        *((owner, "forward", lambda original: mean_over_ranks(original, settings.cp_timeout_s)) for owner in criteria),
        *((owner, "forward", lambda original: rope_of_whole_sequence(original, state)) for owner in rotaries),
        (moe_gate, "paddle", lambda original: PaddleWithStableCumsum(original)),
        (moe_gate.PretrainedMoEGate, "topkgating", dispatch_without_gradient),
        (moe_gate.MoEGateMixin, "_cal_aux_loss", lambda original: balance_over_ranks(original, settings.cp_timeout_s)),
        (qwen2_moe_modeling, "load_balancing_loss_func", mean_of_layer_losses),
    ]


def mean_over_ranks(original: Callable, timeout_s: float) -> Callable:
    """A language-model criterion whose mean runs over the tokens of all context-parallel ranks.

    Upstream averages per rank (qwen2, qwen2_moe), while fleet *sums* gradients over the ranks: gradients come out
    too large by the number of ranks, and ranks with few labels weigh as much as full ones. llama gathers the
    losses, but only if all ranks hold equally many tokens.
    """

    @functools.wraps(original)
    def forward(self: Any, prediction_scores: paddle.Tensor, masked_lm_labels: paddle.Tensor) -> paddle.Tensor:
        group = groups.resolve_group()
        if group is None:
            return original(self, prediction_scores, masked_lm_labels)
        with paddle.amp.auto_cast(False):
            losses = self.loss_func(
                prediction_scores.astype("float32"), masked_lm_labels.unsqueeze(2)
            )  # [b, s_local, 1]
            # Upstream's rule for what counts: ignored labels have loss exactly 0.
            is_counted = (losses > 0).astype("float32")
            totals = paddle.stack([(losses * is_counted).sum(), is_counted.sum()])  # [2]: loss, tokens
            loss_sum, num_tokens = _SumOverRanks.apply(totals, Communicator(group, timeout_s)).unbind()
            return loss_sum / paddle.clip(num_tokens, min=1.0)

    return forward


@_paddle.backward_once
class _SumOverRanks(PyLayer):
    """Sum over ranks whose gradient goes to each rank's own term unchanged.

    Every rank computes the same loss from the sum; fleet later adds the ranks' parameter gradients up. Summing in
    this backward as well would count each term once a rank.
    """

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, communicator: Communicator) -> paddle.Tensor:
        return paddle.stack(communicator.post_all_gather(x, "sum of losses").wait()).sum(axis=0)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return grad


def rope_of_whole_sequence(original: Callable, state: RunState) -> Callable:
    """A rotary embedding whose table covers the sequence that was split, not only this rank's share.

    Upstream cuts the table to the local length and then indexes it with position ids, which run up to the length of
    the longest document: beyond s/cp the index leaves the table.
    """

    @functools.wraps(original)
    def forward(self: Any, x: paddle.Tensor, seq_len: int | None = None) -> tuple[paddle.Tensor, paddle.Tensor]:
        if groups.resolve_group() is None:
            return original(self, x, seq_len=seq_len)
        needed = max(seq_len or 0, state.s_global)
        if needed > self.max_seq_len_cached:
            self._set_cos_sin_cache(needed)
        return original(self, x, seq_len=needed)

    return forward


def dispatch_without_gradient(original: Callable) -> Callable:
    """The gate's choice of experts, with the 0/1 dispatch mask cut off from autograd.

    Upstream makes the mask by casting the combine weights to bool and multiplies the tokens with it. Paddle 3.3 lets
    gradients through that cast, as 1 wherever they are not 0: the gate learns from noise a thousand times larger than
    its gradient.
    """

    @functools.wraps(original)
    def topkgating(self: Any, gates: paddle.Tensor) -> tuple[Any, ...]:
        capacity, combine_weights, dispatch_mask, *rest = original(self, gates)
        return capacity, combine_weights, dispatch_mask.detach(), *rest  # mask: [tokens, experts, capacity]

    return topkgating


def balance_over_ranks(original: Callable, timeout_s: float) -> Callable:
    """The gate's load-balancing loss over the tokens of all context-parallel ranks.

    It multiplies an expert's share of the tokens with its mean probability. Upstream takes both from the rank's own
    tokens, so the loss would depend on how the sequence was cut.
    """

    @functools.wraps(original)
    def _cal_aux_loss(self: Any, gates: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        group = groups.resolve_group()
        if group is None:
            return original(self, gates, mask)
        num_tokens = paddle.full([1], gates.shape[0], "float32")
        # [2 * experts + 1]: sums of probabilities, of choices, and the tokens they run over
        sums = paddle.concat([gates.astype("float32").sum(axis=0), mask.astype("float32").sum(axis=0), num_tokens])
        sums = _SumOverRanks.apply(sums, Communicator(group, timeout_s))
        probability, choice, num_tokens = paddle.split(sums, [self.num_experts, self.num_experts, 1])
        return (probability * choice).sum() * self.num_experts / num_tokens.squeeze() ** 2

    return _cal_aux_loss


def mean_of_layer_losses(original: Callable) -> Callable:
    """qwen2_moe's auxiliary loss. Its layers hand over their balance losses, not router logits as upstream expects.

    With `output_router_logits=True` upstream fails on them; here the loss is their mean, as if computed from the
    logits of all layers at once.
    """

    @functools.wraps(original)
    def load_balancing_loss_func(gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(gate_logits, tuple) and gate_logits and all(len(loss.shape) == 0 for loss in gate_logits):
            return paddle.stack(list(gate_logits)).mean()
        return original(gate_logits, *args, **kwargs)

    return load_balancing_loss_func


class PaddleWithStableCumsum:
    """The `paddle` that moe_gate sees: as it is, but cumsum of int32 stays int32 as it was before Paddle 3.3.

    The gate multiplies the result with an int32 tensor; Paddle 3.3's int64 makes that a type error.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def cumsum(self, x: paddle.Tensor, axis: int | None = None, dtype: Any = None, name: str | None = None) -> Any:
        return self._module.cumsum(x, axis=axis, dtype=x.dtype if dtype is None else dtype, name=name)
