#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step time of context-parallel attention, one process a rank, every strategy against the one-device op.

    tools/bench_cp.py                                        # CPU: 4 ranks on 2 nodes by the node map, s = 16384
    tools/bench_cp.py --ranks 2 --length 8192 --results results   # appends to results/cp_cpu.jsonl
    tools/bench_cp.py --device gpu --ranks 2 --results results    # one process a GPU: results/cp_gpu.jsonl
    tools/bench_cp.py --device gpu --ranks 2 --plans FOLDER --only-plans     # plan here, measure elsewhere

On CPUs one step is forward and backward. `hidden_pct`: of the time in which bytes of a rank were under way (first
byte to last), the share in which that rank computed; the mean over ranks. Over loopback transfers are short beside
compute, and ranks that share cores wait for each other: step times compare strategies, they do not predict a cluster.

On GPUs rows are fetched by copy engines over CUDA IPC. `comm_hidden_pct`: of the time that the transfers take alone,
the share that does not lengthen the step, against the same step with all rows in place. bf16, head_dim 128.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_cp_parts import gpu  # noqa: E402

HEADS = {"h_q": 4, "h_kv": 2, "d": 64}
COLLECTIVE = "collective_dual_chunk"  # the path without a plan: Paddle's all-gather, then one call
TOLERANCE = 1e-4  # largest difference to the one-device op, of values around 1
COLUMNS = ("impl", "ms_median", "ms_p10", "ms_p90", "hidden_pct", "wait_ms", "mb_gathered", "imbalance", "refcheck")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=16384, help="length of the sequence")
    parser.add_argument("--repeats", type=int, default=5)
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
    on_gpu.add_argument("--timeout", type=float, default=3600.0, help="seconds for all ranks")
    on_gpu.add_argument("--commit", help="of the measured tree, where it is no git checkout")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        work(arguments)
        return 0
    if arguments.device == "gpu":
        return on_gpus(arguments)
    from paddle_fm3.testing import bench

    with tempfile.TemporaryDirectory() as folder:
        launch(arguments, Path(folder))
        measured = json.loads((Path(folder) / "rank0.json").read_text())
    identity = bench.RunIdentity.of_this_process(bench.cpu_name())
    records = [bench.record(identity, "cp", fields.pop("impl"), **fields) for fields in measured]
    print(bench.format_table(records, COLUMNS))
    if arguments.results:
        bench.append_records(arguments.results / "cp_cpu.jsonl", records)
    return 0 if all(one["refcheck"] == "pass" for one in records) else 1


def on_gpus(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.plans or Path(temporary)).resolve()
        if not (folder / "config.json").exists():
            calls = {s_local: max(2, arguments.calls * 8192 // s_local) for s_local in arguments.local}
            gpu.make_plans(gpu.cases_of(arguments), folder, calls, arguments.loops, list(range(arguments.ranks)))
        if arguments.only_plans:
            return 0
        lines = gpu.launch(folder, arguments.timeout)
        name = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"], capture_output=True, text=True
        ).stdout.strip()
        records = list(gpu.records_of(folder, lines, name, arguments.commit))
    from paddle_fm3.testing import bench

    print(bench.format_table(records, gpu.COLUMNS))
    if arguments.results:
        bench.append_records(arguments.results / "cp_gpu.jsonl", records)
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
        "--repeats", str(arguments.repeats),
    ]  # fmt: skip
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if result.returncode:
        logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("workerlog.*")))
        raise SystemExit(f"bench_cp: the ranks ended with {result.returncode}\n{result.stderr[-2000:]}\n{logs}")


