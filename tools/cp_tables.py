# SPDX-License-Identifier: Apache-2.0
"""The tables of context parallelism on GPUs, from results/cp_gpu.jsonl: step times beside all-gathers and a ring, one
part left out at a time, and a forward whose keys come late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpu_tables import cut, markdown

Record = dict[str, Any]
Case = tuple[int, int, str, str]  # ranks, rows a rank, heads, mask
ALL_GATHERS = ("dual_chunk_allgather", "contiguous_allgather")
ABLATIONS = ("fm3_no_balance", "fm3_no_overlap", "fm3_no_pruning", "fm3_no_hierarchy")
SHOWN = ("shown", "paced", "beside")
COMMAND = "tools/bench_cp.py --device gpu --ranks {ranks} --results results"


def newest(records: Iterable[Record]) -> dict[Case, dict[str, Record]]:
    """case -> impl -> line, of those that passed and belong to the newest run that measured fm3 there."""
    good = [one for one in records if one["bench"] == "cp_gpu" and one["refcheck"] == "pass" and "s_local" in one]
    good.sort(key=lambda one: one["date"])
    run = {_case(one): one["run"] for one in good if one["impl"] == "fm3"}
    found: dict[Case, dict[str, Record]] = {}
    for one in good:
        if one["run"] == run.get(_case(one)):
            found.setdefault(_case(one), {})[one["impl"]] = one
    return dict(sorted(found.items()))


def _case(one: Record) -> Case:
    return one["ranks"], one["s_local"], one["heads"], one["mask"]


def step_times(records: Iterable[Record]) -> str:
    """fm3 beside the all-gathers and the ring, and what would be left to gain if its transfers cost nothing."""
    rows, used = [], []
    for (ranks, s_local, heads, mask), lines in newest(records).items():
        ours = lines["fm3"]
        used.append(ours)
        calls = {line["bwd_style"]: line for line in lines.values() if line["impl"] in ("fm3", "fm3+one", "fm3+two")}
        gather = min((lines[name]["total_ms"] for name in ALL_GATHERS if name in lines), default=None)
        ring = lines["ring"]["total_ms"] if "ring" in lines else None
        still = ours["total_ms"] - _shown_ms(ours)
        rows.append([
            f"{ranks}", f"{s_local // 1024}K", heads, mask.replace("_", " "), ours["bwd_style"], _three(ours),
            *(f"{calls[style]['bwd_ms']:.3g}" if style in calls else "–" for style in ("one", "two")),
            *(f"{lines[name]['total_ms']:.3g}" if name in lines else "–" for name in (*ALL_GATHERS, "ring")),
            *(_ratio(theirs, time_ms) for time_ms in (ours["total_ms"], still) for theirs in (gather, ring)),
            *(_hidden(ours, name) for name in ("comm_hidden_pct", "copies_hidden_pct")),
            f"{100 * ours['imbalance']:.2f} %",
        ])  # fmt: skip
    header = ["ranks", "rows a rank", "heads", "mask", "backward calls", "fm3", "backward in one call", "in two",
              "dual-chunk all-gather", "contiguous all-gather", "ring",
              "best all-gather ÷ fm3", "ring ÷ fm3", "all-gather ÷ fm3's kernels", "ring ÷ fm3's kernels", "hidden",
              "copies hidden", "imbalance"]  # fmt: skip
    caption = (
        'Milliseconds of forward / backward / both, the slowest rank\'s; "kernels": the step less what it shows of its '
        'transfers; "hidden": of the time that these take alone; "copies hidden": beside a step without copies alone.'
    )
    return _table(header, rows, used, caption)


def left_out(records: Iterable[Record]) -> str:
    """fm3 with one part left out at a time: total time over fm3's."""
    rows, used = [], []
    for (ranks, s_local, heads, mask), lines in newest(records).items():
        present = [name for name in ABLATIONS if name in lines]
        if not present:
            continue
        used.append(lines["fm3"])
        total = lines["fm3"]["total_ms"]
        rows.append([
            f"{ranks}", f"{s_local // 1024}K", heads, mask.replace("_", " "), f"{total:.3g}",
            *(_ratio(lines[name]["total_ms"], total) if name in lines else "–" for name in ABLATIONS),
            *(f"{lines[name]['mb_moved']:.0f}" if name in lines else "–" for name in ("fm3", "fm3_no_pruning")),
        ])  # fmt: skip
    header = ["ranks", "rows a rank", "heads", "mask", "fm3, ms", *(name.removeprefix("fm3_") for name in ABLATIONS),
              "MB moved", "MB without pruning"]  # fmt: skip
    return _table(header, [[cell.replace("_", " ") for cell in row] for row in rows], used, "Total time over fm3's.")


