#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the paper's tables: for real what this machine can, simulated and marked as such what it cannot.

    tools/reproduce.py 3               run table 3, print it beside the paper's figures, keep the records
    tools/reproduce.py 1 5 --quick     fewer samples, for a look
    tools/reproduce.py all
    tools/reproduce.py --render        only rewrite docs/tables.md from results/
    tools/reproduce.py --check         exit status 1 if docs/tables.md is not what results/ give

Tables 2, 3 and 8 (planning) run on any CPU. 1 and 5 need a cluster and are simulated from real plans. 4, 6 and 7 are
kernels: tools/bench_attention.py measures them on a GPU, or the 8K masks of one head on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from reproduce_parts import distributed, kernels, planning, render  # noqa: E402

from paddle_fm3.testing import bench  # noqa: E402

RUNNERS = {
    1: distributed.table_1,
    2: planning.table_2,
    3: planning.table_3,
    5: distributed.table_5,
    8: planning.table_8,
}
KERNEL_TABLES = (4, 6, 7)
PAGE = ROOT / "docs" / "tables.md"


def run_table(table: int, *, is_quick: bool) -> list[bench.Record]:
    identity = bench.RunIdentity.of_this_process(bench.cpu_name())
    records = []
    for fields in RUNNERS[table](is_quick=is_quick):
        kind, is_fine = fields.pop("bench"), fields.pop("refcheck")
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
        impl = rounded.get("algo", "fm3")
        records.append(bench.record(identity, kind, impl, refcheck=is_fine, reproduces=table, **rounded))
    return records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="1 to 8, or all")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results", help="folder of the records (default: results/)"
    )
    parser.add_argument("--json", action="store_true", help="print the records instead of the tables")
    parser.add_argument("--render", action="store_true", help="rewrite docs/tables.md")
    parser.add_argument("--check", action="store_true", help="exit status 1 if docs/tables.md is out of date")
    arguments = parser.parse_args(argv)
    try:
        tables = sorted(set(range(1, 9)) if "all" in arguments.tables else {int(text) for text in arguments.tables})
    except ValueError:
        parser.error(f"tables {arguments.tables} are no numbers from 1 to 8")
    if any(not 1 <= table <= 8 for table in tables):
        parser.error(f"tables {tables} are not all from 1 to 8")
    if not (tables or arguments.render or arguments.check):
        parser.error("give a table, --render or --check")

    status = 0
    if any(table in KERNEL_TABLES for table in tables):
        status |= kernels.measure(arguments.results, is_quick=arguments.quick)
    for table in tables:
        records = run_table(table, is_quick=arguments.quick) if table in RUNNERS else []
        if records:
            bench.append_records(arguments.results / "reproduce_cpu.jsonl", records)
            status |= any(record["refcheck"] != "pass" for record in records)
        if arguments.json:
            print(*map(json.dumps, records), sep="\n")
        else:
            title, show = render.TABLES[table]
            print(f"\nTable {table}. {title}\n", *show(arguments.results), sep="\n")
    if arguments.render:
        PAGE.write_text(render.render(arguments.results), encoding="utf-8")
    if arguments.check and render.render(arguments.results) != PAGE.read_text(encoding="utf-8"):
        print("docs/tables.md is not what results/ give: run tools/reproduce.py --render")
        status = 1
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
