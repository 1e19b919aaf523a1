# SPDX-License-Identifier: Apache-2.0
"""One rank of test_paddlenlp_experts.py: a step of a tiny Qwen2Moe whose experts are split over ranks.

Usage: paddlenlp_expert_worker.py OUTPUT_DIR data|sharding. On one rank: two sequences one after another through
PaddleNLP's dense dispatch. On four: two replicas of two context-parallel ranks, with experts split over 2 ranks and
over all 4; as data parallelism (with whole experts, too), or with the optimizer states sharded over the replicas.
Saved per run: the loss, the norm that clipping saw, every gradient that this rank's optimizer was given, and
"after.NAME", the weights after the step.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelClipGrad
from paddlenlp.trainer import Trainer, TrainerCallback
from paddlenlp.transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from paddlenlp.utils.log import logger

from paddle_fm3.integration.paddlenlp import FlashMask3Settings, FlashMask3TrainingArguments, PackedCollator, enable

S, VOCAB_SIZE = 48, 61
LENGTHS = ((20, 9, 17), (31, 5, 8))
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
    "max_position_embeddings": S,
    "seq_length": S,
    "use_flash_attention": True,
}


def build(**changes: Any) -> Any:
    """Weights by name, so that a rank with some of the experts has the same ones."""
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**SIZES, **changes}))
    for name, parameter in model.named_parameters():
        if len(parameter.shape) > 1:
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            parameter.set_value(paddle.to_tensor(rng.standard_normal(parameter.shape).astype(np.float32) * 0.1))
    return model


class TwoSequences(paddle.io.IterableDataset):
    def __iter__(self):  # noqa: ANN204
        for at, lengths in enumerate(LENGTHS):
            rng = np.random.default_rng(at)
            yield {"documents": [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]}


class Capture(TrainerCallback):
    def __init__(self, model: Any) -> None:
        self.model = model
        self.trainer: Any = None
        self.found: dict[str, np.ndarray] = {}

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        assert len(gradients) == len(list(self.model.parameters())), "a parameter has no gradient"
        # With sharded states a rank's optimizer has some of the parameters, and only their gradients are complete.
        inner = getattr(self.trainer.optimizer, "_inner_opt", self.trainer.optimizer)
        mine = {p.name for p in getattr(inner, "_inner_opt", inner)._parameter_list}
        named = dict(self.model.named_parameters())
        self.found = {name: g.numpy().copy() for name, g in gradients.items() if named[name].name in mine}


class Recording(Trainer):
    step_loss = 0.0

    def training_step(self, model: Any, inputs: dict[str, Any], step_control: int = 0) -> paddle.Tensor:
        loss = super().training_step(model, inputs)
        self.step_loss += float(loss)
        return loss


def one_step(arguments: Any, model: Any) -> dict[str, np.ndarray]:
    norms: list[float] = []
    capture = Capture(model)
    trainer = Recording(
        model=model, args=arguments, train_dataset=TwoSequences(), data_collator=PackedCollator(S), callbacks=[capture]
    )
    capture.trainer = trainer
    with norms_seen_by(norms):
        trainer.train()
    capture.found |= {f"after.{name}": p.numpy() for name, p in model.named_parameters()}
    return {"loss": np.array(trainer.step_loss), "norm": np.array(norms), **capture.found}


class norms_seen_by:
    """Records the norm behind all of the package's replacements: what upstream's clipping divides by."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    def __enter__(self) -> None:
        self.original = original = HybridParallelClipGrad._global_norm
        norms = self.norms

        def recorded(clip: Any, is_distributed: Any, is_not: Any) -> None:
            original(clip, is_distributed, is_not)
            norms.append(float(paddle.sqrt(is_distributed + is_not)))

        HybridParallelClipGrad._global_norm = recorded

    def __exit__(self, *error: object) -> None:
        HybridParallelClipGrad._global_norm = self.original


def main() -> None:
    output_dir, mode, num_ranks = Path(sys.argv[1]), sys.argv[2], dist.get_world_size()
    is_sharded = mode == "sharding" and num_ranks > 1
    logger.set_level("ERROR")
    arguments = FlashMask3TrainingArguments(
        output_dir=str(output_dir / "trainer"),
        use_flashmask3=True,
        cp_timeout_s=60.0,
        context_parallel_degree=2 if num_ranks > 1 else -1,
        sharding="stage1" if is_sharded else "",
        sharding_parallel_degree=2 if is_sharded else -1,
        device="cpu",
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1 if num_ranks > 1 else 2,
        max_grad_norm=0.1,
        recompute=num_ranks > 1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )

    def save(name: str, results: dict[str, np.ndarray]) -> None:
        np.savez(output_dir / f"{name}_rank{dist.get_rank()}.npz", **results)

    if num_ranks == 1:
        enable(FlashMask3Settings(moe_dispatch="dense"))
        save("dense", one_step(arguments, build()))
        return
    for degree in (2, 4) if is_sharded else (1, 2, 4):
        enable(FlashMask3Settings(cp_timeout_s=60.0, expert_parallel=degree))
        save(f"{mode}{degree}", one_step(arguments, build()))
    if not is_sharded:
        check_initial_weights()
        check_refusals()


def check_initial_weights() -> None:
    """A model with split experts starts from the weights of the whole one."""
    found = {}
    for degree in (1, 4):
        enable(FlashMask3Settings(expert_parallel=degree))
        paddle.seed(5)
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES))
        found[degree] = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    assert len(found[4]) < len(found[1])
    own = [name for name in found[4] if ".experts." in name]
    assert len(own) == 2 * 2 * 3, own  # layers, experts of a rank, matrices
    for name, values in found[4].items():
        np.testing.assert_array_equal(values, found[1][name], err_msg=name)


def check_refusals() -> None:
    for degree, changes, words in (
        (3, {}, "expert_parallel=3 must divide the number of ranks, 4"),
        (4, {"num_experts": 6}, "expert_parallel=4 must divide num_experts=6"),
    ):
        enable(FlashMask3Settings(expert_parallel=degree))
        try:
            build(**changes)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"expert_parallel={degree} with {changes} was taken")


main()
