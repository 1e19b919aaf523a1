# SPDX-License-Identifier: Apache-2.0
"""tools/cp_tables.py: which records count, and what is divided by what."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import cp_tables  # noqa: E402


def line(impl: str, total_ms: float, **changes: object) -> dict:
    fields = {
        "bench": "cp_gpu", "refcheck": "pass", "run": "r1", "date": "2026-01-02", "device": "GPU", "commit": "c",
        "ranks": 2, "s_local": 8192, "heads": "32/4", "mask": "causal_document", "fwd_ms": total_ms / 4,
        "bwd_ms": total_ms * 3 / 4, "fwd_still_ms": 0.8, "bwd_still_ms": 1.2, "comm_hidden_pct": 75.9,
        "imbalance": 0.0025, "mb_moved": 31.6, "bwd_style": "two",
    }  # fmt: skip
    return {**fields, "impl": impl, "total_ms": total_ms, **changes}


RECORDS = [
    line("fm3", 9.0, run="r0", date="2026-01-01"),
    line("ring", 99.0, run="r0", date="2026-01-01"),
    line("fm3", 2.5, copies_hidden_pct=92.4),
    line("fm3+one", 3.2, bwd_style="one"),
    line("dual_chunk_allgather", 4.0),
    line("contiguous_allgather", 3.0, refcheck="fail"),
    line("ring", 5.0),
    line("fm3_no_pruning", 3.0, mb_moved=100.2),
    line("fm3", 7.0, s_local=32768),
]


def cells(table: str, at: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[2 + at].strip("|").split("|")]


def test_step_times_are_those_of_the_newest_run() -> None:
    table = cp_tables.step_times(RECORDS)
    assert cells(table, 0) == [
        "2", "8K", "32/4", "causal document", "two", "0.625 / 1.88 / 2.5", "2.4", "1.88", "4", "–", "5", "1.60", "2.00",
        "2.00", "2.50", "75 %", "92 %", "0.25 %",
    ]  # fmt: skip
    in_turns = line("fm3", 2.5, run="r2", date="2026-01-03", fwd_shown_us=[200.0, 1.0], bwd_shown_us=[300.0, 1.0])
    ring = line("ring", 5.0, run="r2", date="2026-01-03")
    assert cells(cp_tables.step_times([in_turns, ring]), 0)[-4] == "2.50"  # 5.0 over 2.5 less 0.5
    assert cells(table, 1)[1] == "32K" and cells(table, 1)[6:11] == ["–", "5.25", "–", "–", "–"]
    assert "--ranks 2 " in table


def test_parts_left_out_are_over_fm3() -> None:
    row = cells(cp_tables.left_out(RECORDS), 0)
    assert row == ["2", "8K", "32/4", "causal document", "2.5", "–", "–", "1.20", "–", "32", "100"]
    assert len(cp_tables.left_out(RECORDS).splitlines()) == 2 + 1 + 2  # a case without ablations has no line


def test_late_keys_take_the_newest_line_of_a_case() -> None:
    late = {"bench": "cp_gpu", "impl": "late_keys", "refcheck": "pass", "device": "GPU", "commit": "c", "heads": "8/8",
            "source": "GPU 1", "case": "8k_full", "plain_ms": 1.0, "copies_ms": 0.1, "speed_ready": 1.0}  # fmt: skip
    records = [
        *RECORDS,
        late | {"speed_late": 0.5, "date": "2026-01-01"},
        late | {"speed_late": 0.98, "date": "2026-01-02"},
    ]
    assert cells(cp_tables.late_keys(records), 0)[-1] == "0.980"
    assert "Not measured yet" in cp_tables.late_keys(RECORDS)


def test_what_a_step_shows() -> None:
    times = {
        f"{phase}_{name}_us": [at + 0.26, 0.5] for phase in ("fwd", "bwd") for at, name in enumerate(cp_tables.SHOWN)
    }
    times |= {"num_turns": 99, "fwd_transfers_ms": 0.05, "bwd_transfers_ms": 0.12, "comm_hidden_pct_error": 1.2}
    table = cp_tables.shown([*RECORDS, line("fm3", 2.6, date="2026-01-03", run="r2", **times)])
    three = ["0.3 ± 0.5", "1.3 ± 0.5", "2.3 ± 0.5"]
    assert cells(table, 0) == ["2", "8K", "32/4", "causal document", "99", "50", *three, "120", *three, "75 ± 1.2 %"]
    assert len(table.splitlines()) == 2 + 1 + 2  # the other case was not measured so
    assert "Not measured yet" in cp_tables.shown(RECORDS)
