# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_tables.py: which records count, how absent peers are scaled, what is averaged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import gpu_tables  # noqa: E402


def line(case: str, impl: str, phase: str, tflops: float, **changes: object) -> dict:
    fields = {"bench": "attention", "refcheck": "pass", "dtype": "bfloat16", "run": "r1", "date": "2026-01-02",
              "device": "GPU", "commit": "c", "deterministic": phase == "fwd"}  # fmt: skip
    return {**fields, "case": case, "impl": impl, "phase": phase, "tflops_exact": tflops, **changes}


def lines_of(case: str, impl: str, *tflops: float, **changes: object) -> list[dict]:
    return [line(case, impl, phase, x, **changes) for phase, x in zip(gpu_tables.PHASES, tflops, strict=True)]


def test_only_passing_lines_of_the_run_of_the_newest_fm3_line_count() -> None:
    records = [
        *lines_of("8k_full", "fm3", 1, 1, 1, run="r0", date="2026-01-01"),
        *lines_of("8k_full", "fa4", 999, 999, 999, run="r0", date="2026-01-01"),
        *lines_of("8k_full", "fm3", 700, 600, 630),
        line("8k_full", "fm3", "bwd", 540, deterministic=True),
        *lines_of("8k_full", "flex", 5, 5, 5, refcheck="fail"),
        *lines_of("8k_full", "cudnn", 6, 6, 6, dtype="float16"),
    ]
    figures = gpu_tables.collect(records)
    assert figures == {"8k_full": {"fm3": {"fwd": 700, "bwd": 600, "total": 630}, "fm3_deterministic": {"bwd": 540}}}


def test_absent_peers_are_scaled_by_fa4() -> None:
    figures = gpu_tables.collect(
        [*lines_of("8k_full", "fm3", 700, 600, 630), *lines_of("8k_full", "fa4", 648 * 0.9, 597 * 0.9, 611 * 0.9),
         *lines_of("8k_causal", "fm3", 1, 1, 1), *lines_of("8k_causal", "fa4", 596 * 2, 559 * 2, 569 * 2)]
    )  # fmt: skip
    assert gpu_tables.scaled(figures, "8k_full", "fa3") == pytest.approx({"fwd": 605.7, "bwd": 513, "total": 536.4})
    # fa4 has no such mask: the causal case of the same length is the yardstick
    assert gpu_tables.scaled(figures, "8k_qk_sparse", "flashmask_v3") == pytest.approx(
        dict.fromkeys(gpu_tables.PHASES, 1070)
    )
    assert gpu_tables.scaled(figures, "32k_full", "fa3") is None


def test_flex_is_the_yardstick_where_a_run_has_no_fa4() -> None:
    records = [*lines_of("8k_full", "fm3", 700, 600, 630), *lines_of("8k_full", "flex", 462 * 0.9, 398 * 1.1, 415)]
    figures = gpu_tables.collect(records)
    assert gpu_tables.scaled(figures, "8k_full", "fa4") == pytest.approx({"fwd": 583.2, "bwd": 656.7, "total": 611})
    table = gpu_tables.anchor_cases(records)
    assert "| FA4, scaled |" in table and "| 583 / 657 / 611 |" in table and "FlexAttention here ÷ then" in table
    assert gpu_tables.scaled(gpu_tables.collect([*lines_of("8k_full", "fm3", 1, 1, 1)]), "8k_full", "fa4") is None


def test_tables_state_ratios_to_the_best_peer_and_their_mean() -> None:
    records = [
        *lines_of("8k_full", "fm3", 700, 600, 630), line("8k_full", "fm3", "bwd", 540, deterministic=True),
        *lines_of("8k_full", "fa4", 648, 597, 611), *lines_of("8k_full", "cudnn", 500, 600, 700),
        *lines_of("8k_causal", "fm3", 615, 560, 577), *lines_of("8k_causal", "fa4", 596, 559, 569),
    ]  # fmt: skip
    table = gpu_tables.anchor_cases(records)
    assert (
        "| 8k_full | 700 / 600 / 630 | 648 / 597 / 611 | 500 / 600 / 700 | 673 / 570 / 596 | 1.04 | 0.90 | 0.90 |"
        in table
    )
    assert "| fm3 | FA4 | cuDNN | FA3, scaled |" in table  # a column of a peer that no case has is left out
    assert [gpu_tables._show(x) for x in (0.9983, 1.0, 1.05, 0.9, None)] == ["0.99", "1.00", "1.05", "0.90", "–"]
    assert "| 8k_causal | 615 / 560 / 577 | 596 / 559 / 569 | – | 615 / 551 / 568 | 1.00 | 1.01 | – |" in table
    assert "forward 1.019, total 0.955" in table
    assert "At least the best: forward in 2 of 2 cases, total in 1 of 2." in table
    assert gpu_tables.other_cases([]).startswith("Not measured yet")
    other = gpu_tables.other_cases([*records, *lines_of("8k_qk_sparse", "fm3", 642, 535, 561.75)])
    assert "| 8k_qk_sparse | 642 / 535 / 562 | – | 535 / 535 / 535 | – | 1.20 | 1.05 | – |" in other
    assert "1.05 times its forward in 1 of 1, 1.03 times its total in 1 of 1" in other
    old = lines_of("8k_full", "fm3", 1, 1, 1, run="r0", date="2026-01-01", commit="old")
    assert "commit c; 2026-01-02;" in gpu_tables.anchor_cases([*old, *records])  # of the lines shown alone


def test_other_heads_and_fp16_have_rows_of_their_own() -> None:
    records = [*lines_of("8k_full", "fm3", 700, 600, 630), *lines_of("8k_full_d64", "fm3", 400, 300, 330)]
    half = {"dtype": "float16", "commit": "h"}
    records += [*lines_of("8k_full", "fm3", 710, 610, 640, **half), *lines_of("8k_full", "fa4", 1, 2, 3, **half)]
    table = gpu_tables.head_dims(records)
    assert "| 8k_full_d64 | 400 / 300 / 330 | – |" in table and "8k_full |" not in table
    assert "| 8k_full, fp16 | 710 / 610 / 640 | 1 / 2 / 3 |" in table
    assert "commit c, h;" in table


def test_geometric_mean_says_what_is_missing() -> None:
    assert gpu_tables.geometric_mean([2.0, 0.5]) == "1.000"
    assert gpu_tables.geometric_mean([2.0, None]) == "2.000 (of 1)"
