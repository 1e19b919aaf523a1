# SPDX-License-Identifier: Apache-2.0
"""One rank of test_paddlenlp_run.py: several steps of the Trainer, saved and resumed.

Usage: paddlenlp_run_worker.py OUTPUT_DIR first|resumed|resumed_on_three [MODEL ...]
`first` trains 4 steps and saves after 2; the others start from that checkpoint in a new process, from other weights.
The model "qwen2_moe_split" has its experts split over the two ranks.
Both write what the Trainer logged to OUTPUT_DIR/<mode>-<model>_rank<R>.json, and the paths that this rank wrote in
checkpoints to OUTPUT_DIR/paths-<model>_rank<R>.json.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddlenlp.trainer import Trainer, TrainerCallback
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from paddlenlp.utils.log import logger

from paddle_fm3.integration.paddlenlp import FlashMask3Settings, FlashMask3TrainingArguments, PackedCollator, enable

S, VOCAB_SIZE = 96, 61
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": S,
    "seq_length": S,
    "use_flash_attention": True,
}
MODELS = ("qwen2_moe", "llama", "qwen2_moe_split")
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
}


def build(name: str, seed: int) -> Any:
    paddle.seed(seed)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **MOE))


class Packs(paddle.io.Dataset):
    """Shuffled by the Trainer, so that resuming must find its place in the data as well."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> dict[str, Any]:
        rng = np.random.default_rng(at)
        return {"documents": [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (17 + at, 40 - at, 21)]}


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.lines.append({key: value for key, value in (logs or {}).items() if isinstance(value, int | float)})


class MasksMissing(PackedCollator):
    """Batches of one mask where the flags name two: planning them fails."""

    def __call__(self, features: Any) -> Any:
        batch = super().__call__(features)
        return {**batch, "attn_mask_startend_row_indices": batch["attn_mask_startend_row_indices"][:, 0]}


def main() -> None:
    output_dir, mode = Path(sys.argv[1]), sys.argv[2]
    logger.set_level("ERROR")
    arguments = FlashMask3TrainingArguments(
        output_dir=str(output_dir / "trainer"),
        use_flashmask3=True,
        cp_nodes=",".join(map(str, range(dist.get_world_size()))),
        cp_timeline=str(output_dir / "timelines"),
        mask_window=8,
        mask_layers="window,full",
        cp_timeout_s=60.0,
        context_parallel_degree=dist.get_world_size(),
        device="cpu",
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=2e-3,
        recompute=True,
        save_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    for name in sys.argv[3:] or MODELS:
        if name == "qwen2_moe_split":
            enable(FlashMask3Settings(cp_timeout_s=60.0, masks=arguments.layer_masks(), expert_parallel=2))
        arguments.output_dir = str(output_dir / name)
        logs = Logs()
        trainer = Trainer(
            model=build(name, seed=1 if mode == "first" else 2),
            args=arguments,
            train_dataset=Packs(),
            data_collator=PackedCollator(S, masks=arguments.layer_masks()),
            callbacks=[logs],
        )
        paths: list[str] = []
        write = trainer._save_ckpt_func

        def recorded(state: Any, path: str, *rest: Any, write=write, paths=paths) -> None:  # noqa: ANN001
            paths.append(str(path))
            write(state, path, *rest)

        trainer._save_ckpt_func = recorded
        trainer.train(resume_from_checkpoint=None if mode == "first" else f"{arguments.output_dir}/checkpoint-2")
        (output_dir / f"{mode}-{name}_rank{dist.get_rank()}.json").write_text(json.dumps(logs.lines))
        (output_dir / f"paths-{name}_rank{dist.get_rank()}.json").write_text(json.dumps(paths))
        assert not planning_threads(), planning_threads()
    if mode == "first":
        check_failed_plan(arguments)


def check_failed_plan(arguments: Any) -> None:
    """What the planning thread raises ends the training with its message, and the thread with it."""
    collator = MasksMissing(S, masks=arguments.layer_masks())
    trainer = Trainer(model=build("llama", 1), args=arguments, train_dataset=Packs(), data_collator=collator)
    try:
        trainer.train()
    except ValueError as error:
        assert "the batch has 1 masks; --mask_layers window,full names 2" in str(error), error
    else:
        raise AssertionError("training went on without a plan")
    assert not planning_threads(), planning_threads()


def planning_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "paddle_fm3-plan-ahead"]


main()