def work(arguments: argparse.Namespace) -> None:
    import numpy as np
    import paddle
    import paddle.distributed as dist

    from paddle_fm3.distributed import groups
    from paddle_fm3.distributed.strategy import STRATEGIES
    from paddle_fm3.mask import builders
    from paddle_fm3.schedule import build_schedule

    groups.enable_gloo_subgroups()
    dist.init_parallel_env()
    group = dist.new_group(list(range(dist.get_world_size())))
    s = arguments.length
    mask = builders.causal_document([s // 2, s // 4, s // 8, s // 16, s - s // 2 - s // 4 - s // 8 - s // 16])
    schedule = build_schedule(mask)
    density = float(schedule.num_visible_tiles.sum()) / (-(-s // 128)) ** 2
    rng = np.random.default_rng(0)
    shapes = {"q": "h_q", "k": "h_kv", "v": "h_kv", "dout": "h_q"}
    tensors = {n: paddle.to_tensor(rng.standard_normal((1, s, HEADS[h], HEADS["d"])).astype("float32"))
               for n, h in shapes.items()}  # fmt: skip
    expected = one_device(mask, tensors)
    records = []
    for name in (COLLECTIVE, *STRATEGIES):
        fields = measure(name, mask, tensors, expected, group, arguments.repeats)
        common = {"s": s, "ranks": group.nranks, **HEADS, "density_block": round(density, 4), "threads_a_rank": 1}
        records.append({"impl": name, **common, **fields})
    if group.rank == 0:
        (arguments.worker / "rank0.json").write_text(json.dumps(records))


def one_device(mask: Any, tensors: dict[str, Any]) -> list[Any]:
    from paddle_fm3.attention import flashmask_attention

    q, k, v = (tensors[name].clone().detach() for name in ("q", "k", "v"))
    for x in (q, k, v):
        x.stop_gradient = False
    out = flashmask_attention(q, k, v, mask)
    out.backward(tensors["dout"])
    return [out.detach(), q.grad, k.grad, v.grad]


def measure(name: str, mask: Any, tensors: dict[str, Any], expected: list[Any], group: Any, repeats: int) -> Any:
    import numpy as np
    import paddle
    import paddle.distributed as dist

    from paddle_fm3.distributed.attention import flashmask_cp_attention
    from paddle_fm3.distributed.partition import dual_chunk_partition
    from paddle_fm3.distributed.planned import plan_attention, transport_bytes
    from paddle_fm3.distributed.shard import shard_rows, unshard_rows
    from paddle_fm3.distributed.topology import Topology
    from paddle_fm3.distributed.trace import Trace
    from paddle_fm3.testing.bench import TimingStats

    indices, causal = mask.to_bounds()
    bounds = paddle.to_tensor(indices)
    plan = None
    if name != COLLECTIVE:
        nodes = Topology.uniform(group.nranks, max(1, group.nranks // 2))
        plan = plan_attention(bounds, causal=causal, num_ranks=group.nranks, strategy=name, topology=nodes)
    partition = dual_chunk_partition(mask.s_q, group.nranks) if plan is None else plan.partition
    local = {n: shard_rows(x, partition, group.rank).detach() for n, x in tensors.items()}
    times_ms, traces, received = [], [], []
    for _ in range(repeats + 1):
        q, k, v = (local[n].clone().detach() for n in ("q", "k", "v"))
        for x in (q, k, v):
            x.stop_gradient = False
        trace = Trace()
        before = sum(transport_bytes(group)[1])
        dist.barrier(group)
        begin = perf_counter()
        out = flashmask_cp_attention(q, k, v, bounds, causal=causal, group=group, plan=plan, trace=trace)
        received.append(sum(transport_bytes(group)[1]) - before)
        out.backward(local["dout"])
        dist.barrier(group)  # the step ends with its last rank
        times_ms.append((perf_counter() - begin) * 1e3)
        traces.append(trace)
    results = [unshard_rows(x.detach(), partition, group) for x in (out, q.grad, k.grad, v.grad)]
    error = max(float((x - y).abs().max()) for x, y in zip(results, expected, strict=True))
    fields: dict[str, Any] = {**TimingStats.from_ms(times_ms[1:]).fields(), "refcheck": error < TOLERANCE}
    fields["max_error"] = float(f"{error:.2g}")
    if plan is None:
        return fields
    own = np.array([[share_hidden(t), wait_ms(t)] for t in traces[1:]]).mean(axis=0)  # [2]
    figures: list[Any] = []
    dist.all_gather(figures, paddle.to_tensor([*own, received[-1]], dtype="float64"), group=group)
    hidden, waited, num_bytes = (np.array([x.numpy()[at] for x in figures]) for at in range(3))  # [ranks]
    fields.update(hidden_pct=round(100 * float(hidden.mean()), 1), wait_ms=round(float(waited.mean()), 1))
    fields.update(mb_gathered=round(float(num_bytes.sum()) / 1e6, 2), imbalance=round(plan.imbalance, 4))
    return {**fields, "nodes": plan.topology.num_nodes, "stages": plan.num_stages}


def share_hidden(trace: Any) -> float:
    from paddle_fm3.distributed.trace import hidden_us

    moving_us, both_us = hidden_us(trace.spans)
    return both_us / moving_us if moving_us else 1.0


def wait_ms(trace: Any) -> float:
    return sum(span.end_us - span.begin_us for span in trace.spans if span.track == "wait") / 1e3


if __name__ == "__main__":
    sys.exit(main())
