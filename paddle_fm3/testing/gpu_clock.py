# SPDX-License-Identifier: Apache-2.0
"""The clock at which a GPU ran a call: cycles of its multiprocessors over nanoseconds, both read on the device.

NVML's clock is a sample every 10 ms and lags; this one belongs to the call. Compiled by Triton, which torch brings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paddle_fm3.testing.gpu_power import megahertz


@triton.jit
def _stamp(out):  # out: int64 [multiprocessors, 2]; one program writes the line of the multiprocessor it runs on
    clock = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    timer = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    line = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + 2 * line, clock)
    tl.store(out + 2 * line + 1, timer)


class ClockStamps:
    """Room for `num_calls` calls between `num_calls + 1` stamps; `stamp` enqueues the next one."""

    def __init__(self, num_calls: int) -> None:
        num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._stamps = torch.zeros(num_calls + 2, num_sms, 2, dtype=torch.int64, device="cuda")  # the last: a trial
        self._enqueue(num_calls + 1)  # compiled here, not between calls
        self._num_stamps = 0

    def stamp(self) -> None:
        """Takes some 3 microseconds of the device: keep it out of what events measure."""
        self._enqueue(self._num_stamps)
        self._num_stamps += 1

    def _enqueue(self, line: int) -> None:
        _stamp[(self._stamps.shape[1],)](self._stamps[line], num_warps=1)

    def megahertz(self) -> list[float]:
        """Of each call. Waits for the device."""
        return megahertz(self._stamps[: self._num_stamps].cpu().numpy())
