# SPDX-License-Identifier: Apache-2.0
"""testing/gpu_rounds.py: a swing of the clock does not move the benchmark's figures, and who is timed when."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest

from paddle_fm3.testing.gpu_rounds import HEATING_S, LONG_CALL_MS, ROUNDS, TIMED_S, Block, Rounds, time_in_rounds

NAN = float("nan")
# The clock of one H200 in a forward of 8K documents, call behind call from a pause on: means of 50 ms, in MHz.
MEASURED_MHZ = (
    1614, 1457, 1457, 1460, 1453, 1453, 1453, 1452, 1449, 1452, 1453, 1450, 1450, 1452, 1453, 1450, 1382, 1194, 1270,
    1351, 1379, 1420, 1421, 1421, 1421, 1415, 1414, 1420, 1421, 1414, 1412, 1419, 1427, 1452, 1445, 1348, 1327, 1340,
    1350, 1366, 1378, 1388, 1412, 1411, 1414, 1421, 1431, 1439, 1436, 1424, 1401, 1433, 1453, 1422, 1370, 1362, 1360,
    1359, 1360, 1371, 1379, 1396, 1413, 1405, 1420, 1422, 1421, 1421, 1415, 1397,
)  # fmt: skip
BIN_S = 0.05


class SwingingChip:
    """Runs calls of given million cycles; `clock(second)` is what the limiter allows. A block heats for half a second
    and then times for `timed_s`, as gpu_timing.time_block does."""

    def __init__(self, clock: Callable[[float], float], *, begin_s: float = 0.0, timed_s: float = TIMED_S) -> None:
        self.clock, self.now_s, self.timed_s = clock, begin_s, timed_s

    def time_block(self, call: Callable[[], float], first: Block | None) -> Block:
        mcycles = call()
        self.now_s += HEATING_S
        times_ms: list[float] = []
        clocks: list[float] = []
        for _ in range(len(first.times_ms) if first else math.ceil(self.timed_s / (mcycles / 1400))):
            mhz = self.clock(self.now_s)
            clocks.append(mhz)
            times_ms.append(1e3 * mcycles / mhz)
            self.now_s += mcycles / mhz
        return Block(times_ms, clocks, None)


def error(chip: SwingingChip, rounds: int) -> float:
    """Of the ratio of the times of two calls that take 11 and 10 million cycles."""
    calls = {"ours": lambda: 10.0, "theirs": lambda: 11.0}
    measured = time_in_rounds(calls, chip.time_block, lambda key: rounds)
    return abs(measured["theirs"].stats.ms_median / measured["ours"].stats.ms_median / 1.1 - 1)


def measured_clock(second: float) -> float:
    return MEASURED_MHZ[int(second / BIN_S) % len(MEASURED_MHZ)]


def test_a_measured_swing_moves_no_result() -> None:
    """Wherever it begins: single short blocks are off by up to 14 %, the benchmark's rounds by little."""
    begins = [BIN_S * idx for idx in range(len(MEASURED_MHZ))]
    short = [error(SwingingChip(measured_clock, begin_s=begin, timed_s=0.12), 1) for begin in begins]
    ours = [error(SwingingChip(measured_clock, begin_s=begin), ROUNDS) for begin in begins]
    assert max(short) > 0.12 and statistics.fmean(short) > 0.03
    assert max(ours) < 0.013 and statistics.fmean(ours) < 0.006


@pytest.mark.parametrize("trough", range(12))
def test_a_trough_anywhere_in_a_block_moves_no_result(trough: int) -> None:
    """The clock falls by 12 % for 0.4 s, once, anywhere in the four blocks: single short blocks that meet it are wrong by
    as much."""

    def clock(second: float) -> float:
        return 1305.0 if 0 <= second - 0.45 * trough < 0.4 else 1485.0

    assert error(SwingingChip(clock), ROUNDS) < 1e-3
    begin = 0.45 * trough - HEATING_S
    assert error(SwingingChip(clock, begin_s=begin, timed_s=0.12), 1) > 0.11


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
