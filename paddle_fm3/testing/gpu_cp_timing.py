# SPDX-License-Identifier: Apache-2.0
"""Timing of context parallelism on GPUs: one process with late keys, and the parts of a rank's step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paddle_fm3._c_api import MaskView
from paddle_fm3.distributed.device import ELEM_BYTES, Sm90Device
from paddle_fm3.testing.cases import AttentionCase
from paddle_fm3.testing.gpu_call import GpuMask, Sm90

_HULL_BYTES, _ENTRY_BYTES = 32, 8  # sm90::ColumnHull, sm90::QueryTileEntry


def tile_order(schedule: torch.Tensor, mask: GpuMask) -> list[int]:
    """Query tiles of the first list of a prepared schedule, in the order of work (device_schedule.cuh's layout)."""
    num_lists, num_hulls, num_tiles = mask.b * mask.h_mask, -(-mask.s_k // 128), -(-mask.s_q // 128)
    begin = -(-num_lists * num_hulls * _HULL_BYTES // 256) * 256
    entries = schedule[begin : begin + num_tiles * _ENTRY_BYTES].cpu().numpy().view(np.int32)
    return entries.reshape(-1, 2)[:, 0].tolist()


class LateKeys:
    """One forward whose keys [num_local, s_k) are copied into place by copy engines, on a stream of their own."""

    def __init__(self, device: Sm90Device, case: AttentionCase, num_local: int, num_pieces: int) -> None:
        self.device, self._num_local = device, num_local
        self.mask = GpuMask.of(case)
        generator = torch.Generator("cuda").manual_seed(1)

        def normal(s: int, h: int, d: int) -> torch.Tensor:
            return torch.randn((case.b, s, h, d), generator=generator, device="cuda", dtype=torch.bfloat16)

        self.q = normal(case.s_q, case.h_q, case.d_qk)
        self.k_full, self.v_full = normal(case.s_k, case.h_kv, case.d_qk), normal(case.s_k, case.h_kv, case.d_v)
        self.k, self.v = self.k_full.clone(), self.v_full.clone()
        self.out = torch.full((case.b, case.s_q, case.h_q, case.d_v), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.lse = torch.full((case.b, case.h_q, case.s_q), float("nan"), device="cuda")
        self._words = torch.zeros(64, dtype=torch.int32, device="cuda")  # [0] ready rows, [32] status
        sm90 = Sm90(device._library)
        schedule = sm90.build_schedule(self.mask)
        view: MaskView = self.mask.view
        self.stream, self.copy_stream = torch.cuda.Stream(), torch.cuda.Stream()
        device._call("order_local_first", view, schedule.data_ptr(), num_local, self.stream.cuda_stream)
        torch.cuda.synchronize()
        self._params = sm90.forward_params(self.q, self.k, self.v, self.mask, self.out, self.lse, schedule=schedule)
        self._keep = (schedule, sm90.prepare(self._params))
        cuts = np.linspace(num_local, case.s_k, num_pieces + 1).astype(int).tolist()
        self._pieces = []
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
            copies = []
            for to, source in ((self.k, self.k_full), (self.v, self.v_full)):
                for entry in range(case.b):
                    at = entry * source.stride(0) * ELEM_BYTES + begin * source.stride(1) * ELEM_BYTES
                    size = (end - begin) * source.stride(1) * ELEM_BYTES
                    copies.append((to.data_ptr() + at, source.data_ptr() + at, size))
            self._pieces.append((copies, end))

    @property
    def status(self) -> int:
        return int(self._words[32])

    def poison(self) -> None:
        """Forgets the late keys and the results. Waits for the device."""
        torch.cuda.synchronize()
        for x in (self.k, self.v):
            x[:, self._num_local :] = float("nan")
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self._words.zero_()
        torch.cuda.synchronize()

    def run(self, *, delay_ms: float, is_sent: bool = True, timeout_us: int = 2_000_000) -> None:
        """Copies and kernel, enqueued; the copies start `delay_ms` after the kernel may."""
        word = self._words.data_ptr()
        self.device.write_word(self.stream.cuda_stream, word, self._num_local)
        self.copy_stream.wait_stream(self.stream)
        if delay_ms:
            with torch.cuda.stream(self.copy_stream):
                torch.cuda._sleep(int(delay_ms * 1.7e6))
        for copies, end in self._pieces if is_sent else []:
            self.device.copy(copies, self.copy_stream.cuda_stream)
            self.device.write_word(self.copy_stream.cuda_stream, word, end)
        self._launch(word, timeout_us)
        self.stream.wait_stream(self.copy_stream)

    def _launch(self, word: int | None, timeout_us: int) -> None:
        self._params.ready_rows = word
        self._params.ready_status = self._words.data_ptr() + 128
        self._params.ready_timeout_us = timeout_us
        self.device._call("fwd", self._params, self.stream.cuda_stream)

    def time(self, repeats: int) -> dict[str, float]:
        """Median ms of the kernel: keys all there and no words; words that are up already; keys on their way."""
        times: dict[str, list[float]] = {"plain": [], "ready": [], "late": []}
        word = self._words.data_ptr()
        for _ in range(repeats):
            for name, found in times.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with torch.cuda.stream(self.stream):
                    self.device.write_word(
                        self.stream.cuda_stream, word, self._num_local if name == "late" else self.k.shape[1]
                    )
                    self.copy_stream.wait_stream(self.stream)
                    torch.cuda._sleep(200_000)  # both are enqueued before either may start
                    begin.record()
                    if name == "late":
                        self.copy_stream.wait_stream(self.stream)
                        for copies, rows in self._pieces:
                            self.device.copy(copies, self.copy_stream.cuda_stream)
                            self.device.write_word(self.copy_stream.cuda_stream, word, rows)
                    self._launch(None if name == "plain" else word, 2_000_000)
                    end.record()
                    self.stream.wait_stream(self.copy_stream)
                end.synchronize()
                found.append(begin.elapsed_time(end))
        return {name: float(np.median(found)) for name, found in times.items()}


def run(process: Any, job: dict[str, Any]) -> dict[str, Any]:
    """A "time" job of `gpu_cp_rank`."""
    raise NotImplementedError
