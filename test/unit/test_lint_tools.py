# SPDX-License-Identifier: Apache-2.0
"""tools/check_limits.py finds each breach it names, and tools/lint.py reports a failing check."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HEAD = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1\n", "a.py: no SPDX line"),
        ("a.py", HEAD + "x = 1\n" * 600, "a.py: 601 lines; the limit is 600"),
        ("a.py", HEAD + "x = 1  # " + "FIX" + "ME later\n", "a.py:2: tag other than"),
        ("a.py", HEAD + "# TO" + "DO: later\n", "a.py:2: tag other than"),
        ("a.py", HEAD + "x = 1 \n", "a.py:2: blanks at the end"),
        ("a.cc", HEAD + "  // x = f(y);\n", "a.cc:2: commented-out code"),
        ("a.cc", HEAD + "// if (x) {\n", "a.cc:2: commented-out code"),
    ],
)
def test_each_breach_is_named_with_its_place(name, text, message):
    (found,) = load("check_limits").breaches(name, text)
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", HEAD + "# DEVIATION: long on purpose\n" + "x = 1\n" * 700),
        ("a.py", HEAD + "# TODO(#7): later\n"),
        ("a.cc", HEAD + "// [b, s_k, h_kv, d_qk]; may be nullptr\n// for every tile: first the mask, then the scale\n"),
        ("a.cc", ""),
    ],
)
def test_what_is_allowed_passes(name, text):
    assert list(load("check_limits").breaches(name, text)) == []


def test_this_repository_is_within_its_limits(capsys):
    assert load("check_limits").main([]) == 0, capsys.readouterr().out


def test_lint_names_the_failing_checks(capsys, monkeypatch):
    lint = load("lint")
    bad = [sys.executable.rsplit("/", 1)[-1], "-c", "print('a.py:1: wrong'); raise SystemExit(1)"]
    monkeypatch.setattr(
        lint, "commands", lambda **_: {"ruff": bad, "mypy": ["no-such-program"], "limits": [bad[0], "-c", ""]}
    )
    assert lint.main([]) == 1
    out = capsys.readouterr().out
    assert "--- ruff ---\na.py:1: wrong" in out and "no-such-program is not installed" in out
    assert out.splitlines()[-1] == "lint: failed: ruff, mypy"
    assert lint.main(["--only", "limits"]) == 0
