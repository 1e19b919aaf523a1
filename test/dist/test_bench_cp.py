# SPDX-License-Identifier: Apache-2.0
"""tools/bench_cp.py on two CPU ranks: every line complete and checked against the one-device operator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
REPO_ROOT = Path(__file__).resolve().parents[2]
IMPLS = ["collective_dual_chunk", "collective_dual_chunk_regather", "fm3", "fm3_regather"]


def test_lines_are_complete(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO_ROOT / "tools" / "bench_cp.py"), "--ranks", "2", "--length", "1024"]
    command += ["--repeats", "2", "--results", str(tmp_path), "--cpu-impls", *IMPLS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-2000:]
    lines = {}
    for line in (tmp_path / "cp_cpu.jsonl").read_text().splitlines():
        fields = json.loads(line)
        lines[fields["impl"]] = fields
    assert list(lines) == IMPLS
    for name, fields in lines.items():
        assert fields["refcheck"] == "pass" and fields["ranks"] == 2 and fields["s"] == 1024, name
        assert fields["ms_median"] > 0 and fields["cpu_ms"] > 0 and 0 < fields["density_block"] < 1, name
    for kept, gathered_again in (IMPLS[:2], IMPLS[2:]):
        assert lines[gathered_again]["held_mb"] < lines[kept]["held_mb"]
    assert 0 <= lines["fm3"]["hidden_pct"] <= 100 and lines["fm3"]["mb_gathered"] > 0
