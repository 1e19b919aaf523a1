# SPDX-License-Identifier: Apache-2.0
"""testing/gpu_rounds.py: a swing of the clock does not move the benchmark's figures, and who is timed when."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from paddle_fm3.testing.gpu_rounds import LONG_CALL_MS, ROUNDS, Block, Rounds, time_in_rounds

NAN = float("nan")


class SwingingChip:
    """Runs calls of given million cycles; `clock(second)` is what the limiter allows. A block heats for half a second
    and then times for `timed_s`, as gpu_timing.time_block does."""

    def __init__(self, clock: Callable[[float], float], timed_s: float = 0.25) -> None:
        self.clock, self.timed_s, self.now_s = clock, timed_s, 0.0
        self.order: list[float] = []

    def time_block(self, call: Callable[[], float], first: Block | None) -> Block:
        mcycles = call()
        self.order.append(mcycles)
        self.now_s += 0.5
        times_ms: list[float] = []
        clocks: list[float] = []
        num_calls = len(first.times_ms) if first else max(3, math.ceil(self.timed_s / (mcycles / 1400)))
        for _ in range(num_calls):
            mhz = self.clock(self.now_s)
            clocks.append(mhz)
            times_ms.append(1e3 * mcycles / mhz)
            self.now_s += mcycles / mhz
        return Block(times_ms, clocks, (clocks[0], 700.0 * clocks[0] / 1450))


def ratio(chip: SwingingChip, rounds: int) -> float:
    """Time of a call of 11 over one of 10 million cycles."""
    calls = {"ours": lambda: 10.0, "theirs": lambda: 11.0}
    measured = time_in_rounds(calls, chip.time_block, lambda key: rounds)
    return measured["theirs"].stats.ms_median / measured["ours"].stats.ms_median


@pytest.mark.parametrize("trough", range(2 * ROUNDS))
def test_a_block_in_a_trough_does_not_move_the_result(trough: int) -> None:
    """The clock falls by 12 % over any one of the blocks: a single round is wrong by as much, three are not."""

    def clock(second: float) -> float:
        return 1305.0 if trough * 0.75 - 0.1 < second < trough * 0.75 + 0.8 else 1485.0

    assert ratio(SwingingChip(clock), ROUNDS) == pytest.approx(1.1, rel=1e-3)
    if trough < 2:
        assert abs(ratio(SwingingChip(clock), 1) / 1.1 - 1) > 0.11


def test_rounds_turn_the_order_and_repeat_the_number_of_calls() -> None:
    seen: list[tuple[str, int | None]] = []

    def time_block(call: Callable[[], str], first: Block | None) -> Block:
        seen.append((call(), len(first.times_ms) if first else None))
        num_calls = len(first.times_ms) if first else {"a": 3, "b": 5, "once": 4, "long": 2}[call()]
        return Block([2 * LONG_CALL_MS if call() == "long" else 7.0] * num_calls, [NAN] * num_calls, None)

    calls = {key: (lambda key=key: key) for key in ("a", "once", "long", "b")}
    measured = time_in_rounds(calls, time_block, lambda key: 1 if key == "once" else 3, is_reversed=True)
    assert [name for name, _ in seen] == ["b", "long", "once", "a", "a", "b", "b", "a"]
    assert [number for _, number in seen[4:]] == [3, 5, 5, 3] and all(number is None for _, number in seen[:4])
    assert list(measured) == list(calls)
    assert {key: of_key.stats.repeats for key, of_key in measured.items()} == {"a": 9, "once": 4, "long": 2, "b": 15}


def test_figures_are_medians_over_the_calls_of_all_rounds() -> None:
    blocks = [
        Block([10.0, 10.1, 10.2], [1400.0, 1400.0, NAN], (1395.0, 700.0)),
        Block([11.9, 12.0, 12.1], [1200.0, 1200.0, 1200.0], (1190.0, 610.0)),
        Block([10.3, 10.4, 10.5], [1390.0, 1380.0, 1370.0], None),
    ]
    measured = Rounds(blocks)
    stats = measured.stats
    assert (stats.ms_median, stats.repeats) == (10.4, 9)
    assert stats.ms_p10 < 10.1 and stats.ms_p90 > 11.9  # the swing shows
    assert measured.fields() == {"ms_rounds": [10.1, 12.0, 10.4], "sm_mhz": 1375, "mcycles": 14.335, "watts": 655}
    assert Rounds([Block([1.0], [NAN], None)]).fields() == {"ms_rounds": [1.0]}


def test_no_round_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds is 0; every call needs at least 1"):
        time_in_rounds({"a": lambda: 1.0}, SwingingChip(lambda second: 1400.0).time_block, lambda key: 0)
