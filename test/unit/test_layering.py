# SPDX-License-Identifier: Apache-2.0
"""Imports go leftwards only, planning imports nothing heavy, and importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_fm3

ROOT = Path(paddle_fm3.__file__).parent
REPOSITORY = ROOT.parent

PURE_TESTING = ("reference", "compare", "cases", "hostile_cases")
# Left to right. A module may import from its own layer and those left of it.
LAYERS = [
    ["paddle_fm3.env", "paddle_fm3._c_api"],
    ["paddle_fm3.mask"],
    ["paddle_fm3.schedule"],
    ["paddle_fm3.explain", "paddle_fm3.viz", *(f"paddle_fm3.testing.{name}" for name in PURE_TESTING)],
    [
        "paddle_fm3._native",
        "paddle_fm3._paddle",
        "paddle_fm3._device_api",
        "paddle_fm3._arguments",
        "paddle_fm3.backends",
        "paddle_fm3.attention",
    ],
    ["paddle_fm3.patch"],
    ["paddle_fm3.distributed"],
    ["paddle_fm3.integration"],
    ["paddle_fm3.commands"],
]
# Planning is pure: NumPy and nothing heavier.
PURE = ["paddle_fm3.mask", "paddle_fm3.schedule", "paddle_fm3.explain", "paddle_fm3.viz", "paddle_fm3._c_api",
        "paddle_fm3.distributed.partition",
        *(f"paddle_fm3.testing.{name}" for name in PURE_TESTING)]  # fmt: skip
HEAVY = ("paddle", "paddlenlp", "torch", "scipy", "pandas", "matplotlib", "ml_dtypes", "hypothesis")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module) of each import, inside functions too; `from a import b` gives a and a.b."""
    found = []
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, module)] + [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def layer_of(module: str) -> int | None:
    for index, members in enumerate(LAYERS):
        if any(module == member or module.startswith(member + ".") for member in members):
            return index
    return None


def back_edges(path: Path) -> list[str]:
    own = layer_of(module_name(path))
    if own is None:
        return []
    edges = []
    for line, module in imported_modules(path):
        target = layer_of(module)
        if target is not None and target > own:
            edges.append(f"{path.relative_to(REPOSITORY)}:{line} imports {module}, which stands to its right")
    return edges


def test_imports_go_leftwards_only():
    edges = [edge for path in python_files() for edge in back_edges(path)]
    assert not edges, "\n".join(edges)


def test_every_module_has_a_layer():
    """Except the package itself, the command line, and the rest of testing, which may look at everything."""
    free = ("paddle_fm3.testing", "paddle_fm3.__main__")
    names = [module_name(path) for path in python_files()]
    homeless = [n for n in names if n != "paddle_fm3" and layer_of(n) is None and not n.startswith(free)]
    assert not homeless, f"add to LAYERS: {homeless}"


def test_the_check_sees_a_back_edge(tmp_path, monkeypatch):
    package = tmp_path / "paddle_fm3"
    (package / "mask").mkdir(parents=True)
    bad = package / "mask" / "bad.py"
    bad.write_text("def f():\n    from paddle_fm3.schedule import build_schedule\n    from .. import patch\n")
    monkeypatch.setitem(globals(), "ROOT", package)
    monkeypatch.setitem(globals(), "REPOSITORY", tmp_path)
    assert len(back_edges(bad)) == 3  # paddle_fm3.schedule, paddle_fm3.schedule.build_schedule, paddle_fm3.patch


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_nothing_heavy(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.strip() == "[]", f"{module} pulls in {shown.stdout}"


def test_import_prints_nothing_and_sets_nothing():
    code = "import os; before = dict(os.environ); import paddle_fm3; assert dict(os.environ) == before"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout == shown.stderr == ""
