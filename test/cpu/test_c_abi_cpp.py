# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the C++ tests, and compares the C ABI's layout as the compiler sees it with its ctypes mirror."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from paddle_fm3 import _c_api

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cpp_build(tmp_path_factory) -> Path:
    """Folder with the test programs; built from the sources of this checkout."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the C++ tests need g++")
    folder = tmp_path_factory.mktemp("cpp")
    common = [compiler, "-std=c++17", "-O2", f"-I{REPOSITORY}", f"-I{REPOSITORY}/ops/include"]
    flags = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
    cpp = REPOSITORY / "test" / "cpp"
    parts = [cpp / f"{name}.cc" for name in ("test_kernel_parts", "parts_avx2", "parts_avx512", "parts_baseline")]
    subprocess.run([*common, *flags, *map(str, parts), "-o", str(folder / "test_kernel_parts")], check=True)
    layout = [str(cpp / "print_abi_layout.cc"), "-o", str(folder / "print_abi_layout")]
    subprocess.run([*common, *layout], check=True)
    return folder


def test_kernel_parts(cpp_build):
    done = subprocess.run([cpp_build / "test_kernel_parts"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "0 failures" in done.stdout


def test_struct_layout_matches_the_ctypes_mirror(cpp_build):
    """Same size, same fields, same offsets: a field missing on either side shows."""
    done = subprocess.run([cpp_build / "print_abi_layout"], check=True, capture_output=True, text=True)
    from_compiler = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    mirrored = {}
    for name in ("MaskView", "Strides", "Shape", "FwdParams", "BwdSchedule", "BwdParams", "RowRun", "KeyTileSummary"):
        struct = getattr(_c_api, name)
        mirrored[name] = str(ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            mirrored[f"{name}.{field}"] = str(getattr(struct, field).offset)
    assert from_compiler == mirrored
