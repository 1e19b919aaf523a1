#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step time of context-parallel attention, one process a rank, every strategy against the one-device op.

    tools/bench_cp.py                                        # CPU: 4 ranks on 2 nodes by the node map, s = 16384
    tools/bench_cp.py --ranks 2 --length 8192 --results results   # appends to results/cp_cpu.jsonl
    tools/bench_cp.py --device gpu --ranks 2 --results results    # one process a GPU: results/cp_gpu.jsonl
    tools/bench_cp.py --device gpu --ranks 2 --plans FOLDER --only-plans     # plan here, measure elsewhere

On CPUs one step is forward and backward. `hidden_pct`: of the time in which bytes of a rank were under way (first
byte to last), the share in which that rank computed; the mean over ranks. `cpu_ms`: processor time of all ranks
together, which other load on the machine hardly changes. `held_mb`: what a rank keeps from forward to backward, the
most of any rank. Over loopback transfers are short beside compute, and ranks that share cores wait for each other:
step times compare strategies, they do not predict a cluster.

On GPUs rows are fetched by copy engines over CUDA IPC, and all implementations of a case are timed in turns.
What a step shows of its transfers: it runs as it is and with parts left out in turns, some milliseconds apart
(`paddle_fm3/testing/gpu_cp_ways.py`). `fwd_shown_us`, `bwd_shown_us`: [mean, standard error] of how much longer a phase
takes than its kernels alone; `comm_hidden_pct`: of the time that the transfers take alone, the share that does not
show; `copies_hidden_pct`: beside a step in which ranks wait as ever and only the copies are left out.

bf16, head_dim 128.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_cp_parts import gpu  # noqa: E402

COLUMNS = (
    "impl", "ms_median", "ms_p10", "ms_p90", "cpu_ms", "hidden_pct", "wait_ms", "mb_gathered", "held_mb", "imbalance",
    "refcheck",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=16384, help="length of the sequence")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of one step of each implementation (CPU)")
    parser.add_argument("--cpu-impls", nargs="+", metavar="NAME", help="of bench_cp_parts/cpu.py; default all")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="append the records to FOLDER/cp_<device>.jsonl")
    on_gpu = parser.add_argument_group("with --device gpu")
    on_gpu.add_argument("--local", type=int, nargs="+", default=[8192, 32768], help="rows a rank")
    on_gpu.add_argument("--heads", nargs="+", default=list(gpu.HEADS), choices=list(gpu.HEADS))
    on_gpu.add_argument("--masks", nargs="+", default=list(gpu.MASKS), choices=gpu.MASKS)
    on_gpu.add_argument("--impls", nargs="+", default=list(gpu.IMPLS), choices=gpu.IMPLS)
    on_gpu.add_argument(
        "--plans", type=Path, metavar="FOLDER", help="use the plans there, if it has any; else make them"
    )
    on_gpu.add_argument("--only-plans", action="store_true", help="make the plans and stop")
    on_gpu.add_argument("--calls", type=int, default=10, help="calls of a timed loop at 8K rows a rank; fewer above")
    on_gpu.add_argument("--loops", type=int, default=5, help="timed loops, each started by all ranks together")
    on_gpu.add_argument(
        "--pair-seconds", type=float, default=2.0, help="time a case for a step beside itself without transfers"
    )
    on_gpu.add_argument("--trace", type=Path, metavar="FOLDER", help="write each case's timeline of one step there")
    on_gpu.add_argument(
        "--late-keys", metavar="SOURCE", help="only: one forward whose keys come from a GPU (1, ...) or host"
    )
    on_gpu.add_argument("--timeout", type=float, default=3600.0, help="seconds for all ranks")
    on_gpu.add_argument("--commit", help="of the measured tree, where it is no git checkout")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        from bench_cp_parts import cpu

        cpu.work(arguments.worker, arguments.length, arguments.repeats, arguments.cpu_impls or list(cpu.IMPLS))
        return 0
    if arguments.device == "gpu":
        return on_gpus(arguments)
    from paddle_fm3.testing import bench

    with tempfile.TemporaryDirectory() as folder:
        launch(arguments, Path(folder))
        measured = json.loads((Path(folder) / "rank0.json").read_text())
    identity = bench.RunIdentity.of_this_process(bench.cpu_name())
    records = [bench.record(identity, "cp", fields.pop("impl"), **fields) for fields in measured]
    return report(records, COLUMNS, arguments.results and arguments.results / "cp_cpu.jsonl")


def on_gpus(arguments: argparse.Namespace) -> int:
    if arguments.late_keys is not None:
        records = list(
            gpu.late_key_records(
                None if arguments.late_keys == "host" else int(arguments.late_keys), 20, arguments.commit
            )
        )
        return report(records, gpu.LATE_COLUMNS, arguments.results and arguments.results / "cp_gpu.jsonl")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.plans or Path(temporary)).resolve()
        if not (folder / "config.json").exists():
            calls = {s_local: max(2, arguments.calls * 8192 // s_local) for s_local in arguments.local}
            devices = list(range(arguments.ranks))
            cases = gpu.cases_of(arguments)
            gpu.make_plans(cases, folder, calls, arguments.loops, devices, arguments.pair_seconds)
        if arguments.only_plans:
            return 0
        lines = gpu.launch(folder, arguments.timeout, has_trace=arguments.trace is not None)
        if arguments.trace:
            gpu.merge_traces(folder, arguments.trace)
        name = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"], capture_output=True, text=True
        ).stdout.strip()
        records = list(gpu.records_of(folder, lines, name, arguments.commit))
    return report(records, gpu.COLUMNS, arguments.results and arguments.results / "cp_gpu.jsonl")


def report(records: list[dict], columns: tuple[str, ...], path: Path | None) -> int:
    from paddle_fm3.testing import bench

    print(bench.format_table(records, columns))
    if path:
        bench.append_records(path, records)
    return 0 if records and all(one["refcheck"] == "pass" for one in records) else 1


def launch(arguments: argparse.Namespace, folder: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "FM3_NUM_THREADS": "1",
    }
    command = [
        sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(arguments.ranks),
        "--log_dir", str(folder), __file__, "--worker", str(folder), "--length", str(arguments.length),
        "--repeats", str(arguments.repeats), *(["--cpu-impls", *arguments.cpu_impls] if arguments.cpu_impls else []),
    ]  # fmt: skip
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if result.returncode:
        logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("workerlog.*")))
        raise SystemExit(f"bench_cp: the ranks ended with {result.returncode}\n{result.stderr[-2000:]}\n{logs}")


if __name__ == "__main__":
    sys.exit(main())
