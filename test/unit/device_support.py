# SPDX-License-Identifier: Apache-2.0
"""Runs all ranks of a plan on model devices in one process: one thread a rank enqueues, then everything is executed in
a random order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_fm3.distributed.device import DeviceTensor
from paddle_fm3.distributed.device_execute import DeviceAttention, Heads
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_transport import DeviceTransport
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing.fake_device import FakeDevice, FakeWorld, view


class Exchanger:
    """exchange(record) for threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._records: list[Any] = [None] * num_ranks

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(record: Any) -> list[Any]:
            self._records[rank] = record
            self._barrier.wait(30)
            records = list(self._records)
            self._barrier.wait(30)
            return records

        return exchange

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(num_ranks: int, action: Callable[[int], Any]) -> list[Any]:
    """action(rank) in a thread each; results by rank, or the first error."""
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = action(rank)
        except BaseException as error:  # noqa: BLE001  handed on below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


@dataclass
class Results:
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@dataclass
class Rank:
    """One rank of a group: device, transport, executor."""

    device: FakeDevice
    transport: DeviceTransport | None
    attention: DeviceAttention
    stream: int


class Group:
    """All ranks of a plan. `make_transport(device, rank, num_ranks, exchange)`, `make_device(world)`."""

    def __init__(
        self, num_ranks: int, seed: int, make_transport: Any = None, make_device: Any = FakeDevice, **options: Any
    ) -> None:
        self.world = FakeWorld(seed)
        self.num_ranks = num_ranks
        self.exchanger = Exchanger(num_ranks)

        def rank_of(rank: int) -> Rank:
            device = make_device(self.world)
            transport = None
            if num_ranks > 1:
                make = make_transport or (lambda *arguments: IpcTransport(*arguments, timeout_s=20.0))
                transport = make(device, rank, num_ranks, self.exchanger.of(rank))
            return Rank(device, transport, DeviceAttention(device, transport, **options), device.stream_create())

        self.ranks: list[Rank] = on_ranks(num_ranks, rank_of)

    def close(self) -> None:
        for rank in self.ranks:
            if rank.transport is not None:
                rank.transport.close()

    def step(
        self, plan: CpPlan, mask: ColumnMask, inputs: dict[str, np.ndarray], scale: float, *,
        has_backward: bool = True, bwd_styles: tuple[str, ...] | None = None, num_backwards: int = 1, **options: Any,
    ) -> Any:  # fmt: skip
        """Enqueues forward and backward on all ranks; call the result after `world.run()` to get `Results`.

        Args:
            bwd_styles: by rank.
            num_backwards: of the one forward, one after another, as if a graph were kept.
            inputs: float16 q, k, v, dout [b, s, h, d] and float32 dlse [b, h, s] or None, in global order.
        """
        styles = bwd_styles or ("plan",) * self.num_ranks
        works = [
            DeviceWork.of(plan, plan.rank_plan(rank, mask), bwd_style=styles[rank], **options)
            for rank in range(self.num_ranks)
        ]
        rows = [plan.rank_plan(rank, mask).key_rows_global()[: works[rank].num_own] for rank in range(self.num_ranks)]
        b, _, h_q, d_qk = inputs["q"].shape
        heads = Heads(b, h_q, inputs["k"].shape[2], d_qk, inputs["v"].shape[3], "float16")
        prepared = on_ranks(self.num_ranks, lambda rank: self.ranks[rank].attention.prepare(works[rank], heads))

        def enqueue(rank: int) -> dict[str, Any]:
            one = self.ranks[rank]

            def put(x: np.ndarray, poison_after: bool = False) -> DeviceTensor:
                local = np.ascontiguousarray(x[:, rows[rank]])
                return DeviceTensor.contiguous(one.device.upload(local), *local.shape)

            q, k, v, dout = (put(inputs[name]) for name in ("q", "k", "v", "dout"))
            dlse = None
            if inputs.get("dlse") is not None:
                dlse = one.device.upload(np.ascontiguousarray(inputs["dlse"][:, :, rows[rank]]))
            num_own = len(rows[rank])

            def new(x: DeviceTensor, d: int) -> DeviceTensor:
                return DeviceTensor.contiguous(one.device.malloc(x.b * x.s * x.h * d * 2), x.b, x.s, x.h, d)

            out, dq, dk, dv = new(q, heads.d_v), new(q, d_qk), new(k, d_qk), new(v, heads.d_v)
            lse = one.device.malloc(b * h_q * num_own * 4)
            one.attention.forward(prepared[rank], heads, q, k, v, out, lse, scale, one.stream)
            if not has_backward:
                return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
            grads = (dq, dk, dv)
            for _ in range(num_backwards):
                one.attention.backward(prepared[rank], heads, q, k, v, out, lse, dout, dlse, *grads, scale, one.stream)
            return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

        outputs = on_ranks(self.num_ranks, enqueue)

        def collect() -> Results:
            s = plan.partition.s
            full = {"out": np.full((b, s, h_q, heads.d_v), np.nan, np.float32)}
            full["dq"] = np.full(inputs["q"].shape, np.nan, np.float32)
            full["dk"], full["dv"] = (np.full(inputs[n].shape, np.nan, np.float32) for n in ("k", "v"))
            lse = np.full((b, h_q, s), np.nan, np.float32)
            for rank, output in enumerate(outputs):
                for name, total in full.items():
                    x = output[name]
                    total[:, rows[rank]] = view(x.address, (x.b, x.s, x.h, x.d), np.float16)
                lse[:, :, rows[rank]] = view(output["lse"], (b, h_q, len(rows[rank])), np.float32)
            return Results(lse=lse, **full)

        return collect
