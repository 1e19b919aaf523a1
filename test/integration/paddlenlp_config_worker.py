# SPDX-License-Identifier: Apache-2.0
"""One rank of test_paddlenlp_config.py: trains from what `python -m paddle_fm3 config NAME --write FOLDER` wrote.

Usage: paddlenlp_config_worker.py FOLDER [CHECKPOINT]. FOLDER also holds data.json, document lengths of a pack.
Writes the losses to FOLDER/losses_rank<R>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddlenlp.trainer import PdArgumentParser, Trainer
from paddlenlp.transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from paddlenlp.utils.log import logger

from paddle_fm3.integration.paddlenlp import FlashMask3TrainingArguments, PackedCollator


class Packs(paddle.io.Dataset):
    def __init__(self, lengths: list[Any], vocab_size: int) -> None:
        super().__init__()
        self.lengths, self.vocab_size = lengths, vocab_size

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, Any]:
        rng = np.random.default_rng(at)

        def tokens(length: Any) -> Any:
            if isinstance(length, list):
                return [tokens(part) for part in length]
            return rng.integers(0, self.vocab_size, length).tolist()

        return {"groups" if isinstance(self.lengths[0], list) else "documents": tokens(self.lengths)}


class Recording(Trainer):
    losses: list[float] = []

    def training_step(self, model: Any, inputs: dict[str, Any], step_control: int = 0) -> paddle.Tensor:
        loss = super().training_step(model, inputs)
        self.losses.append(float(loss))
        return loss


def main() -> None:
    folder = Path(sys.argv[1])
    logger.set_level("ERROR")
    (arguments,) = PdArgumentParser((FlashMask3TrainingArguments,)).parse_json_file(str(folder / "trainer.json"))
    config = Qwen2MoeConfig(**json.loads((folder / "model.json").read_text()))
    checkpoint = sys.argv[2] if len(sys.argv) > 2 else None
    paddle.seed(1 if checkpoint is None else 2)
    Recording(
        model=Qwen2MoeForCausalLM(config),
        args=arguments,
        train_dataset=Packs(json.loads((folder / "data.json").read_text()), config.vocab_size),
        data_collator=PackedCollator(config.seq_length, masks=arguments.layer_masks()),
    ).train(resume_from_checkpoint=checkpoint)
    result = {"losses": Recording.losses, "mask": arguments.mask_kind, "strategy": arguments.cp_strategy}
    (folder / f"losses_rank{dist.get_rank()}.json").write_text(json.dumps(result))


main()
