# SPDX-License-Identifier: Apache-2.0
"""The flag: command-line fields for PaddleNLP's argument parser."""

from __future__ import annotations

from dataclasses import dataclass, field

from paddlenlp.trainer import TrainingArguments

from paddle_fm3.integration.paddlenlp.patch import enable
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings


@dataclass
class FlashMask3Arguments:
    """A parser group of its own. List it *before* TrainingArguments, which builds the process groups."""

    use_flashmask3: bool = field(
        default=False,
        metadata={"help": "run attention through paddle_fm3; keeps document masks under context parallelism"},
    )
    cp_strategy: str = field(
        default="dual_chunk",
        metadata={"help": "how context-parallel ranks share a sequence: dual_chunk, contiguous, or (CPU) fm3, by plan"},
    )
    cp_timeout_s: float = field(default=60.0, metadata={"help": "longest wait for another rank, in seconds"})
    cp_reduce_dtype: str = field(
        default="float32", metadata={"help": "dtype in which dK and dV of the ranks are summed: float32 or input"}
    )

    def __post_init__(self) -> None:
        settings = FlashMask3Settings(self.cp_strategy, self.cp_timeout_s, self.cp_reduce_dtype)
        if self.use_flashmask3:
            enable(settings)


@dataclass
class FlashMask3TrainingArguments(FlashMask3Arguments, TrainingArguments):
    """PaddleNLP's TrainingArguments with the fields of FlashMask3Arguments."""

    def __post_init__(self) -> None:
        # Before TrainingArguments, whose initialisation makes the process groups that gloo needs repaired.
        FlashMask3Arguments.__post_init__(self)
        TrainingArguments.__post_init__(self)
