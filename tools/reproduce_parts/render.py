# SPDX-License-Identifier: Apache-2.0
"""docs/tables.md from results/*.jsonl: the newest run of each table beside the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from reproduce_parts import kernels, paper

Record = dict[str, Any]
NOT_YET = "Not run yet: `tools/reproduce.py {}`."
CPU_ONLY = "This project's GPU kernels are not in these records yet; the paper's figures stand alone."


def read(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def newest_run(records: Sequence[Record], table: int) -> list[Record]:
    """The passing lines of the newest run of a table; a line that failed its check is not shown."""
    mine = [one for one in records if one.get("reproduces") == table]
    if not mine:
        return []
    run = max(mine, key=lambda one: one["date"])["run"]
    return [one for one in mine if one["run"] == run and one["refcheck"] == "pass"]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(records: Sequence[Record]) -> str:
    one = records[0]
    return f"{one['device']}; commit {one['commit']}; {one['date'][:10]}."


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f} %"


def table_1(results: Path) -> list[str]:
    records = newest_run(read(results / "reproduce_cpu.jsonl"), 1)
    if not records:
        return [NOT_YET.format(1)]
    by_row = {one["row"]: one for one in records}
    parts = [f"**Simulated**, from real plans made on {origin(records)} Assumed: {records[0]['assumptions']}."]
    for kind in ("causal_document", "document"):
        head = ["configuration"]
        for sparsity in (70, 80, 86):
            head += [f"{sparsity} %: step", "paper", "attention", "paper"]
        rows = []
        for name, label in paper.TABLE_1_LABELS.items():
            row = [label]
            for sparsity in (70, 80, 86):
                one = by_row.get(f"{kind} {sparsity} {name}", {})
                names = ("gain_pct", "paper_gain_pct", "attention_gain_pct", "paper_attention_gain_pct")
                row += [percent(one.get(field)) for field in names]
            rows.append(row)
        parts += [f"Sequences with a {kind.replace('_', ' ')} mask; gains over the first line:", markdown(head, rows)]
    return [*parts, "The paper says “document mask”, which both tables may be; its own sequences are not published."]


def table_2(results: Path) -> list[str]:
    records = newest_run(read(results / "reproduce_cpu.jsonl"), 2)
    if not records:
        return [NOT_YET.format(2)]
    chunks = sorted({one["chunks_a_rank"] for one in records})
    cells = {(one["s"], one["chunks_a_rank"]): one for one in records}
    rows = []
    for s in sorted({one["s"] for one in records}):
        row = [f"{s:,}", *(f"{cells[s, n]['ms_median']:.3f}" if (s, n) in cells else "–" for n in chunks)]
        rows.append([*row, f"{cells[s, chunks[0]]['result_bytes'] / s:.0f}", "0"])
    head = [
        "keys N_K",
        *(f"{n} chunk{'s' if n > 1 else ''} a rank, ms" for n in chunks),
        "result, B a key",
        "bytes sent",
    ]
    return [
        f"**Measured here**: {origin(records)} Sampled columns were compared row by row with the global mask.",
        markdown(head, rows),
        "The paper's bound is O(n_r N_K) time and O(N_K) memory without communication. Here one counting table of the "
        "sequence replaces the pass over n_r chunks: O(s + N_K).",
    ]


def table_3(results: Path) -> list[str]:
    records = newest_run(read(results / "reproduce_cpu.jsonl"), 3)
    if not records:
        return [NOT_YET.format(3)]
    rows = []
    for one in records:
        published = paper.TABLE_3[one["row"]].get(one["algo"], (None, None))
        shown = [f"{x:.2f} %" if x is not None else "–" for x in published]
        rows.append(
            [one["row"], one["algo"],
             f"{one['subopt_vs_paper_best_pct']:.1f} %", f"{one['max_gap_vs_paper_best_pct']:.2f} %", *shown,
             f"{one['max_gap_vs_lb_pct']:.2f} %", f"{one['certified_optimal_pct']:.1f} %", f"{one['ms_mean']:.2f}"]
        )  # fmt: skip
    head = ["N, P, κ, w", "algorithm", "worse than best of lpt/p2/p3", "largest gap to it",
            "paper: worse", "paper: gap", "largest gap to the bound", "proven optimal", "ms"]  # fmt: skip
    return [
        f"**Measured here**: {origin(records)} Weights uniform in [1, w], which fits the paper's own figures.",
        markdown(head, rows),
        "The paper's optimum is the best solution that its own search found, so its last phase is 0 % suboptimal by "
        "definition. The three columns on the right compare with a lower bound that no assignment can beat. A "
        "negative gap: "
        "fm3 found a better assignment than all three in every instance.",
    ]


def table_5(results: Path) -> list[str]:
    records = newest_run(read(results / "reproduce_cpu.jsonl"), 5)
    if not records:
        return [NOT_YET.format(5)]
    cells = {one["row"]: one for one in records}
    labels = {"dual_chunk_allgather": "Megatron all-gather", "ring": "Megatron ring"}
    rows = []
    for (name, phase), (least, most, mean) in paper.TABLE_5.items():
        label = labels.get(name, "MagiAttention")
        ours = [cells.get(f"{name} {phase} {statistic}") for statistic in ("least", "most", "mean")]
        shown = [f"{1 + one['gain_pct'] / 100:.2f}×" if one else "not simulated" for one in ours]
        rows.append([label, phase, *shown, f"{least:.2f}×", f"{most:.2f}×", f"{mean:.2f}×"])
    head = ["against", "phase", "least", "most", "geometric mean", "paper: least", "most", "mean"]
    return [
        f"**Simulated**, from real plans made on {origin(records)} Assumed: {records[0]['assumptions']}.",
        markdown(head, rows),
        "Both sides use the same kernel rates here, so only layout, traffic and overlap differ. MagiAttention has "
        "planner and "
        "kernels of its own and is not simulated.",
    ]


def table_8(results: Path) -> list[str]:
    records = newest_run(read(results / "reproduce_cpu.jsonl"), 8)
    if not records:
        return [NOT_YET.format(8)]
    rows = []
    for one in records:
        attention_ms, schedule_ms = paper.TABLE_8[one["mask"]]
        rows.append(
            [one["mask"], f"{one['ms_median']:.2f}", f"{one['ms_max']:.2f}", f"{schedule_ms:.2f}",
             f"{one['simulated_attention_ms']:.2f}", f"{attention_ms:.2f}"]
        )  # fmt: skip
    head = [
        "mask",
        "plan, ms",
        "slowest sample",
        "paper: schedule, ms",
        "attention, ms (simulated)",
        "paper: attention, ms",
    ]
    return [
        f"**Plan time measured here**: {origin(records)} The whole plan: workload, balance, needs, routing; cold, "
        "one mask.",
        markdown(head, rows),
    ]


def passing(path: Path) -> list[Record]:
    """Attention records whose results were compared with a reference and agreed."""
    return [one for one in read(path) if one.get("bench") == "attention" and one.get("refcheck") == "pass"]


def kernel_table(results: Path, table: int) -> list[str]:
    figures, impls = (paper.TABLE_6, paper.TABLE_6_IMPLS) if table == 6 else (paper.TABLE_7, paper.TABLE_7_IMPLS)
    phase = "total" if table == 6 else "fwd"
    wanted = {"phase": phase, "dtype": "bfloat16"}
    measured = [one for one in passing(results / "attention_gpu.jsonl") if one["case"] in figures]
    measured = [one for one in measured if all(one[name] == value for name, value in wanted.items())]
    known = ("fm3", "fa3", "fa4", "flashmask_v3", "flex", "cudnn")
    peers = [name for name in known if any(one["impl"] == name for one in measured)]
    rows = []
    for case, published in figures.items():
        fm3 = kernels.newest(measured, case=case, impl="fm3")  # peers count in its run alone
        ours = [fm3 and kernels.newest(measured, case=case, impl=name, run=fm3["run"]) for name in peers]
        shown = [f"{one['tflops_exact']:.0f}" if one else "–" for one in ours]
        rows.append([case, *shown, *(f"{x:.0f}" for x in published)])
    head = ["case", *(f"{name}, here" for name in peers), *(f"{name}, paper" for name in impls)]
    if measured:
        lead = f"**Measured here**, TFLOP/s by visible pairs: {origin(measured[-1:])}"
        lead += " The paper counts whole 128 x 128 blocks."
    else:
        lead = f"TFLOP/s. {CPU_ONLY}"
    return [lead, markdown(head, rows), *cpu_share(results, phase)]


def cpu_share(results: Path, phase: str) -> list[str]:
    """What a CPU can show of the same masks: time against a dense peer of the same run."""
    measured = passing(results / "attention_cpu.jsonl")
    rows, used = [], []
    for case in kernels.CPU_CASES:
        wanted = {"case": case, "phase": phase, "dtype": "float32"}
        dense = kernels.newest(measured, impl="paddle_dense", **wanted)
        ours = dense and kernels.newest(measured, impl="fm3", run=dense["run"], **wanted)
        if ours and dense:
            used.append(ours)
            times = (ours["ms_median"], dense["ms_median"])
            shown = [f"{ms:.0f}" for ms in times]
            rows.append([case, *shown, f"{times[1] / times[0]:.2f}×", f"{ours['density_block']:.3f}"])
    if not rows:
        return []
    head = ["case, one head, float32", "fm3, ms", "paddle dense, ms", "faster", "visited share"]
    what = "forward and backward" if phase == "total" else "forward"
    return [f"On a CPU, {what}: {origin(used)}", markdown(head, rows)]


def table_4(results: Path) -> list[str]:
    measured = passing(results / "attention_gpu.jsonl")
    rows = []
    for (peer, scope), published in paper.TABLE_4.items():
        found = kernels.improvement(measured, peer, None if scope == "all" else scope)
        ours = [f"{x:+.1f} %" for x in found[:3]] + [str(found[3])] if found else ["–"] * 4
        rows.append([peer, scope, *ours, *(f"{x:+.1f} %" for x in published)])
    head = ["against", "lengths", "least", "most", "mean", "cases", "paper: least", "most", "mean"]
    lead = "**Measured here.**" if any(row[2] != "–" for row in rows) else CPU_ONLY
    return [lead, markdown(head, rows)]


TABLES: dict[int, tuple[str, Callable[[Path], list[str]]]] = {
    1: ("Training throughput of the 118B-A14B model", table_1),
    2: ("Distributed mask preprocessing", table_2),
    3: ("Balance ablation", table_3),
    4: ("Improvement over baselines, one GPU", table_4),
    5: ("Distributed attention against baselines", table_5),
    6: ("One GPU, five masks, forward and backward", lambda results: kernel_table(results, 6)),
    7: ("What skipping by lists is worth, forward", lambda results: kernel_table(results, 7)),
    8: ("Scheduling latency", table_8),
}


def render(results: Path) -> str:
    """The whole of docs/tables.md."""
    parts = [
        "# The paper's tables, beside what runs here",
        "Written by `tools/reproduce.py --render` from `results/`; `tools/reproduce.py N` runs table N. *Measured* "
        "ran on "
        "the named machine and passed a check of its result; *simulated* has real plans and modelled time.",
    ]
    for number, (title, table) in TABLES.items():
        parts += [f"## Table {number}. {title}", *table(results)]
    return "\n\n".join(parts) + "\n"
