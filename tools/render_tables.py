#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of figures in README.md and docs/*.md from results/*.jsonl.

    tools/render_tables.py            rewrite every table in place
    tools/render_tables.py --check    change nothing; exit status 1 if a table is out of date

A table stands between two marker lines and is never edited by hand:

    <!-- table: attention_cpu -->
    <!-- end table -->

TABLES below says what each name means. Of several measurements of one cell the newest that passed its check
against the reference counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import cp_tables  # noqa: E402
import gpu_tables  # noqa: E402
from reproduce_parts import render as paper_tables  # noqa: E402

PAPER_PAGE = ROOT / "docs" / "tables.md"  # written as a whole
Record = dict[str, Any]

MARKED = re.compile(r"(<!-- table: (?P<name>\w+) -->\n)(?P<body>.*?)(<!-- end table -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A pivot of one results file: one line a distinct `rows`, one column a distinct `columns`."""

    source: str  # file in results/
    bench: str
    rows: tuple[str, ...]  # fields that name a line
    columns: tuple[str, ...]  # fields that name a column
    cell: str  # format of one record
    caption: str  # what a cell shows
    command: str  # how to measure it


TABLES = {
    "attention_cpu": Table(
        "attention_cpu.jsonl", "attention", ("case", "dtype"), ("impl", "phase"), "{ms_median:.4g}",
        "Median milliseconds", "tools/bench_attention.py --device cpu --json results/attention_cpu.jsonl",
    ),
    "memory_cpu": Table(
        "memory_cpu.jsonl", "memory", ("case", "dtype", "phase"), ("impl",), "{peak_extra_bytes:,}",
        "Peak bytes above inputs and outputs",
        "tools/bench_attention.py --device cpu --bench memory --json results/memory_cpu.jsonl",
    ),
    "schedule_gpu": Table(
        "attention_gpu.jsonl", "schedule", ("case",), ("impl",),
        "{us_scan_median:.1f} + {us_lists_median:.1f} = {us_median:.1f}; {us_cold_median:.1f}",
        "Microseconds to prepare a mask: scan of its bounds + lists, in a row; a single time, nothing of it in the L2",
        f"{gpu_tables.COMMAND} --bench schedule",
    ),
    "cp_cpu": Table(
        "cp_cpu.jsonl", "cp", ("impl",), ("ranks",), "{ms_median:.0f} ({ms_p10:.0f} to {ms_p90:.0f}); {held_mb:.3g} MB",
        "Milliseconds of a step by ranks, median (10th to 90th percentile); what a rank keeps for the backward; "
        "16,384 tokens in documents, 4 query and 2 key/value heads of 64, one thread a rank",
        "tools/bench_cp.py --results results && tools/bench_cp.py --ranks 2 --results results",
    ),
    "balance": Table(
        "balance_cpu.jsonl", "balance", ("row",), ("algo",),
        "{subopt_vs_best_pct:.1f} % / {max_gap_vs_best_pct:.2f} %",
        "Instances worse than the best found / largest gap to it",
        "tools/bench_planner.py balance --results results",
    ),
    "fidelity": Table(
        "fidelity_cpu.jsonl", "training", ("arm", "noise_between_seeds"), ("seed",),
        "{loss_final:.5f} ({final_gap:+.5f}; steps 1 to 20: {early_gap:.0e})",
        "Final loss by seed (minus that of dense; largest relative difference of an early step)",
        "tools/loss_fidelity.py --json results/fidelity_cpu.jsonl --picture docs/fidelity.png",
    ),
    "training": Table(
        "training_cpu.jsonl", "training", ("config",), ("cp",),
        "{loss_first:.4f} → {loss_last:.4f}, {tokens_per_s:.0f} tokens/s",
        "Loss and speed by context-parallel ranks", "make demo DEMO_ARGS='--json results/training_cpu.jsonl'",
    ),
}  # fmt: skip


# Tables that put peers side by side: text from the records of results/attention_gpu.jsonl.
GPU_TABLES = {
    "attention_gpu": gpu_tables.anchor_cases,
    "attention_gpu_masks": gpu_tables.other_cases,
    "attention_gpu_heads": gpu_tables.head_dims,
}


def read_records(path: Path) -> list[Record]:
    """Every line of a results file, or none if it is not there."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def newest_cells(table: Table, records: Iterable[Record]) -> dict[tuple, dict[tuple, Record]]:
    """row key -> column key -> newest record that passed; keys in order of first appearance."""
    cells: dict[tuple, dict[tuple, Record]] = {}
    for record in sorted(records, key=lambda record: record["date"]):
        if record["bench"] == table.bench and record["refcheck"] == "pass":
            row, column = (tuple(record[name] for name in names) for names in (table.rows, table.columns))
            cells.setdefault(row, {})[column] = record
    return cells


def render(table: Table, records: Iterable[Record]) -> str:
    """The Markdown between the markers, ending in a newline."""
    cells = newest_cells(table, records)
    if not cells:
        return f"Not measured yet: `{table.command}`.\n"
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [[*table.rows, *(" ".join(str(part) for part in column) for column in columns)]]
    for row, by_column in cells.items():
        values = [table.cell.format(**by_column[column]) if column in by_column else "–" for column in columns]
        lines.append([*(str(part) for part in row), *values])
    used = [record for by_column in cells.values() for record in by_column.values()]
    return "\n".join([*_markdown(lines), "", _caption(table, used)]) + "\n"


def _markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    header, *body = (f"| {' | '.join(line)} |" for line in lines)
    return [header, f"|{'---|' * len(lines[0])}", *body]


def _caption(table: Table, used: Sequence[Record]) -> str:
    devices = ", ".join(sorted({record["device"] for record in used}))
    commits = ", ".join(sorted({record["commit"] for record in used}))
    days = sorted({record["date"][:10] for record in used})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{table.caption}. {devices}; commit {commits}; {when}; `{table.command}`."


def render_document(text: str, results: Path) -> str:
    """The document with every marked table rewritten.

    Raises:
        KeyError: a marker names no table.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name in GPU_TABLES:
            return match[1] + GPU_TABLES[name](read_records(results / "attention_gpu.jsonl")) + match[4]
        if name == "training_gpu":
            return match[1] + gpu_tables.training(read_records(results / "training_gpu.jsonl")) + match[4]
        if name in cp_tables.TABLES:
            return match[1] + cp_tables.TABLES[name](read_records(results / "cp_gpu.jsonl")) + match[4]
        if name not in TABLES:
            known = ", ".join([*TABLES, *GPU_TABLES, *cp_tables.TABLES, "training_gpu"])
            raise KeyError(f"render_tables: no table {name!r}; known: {known}")
        table = TABLES[name]
        return match[1] + render(table, read_records(results / table.source)) + match[4]

    return MARKED.sub(replace, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="report tables that are out of date, change nothing")
    arguments = parser.parse_args()
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        text = path.read_text(encoding="utf-8")
        if path == PAPER_PAGE:
            rendered = paper_tables.render(ROOT / "results")
        else:
            rendered = render_document(text, ROOT / "results")
        if rendered != text:
            stale.append(path.relative_to(ROOT))
            if not arguments.check:
                path.write_text(rendered, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'out of date; run tools/render_tables.py' if arguments.check else 'rewritten'}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
