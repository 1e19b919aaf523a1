# SPDX-License-Identifier: Apache-2.0
"""Parameters and memory of a Qwen2Moe model, by formula: nothing is allocated and no framework is imported."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_LOW = 2  # bfloat16
BYTES_F32 = 4
# AdamW with a float32 master copy: master, first moment, second moment.
OPTIMIZER_BYTES_PER_PARAMETER = 3 * BYTES_F32


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a `Qwen2MoeConfig` that parameters and activations depend on, under PaddleNLP's names.

    Raises:
        ValueError: a size is not positive, heads do not divide, or more experts are active than exist.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    max_position_embeddings: int
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "tie_word_embeddings" and not value > 0:
                raise ValueError(f"ModelShape: {name}={value} must be positive")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"ModelShape: num_attention_heads={self.num_attention_heads} must divide hidden_size={self.hidden_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"ModelShape: num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"ModelShape: num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}"
            )

    @property
    def head_dim(self) -> int:
        """Qwen2Moe derives it: hidden_size / num_attention_heads."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_width(self) -> int:
        """Columns of k_proj and of v_proj."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model by what they are split over.

    Attributes:
        dense: embeddings, attention, norms, router, shared expert: every rank of a data-parallel group holds them.
        experts: all routed experts of all layers: expert parallelism splits them.
        active: what one token passes through (dense, and num_experts_per_tok experts a layer).
    """

    dense: int
    experts: int
    active: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def count_parameters(model: ModelShape) -> ParameterCount:
    """Counts as `Qwen2MoeForCausalLM` of PaddleNLP 3.0.0b4 allocates (q, k, v with bias, o without)."""
    hidden = model.hidden_size
    attention = hidden * hidden + hidden  # q_proj; its width is heads * head_dim = hidden
    attention += 2 * (hidden * model.kv_width + model.kv_width)  # k_proj, v_proj
    attention += hidden * hidden  # o_proj
    norms = 2 * hidden
    router = hidden * model.num_experts
    shared = 3 * hidden * model.shared_expert_intermediate_size + hidden  # gate, up, down; and its sigmoid gate
    expert = 3 * hidden * model.moe_intermediate_size  # gate, up, down
    vocabulary = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    dense = model.num_hidden_layers * (attention + norms + router + shared) + vocabulary + hidden  # + the last norm
    return ParameterCount(
        dense=dense,
        experts=model.num_hidden_layers * model.num_experts * expert,
        active=dense + model.num_hidden_layers * model.num_experts_per_tok * expert,
    )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU, part by part; `FORMULAS` says how each is made up. An estimate, not a measurement."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    reference_model_bytes: int
    checkpoints_bytes: int
    layer_bytes: int
    gathered_kv_bytes: int
    router_bytes: int
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        """The states, the checkpoints, and the larger of: one layer being recomputed, or the logits."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.reference_model_bytes
        layer = self.layer_bytes + self.gathered_kv_bytes + self.router_bytes
        return states + self.checkpoints_bytes + max(layer, self.logits_bytes)

    def as_dict(self) -> dict[str, int]:
        return {**vars(self), "total_bytes": self.total_bytes}


# For bfloat16; a float32 run has 4 B where 2 B stand and no master copy.
FORMULAS = {
    "weights_bytes": "2 B x (dense / TP + experts / (EP x TP)) / PP, bfloat16",
    "gradients_bytes": "the weights' count x 2 B (float32 main gradients: 4 B), / sharding at stage 2 and 3",
    "optimizer_bytes": "12 B (float32 master, two moments) x (dense / (TP x sharding) + experts / (TP x expert "
    "ranks)) / PP",
    "reference_model_bytes": "the weights once more where a frozen reference model stays on the GPU (DPO)",
    "checkpoints_bytes": "2 B x b x s_local x hidden x layers / PP, the input of each recomputed layer",
    "layer_bytes": "what one layer keeps between its recomputed forward and its backward, plus as much again for "
    "gradients",
    "gathered_kv_bytes": "K and V of the whole sequence: 2 x b x s x h_kv x d x (2 B values + 4 B float32 gradients) "
    "/ TP",
    "router_bytes": "rows [tokens x top_k, hidden] on the way to experts and back: 3 copies of 2 B (sent, returned, "
    "put in order) and the weighted rows at 4 B, and as much again for gradients; a balanced router, more with an "
    "unbalanced one",
    "logits_bytes": "b x s_local x vocabulary / TP x 8 B (bfloat16, float32 softmax, bfloat16 gradient)",
}


def estimate_memory(
    model: ModelShape,
    *,
    b: int,
    s: int,
    cp: int,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    sharding: int = 1,
    sharding_stage: int = 1,
    expert_sharding: int = 1,
    is_bfloat16: bool = True,
    has_f32_gradients: bool = False,
    has_reference_model: bool = False,
    is_recomputed: bool = True,
) -> MemoryEstimate:
    """Memory of one GPU under a parallel layout.

    Args:
        model: the sizes.
        b: sequences in flight on one context-parallel group (micro batch).
        s: tokens a sequence; each rank holds s / cp.
        cp, tp, pp, ep: context, tensor, pipeline, expert parallel degrees.
        sharding: ranks over which the optimizer states of dense parameters are split.
        sharding_stage: 1 splits optimizer states, 2 gradients as well, 3 weights as well.
        expert_sharding: ranks over which each expert's optimizer states are split, besides ep.
        is_bfloat16: weights and activations in bfloat16 with a float32 master copy; else all in float32.
        has_f32_gradients: float32 main gradients (PaddleNLP: amp_master_grad).
        has_reference_model: a frozen copy of the weights stays on the GPU.
        is_recomputed: each layer's activations are recomputed in backward.
    """
    count = count_parameters(model)
    dense, experts = count.dense / (tp * pp), count.experts / (ep * tp * pp)
    element = BYTES_LOW if is_bfloat16 else BYTES_F32
    weights = (dense + experts) * element
    if sharding_stage == 3:
        weights = (dense / sharding + experts / expert_sharding) * element
    split = (sharding, expert_sharding) if sharding_stage >= 2 else (1, 1)
    gradients = (dense / split[0] + experts / split[1]) * (BYTES_F32 if has_f32_gradients else element)
    optimizer = (dense / sharding + experts / expert_sharding) * (
        OPTIMIZER_BYTES_PER_PARAMETER - (0 if is_bfloat16 else BYTES_F32)
    )

    tokens = b * s / cp
    layers = model.num_hidden_layers / pp
    hidden, top_k = model.hidden_size, model.num_experts_per_tok
    # Elements a token keeps inside one layer: two norms, q/k/v before and after rope, attention output, o_proj,
    # then gate, up and product of the shared expert and of each routed expert with that expert's input and output.
    attention_width = 2 * hidden + (2 * (hidden + 2 * model.kv_width) + hidden) / tp + hidden
    experts_width = 3 * model.shared_expert_intermediate_size / tp + hidden
    experts_width += top_k * (3 * model.moe_intermediate_size / tp + 2 * hidden)
    layer = tokens * (attention_width + experts_width) * element
    kept_layers = 1 if is_recomputed else layers
    return MemoryEstimate(
        weights_bytes=round(weights),
        gradients_bytes=round(gradients),
        optimizer_bytes=round(optimizer),
        reference_model_bytes=round((dense + experts) * element) if has_reference_model else 0,
        checkpoints_bytes=round(tokens * hidden * element * layers) if is_recomputed else 0,
        layer_bytes=round(layer * (kept_layers + 1)),
        gathered_kv_bytes=round(2 * b * s * model.kv_width / tp * (element + BYTES_F32)) if cp > 1 else 0,
        router_bytes=round(tokens * top_k * hidden * (3 * element + BYTES_F32) * (kept_layers + 1)),
        logits_bytes=round(tokens * model.vocab_size / tp * 8),
    )
