# SPDX-License-Identifier: Apache-2.0
"""tools/reproduce.py: what it runs is checked, what it shows is what it recorded."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from reproduce_parts import distributed, kernels, paper, planning, render, samples  # noqa: E402

from paddle_fm3.distributed.planner import build_plan  # noqa: E402
from paddle_fm3.schedule import build_schedule  # noqa: E402


@pytest.fixture(scope="module")
def reproduce():
    spec = importlib.util.spec_from_file_location("reproduce", ROOT / "tools" / "reproduce.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("table", [2, 3, 5, 8])
def test_a_table_runs_records_and_shows(reproduce, table, tmp_path, capsys):
    assert reproduce.main([str(table), "--quick", "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "reproduce_cpu.jsonl").read_text().splitlines()]
    assert records and all(one["reproduces"] == table and one["refcheck"] == "pass" for one in records)
    assert {"schema", "bench", "commit", "date", "device", "impl", "run"} <= set(records[0])
    if table == 5:
        assert "**Simulated**" in shown and all("assumptions" in one for one in records)
    else:
        assert "easured here**" in shown and records[0]["device"] in shown
    if table == 3:
        fm3 = {one["row"]: one for one in records if one["algo"] == "fm3"}
        assert set(fm3) == set(paper.TABLE_3)
        assert all(one["max_gap_vs_lb_pct"] < 0.5 for one in fm3.values())
        p3 = [one for one in records if one["algo"] == "p3"]
        assert all(one["subopt_vs_paper_best_pct"] == 0 for one in p3)  # best of its own kind, by definition
    if table == 8:
        assert all(one["ms_median"] < one["ms_max"] * 1.001 for one in records)
        assert {one["mask"] for one in records} == set(paper.TABLE_8)


def test_table_1_has_every_row_of_the_paper(monkeypatch):
    labels = {name: label for name, label in paper.TABLE_1_LABELS.items() if name != "paper"}  # slow, and no row of it
    monkeypatch.setattr(paper, "TABLE_1_LABELS", labels)
    records = distributed.table_1(is_quick=True, kinds=("document",), sparsities=(86,))
    rows = {one["row"]: one for one in records}
    assert set(rows) == {f"document 86 {name}" for name in labels}
    best = rows["document 86 fm3"]
    assert best["paper_gain_pct"] == pytest.approx(100 * (902.1 / 812.4 - 1))
    assert best["gain_pct"] > 0 and best["refcheck"]
    assert rows["document 86 dual_chunk_allgather"]["gain_pct"] == 0


def test_checks_notice_a_plan_that_lost_work():
    mask = samples.sample_mask("document", 32768, 0)
    plan = build_plan(mask, 4)
    assert planning.counts_every_tile(plan, mask)
    tiles = plan.chunk_tiles.copy()
    tiles[3, 0] -= 1
    assert not planning.counts_every_tile(replace(plan, chunk_tiles=tiles), mask)


def test_checks_notice_a_wrong_localisation():
    s = 4096
    mask = samples.builders.eviction(np.random.default_rng(0).integers(0, s + 1, (1, 1, s)))
    partition = planning.interleaved(s, 4)
    local = planning.localize_mask(mask, partition, 1)
    assert planning.is_localised_right(mask, partition, local)
    shifted = replace(local, lt_begin=(local.lt_begin + 1).astype(np.int32))
    assert not planning.is_localised_right(mask, partition, shifted)


@pytest.mark.parametrize(("kind", "sparsity"), [("document", 0.70), ("causal_document", 0.86)])
def test_masks_have_the_sparsity_that_they_are_made_for(kind, sparsity):
    mask = samples.mask_of_sparsity(kind, 32768, sparsity, 3)
    assert 1 - build_schedule(mask).density_block == pytest.approx(sparsity, abs=0.005)
    with pytest.raises(ValueError, match="at sparsity 0.3"):
        samples.mask_of_sparsity("causal_document", 8192, 0.3, 0)


GPU_RECORD = {
    "bench": "attention", "phase": "total", "dtype": "bfloat16", "refcheck": "pass", "run": "r1", "device": "H", "commit": "c",
    "date": "2026-01-02", "deterministic": False,
}  # fmt: skip


def test_kernel_tables_take_the_newest_passing_record_of_one_run(tmp_path):
    lines = [
        {**GPU_RECORD, "case": "8k_full", "impl": "fm3", "tflops_exact": 660},
        {**GPU_RECORD, "case": "8k_full", "impl": "flex", "tflops_exact": 400},
        {**GPU_RECORD, "case": "8k_full", "impl": "flex", "tflops_exact": 1, "run": "r0", "date": "2026-01-01"},
        {**GPU_RECORD, "case": "8k_full", "impl": "flex", "tflops_exact": 2, "date": "2026-01-03", "refcheck": "fail"},
        {**GPU_RECORD, "case": "128k_full", "impl": "fm3", "tflops_exact": 600},
        {
            **GPU_RECORD,
            "case": "128k_full",
            "impl": "fm3",
            "tflops_exact": 3,
            "deterministic": True,
            "date": "2026-02-01",
        },
        {**GPU_RECORD, "case": "128k_full", "impl": "flex", "tflops_exact": 500},
    ]
    (tmp_path / "attention_gpu.jsonl").write_text("\n".join(map(json.dumps, lines)))
    least, most, mean, count = kernels.improvement(lines, "flex", None)
    assert (least, most, count) == (pytest.approx(20), pytest.approx(65), 2) and mean == pytest.approx(42.5)
    table = "\n".join(render.kernel_table(tmp_path, 6))
    assert "| 8k_full | 660 | 400 | 604 | 570 | 394 | 514 |" in table
    assert "| 8k_causal | – | – | 580 |" in table
    assert "| flex | 8k | +65.0 % | +65.0 % | +65.0 % | 1 | +33.6 % |" in "\n".join(render.table_4(tmp_path))


def test_without_records_nothing_is_made_up(tmp_path):
    page = render.render(tmp_path)
    for table in (1, 2, 3, 5, 8):
        assert f"Not run yet: `tools/reproduce.py {table}`." in page
    assert "| 8k_full | 604 | 570 | 394 | 514 |" in page  # the paper's, alone
    assert render.CPU_ONLY in page


def test_wrong_arguments_are_refused(reproduce):
    for argv in ([], ["9"], ["three"]):
        with pytest.raises(SystemExit) as stopped:
            reproduce.main(argv)
        assert stopped.value.code == 2
