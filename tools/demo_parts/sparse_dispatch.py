# SPDX-License-Identifier: Apache-2.0
"""The same mixture of experts at a cost that grows with the tokens, not with their square.

PaddleNLP's layer sends tokens to experts through a dense [tokens, experts, capacity] tensor. At 2,048 tokens without
dropping that is up to 43 GFLOP a step for two layers of width 128, nearly all of them products with zeros; on two
cores it would be the demo. Here every expert gets its own tokens by index. Expert parallelism is not covered.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddlenlp.transformers.moe_gate import PretrainedMoEGate
from paddlenlp.transformers.moe_layer import MoELayer


def install() -> None:
    """Replaces the dispatch of PaddleNLP's MoE layers for this process."""
    PretrainedMoEGate._priority = _chosen_experts
    MoELayer.forward = _forward


def _chosen_experts(self: Any, topk_idx: paddle.Tensor, capacity: int) -> paddle.Tensor:
    """[tokens, k] expert ids -> 0/1 [tokens, experts, 1], in the place of upstream's [tokens, experts, capacity].

    Nothing is dropped (the layer's capacity is that of the fullest expert), so a token's place in its expert's
    buffer carries no information.
    """
    return F.one_hot(topk_idx, self.num_experts).sum(axis=1).unsqueeze(-1)


def _forward(self: Any, hidden_state: paddle.Tensor, used_token: None = None) -> tuple[paddle.Tensor, ...]:
    tokens = hidden_state.reshape([-1, hidden_state.shape[-1]])  # [tokens, hidden]
    _, combine_weights, _, _, l_aux, l_zloss = self.gate(hidden_state)
    weights = combine_weights.squeeze(-1)  # [tokens, experts], 0 where not chosen
    out = paddle.zeros_like(tokens)
    for expert_idx, expert in enumerate(self.experts):
        weight = weights[:, expert_idx]  # [tokens]
        chosen = paddle.nonzero(weight.detach()).flatten()
        if chosen.shape[0] == 0:
            # One token of weight 0: the expert's parameters must have a gradient on every rank, or none would sum it.
            chosen = paddle.zeros([1], "int64")
        part = expert(paddle.gather(tokens, chosen)) * paddle.gather(weight, chosen).unsqueeze(-1)
        out = paddle.scatter_nd_add(out, chosen.unsqueeze(-1), part)
    return out.reshape(hidden_state.shape), l_aux, l_zloss
