# SPDX-License-Identifier: Apache-2.0
"""The kernels' own arithmetic as a library for the host: a source of test/cpp, compiled with g++."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compile_for_host(source: str, folder: Path, *options: str) -> ctypes.CDLL:
    """test/cpp/`source` as a library in `folder`."""
    path = (folder / source).with_suffix(".so")
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *options, f"-I{ROOT}", f"-I{ROOT}/ops/include"]
    subprocess.run([*command, str(ROOT / "test/cpp" / source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))
