# SPDX-License-Identifier: Apache-2.0
"""The script of docs/guide_own_model.md under the launcher, as the page says it is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import REPO_ROOT, launch

pytestmark = pytest.mark.dist


def test_the_guide_s_script_runs_on_two_ranks(tmp_path: Path) -> None:
    page = (REPO_ROOT / "docs" / "guide_own_model.md").read_text(encoding="utf-8")
    (script,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "init_parallel_env" in block)
    (tmp_path / "attend.py").write_text(script)
    result = launch(tmp_path / "attend.py", [], 2, tmp_path, timeout_s=60)
    assert result.exit_code == 0, result.tail()
    rows = [int(re.search(rf"rank {rank} of 2: (\d+) rows", log)[1]) for rank, log in enumerate(result.logs)]
    assert sum(rows) == 1024, rows
