# SPDX-License-Identifier: Apache-2.0
"""How the GPU benchmark comes from blocks of timed calls to a figure: every call in several rounds, in turned order.

At its power limit a chip's clock swings: some 0.9 s too fast (730 W of 700), then 0.2 to 0.4 s too slow, and again. On
the clock of one H200 in 3.5 s of an 8K document forward (test/unit/test_gpu_rounds.py), the ratio of two calls is off
by up to 14 % (3.6 % on average over where it begins) with a block of 0.12 s each, by 4.3 % (1.2 %) with three of 0.25
s, by 1.1 % (0.5 %) with two of 1 s, about a swing each.
A figure is the median over all timed calls of all rounds: the rounds of a call have equally many calls,
so each counts the same, and p10 and p90, which show the swing, are of the same calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from paddle_fm3.testing.bench import Record, TimingStats

ROUNDS = 2
HEATING_S = 0.5  # by the timed call itself, ahead of every block
# Ahead of a case's first round, by its first call: after a pause a chip is cool and at first draws more than its limit.
# Without it the first block of two cases was 2.2 and 4.9 % faster than its second; others agreed within 0.7 %.
PAUSE_HEATING_S = 1.0
TIMED_S = 1.0
LONG_CALL_MS = 500.0  # calls of this length average over the swing themselves: one round of them

Call = Callable[[], Any]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Block:
    """Calls in a row, all of one kind."""

    times_ms: list[float]
    megahertz: list[float]  # of each call, NaN if unknown
    draw: tuple[float, float] | None  # NVML's clock in MHz and watts over the block

    @property
    def ms_median(self) -> float:
        return statistics.median(self.times_ms)


@dataclass(frozen=True)
class Rounds:
    """The blocks of one call."""

    blocks: list[Block]

    @property
    def stats(self) -> TimingStats:
        return TimingStats.from_ms([ms for block in self.blocks for ms in block.times_ms])

    def fields(self) -> Record:
        """`ms_rounds` (the median of each), `sm_mhz`, `mcycles` (a multiprocessor's cycles a call, in millions: what is
        left of a time when the clock is taken out) and `watts`: medians over all calls, of `watts` over the rounds."""
        fields: Record = {"ms_rounds": [round(block.ms_median, 4) for block in self.blocks]}
        pairs = [pair for block in self.blocks for pair in zip(block.times_ms, block.megahertz, strict=True)]
        known = [(ms, mhz) for ms, mhz in pairs if mhz == mhz]
        if known:
            cycles = statistics.median(1e-3 * ms * mhz for ms, mhz in known)
            fields["sm_mhz"] = round(statistics.median(mhz for _, mhz in known))
            fields["mcycles"] = float(f"{cycles:.5g}")
        watts = [block.draw[1] for block in self.blocks if block.draw is not None]
        return {**fields, "watts": round(statistics.median(watts))} if watts else fields


def time_in_rounds(
    calls: Mapping[Key, Call],
    time_block: Callable[[Call, Block | None], Block],
    rounds_of: Callable[[Key], int],
    *,
    is_reversed: bool = False,
) -> dict[Key, Rounds]:
    """Times every call `rounds_of(key)` times, long ones once; each round takes them in the other order.

    Args:
        time_block: (call, its first block) -> a block with as many calls; without a first block it chooses.
        is_reversed: the first round begins with the last call.

    Raises:
        ValueError: a call would have no round.
    """
    numbers = {key: rounds_of(key) for key in calls}
    if any(number < 1 for number in numbers.values()):
        raise ValueError(f"time_in_rounds: rounds is {min(numbers.values())}; every call needs at least 1")
    blocks: dict[Key, list[Block]] = {key: [] for key in calls}
    for round_idx in range(max(numbers.values(), default=0)):
        for key in list(calls)[:: -1 if (round_idx + is_reversed) % 2 else 1]:
            own = blocks[key]
            is_done = round_idx >= numbers[key] or (own and own[0].ms_median >= LONG_CALL_MS)
            if not is_done:
                own.append(time_block(calls[key], own[0] if own else None))
    return {key: Rounds(own) for key, own in blocks.items()}
