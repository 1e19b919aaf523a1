# SPDX-License-Identifier: Apache-2.0
"""Folders of jobs for `paddle_fm3.testing.gpu_cp_rank`, and the processes that run them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from paddle_fm3.distributed.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]
HEADS = {"b": 1, "h_q": 8, "h_kv": 2, "d_qk": 128, "d_v": 128, "dtype": "bfloat16"}
MAX_RELATIVE_ERROR = 6e-3  # to one GPU's results; bf16 partial sums give up to 3e-3


class Jobs:
    """Collects jobs in a folder. A folder that has jobs already is used as it is: plans may come from elsewhere."""

    def __init__(self, folder: Path, devices: list[int], timeout_s: float = 10.0) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._config: dict[str, Any] = {"devices": devices, "timeout_s": timeout_s, "jobs": []}

    def add(self, kind: str, num_ranks: int, strategy: str | Strategy, mask_kind: str, s: int, **extra: Any) -> str:
        """A job on a plan with two nodes where there are four ranks; returns its name."""
        from paddle_fm3.distributed.device_work import DeviceWork
        from paddle_fm3.distributed.planner import PlanOptions, build_plan
        from paddle_fm3.distributed.topology import Topology
        from paddle_fm3.mask import builders
        from paddle_fm3.testing.device_work_file import save_work

        lengths = [s // 3, s // 5 + 7, 1, s // 4]
        lengths.append(s - sum(lengths))
        mask = {
            "causal": lambda: builders.causal(s),
            "causal_document": lambda: builders.causal_document(lengths),
            "document": lambda: builders.document(lengths),
            "prefix_document": lambda: builders.prefix_lm_document(lengths, [max(1, n // 3) for n in lengths]),
            "window": lambda: builders.sliding_window(s, s // 8),
        }[mask_kind]()
        bounds, causal = mask.to_bounds()
        np.save(self.folder / f"{mask_kind}_{s}.npy", bounds)
        topology = Topology.uniform(num_ranks, 2 if num_ranks == 4 else num_ranks)
        plan = build_plan(mask, num_ranks, topology=topology, strategy=strategy, options=PlanOptions(chunk_rows=256))
        work = f"{getattr(strategy, 'name', strategy)}_{num_ranks}_{mask_kind}_{s}"
        for rank in range(num_ranks):
            rank_plan = plan.rank_plan(rank, mask)
            save_work(DeviceWork.of(plan, rank_plan), self.folder / f"{work}_rank{rank}.npz")
            np.save(self.folder / f"{work}_rank{rank}_rows.npy", rank_plan.key_rows_global()[: rank_plan.num_q_rows])
        options = extra.pop("options", {})
        name = f"{kind} {work} {json.dumps(options)}"
        self._config["jobs"].append({
            "kind": kind, "name": name, "num_ranks": num_ranks, "work": work, "heads": HEADS, "s": s,
            "mask": f"{mask_kind}_{s}", "causal": causal, "options": options, **extra,
        })  # fmt: skip
        (self.folder / "config.json").write_text(json.dumps(self._config))
        return name

    def run(self, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
        return run_jobs(self.folder, timeout_s)


def run_jobs(folder: Path, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """Lines of all ranks by the name of the job."""
    config = json.loads((folder / "config.json").read_text())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        config["port"] = probe.getsockname()[1] % 40000 + 20000
    config |= {"folder": str(folder), "out": str(folder)}
    (folder / "config.json").write_text(json.dumps(config))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    command = [sys.executable, "-m", "paddle_fm3.testing.gpu_cp_rank", str(folder / "config.json")]
    num_ranks = len(config["devices"])
    logs = [(folder / f"log{rank}").open("w") for rank in range(num_ranks)]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=logs[rank], stderr=logs[rank])
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.wait(timeout_s)
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in range(num_ranks):
        lines = folder / f"rank{rank}.jsonl"
        assert lines.exists(), (folder / f"log{rank}").read_text()[-3000:]
        for text in lines.read_text().splitlines():
            line = json.loads(text)
            assert "error" not in line, f"rank {rank}, {line['job']}: {line['error']}"
            found.setdefault(line["job"], []).append(line)
    return found
