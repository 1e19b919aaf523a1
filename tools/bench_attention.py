#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention on this machine, beside its peers in the same run, and checks every number it times.

    tools/bench_attention.py --device cpu                     # the default cases, fm3 and its peers
    tools/bench_attention.py --device cpu --case 8k_window --impl fm3 --json results/attention_cpu.jsonl
    tools/bench_attention.py --device cpu --bench memory      # peak memory above inputs and outputs
    tools/bench_attention.py --device gpu --json results/attention_gpu.jsonl
    tools/bench_attention.py --device gpu --case 8k_full:fm3,fa4 --case 8k_full:fm3:float16      # with peers, dtype
    tools/bench_attention.py --device gpu --bench schedule    # time to prepare a mask

A device's part is paddle_fm3/testing/bench_<device>.py; it provides CASES, IMPLS, COLUMNS and
`run(bench, options)`, which yields one record a line of the table. Each record is printed and kept at once: a run
that is cut short keeps what it measured.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--bench", choices=("attention", "memory", "schedule"), default="attention")
    parser.add_argument("--case", action="append", default=[], help="case name; may be repeated (default: a set)")
    parser.add_argument("--impl", action="append", default=[], help="fm3 or a peer; may be repeated (default: all)")
    parser.add_argument("--dtype", action="append", default=[], help="float32, bfloat16, float16; may be repeated")
    parser.add_argument("--repeats", type=int, help="timings of each call")
    parser.add_argument("--rounds", type=int, help="GPU: blocks of timings of each call, in turned order (default: 2)")
    parser.add_argument("--threads", type=int, help="CPU threads of every impl (default: all usable cores)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the records to this file, one a line")
    parser.add_argument("--commit", help="of the measured tree, where it is a copy without git")
    parser.add_argument("--list", action="store_true", help="print the device's case and impl names and stop")
    return parser.parse_args(arguments)


def prepare_cpu_libraries(threads: int) -> None:
    """Same threads for every impl, and NumPy's own choice of kernel: an override would lower the bar."""
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(name, None)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "FLAGS_paddle_num_threads"):
        os.environ[name] = str(threads)


def main() -> int:
    arguments = parse_arguments()
    threads = arguments.threads or len(os.sched_getaffinity(0))
    if arguments.device == "cpu":
        prepare_cpu_libraries(threads)  # before NumPy is imported
    device = importlib.import_module(f"paddle_fm3.testing.bench_{arguments.device}")
    from paddle_fm3.testing import bench

    if arguments.bench not in device.COLUMNS:
        print(f"bench_attention: {arguments.device} has no bench {arguments.bench!r}, only {', '.join(device.COLUMNS)}")
        return 2
    if arguments.list:
        print("cases:", *device.CASES, sep="\n  ")
        print("impls:", *device.IMPLS, sep="\n  ")
        return 0
    options = bench.BenchOptions(
        tuple(arguments.case), tuple(arguments.impl), tuple(arguments.dtype), arguments.repeats, threads,
        arguments.commit, arguments.rounds,
    )  # fmt: skip
    records = []
    for record in device.run(arguments.bench, options):
        records.append(record)
        print(bench.format_table([record], device.COLUMNS[arguments.bench]).splitlines()[-1], flush=True)
        if arguments.json:
            bench.append_records(arguments.json, [record])
    print(bench.format_table(records, device.COLUMNS[arguments.bench]))
    return 0 if all(one["refcheck"] == "pass" for one in records) else 1


if __name__ == "__main__":
    sys.exit(main())
