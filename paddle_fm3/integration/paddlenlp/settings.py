# SPDX-License-Identifier: Apache-2.0
"""Settings of the PaddleNLP integration, and the little state that its replacements share while enabled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_fm3.distributed.strategy import STRATEGIES as PLANNED_STRATEGIES

if TYPE_CHECKING:
    from paddle_fm3.distributed.plan import CpPlan

# The first two gather all keys with Paddle's collectives; the others are the planner's, on CPU ranks so far.
CP_STRATEGIES = ("dual_chunk", "contiguous", *PLANNED_STRATEGIES)


@dataclass(frozen=True)
class FlashMask3Settings:
    """What the flag was turned on with.

    Attributes:
        cp_strategy: how the sequence is cut over the context-parallel ranks and its keys moved.
        cp_timeout_s: longest wait for another rank.
        cp_reduce_dtype: "float32", or "input" to sum dK and dV of the ranks in the model's dtype.
        deterministic: bitwise repeatable gradients.
    """

    cp_strategy: str = "dual_chunk"
    cp_timeout_s: float = 60.0
    cp_reduce_dtype: str = "float32"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.cp_strategy not in CP_STRATEGIES:
            raise ValueError(
                f"FlashMask3Settings: cp_strategy={self.cp_strategy!r} is unknown; known: {', '.join(CP_STRATEGIES)}"
            )
        if not self.cp_timeout_s > 0:
            raise ValueError(f"FlashMask3Settings: cp_timeout_s={self.cp_timeout_s} must be > 0")
        if self.cp_reduce_dtype not in ("float32", "input"):
            raise ValueError(
                f"FlashMask3Settings: cp_reduce_dtype={self.cp_reduce_dtype!r} must be 'float32' or 'input'"
            )


@dataclass
class RunState:
    """What one replacement must tell another during a step.

    Attributes:
        s_global: length of the sequence that was split last; 0 before the first split.
        plan: what it was split by, with a planned strategy.
    """

    s_global: int = 0
    plan: CpPlan | None = None
