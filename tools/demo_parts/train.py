# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo's training run: a small Qwen2Moe under PaddleNLP's Trainer with --use_flashmask3.

Usage (under python -m paddle.distributed.launch for several ranks): train.py RUN_DIR NUM_RANKS
RUN_DIR holds config.json and packs.npz (tokens of all sequences and the ends of their documents).
With "attention": "paddle_dense" in config.json PaddleNLP's own attention runs instead, on a dense additive mask
(tools/loss_fidelity.py compares the two); with "nudge" every weight starts one float32 step higher.
Rank 0 appends one JSON line a step to RUN_DIR/metrics_cp<NUM_RANKS>.jsonl.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from attention_timer import AttentionTimer
from paddlenlp.trainer import Trainer, TrainerCallback
from paddlenlp.transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from paddlenlp.utils.log import logger
from weights import WeightHandover

from paddle_fm3.distributed.prepared import digest_of
from paddle_fm3.integration.paddlenlp import FlashMask3TrainingArguments, PackedCollator


def build_model(config: dict[str, Any]) -> Qwen2MoeForCausalLM:
    """A Qwen2Moe whose weights come from NumPy and a seed: the same in every process and for every rank count."""
    model = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=config["num_heads"],
            num_key_value_heads=config["num_kv_heads"],
            num_experts=config["num_experts"],
            num_experts_per_tok=2,
            moe_intermediate_size=config["hidden_size"],
            shared_expert_intermediate_size=config["hidden_size"],
            max_position_embeddings=config["s"],
            seq_length=config["s"],
            norm_topk_prob=True,
            use_flash_attention=config.get("attention") != "paddle_dense",
            output_router_logits=True,  # adds the load-balancing loss
            router_aux_loss_coef=0.01,
        )
    )
    rng = np.random.default_rng(config["seed"])
    for _, parameter in model.named_parameters():
        # The gate too: PaddleNLP leaves it at all ones, so that every expert scores the same.
        if len(parameter.shape) > 1:
            values = rng.standard_normal(parameter.shape).astype(np.float32) * 0.02
            if config.get("nudge"):
                values = np.nextafter(values, np.float32(np.inf))
            parameter.set_value(paddle.to_tensor(values))
    return model


class PackedSequences(paddle.io.IterableDataset):
    """The prepared sequences in a fixed order, the same on every rank."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.data = dict(np.load(path))

    def __iter__(self):  # noqa: ANN204
        begins = self.data["sequence_begins"]  # [num_sequences + 1], into tokens
        for begin, end in pairwise(begins):
            ends = self.data["document_ends"]
            inner = ends[(ends > begin) & (ends < end)]
            yield {"documents": np.split(self.data["tokens"][begin:end], inner - begin)}


class DemoTrainer(Trainer):
    """Records loss and time of each step where they are known."""

    is_dense = False

    def training_step(self, model: Any, inputs: dict[str, Any], step_control: int = 0) -> paddle.Tensor:
        self.step_began = time.perf_counter()
        self.batch_digest = digest_of(inputs["attn_mask_startend_row_indices"].numpy())
        if self.is_dense:
            inputs["attention_mask"] = dense_mask(inputs.pop("attn_mask_startend_row_indices"))
        loss = super().training_step(model, inputs)
        self.step_loss = float(loss)
        return loss


def dense_mask(bounds: paddle.Tensor) -> paddle.Tensor:
    """Row at which each key column ends, [b, s] -> True where a row may see a key, [b, 1, s, s].

    PaddleNLP turns it into 0 and the lowest number, and adds that to the scores.
    """
    row = paddle.arange(bounds.shape[1], dtype="int32").reshape([1, -1, 1])
    key = paddle.arange(bounds.shape[1], dtype="int32").reshape([1, 1, -1])
    return ((key <= row) & (row < bounds.unsqueeze(1))).unsqueeze(1)


class MetricsWriter(TrainerCallback):
    """Writes one JSON line a step. The gradient norm is taken after the ranks' gradients were summed."""

    def __init__(self, path: Path, timer: AttentionTimer, tokens_per_step: int) -> None:
        self.file = path.open("w")
        self.timer = timer
        self.tokens_per_step = tokens_per_step
        self.trainer: DemoTrainer | None = None

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        squares = [float(paddle.sum(g.astype("float64") ** 2)) for g in gradients]
        self.gradient_norm = float(np.sqrt(sum(squares)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step_s = time.perf_counter() - self.trainer.step_began
        record = {
            "step": state.global_step,
            "loss": self.trainer.step_loss,
            "gradient_norm": self.gradient_norm,
            "step_s": step_s,
            "tokens_per_s": self.tokens_per_step / step_s,
            "attention_s": self.timer.take(),
            "batch": self.trainer.batch_digest,
        }
        if paddle.distributed.get_rank() == 0:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()


def main() -> None:
    run_dir, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    config = json.loads((run_dir / "config.json").read_text())
    logger.set_level("WARNING")
    arguments = FlashMask3TrainingArguments(
        output_dir=str(run_dir / f"cp{num_ranks}"),
        use_flashmask3=True,
        cp_strategy=config["strategy"],
        context_parallel_degree=num_ranks if num_ranks > 1 else -1,
        device="cpu",
        max_steps=config["steps"],
        learning_rate=config["learning_rate"],
        warmup_steps=config["warmup_steps"],
        per_device_train_batch_size=config["batch_size"],
        logging_steps=config["steps"] + 1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        seed=config["seed"],
    )
    timer = AttentionTimer()
    timer.install()
    metrics = MetricsWriter(run_dir / f"metrics_cp{num_ranks}.jsonl", timer, config["s"] * config["batch_size"])
    model, callbacks = build_model(config), [metrics]
    if config.get("hands_over_weights"):
        callbacks.append(WeightHandover(run_dir / "weights", model, num_ranks, config["steps"]))
    trainer = DemoTrainer(
        model=model,
        args=arguments,
        train_dataset=PackedSequences(run_dir / "packs.npz"),
        data_collator=PackedCollator(config["s"]),
        callbacks=callbacks,
    )
    metrics.trainer = trainer
    if config.get("attention") == "paddle_dense":
        trainer.is_dense = True
        Trainer._wrap_model = Trainer._wrap_model.__wrapped__  # the flag refuses a model that bypasses its attention
    trainer.train()


main()
