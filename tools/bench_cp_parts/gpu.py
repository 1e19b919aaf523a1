# SPDX-License-Identifier: Apache-2.0
"""The GPU side of tools/bench_cp.py: plans into a folder, one process a GPU, lines out of what the ranks measured."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench_cp_parts.shown import shown_fields
from paddle_fm3.distributed.device_work import BWD_STYLES
from paddle_fm3.env import GPU_FORWARDS

ROOT = Path(__file__).resolve().parents[2]

# What table 5 varies, on our transport. A ring computes step by step, as rings do. After a "+": a forward mode of
# DeviceAttention, or how DeviceWork groups backward calls ("plan": in all of the plan's steps, whatever they cost), in
# place of what they choose.
IMPLS = ("fm3", "fm3+whole", "fm3+rows", "fm3+plan", "fm3+two", "fm3+one", "fm3_no_balance", "fm3_no_overlap",
         "fm3_no_pruning", "fm3_no_hierarchy", "dual_chunk_allgather", "contiguous_allgather", "ring")  # fmt: skip
HAS_PARTS = ("fm3", "fm3+two", "fm3+one")  # timed beside themselves without transfers, and transfers alone, as well
MASKS = ("causal_document", "document", "prefix_document")
HEADS = {"8/1": (8, 1), "32/4": (32, 4), "64/8": (64, 8)}
HEAD_DIM = 128
MAX_RELATIVE_ERROR = 1e-2  # of bf16 results to those of one GPU; two of its runs differ by up to 3e-3
COLUMNS = ("impl", "s_local", "heads", "mask", "fwd_ms", "bwd_ms", "total_ms", "tflops_per_gpu", "comm_hidden_pct",
           "copies_hidden_pct", "mb_moved", "imbalance", "refcheck")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One plan to run on `num_ranks` GPUs."""

    impl: str
    num_ranks: int
    s_local: int
    heads: str
    mask: str
    seed: int = 0

    @property
    def bwd_style(self) -> str | None:
        return self._chosen if self._chosen in BWD_STYLES else None

    @property
    def forward_mode(self) -> str | None:
        return self._chosen if self._chosen in GPU_FORWARDS else None

    @property
    def _chosen(self) -> str:
        return self.impl.partition("+")[2]

    @property
    def s(self) -> int:
        return self.s_local * self.num_ranks

    @property
    def name(self) -> str:
        return f"{self.impl}_{self.num_ranks}x{self.s_local}_{self.heads.replace('/', '-')}_{self.mask}"

    @property
    def mask_name(self) -> str:
        return f"{self.mask}_{self.s}_{self.seed}"

    @property
    def num_nodes(self) -> int:
        """Hierarchy needs nodes: half of the ranks each. With 2 ranks every link is the same."""
        return 2 if self.num_ranks >= 4 else 1


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(impl, arguments.ranks, s_local, heads, mask)
        for s_local in arguments.local
        for heads in arguments.heads
        for mask in arguments.masks
        for impl in arguments.impls
        if impl != "fm3_no_hierarchy" or arguments.ranks >= 4  # without nodes it is fm3 itself
    ]


def sample(kind: str, s: int, seed: int) -> Any:
    """A mask of MASKS as table 5 draws them; below its shortest length, as many documents as there."""
    from bench_planner_parts.samples import NUM_DOCUMENTS, sample_mask

    from paddle_fm3.mask import builders

    shortest = min(NUM_DOCUMENTS)
    if s >= shortest:
        return sample_mask(kind, s, seed)
    rng = np.random.default_rng([seed, s])
    least, most = NUM_DOCUMENTS[shortest]
    share = rng.random(int(rng.integers(least, most + 1))) + 1e-3
    edges = np.unique(np.concatenate([[0], np.round(np.cumsum(share) / share.sum() * s).astype(int)]))
    lengths = np.diff(edges).tolist()
    if kind == "prefix_document":
        return builders.prefix_lm_document(lengths, [int(rng.integers(1, max(2, length))) for length in lengths])
    return getattr(builders, kind)(lengths)


