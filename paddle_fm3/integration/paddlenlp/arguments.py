# SPDX-License-Identifier: Apache-2.0
"""The flag: command-line fields for PaddleNLP's argument parser."""

from __future__ import annotations

from dataclasses import dataclass, field

from paddlenlp.trainer import TrainingArguments

from paddle_fm3.integration.paddlenlp.masks import KINDS, LayerMasks
from paddle_fm3.integration.paddlenlp.patch import enable
from paddle_fm3.integration.paddlenlp.settings import (
    DEFAULT_CP_STRATEGY,
    DEFAULT_PLANS_AHEAD,
    FlashMask3Settings,
)


@dataclass
class FlashMask3Arguments:
    """A parser group of its own. List it *before* TrainingArguments, which builds the process groups."""

    use_flashmask3: bool = field(
        default=False,
        metadata={"help": "run attention through paddle_fm3; keeps document masks under context parallelism"},
    )
    cp_strategy: str = field(
        default=DEFAULT_CP_STRATEGY,
        metadata={"help": "how context-parallel ranks share a sequence: fm3, by a plan for each batch, or another"},
    )
    cp_nodes: str = field(
        default="",
        metadata={
            "help": "ranks a node (8), or the node of each context-parallel rank (0,0,1,1); empty: ranks of one host "
            "share a node"
        },
    )
    cp_plans_ahead: int = field(
        default=DEFAULT_PLANS_AHEAD,
        metadata={"help": "batches that a thread plans ahead of training; 0 plans when the batch is used"},
    )
    cp_timeout_s: float = field(default=60.0, metadata={"help": "longest wait for another rank, in seconds"})
    cp_reduce_dtype: str = field(
        default="float32", metadata={"help": "dtype in which dK and dV of the ranks are summed: float32 or input"}
    )
    cp_timeline: str = field(
        default="",
        metadata={
            "help": "folder for timelines of context parallelism, a file a rank, of the last batch before each log "
            "(Perfetto)"
        },
    )
    mask_kind: str = field(
        default="causal_document", metadata={"help": f"what a packed document means: {', '.join(KINDS)}"}
    )
    mask_window: int = field(
        default=0, metadata={"help": "tokens that a layer with a sliding window sees, itself included; 0: no window"}
    )
    mask_layers: str = field(
        default="",
        metadata={"help": "which layers have the window, repeated over the model: window,window,full. Empty: all"},
    )

    moe_dispatch: str = field(
        default="index", metadata={"help": "index: each expert gets its own tokens; dense: PaddleNLP's layer as it is"}
    )
    moe_expert_parallel: int = field(
        default=1, metadata={"help": "ranks over which each layer's experts are split; 1: every rank has all"}
    )

    def __post_init__(self) -> None:
        settings = FlashMask3Settings(
            self.cp_strategy,
            self.cp_timeout_s,
            self.cp_reduce_dtype,
            cp_nodes=self.cp_nodes,
            cp_timeline=self.cp_timeline,
            plans_ahead=self.cp_plans_ahead,
            masks=self.layer_masks(),
            moe_dispatch=self.moe_dispatch,
            expert_parallel=self.moe_expert_parallel,
        )
        if self.use_flashmask3:
            enable(settings)

    def layer_masks(self) -> LayerMasks:
        """The three mask fields as `PackedCollator(masks=...)` takes them."""
        return LayerMasks.from_flags(self.mask_kind, self.mask_window, self.mask_layers)


@dataclass
class FlashMask3TrainingArguments(FlashMask3Arguments, TrainingArguments):
    """PaddleNLP's TrainingArguments with the fields of FlashMask3Arguments."""

    def __post_init__(self) -> None:
        # Before TrainingArguments, whose initialisation makes the process groups that gloo needs repaired.
        if self.moe_expert_parallel > 1 and (self.use_expert_parallel or self.expert_parallel_degree > 1):
            raise ValueError(
                f"FlashMask3TrainingArguments: moe_expert_parallel={self.moe_expert_parallel} with "
                f"use_expert_parallel={self.use_expert_parallel} and expert_parallel_degree="
                f"{self.expert_parallel_degree}: those are PaddleNLP's own ways to split experts; leave them out"
            )
        FlashMask3Arguments.__post_init__(self)
        TrainingArguments.__post_init__(self)
