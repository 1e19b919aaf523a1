# SPDX-License-Identifier: Apache-2.0
"""testing/gpu_power.py: what of the samples counts, and a machine without NVML."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

from paddle_fm3.testing.gpu_power import PowerLog, megahertz


class FakeNvml:
    """Answers as the driver does: 1500 MHz, 690 W."""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: object) -> int:  # noqa: N802
        return 0 if name == b"GPU-12-34" else 6

    def nvmlDeviceGetClockInfo(self, device: object, kind: int, clock: object) -> int:  # noqa: N802
        clock._obj.value = 1500
        return 0

    def nvmlDeviceGetFieldValues(self, device: object, count: int, field: object) -> int:  # noqa: N802
        assert field._obj.field_id == 186
        field._obj.value_type, field._obj.value = 1, 690_000 | 7 << 32  # an unsigned int in a wider union
        return 0


def test_without_nvml_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    begin = time.perf_counter()
    with PowerLog("12-34") as log:
        time.sleep(0.03)
    assert log.between(begin, time.perf_counter()) is None


def test_only_samples_of_the_interval_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    begin = time.perf_counter()
    with PowerLog("12-34") as log:
        while log.between(begin, time.perf_counter()) is None:
            assert time.perf_counter() < begin + 10
            time.sleep(0.01)
    assert log.between(begin, time.perf_counter()) == (1500, 690.0)
    assert log.between(begin - 2, begin - 1) is None
    with PowerLog("56-78") as log:  # NVML knows no such GPU
        time.sleep(0.03)
    assert log.between(begin, time.perf_counter()) is None


def test_clock_between_stamps() -> None:
    """Three calls on four multiprocessors; the second is 1.5 GHz on most, the third reached no one a second time."""
    stamps = np.zeros((4, 4, 2), np.int64)
    stamps[0] = [(10, 1_000), (20, 1_000), (30, 1_000), (0, 0)]
    stamps[1] = [(2_010, 2_000), (2_020, 2_000), (0, 0), (7, 2_000)]  # 2 cycles a nanosecond
    stamps[2] = [(5_010, 4_000), (5_020, 4_000), (99, 4_000), (9_007, 4_000)]  # 1.5, but one of 4.5
    assert megahertz(stamps)[:2] == [2000.0, 1500.0]
    assert np.isnan(megahertz(stamps)[2])