def make_plans(
    cases: list[Case], folder: Path, calls: dict[int, int], loops: int, devices: list[int], pair_seconds: float = 2.0
) -> None:
    """Writes what the ranks' processes read: their work, their rows, the masks, and the list of jobs."""
    from paddle_fm3.distributed.cost import CostModel
    from paddle_fm3.distributed.device_style import choose_bwd_style
    from paddle_fm3.distributed.device_work import DeviceWork
    from paddle_fm3.distributed.planner import build_plan
    from paddle_fm3.distributed.topology import Topology
    from paddle_fm3.schedule import build_schedule
    from paddle_fm3.testing.device_work_file import save_work

    folder.mkdir(parents=True, exist_ok=True)
    jobs, flops_of = [], {}
    styles: dict[tuple[Any, ...], str] = {}  # fm3's, by sizes and mask
    for case in cases:
        mask = sample(case.mask, case.s, case.seed)
        indices, causal = mask.to_bounds()
        np.save(folder / f"{case.mask_name}.npy", indices)
        h_q, h_kv = HEADS[case.heads]
        if case.mask_name not in flops_of:
            tiles = int(build_schedule(mask).num_visible_tiles.sum())
            flops_of[case.mask_name] = 4 * tiles * 128 * 128 * HEAD_DIM
        topology = Topology.uniform(case.num_ranks, case.num_ranks // case.num_nodes)
        cost = CostModel(h_q=h_q, h_kv=h_kv, d=HEAD_DIM)
        strategy = case.impl.partition("+")[0]
        plan = build_plan(mask, case.num_ranks, topology=topology, strategy=strategy, cost=cost)
        style = case.bwd_style or choose_bwd_style(plan, cost)
        sizes = (case.num_ranks, case.s_local, case.heads, case.mask_name)
        if case.impl == "fm3":
            styles[sizes] = style
        elif case.bwd_style == styles.get(sizes):
            continue  # that is fm3 itself
        for rank in range(case.num_ranks):
            rank_plan = plan.rank_plan(rank, mask)
            work = DeviceWork.of(plan, rank_plan, bwd_style=style)
            save_work(work, folder / f"{case.name}_rank{rank}.npz")
            np.save(folder / f"{case.name}_rank{rank}_rows.npy", rank_plan.key_rows_global()[: rank_plan.num_q_rows])
        jobs.append({
            "kind": "time", "name": case.name, "num_ranks": case.num_ranks, "work": case.name, "s": case.s,
            "mask": case.mask_name, "causal": causal, "calls": calls[case.s_local], "loops": loops,
            "heads": {"b": 1, "h_q": h_q, "h_kv": h_kv, "d_qk": HEAD_DIM, "d_v": HEAD_DIM, "dtype": "bfloat16"},
            "options": {"num_step_streams": 2, "forward_mode": case.forward_mode},
            "case": "_".join(map(str, sizes)), "has_parts": case.impl in HAS_PARTS,
            "pair_seconds": pair_seconds,
            "fields": {
                "impl": case.impl, "ranks": case.num_ranks, "s_local": case.s_local, "heads": case.heads,
                "mask": case.mask, "bwd_style": style, "stages": plan.num_stages, "nodes": case.num_nodes,
                "imbalance": round(plan.imbalance, 5), "gflop_fwd": h_q * flops_of[case.mask_name] / 1e9,
            },
        })  # fmt: skip
    config = {"port": 0, "devices": devices, "timeout_s": 20.0, "folder": str(folder), "out": str(folder), "jobs": jobs}
    (folder / "config.json").write_text(json.dumps(config))


def launch(folder: Path, timeout_s: float, has_trace: bool = False) -> list[dict[str, Any]]:
    """One process a rank over the folder's jobs; their lines. A rank that fails leaves a line with `error`."""
    config = json.loads((folder / "config.json").read_text())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        config["port"] = probe.getsockname()[1] % 50000 + 10000
    config |= {"folder": str(folder), "out": str(folder)}
    config["jobs"] = [job | {"has_trace": has_trace} for job in config["jobs"]]
    (folder / "config.json").write_text(json.dumps(config))
    for old in (*folder.glob("rank*.jsonl"), *folder.glob("trace_*_rank*.json")):
        old.unlink()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a stream that waits must not hold up another one
    }
    num_ranks = len(config["devices"])
    command = [sys.executable, "-m", "paddle_fm3.testing.gpu_cp_rank", str(folder / "config.json")]
    processes = []
    for rank in range(num_ranks):
        log = (folder / f"log{rank}").open("w")
        processes.append(subprocess.Popen([*command, str(rank)], env=environment, stdout=log, stderr=log))
    try:
        for process in processes:
            process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"bench_cp: the ranks did not end in {timeout_s:g} s; lines so far are kept", file=sys.stderr)
    finally:
        for process in processes:
            process.kill()
    lines = []
    for rank in range(num_ranks):
        found = folder / f"rank{rank}.jsonl"
        lines += [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
        if not found.exists() or any("error" in line for line in lines):
            print((folder / f"log{rank}").read_text()[-2000:], file=sys.stderr)
    return lines


def merge_traces(folder: Path, to: Path) -> None:
    """One file a job, with all its ranks."""
    to.mkdir(parents=True, exist_ok=True)
    for first in sorted(folder.glob("trace_*_rank0.json")):
        name = first.name.removeprefix("trace_").removesuffix("_rank0.json")
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob(f"trace_{name}_rank*.json"))]
        merged = ranks[0] | {"traceEvents": [event for rank in ranks for event in rank["traceEvents"]]}
        (to / f"{name}.json").write_text(json.dumps(merged))


def records_of(folder: Path, lines: list[dict[str, Any]], device: str, commit: str | None) -> Iterator[dict[str, Any]]:
    """One record a job that every rank finished."""
    from paddle_fm3.testing import bench

    identity = bench.RunIdentity.of_this_process(device, commit)
    for job in json.loads((folder / "config.json").read_text())["jobs"]:
        own = [line for line in lines if line["job"] == job["name"] and "error" not in line]
        if len(own) != job["num_ranks"]:
            continue
        yield bench.record(identity, "cp_gpu", **_fields(job, own))


