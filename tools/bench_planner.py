#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the context-parallel planner, beside the paper's algorithm in the same run, and checks what it measures.

    tools/bench_planner.py balance     # the paper's table 3, with gaps to a proven bound
    tools/bench_planner.py plan        # latency of a whole plan (table 8), up to 2M tokens over 256 ranks
    tools/bench_planner.py traffic     # imbalance and bytes of every strategy, CP 4 to 32
    tools/bench_planner.py sim         # tables 1 and 5 on simulated time; then 1,024 and 16,384 GPUs
    tools/bench_planner.py all --results results

Each appends to RESULTS/<bench>_cpu.jsonl (with --results) and prints a table. --quick takes fewer samples.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # "on one core" holds for the NumPy baseline too

from bench_planner_parts import balance, latency, sim, traffic  # noqa: E402

from paddle_fm3.testing import bench  # noqa: E402

BENCHES = {"balance": balance, "plan": latency, "traffic": traffic, "sim": sim}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=[*BENCHES, "all"])
    parser.add_argument("--quick", action="store_true", help="fewer samples, for a look")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="append the records there")
    arguments = parser.parse_args(argv)
    identity = bench.RunIdentity.of_this_process(bench.cpu_name())
    is_fine = True
    for name, part in BENCHES.items():
        if arguments.bench not in (name, "all"):
            continue
        records = []
        for fields in part.run(is_quick=arguments.quick):
            impl, refcheck = fields.pop("impl", "fm3"), fields.pop("refcheck")
            rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in fields.items()}
            records.append(bench.record(identity, name, impl, refcheck=refcheck, **rounded))
        print(bench.format_table(records, part.COLUMNS))
        is_fine &= all(record["refcheck"] == "pass" for record in records)
        if arguments.results:
            bench.append_records(arguments.results / f"{name}_cpu.jsonl", records)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
