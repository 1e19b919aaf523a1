# SPDX-License-Identifier: Apache-2.0
"""What the chip's clock and power were while something ran: NVML, reading only, or stamps of the chip's counters."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

_SM_CLOCK = 1  # nvmlClockType_t
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, milliwatts; the plain query averages over a second
_PERIOD_S = 0.01


def megahertz(
    stamps: NDArray[np.int64],  # [calls + 1, multiprocessors, 2]: cycles, nanoseconds; 0 where nothing was written
) -> list[float]:
    """The clock of each call between two stamps: median over the multiprocessors that both reached, NaN if none."""
    cycles, nanoseconds = np.moveaxis(np.diff(stamps, axis=0), 2, 0)
    is_known = (stamps[1:] != 0).all(2) & (stamps[:-1] != 0).all(2) & (nanoseconds > 0)
    return [
        float(np.median(1e3 * a[known] / b[known])) if known.any() else float("nan")
        for a, b, known in zip(cycles, nanoseconds, is_known, strict=True)
    ]


class _FieldValue(ctypes.Structure):
    _fields_ = [
        ("field_id", ctypes.c_uint), ("scope_id", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong), ("value_type", ctypes.c_int), ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]  # fmt: skip


class PowerLog:
    """Samples one GPU in a thread while the context is open; without NVML it has no samples.

    Args:
        uuid: of the GPU, as torch's device properties have it: indices of CUDA and NVML need not agree.
    """

    def __init__(self, uuid: str) -> None:
        self._samples: list[tuple[float, int, float]] = []  # (time.perf_counter(), MHz, watts)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._device = ctypes.c_void_p()
        try:
            self._nvml: ctypes.CDLL | None = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._nvml = None
            return
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._device)):
            self._nvml = None

    def __enter__(self) -> PowerLog:
        if self._nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._nvml is not None:
            self._thread.join()

    def between(self, begin_s: float, end_s: float) -> tuple[float, float] | None:
        """Median SM clock in MHz and mean power in watts of the samples between two readings of perf_counter."""
        inside = [(mhz, watts) for at, mhz, watts in list(self._samples) if begin_s <= at <= end_s]
        if not inside:
            return None
        return statistics.median(mhz for mhz, _ in inside), statistics.fmean(watts for _, watts in inside)

    def _run(self) -> None:
        assert self._nvml is not None
        clock, field = ctypes.c_uint(), _FieldValue(field_id=_POWER_INSTANT)
        while not self._stop.wait(_PERIOD_S):
            if self._nvml.nvmlDeviceGetClockInfo(self._device, _SM_CLOCK, ctypes.byref(clock)) != 0:
                continue
            if self._nvml.nvmlDeviceGetFieldValues(self._device, 1, ctypes.byref(field)) != 0 or field.status != 0:
                continue
            milliwatts = field.value & 0xFFFFFFFF if field.value_type == 1 else field.value  # 1: unsigned int
            self._samples.append((time.perf_counter(), clock.value, milliwatts / 1000))
