# SPDX-License-Identifier: Apache-2.0
"""testing/gpu_timing.py on a GPU: a block follows untimed calls of its own, and its clock is the chip's."""

from __future__ import annotations

import statistics

import pytest

torch = pytest.importorskip("torch")

from paddle_fm3.testing.gpu_power import PowerLog  # noqa: E402
from paddle_fm3.testing.gpu_rounds import Rounds  # noqa: E402
from paddle_fm3.testing.gpu_timing import MAX_CALLS, MIN_CALLS, time_block  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    return torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)


def test_every_timed_call_has_its_clock(matrix: torch.Tensor) -> None:
    num_calls = 0

    def call() -> None:
        nonlocal num_calls
        num_calls += 1
        torch.mm(matrix, matrix)

    with PowerLog(str(torch.cuda.get_device_properties(0).uuid)) as power:
        block = time_block(call, power=power)
    assert MIN_CALLS <= len(block.times_ms) == len(block.megahertz) <= MAX_CALLS
    assert num_calls > len(block.times_ms)  # how many more, HEATING_S says on a GPU that nobody shares
    assert all(200 < mhz < 3000 for mhz in block.megahertz)
    again = time_block(call, block)
    assert len(again.times_ms) == len(block.times_ms)
    fields = Rounds([block, again]).fields()
    assert fields["mcycles"] == pytest.approx(1e-3 * fields["sm_mhz"] * statistics.median(fields["ms_rounds"]), rel=0.5)


def test_long_calls_are_few(matrix: torch.Tensor) -> None:
    cycles = int(1000e6)  # half a second or more
    assert len(time_block(lambda: torch.cuda._sleep(cycles)).times_ms) == MIN_CALLS
    assert len(time_block(lambda: torch.cuda._sleep(cycles), repeats=1).times_ms) == 1
