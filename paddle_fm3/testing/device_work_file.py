# SPDX-License-Identifier: Apache-2.0
"""DeviceWork in a file: plans made on one machine, run on another that has the GPUs and not the planner."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from paddle_fm3.distributed.device_work import DeviceWork, KeyRange, RowBatch, RowPiece, SumTable


def save_work(work: DeviceWork, path: Path) -> None:
    """NumPy's npz: arrays, and everything else as JSON. Nothing is pickled."""
    arrays: dict[str, np.ndarray] = {"bounds": work.bounds}
    if work.block_mask is not None:
        arrays["block_mask"] = work.block_mask
    for name, sums in [("own", work.own_sums), *((str(at), b.sums) for at, b in enumerate(work.reduce))]:
        if sums is not None:
            arrays[f"rows_{name}"], arrays[f"entries_{name}"] = sums.rows, sums.entries
    plain: dict[str, Any] = {}
    for field in fields(work):
        value = getattr(work, field.name)
        if field.name in ("gather", "reduce"):
            value = [_plain_batch(batch) for batch in value]
        elif field.name.endswith("_calls"):
            value = [asdict(call) for call in value]
        elif field.name in ("bounds", "block_mask", "own_sums"):
            continue
        plain[field.name] = value
    np.savez_compressed(path, plain=np.frombuffer(json.dumps(plain).encode(), np.uint8), **arrays)


def load_work(path: Path) -> DeviceWork:
    with np.load(path, allow_pickle=False) as arrays:
        plain = json.loads(arrays["plain"].tobytes())

        def sums(name: str) -> SumTable | None:
            return SumTable(arrays[f"rows_{name}"], arrays[f"entries_{name}"]) if f"rows_{name}" in arrays else None

        for name in ("gather", "reduce"):
            plain[name] = tuple(
                RowBatch(
                    name=batch["name"], stage=batch["stage"], hop=batch["hop"],
                    sends=tuple(RowPiece(*piece) for piece in batch["sends"]),
                    recvs=tuple(RowPiece(*piece) for piece in batch["recvs"]),
                    after=tuple(batch["after"]), sums=sums(str(at)) if name == "reduce" else None,
                )
                for at, batch in enumerate(plain[name])
            )  # fmt: skip
        for name in ("fwd_calls", "bwd_calls"):
            plain[name] = tuple(KeyRange(tuple(c["stages"]), c["k_begin"], c["k_end"]) for c in plain[name])
        for name in ("k_rows", "wire_rows", "stage_rows", "bwd_gather", "reduce_after"):
            plain[name] = tuple(plain[name])
        own_sums = sums("own")
        assert own_sums is not None
        block_mask = arrays["block_mask"] if "block_mask" in arrays else None
        return DeviceWork(**plain, own_sums=own_sums, bounds=arrays["bounds"], block_mask=block_mask)


def _plain_batch(batch: RowBatch) -> dict[str, Any]:
    return {
        "name": batch.name,
        "stage": batch.stage,
        "hop": batch.hop,
        "sends": [list(asdict(piece).values()) for piece in batch.sends],
        "recvs": [list(asdict(piece).values()) for piece in batch.recvs],
        "after": list(batch.after),
    }
