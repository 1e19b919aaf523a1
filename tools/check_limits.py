#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""House rules that no formatter knows, over every tracked source file.

    tools/check_limits.py            the rules, one line a breach; exit status 1 if any
    tools/check_limits.py --longest  the longest files as well

Rules: a file has at most 600 lines (aim: 300) unless a DEVIATION note stands in its first 20; it begins with an SPDX
line; the only tags are NOTE:, DEVIATION: and TODO(#issue); a comment holds no commented-out C++ statement; no line ends
in blanks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh"}
MAX_LINES, AIM_LINES = 600, 300
# A tag is written with a colon or an issue; the word in a sentence is no tag.
_COMMENT = r"(?:#|//).*\b"
_BAD_TAG = re.compile(rf"{_COMMENT}(?:FIX" rf"ME|XX" rf"X|HA" rf"CK)\b|{_COMMENT}TO" r"DO\b(?!\(#\w+\))")
_DEAD_CODE = re.compile(
    r"^\s*//\s*(?:if|for|while|return)\b.*[;{]\s*$|^\s*//\s*[\w:<>.\->\[\]]+\s*(?:=|\(.*\))[^=]*;\s*$"
)


def source_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.splitlines() if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()]


def breaches(name: str, text: str) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) > MAX_LINES and not any("DEVIATION:" in line for line in lines[:20]):
        yield f"{name}: {len(lines)} lines; the limit is {MAX_LINES} (or a DEVIATION note in the first 20)"
    if lines and not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
        yield f"{name}: no SPDX line in the first three"
    is_cpp = not name.endswith(".py")
    for number, line in enumerate(lines, 1):
        if _BAD_TAG.search(line):
            yield f"{name}:{number}: tag other than NOTE:, DEVIATION:, TODO(#issue)"
        if is_cpp and _DEAD_CODE.search(line):
            yield f"{name}:{number}: commented-out code"
        if line != line.rstrip():
            yield f"{name}:{number}: blanks at the end of the line"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", action="store_true", help="print the files beyond the aim, longest first")
    arguments = parser.parse_args(argv)
    files = {path: path.read_text(encoding="utf-8") for path in source_files()}
    if arguments.longest:
        lengths = sorted(((len(text.splitlines()), path) for path, text in files.items()), reverse=True)
        for length, path in lengths:
            if length > AIM_LINES:
                print(f"{length:5} {path.relative_to(ROOT)}")
    found = [one for path, text in files.items() for one in breaches(str(path.relative_to(ROOT)), text)]
    print("\n".join(found) if found else f"{len(files)} files within the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
