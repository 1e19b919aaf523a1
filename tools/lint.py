#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every static check, one after another; the exit status is 0 if all pass.

    tools/lint.py                    all of them
    tools/lint.py --only mypy        one
    tools/lint.py --fix              let ruff and clang-format rewrite what they can

ruff (rules and format), clang-format, mypy (strict, the pure half) and tools/check_limits.py; versions in
requirements-dev.txt, settings in pyproject.toml and .clang-format.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ("ruff", "ruff-format", "clang-format", "mypy", "limits")


def commands(*, is_fixing: bool) -> dict[str, list[str]]:
    listed = subprocess.run(
        ["git", "ls-files", "*.h", "*.cc", "*.cu", "*.cuh"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    cpp = [name for name in listed.stdout.split() if (ROOT / name).is_file()]
    return {
        "ruff": ["ruff", "check", "--output-format", "concise", *(["--fix"] if is_fixing else []), "."],
        "ruff-format": ["ruff", "format", *([] if is_fixing else ["--check"]), "."],
        "clang-format": ["clang-format", *(["-i"] if is_fixing else ["--dry-run", "-Werror"]), *cpp],
        "mypy": ["mypy"],
        "limits": [sys.executable, "tools/check_limits.py"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CHECKS, default=[], help="may be repeated")
    parser.add_argument("--fix", action="store_true")
    arguments = parser.parse_args(argv)
    failed = []
    for name, command in commands(is_fixing=arguments.fix).items():
        if arguments.only and name not in arguments.only:
            continue
        beside = Path(sys.executable).parent / command[0]
        program = str(beside) if beside.is_file() else shutil.which(command[0])
        if program is None:
            print(f"lint: {command[0]} is not installed: pip install -r requirements-dev.txt")
            failed.append(name)
            continue
        finished = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            failed.append(name)
            print(f"--- {name} ---\n{(finished.stdout + finished.stderr).strip()}")
    print(f"lint: failed: {', '.join(failed)}" if failed else "lint: all pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
