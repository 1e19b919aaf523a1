# SPDX-License-Identifier: Apache-2.0
"""One rank of test_paddlenlp_training.py: a step of tiny models under PaddleNLP's Trainer, gradients saved.

Usage: paddlenlp_worker.py OUTPUT_DIR. With one process it also runs PaddleNLP's own dense attention as the reference.
Saved per run: loss<R>, and every parameter's gradient as the optimizer would see it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddlenlp.trainer import Trainer, TrainerCallback
from paddlenlp.transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from paddlenlp.transformers.qwen2_moe.modeling import Qwen2MoePretrainingCriterion
from paddlenlp.utils.log import logger

from paddle_fm3.integration.paddlenlp import (
    FlashMask3Settings,
    FlashMask3TrainingArguments,
    LayerMasks,
    PackedCollator,
    enable,
)
from paddle_fm3.integration.paddlenlp.inputs import split_batch
from paddle_fm3.integration.paddlenlp.settings import RunState

S = 50  # no multiple of 4: the chunks of two ranks are uneven
DOCUMENT_LENGTHS = (3, 29, 11)  # 29 > S / 2; 43 of 50 tokens, so 7 are padding
MODELS = {
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
        },
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, {"intermediate_size": 48}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"intermediate_size": 48}),
}
VOCAB_SIZE = 61
WINDOW = 6
WINDOW_AND_FULL = LayerMasks.from_flags("causal_document", WINDOW, "window,full")


def build(name: str, **changes: Any) -> Any:
    model_class, config_class, extra = MODELS[name]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Shorter than the longest document on purpose: the table must grow to the whole sequence.
        max_position_embeddings=16 if dist.get_world_size() > 1 else S,
        seq_length=S,
        **{"use_flash_attention": True, **extra, **changes},
    )
    model = model_class(config)
    rng = np.random.default_rng(11)
    for _, parameter in model.named_parameters():
        if len(parameter.shape) > 1:
            values = rng.standard_normal(parameter.shape).astype(np.float32) * 0.1
            parameter.set_value(paddle.to_tensor(values))
    return model


class OneBatch(paddle.io.IterableDataset):
    def __iter__(self):  # noqa: ANN204
        rng = np.random.default_rng(3)
        yield {"documents": [rng.integers(0, VOCAB_SIZE, length).tolist() for length in DOCUMENT_LENGTHS]}


class Capture(TrainerCallback):
    """Keeps the gradients that the optimizer is about to use."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: dict[str, np.ndarray] = {}

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradients = {name: p.grad.numpy() for name, p in self.model.named_parameters() if p.grad is not None}


class RecordingTrainer(Trainer):
    """Keeps the loss; feeds the dense table instead of bounds if asked to."""

    is_dense = False

    def training_step(self, model: Any, inputs: dict[str, Any], step_control: int = 0) -> paddle.Tensor:
        if self.is_dense:
            bounds = inputs.pop("attn_mask_startend_row_indices")  # [b, s]
            row = paddle.arange(S, dtype="int32").reshape([1, S, 1])
            key = paddle.arange(S, dtype="int32").reshape([1, 1, S])
            inputs["attention_mask"] = ((key <= row) & (row < bounds.unsqueeze(1))).unsqueeze(1)  # [b, 1, s, s]
        loss = super().training_step(model, inputs)
        self.step_loss = float(loss)
        return loss


def one_step(
    model: Any, arguments: Any, is_dense: bool = False, masks: LayerMasks | None = None
) -> dict[str, np.ndarray]:
    capture = Capture(model)
    trainer = RecordingTrainer(
        model=model,
        args=arguments,
        train_dataset=OneBatch(),
        data_collator=PackedCollator(S, masks=masks),
        callbacks=[capture],
    )
    trainer.is_dense = is_dense
    trainer.train()
    return {"loss": np.array(trainer.step_loss), **capture.gradients}


def attend_densely(model: Any) -> None:
    """PaddleNLP's dense attention with a table a layer: the window in layer 0, the whole document in layer 1."""
    document = np.repeat(np.arange(len(DOCUMENT_LENGTHS) + 7), [*DOCUMENT_LENGTHS, *[1] * 7])  # padding: one each
    q_idx, k_idx = np.arange(S)[:, None], np.arange(S)[None, :]
    is_full = (document[:, None] == document[None, :]) & (k_idx <= q_idx)
    tables = [is_full & (q_idx - k_idx < WINDOW), is_full]
    attentions = [layer for layer in model.sublayers() if type(layer).__name__.endswith("Attention")]
    for attention, table in zip(attentions, tables, strict=True):
        bias = paddle.to_tensor(np.where(table, 0.0, -1e9).astype(np.float32).reshape(1, 1, S, S))
        original = attention.attn_func

        def attend(
            q: Any, config: Any, k: Any, v: Any, mask: Any, *rest: Any, original=original, bias=bias, **named: Any
        ):  # noqa: ANN001, ANN202, E501
            return original(q, config, k, v, bias, *rest, **named)

        attention.attn_func = attend