LATE_CASES = (("32k_causal_document", "32/4"), ("32k_document", "64/8"), ("32k_causal", "8/8"),
              ("8k_causal_document", "32/4"), ("8k_document", "64/8"), ("8k_causal", "8/8"))  # fmt: skip
LATE_COLUMNS = ("impl", "case", "heads", "plain_ms", "ready_ms", "beside_ms", "late_ms", "copies_ms", "speed_ready",
                "speed_late", "refcheck")  # fmt: skip


def late_key_records(device_idx: int | None, repeats: int, commit: str | None) -> Iterator[dict[str, Any]]:
    """One forward in one process whose last half of the keys comes by copy engines while it runs: its speed as a
    fraction of that with all keys in place. See `LateKeys.time` for what is timed."""
    import torch

    from paddle_fm3._native import sm90_library
    from paddle_fm3.distributed.device import Sm90Device
    from paddle_fm3.distributed.device_bind import Heads, first_cols
    from paddle_fm3.testing import bench
    from paddle_fm3.testing.cases import benchmark_case, resized
    from paddle_fm3.testing.gpu_call import Sm90
    from paddle_fm3.testing.gpu_cp_timing import LateKeys

    identity = bench.RunIdentity.of_this_process(torch.cuda.get_device_name(), commit)
    device = Sm90Device(sm90_library())
    for name, heads in LATE_CASES:
        h_q, h_kv = map(int, heads.split("/"))
        case = resized(benchmark_case(name), b=1, h_q=h_q, h_kv=h_kv)
        as_planned = first_cols(Heads(1, h_q, h_kv, case.d_qk, case.d_v, "bfloat16"), case.s_k // 2, 4, 300.0)
        late = LateKeys(
            device, case, num_local=case.s_k // 2, num_pieces=4, source_device_idx=device_idx, num_first_cols=as_planned
        )
        try:
            out, lse = Sm90(sm90_library()).forward(late.q, late.k_full, late.v_full, late.mask)
            late.poison()
            late.run(delay_ms=0.5)
            torch.cuda.synchronize()
            is_right = late.status == 0 and torch.equal(late.out, out) and torch.equal(late.lse, lse)
            times = late.time(repeats)
            yield bench.record(
                identity, "cp_gpu", "late_keys", refcheck=is_right and late.status == 0, case=name, heads=heads,
                source="host memory" if device_idx is None else f"GPU {device_idx}", repeats=repeats,
                mb_copied=round(sum(x[:, case.s_k // 2 :].nbytes for x in (late.k, late.v)) / 1e6, 2),
                **{f"{key}_ms": round(ms, 4) for key, ms in times.items()},
                speed_ready=round(times["plain"] / times["ready"], 4),
                speed_late=round(times["plain"] / times["late"], 4),
            )  # fmt: skip
        finally:
            late.close()


def _fields(job: dict[str, Any], own: list[dict[str, Any]]) -> dict[str, Any]:
    def slowest(name: str) -> np.ndarray:
        """By loop, of the ranks."""
        return np.array([line[name] for line in own]).max(axis=0)

    fields: dict[str, Any] = dict(job["fields"])
    gflop = fields.pop("gflop_fwd")
    fields |= {"forward_mode": own[0]["forward_mode"], "step_streams": job["options"]["num_step_streams"]}
    fields["prepare_ms"] = max(line["prepare_ms"] for line in own)
    for part, factor in (("fwd", 1.0), ("bwd", 2.5), ("total", 3.5)):
        times_ms = slowest(f"{part}_ms")
        median = float(np.median(times_ms))
        fields[f"{part}_ms"] = round(median, 4)
        fields[f"{part}_ms_spread"] = [round(float(x), 4) for x in (times_ms.min(), times_ms.max())]
        fields["tflops_per_gpu" if part == "total" else f"{part}_tflops_per_gpu"] = round(
            gflop * factor / median / fields["ranks"], 1
        )
    if "pairs" in own[0]:
        transfers = {part: float(np.median(slowest(f"transfers_{part}_ms"))) for part in ("fwd", "bwd")}
        fields |= {f"{part}_transfers_ms": round(time_ms, 4) for part, time_ms in transfers.items()}
        fields |= shown_fields([line["pairs"] for line in own], sum(transfers.values()))
    if "overlapped_pct" in own[0]:
        fields["overlapped_pct"] = min(line["overlapped_pct"] for line in own)
    fields["mb_moved"] = round(sum(line["bytes_received"] for line in own) / 1e6, 2)
    errors = {name: float(np.max([line["errors"][name] for line in own])) for name in own[0]["errors"]}  # NaN stays
    fields["max_relative_error"] = float(f"{np.max(list(errors.values())):.2g}")
    fields["refcheck"] = all(error <= MAX_RELATIVE_ERROR for error in errors.values())
    return fields
