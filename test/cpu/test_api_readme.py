# SPDX-License-Identifier: Apache-2.0
"""The README's example runs, its tables are those of results/, and the verbs it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import render_tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    subprocess.run([sys.executable, "-W", "ignore", "-c", example], cwd=ROOT, check=True, timeout=120)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_verbs_exist():
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"make ([a-z-]+)", README))
    assert verbs >= {"demo", "test", "build", "lint", "bench"}
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_tables_are_those_of_the_results():
    assert render_tables.render_document(README, ROOT / "results") == README, "run tools/render_tables.py"


RECORD = {
    "schema": 1, "bench": "attention", "run": "a", "commit": "c0ffee", "date": "2026-01-02T00:00:00", "device": "CPU X",
    "impl": "fm3", "refcheck": "pass", "case": "8k_full", "phase": "fwd", "dtype": "float32", "ms_median": 12.345678,
}  # fmt: skip


def test_rendering():
    records = [
        RECORD,
        RECORD | {"date": "2026-01-03T00:00:00", "ms_median": 11.0, "commit": "beef"},  # newer: counts
        RECORD | {"date": "2026-01-04T00:00:00", "ms_median": 1.0, "refcheck": "fail"},  # failed: does not
        RECORD | {"phase": "bwd", "ms_median": 30.5},
        RECORD | {"impl": "paddle_dense", "case": "8k_causal", "ms_median": 99.0},
        RECORD | {"bench": "memory"},  # another kind of measurement
    ]
    text = render_tables.render(render_tables.TABLES["attention_cpu"], records)
    lines = text.splitlines()
    assert lines[0] == "| case | dtype | fm3 fwd | fm3 bwd | paddle_dense fwd |"
    assert lines[2] == "| 8k_full | float32 | 11 | 30.5 | – |"
    assert lines[3] == "| 8k_causal | float32 | – | – | 99 |"
    assert "CPU X; commit beef, c0ffee; 2026-01-02 to 2026-01-03;" in lines[5]


def test_unknown_table_is_named():
    with pytest.raises(KeyError, match="no table 'nothing'; known: attention_cpu"):
        render_tables.render_document("<!-- table: nothing -->\n<!-- end table -->", ROOT / "results")
