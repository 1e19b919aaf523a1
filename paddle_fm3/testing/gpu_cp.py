# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on GPUs without a framework's process group: what the tests under test/gpu and
tools/bench_cp.py run in each rank's process. torch only holds tensors."""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paddle_fm3.distributed.device import DeviceTensor
from paddle_fm3.distributed.device_execute import DeviceAttention, Heads, PreparedWork
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.testing.gpu_call import GpuMask, Sm90
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Sm90Backward

Record = dict[str, Any]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class LoopbackExchange:
    """exchange(record) between processes of one machine: rank 0 collects and hands out JSON lines."""

    def __init__(self, rank: int, num_ranks: int, port: int, timeout_s: float = 150.0) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._connections: list[socket.socket] = []
        if rank == 0:
            with socket.create_server(("127.0.0.1", port), backlog=num_ranks) as listener:
                listener.settimeout(timeout_s)
                found: dict[int, socket.socket] = {}
                while len(found) < num_ranks - 1:
                    connection, _ = listener.accept()
                    connection.settimeout(timeout_s)
                    found[struct.unpack("<I", _read(connection, 4))[0]] = connection
                self._connections = [found[peer] for peer in range(1, num_ranks)]
            return
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout_s)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
        connection.settimeout(timeout_s)
        connection.sendall(struct.pack("<I", rank))
        self._connections = [connection]

    def __call__(self, record: Record) -> list[Record]:
        if self._rank == 0:
            records = [record, *(_receive(connection) for connection in self._connections)]
            for connection in self._connections:
                _send(connection, records)
            return records
        _send(self._connections[0], record)
        return list(_receive(self._connections[0]))


def _send(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    connection.sendall(struct.pack("<Q", len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    return json.loads(_read(connection, struct.unpack("<Q", _read(connection, 8))[0]))


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("the other rank closed its connection")
        data += piece
    return data


def tensor_of(x: torch.Tensor) -> DeviceTensor:
    """A [b, s, h, d] tensor as the executor takes it; x must outlive its use."""
    b, s, h, d = x.shape
    return DeviceTensor(x.data_ptr(), b, s, h, d, (x.stride(0), x.stride(1), x.stride(2)))


@dataclass(frozen=True, eq=False)
class Inputs:
    """q, dout [b, s, h_q, d]; k, v [b, s, h_kv, d]; of the whole sequence or of one rank's rows."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, heads: Heads, s: int, seed: int) -> Inputs:
        """The same on every rank."""
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(h: int, d: int) -> torch.Tensor:
            return torch.randn((heads.b, s, h, d), generator=generator, device="cuda", dtype=DTYPES[heads.dtype])

        return cls(normal(heads.h_q, heads.d_qk), normal(heads.h_kv, heads.d_qk), normal(heads.h_kv, heads.d_v),
                   normal(heads.h_q, heads.d_v))  # fmt: skip

    def rows(self, rows: torch.Tensor) -> Inputs:
        return Inputs(*(x[:, rows].contiguous() for x in (self.q, self.k, self.v, self.dout)))


class RankStep:
    """One rank's forward and backward on given tensors, again and again. Outputs are NaN before the first."""

    def __init__(self, attention: DeviceAttention, prepared: PreparedWork, heads: Heads, local: Inputs) -> None:
        self._attention, self._prepared, self.heads, self.local = attention, prepared, heads, local
        self.out = torch.full_like(local.dout, float("nan"))
        self.lse = torch.full((heads.b, heads.h_q, local.q.shape[1]), float("nan"), device="cuda")
        self.dq, self.dk, self.dv = (torch.full_like(x, float("nan")) for x in (local.q, local.k, local.v))
        self.scale = heads.d_qk**-0.5

    @property
    def work(self) -> DeviceWork:
        return self._prepared.work

    def with_attention(self, attention: DeviceAttention) -> RankStep:
        """The same tensors and masks under another executor."""
        return RankStep(attention, self._prepared, self.heads, self.local)

    def forward(self) -> None:
        x = self.local
        self._attention.forward(
            self._prepared, self.heads, *map(tensor_of, (x.q, x.k, x.v, self.out)), self.lse.data_ptr(), self.scale,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def backward(self) -> None:
        x = self.local
        self._attention.backward(
            self._prepared, self.heads, *map(tensor_of, (x.q, x.k, x.v, self.out)), self.lse.data_ptr(),
            tensor_of(x.dout), None, *map(tensor_of, (self.dq, self.dk, self.dv)), self.scale,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def results(self) -> dict[str, torch.Tensor]:
        return {"out": self.out, "lse": self.lse, "dq": self.dq, "dk": self.dk, "dv": self.dv}


def one_device(library: Any, full: Inputs, mask: GpuMask) -> dict[str, torch.Tensor]:
    """What one GPU gives for the whole sequence."""
    schedule, backend = Sm90(library).build_schedule(mask), Sm90Backward(library)
    out, lse = Sm90(library).forward(full.q, full.k, full.v, mask, schedule=schedule)
    grads = backend.backward(
        BackwardInputs(full.q, full.k, full.v, out, lse, full.dout), mask, lists=backend.build_schedule(mask)
    )
    return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def mask_of(bounds: np.ndarray, causal: bool) -> GpuMask:
    """A mask over a whole sequence from its int32 bounds [b, h_mask, s, n]."""
    b, h_mask, s, _ = bounds.shape
    return GpuMask(torch.from_numpy(np.ascontiguousarray(bounds)).cuda(), None, causal, b, h_mask, s, s)


def relative_errors(
    results: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rows: torch.Tensor
) -> dict[str, float]:
    """|x - wanted| / |wanted| of each result of a rank's rows; NaN if any is where none should be."""
    errors = {}
    for name, x in results.items():
        full = wanted[name].float()
        part = full[:, :, rows] if name == "lse" else full[:, rows]
        is_inf = torch.isinf(part)
        if not torch.equal(is_inf, torch.isinf(x)):
            errors[name] = float("nan")
            continue
        part, own = (torch.where(is_inf, torch.zeros_like(part), y) for y in (part, x.float()))
        errors[name] = float((own - part).norm() / part.norm().clamp_min(1e-20))
    return errors


def planned_bytes(work: DeviceWork, heads: Heads) -> tuple[int, int]:
    """Payload that the plan lets this rank receive in a forward and in a backward (which gathers again)."""
    per_row = heads.b * (heads.elems(False) + heads.elems(True))
    gathered = sum(batch.num_recv_rows for batch in work.gather) * per_row * 2
    reduced = sum(
        piece.num_rows * per_row * (4 if piece.buffer == "wide" else 2)
        for batch in work.reduce
        for piece in batch.recvs
    )
    return gathered, gathered + reduced
