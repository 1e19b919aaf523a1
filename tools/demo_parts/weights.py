# SPDX-License-Identifier: Apache-2.0
"""Hands the weights of the run on several ranks to the run on one, step by step, so that each step is compared from
the same weights.

Left to themselves two runs part after some fifty steps: a token whose two best experts score alike goes to one or the
other by rounding alone, and from then on it is another training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddlenlp.trainer import TrainerCallback

BUDGET_BYTES = 512 << 20  # on disk; a larger model is handed over every few steps only


class WeightHandover(TrainerCallback):
    """Rank 0 of several leaves its weights before a step; the run on one rank takes them over before the same step."""

    def __init__(self, folder: Path, model: paddle.nn.Layer, num_ranks: int, num_steps: int) -> None:
        self.folder = folder
        self.parameters = dict(model.named_parameters())
        self.is_giver = num_ranks > 1
        num_bytes = sum(4 * p.size for p in self.parameters.values())
        self.every = max(1, -(-num_steps * num_bytes // BUDGET_BYTES))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0 or state.global_step % self.every:
            return  # before the first step both have the weights of the seed
        path = self.folder / f"before_step_{state.global_step + 1}.npz"
        if not self.is_giver:
            with np.load(path) as weights:
                for name, parameter in self.parameters.items():
                    parameter.set_value(weights[name])
            path.unlink()
        elif paddle.distributed.get_rank() == 0:
            self.folder.mkdir(exist_ok=True)
            np.savez(path, **{name: parameter.numpy() for name, parameter in self.parameters.items()})
