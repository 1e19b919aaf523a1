# SPDX-License-Identifier: Apache-2.0
"""One forward whose keys come late: what the test of remote rows and tools/bench_cp.py --late-keys run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import numpy as np
import torch

from paddle_fm3._c_api import MaskView
from paddle_fm3._device_api import LocalFirst
from paddle_fm3.distributed.device import ELEM_BYTES, Sm90Device
from paddle_fm3.testing.cases import AttentionCase
from paddle_fm3.testing.gpu_call import GpuMask, Sm90

MOST_COLS = 1 << 30  # more than a list visits
_TOTALS_BYTES, _ENTRY_BYTES = 256, 16  # ScheduleTotals' place, QueryTileEntry


def tile_order(schedule: torch.Tensor, mask: GpuMask) -> list[int]:
    """Query tiles of the first list of a prepared schedule, in the order of work (device_schedule.cuh's layout). For a
    mask whose tiles are on the grid."""
    end = _TOTALS_BYTES + -(-mask.s_q // 128) * _ENTRY_BYTES
    entries = schedule[_TOTALS_BYTES:end].cpu().numpy().view(np.int32)
    return entries.reshape(-1, 4)[:, 0].tolist()


class MemoryOwner:
    """Another process with memory on another GPU that this one maps, as it maps that of the other ranks. On the same
    GPU it would not do: copies inside one GPU are kernels, whatever is asked for (seen on an H200).

    Args:
        device_idx: GPU of the memory.
    """

    def __init__(self, device: Sm90Device, num_bytes: int, device_idx: int) -> None:
        code = (
            "import sys; from paddle_fm3._native import sm90_library\n"
            "from paddle_fm3.distributed.device import Sm90Device\n"
            "device = Sm90Device(sm90_library()); address = device.malloc(int(sys.argv[1]))\n"
            "print(device.ipc_export(address).hex(), flush=True); sys.stdin.read()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(num_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(device_idx)},
        )  # fmt: skip
        assert self._process.stdout is not None
        self._device, self.address = device, device.ipc_open(bytes.fromhex(self._process.stdout.readline()))

    def close(self) -> None:
        torch.cuda.synchronize()
        self._device.ipc_close(self.address)
        self._process.communicate(timeout=20)


class LateKeys:
    """One forward whose keys [num_local, s_k) are copied into place by copy engines, on a stream of their own.

    Args:
        source_device_idx: the GPU they come from, another one; None: host memory.
        num_first_cols: that the tiles visit which come first, by the pieces that they wait for.
    """

    def __init__(
        self, device: Sm90Device, case: AttentionCase, num_local: int, num_pieces: int,
        source_device_idx: int | None = None, num_first_cols: int = MOST_COLS,
    ) -> None:  # fmt: skip
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
        torch.cuda.synchronize()  # the schedule is built on another stream
        cuts = np.linspace(num_local, case.s_k, num_pieces + 1).astype(int).tolist()
        first = LocalFirst(num_pieces, num_first_cols)
        first.k_ends[:num_pieces] = cuts[:-1]
        device._call("order_local_first", view, schedule.data_ptr(), first, self.stream.cuda_stream)
        torch.cuda.synchronize()
        self._params = sm90.forward_params(self.q, self.k, self.v, self.mask, self.out, self.lse, schedule=schedule)
        self._keep = (schedule, sm90.prepare(self._params))
        self._owner: MemoryOwner | None = None
        if source_device_idx is None:
            self._host = [x.cpu().pin_memory() for x in (self.k, self.v)]
            sources = tuple(x.data_ptr() for x in self._host)
        else:
            self._owner = MemoryOwner(device, self.k.nbytes + self.v.nbytes, source_device_idx)
            sources = self._owner.address, self._owner.address + self.k.nbytes
            copies = [(sources[0], self.k.data_ptr(), self.k.nbytes), (sources[1], self.v.data_ptr(), self.v.nbytes)]
            device.copy(device.copies(copies), self.copy_stream.cuda_stream)
            torch.cuda.synchronize()
        self._pieces = []
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
            copies = []
            for to, source in zip((self.k, self.v), sources, strict=True):
                for entry in range(case.b):
                    at = entry * to.stride(0) * ELEM_BYTES + begin * to.stride(1) * ELEM_BYTES
                    size = (end - begin) * to.stride(1) * ELEM_BYTES
                    copies.append((to.data_ptr() + at, source + at, size))
            self._pieces.append((device.copies(copies), end))

    def close(self) -> None:
        if self._owner is not None:
            self._owner.close()

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
        """Kernel and copies, enqueued; copies are enqueued `delay_ms` after the kernel.

        NOTE: the host waits; a kernel that waits in the copies' stream may find no multiprocessor beside the forward.
        """
        word = self._words.data_ptr()
        self.device.write_word(self.stream.cuda_stream, word, self._num_local)
        self.copy_stream.wait_stream(self.stream)
        if delay_ms:
            self._launch(word, timeout_us)
            time.sleep(1e-3 * delay_ms)
        for copies, end in self._pieces if is_sent else []:
            self.device.copy(copies, self.copy_stream.cuda_stream)
            self.device.write_word(self.copy_stream.cuda_stream, word, end)
        if not delay_ms:
            self._launch(word, timeout_us)
        self.stream.wait_stream(self.copy_stream)

    def _launch(self, word: int | None, timeout_us: int) -> None:
        self._params.ready_rows = word
        self._params.ready_status = self._words.data_ptr() + 128
        self._params.ready_timeout_us = timeout_us
        self.device._call("fwd", self._params, self.stream.cuda_stream)

    def time(self, repeats: int, heat_s: float = 0.5) -> dict[str, float]:
        """Median ms of the kernel, in random order after `heat_s` of it: keys all there and no words ("plain"); words
        that are up already ("ready"); no words while the same copies run, over the same bytes ("beside"); keys on their
        way ("late"). And until the last copy of "late" is in ("copies")."""
        names = ["plain", "ready", "beside", "late"]
        times: dict[str, list[float]] = {name: [] for name in [*names, "copies"]}
        until_s, order = time.monotonic() + heat_s, random.Random(0)
        while time.monotonic() < until_s:
            self._launch(None, 1)
            self.stream.synchronize()
        for _ in range(repeats):
            for name in order.sample(names, len(names)):
                kernel_ms, copies_ms = self._time_once(name)
                times[name].append(kernel_ms)
                if name == "late":
                    times["copies"].append(copies_ms)
        return {name: float(np.median(found)) for name, found in times.items()}

    def _time_once(self, name: str) -> tuple[float, float]:
        word, has_copies = self._words.data_ptr(), name in ("beside", "late")
        begin, end, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        with torch.cuda.stream(self.stream):
            num_ready = self._num_local if name == "late" else self.k.shape[1]
            self.device.write_word(self.stream.cuda_stream, word, num_ready)
            torch.cuda._sleep(400_000)  # all is enqueued before any of it may start
            begin.record()
            self.copy_stream.wait_stream(self.stream)
            for copies, rows in self._pieces if has_copies else []:
                self.device.copy(copies, self.copy_stream.cuda_stream)
                self.device.write_word(self.copy_stream.cuda_stream, word, rows)
            copied.record(self.copy_stream)
            self._launch(word if name in ("ready", "late") else None, 2_000_000)
            end.record()
            self.stream.wait_stream(self.copy_stream)
        self.stream.synchronize()
        return begin.elapsed_time(end), begin.elapsed_time(copied)