def late_keys(records: Iterable[Record]) -> str:
    """One forward on one GPU, half of its keys brought by copy engines while it runs."""
    found: dict[tuple[str, ...], Record] = {}
    for one in sorted(records, key=lambda one: one["date"]):
        if one["impl"] == "late_keys" and one["refcheck"] == "pass":
            found[one["source"], one["case"], one["heads"]] = one
    rows = [
        [one["case"], one["heads"], one["source"], f"{one['plain_ms']:.4g}", f"{one['copies_ms']:.3g}",
         cut(one["speed_ready"], 3), cut(one["speed_late"], 3)]
        for one in found.values()
    ]  # fmt: skip
    header = ["case", "heads", "keys from", "all keys in place, ms", "last copy in, ms", "speed with flags",
              "speed with late keys"]  # fmt: skip
    caption = "Speeds are fractions of the same kernel's with all keys in place and no flags."
    return _table(header, rows, list(found.values()), caption, "tools/bench_cp.py --device gpu --late-keys 1")


def shown(records: Iterable[Record]) -> str:
    """What fm3's steps show of their transfers, where that was measured in turns."""
    rows, used = [], []
    for (ranks, s_local, heads, mask), lines in newest(records).items():
        ours = lines["fm3"]
        if "fwd_shown_us" not in ours:
            continue
        used.append(ours)
        transfers_us = [1e3 * ours[f"{phase}_transfers_ms"] for phase in ("fwd", "bwd")]
        rows.append([
            f"{ranks}", f"{s_local // 1024}K", heads, mask.replace("_", " "), f"{ours['num_turns']}",
            *(
                cell
                for phase, alone_us in zip(("fwd", "bwd"), transfers_us, strict=True)
                for cell in (f"{alone_us:.0f}", *(_mean(ours[f"{phase}_{name}_us"]) for name in SHOWN))
            ),
            _hidden(ours, "comm_hidden_pct"),
        ])  # fmt: skip
    header = ["ranks", "rows a rank", "heads", "mask", "turns",
              *(f"{phase}: {name}" for phase in ("forward", "backward") for name in ("transfers", *SHOWN)),
              "hidden"]  # fmt: skip
    caption = (
        'µs, ± standard error. "transfers": alone; "shown": how much longer a phase takes than its kernels alone: '
        'nothing is copied and nobody waits; "paced": so without the copies alone; "beside": with copies that nobody '
        "waits for."
    )
    return _table(header, rows, used, caption)


def _shown_ms(one: Record) -> float:
    """What a step shows of its transfers. Turns are taken without a pause, at other clocks than the timed loops: their
    difference counts, not their times."""
    if "fwd_shown_us" in one:
        return max(0.0, one["fwd_shown_us"][0] + one["bwd_shown_us"][0]) / 1e3
    return one["total_ms"] - one["fwd_still_ms"] - one["bwd_still_ms"]


def _mean(both: Sequence[float]) -> str:
    return f"{both[0]:.1f} ± {both[1]:.1f}"


def _hidden(one: Record, name: str) -> str:
    if name not in one:
        return "–"
    error = f" ± {one[name + '_error']:.1f}" if name + "_error" in one else ""
    return f"{cut(one[name], 0)}{error} %"


def _three(one: Record) -> str:
    return " / ".join(f"{one[name]:.3g}" for name in ("fwd_ms", "bwd_ms", "total_ms"))


def _ratio(theirs: float | None, ours: float) -> str:
    return "–" if theirs is None else cut(theirs / ours, 2)


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], used: Sequence[Record], text: str, command: str = COMMAND
) -> str:
    if "{ranks}" in command:
        command = command.format(ranks=" ".join(sorted({str(one["ranks"]) for one in used})) or "2")
    if not rows:
        return f"Not measured yet: `{command}`.\n"
    devices, commits = (", ".join(sorted({one[key] for one in used})) for key in ("device", "commit"))
    day = max(one["date"] for one in used)[:10]
    return "\n".join([*markdown(header, rows), "", f"{text} {devices}; commit {commits}; {day}; `{command}`."]) + "\n"


TABLES: dict[str, Callable[[Iterable[Record]], str]] = {
    "cp_gpu": step_times,
    "cp_gpu_shown": shown,
    "cp_gpu_left_out": left_out,
    "cp_gpu_late_keys": late_keys,
}