def main() -> None:
    output_dir = Path(sys.argv[1])
    num_ranks = dist.get_world_size()
    logger.set_level("ERROR")
    arguments = FlashMask3TrainingArguments(
        output_dir=str(output_dir / "trainer"),
        use_flashmask3=True,
        cp_timeout_s=30.0,
        context_parallel_degree=num_ranks if num_ranks > 1 else -1,
        device="cpu",
        max_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        logging_steps=10,
    )

    def save(name: str, results: dict[str, np.ndarray]) -> None:
        np.savez(output_dir / f"{name}_cp{num_ranks}_rank{dist.get_rank()}.npz", **results)

    for name in MODELS:
        # As user scripts do; for llama upstream would then use its own position ids and drop the mask.
        save(f"{name}-flag", one_step(build(name, context_parallel_degree=num_ranks), arguments))
        if num_ranks == 1:
            enable(FlashMask3Settings(moe_dispatch="dense"))
            with unchecked_wrap():
                save(f"{name}-dense", one_step(build(name, use_flash_attention=False), arguments, is_dense=True))
    enable(FlashMask3Settings(cp_timeout_s=30.0, masks=WINDOW_AND_FULL))
    for name in ("qwen2_moe", "llama"):
        save(f"{name}-windows", one_step(build(name), arguments, masks=WINDOW_AND_FULL))
    if num_ranks == 1:
        enable(FlashMask3Settings(moe_dispatch="dense"))
        with unchecked_wrap():
            for name in ("qwen2_moe", "llama"):
                model = build(name, use_flash_attention=False)
                attend_densely(model)
                save(f"{name}-windows-dense", one_step(model, arguments, is_dense=True))
        enable(FlashMask3Settings())
        save("evaluation", evaluation())
        return
    enable(FlashMask3Settings(cp_strategy="dual_chunk", cp_timeout_s=30.0, masks=WINDOW_AND_FULL))
    save("qwen2_moe-windows-dual_chunk", one_step(build("qwen2_moe"), arguments, masks=WINDOW_AND_FULL))
    enable(FlashMask3Settings(cp_strategy="contiguous", cp_timeout_s=30.0))
    save("qwen2_moe-contiguous", one_step(build("qwen2_moe"), arguments))
    enable(FlashMask3Settings(cp_strategy="dual_chunk", cp_timeout_s=30.0))
    save("qwen2_moe-dual_chunk", one_step(build("qwen2_moe"), arguments))
    save("llama-dual_chunk", one_step(build("llama"), arguments))
    enable(FlashMask3Settings(cp_strategy="contiguous", cp_timeout_s=30.0))
    # What the loss correction repairs, and that the comparison would notice it missing.
    corrected, Qwen2MoePretrainingCriterion.forward = (
        Qwen2MoePretrainingCriterion.forward,
        Qwen2MoePretrainingCriterion.forward.__wrapped__,
    )
    save("qwen2_moe-uncorrected", one_step(build("qwen2_moe"), arguments))
    Qwen2MoePretrainingCriterion.forward = corrected
    save("evaluation", evaluation())
    check_refusals()


class unchecked_wrap:
    """The reference runs without flash attention, which the flag refuses."""

    def __enter__(self) -> None:
        self.checked, Trainer._wrap_model = Trainer._wrap_model, Trainer._wrap_model.__wrapped__

    def __exit__(self, *error: object) -> None:
        Trainer._wrap_model = self.checked


def evaluation() -> dict[str, np.ndarray]:
    """The Trainer does not split evaluation batches: every rank must compute the whole sequence."""
    model = build("qwen2_moe", output_router_logits=False)
    model.eval()
    batch = {name: paddle.to_tensor(x) for name, x in PackedCollator(S)([next(iter(OneBatch()))]).items()}
    with paddle.no_grad():
        return {"loss": model(**batch)[0].numpy()}


def check_refusals() -> None:
    tokens = paddle.zeros([1, S], "int64")
    for batch, words in (
        ({"input_ids": tokens, "attention_mask": tokens}, "cannot be split over context-parallel ranks"),
        ({"labels": tokens}, "cannot split a batch without input_ids; it has ['labels']"),
    ):
        try:
            split_batch(batch, FlashMask3Settings(cp_strategy="dual_chunk"), RunState())
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"split_batch took {sorted(batch)}")
    filled = split_batch({"input_ids": tokens}, FlashMask3Settings(cp_strategy="dual_chunk"), RunState())
    assert filled["attn_mask_startend_row_indices"].tolist() == [[S] * S]
    rank_rows = [*range(0, 12), *range(37, S)] if dist.get_rank() == 0 else list(range(12, 37))
    assert filled["position_ids"].tolist() == [rank_rows], filled["position_ids"]


main()
