# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels compile for sm_90a here, without a GPU; head_dim-128 kernels spill nothing (five minutes of CPU)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sm90"
OLDEST_NVCC = (12, 8)


def nvcc_version() -> tuple[int, int] | None:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None


pytestmark = [
    pytest.mark.skipif(
        (nvcc_version() or (0, 0)) < OLDEST_NVCC or shutil.which("cmake") is None,
        reason="needs cmake and nvcc 12.8 or newer (PyPI: nvidia-cuda-nvcc, and CUDACXX)",
    ),
    pytest.mark.timeout(1500),  # the build, on a busy machine
]


@pytest.fixture(scope="module")
def build_log() -> str:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(BUILD), *generator, f"-DPython_EXECUTABLE={sys.executable}",
        "-DFM3_CUDA=ON", "-DFM3_PADDLE_OP=OFF", "-DFM3_PLANNER=OFF", f"-DFM3_LIB_DIR={BUILD / 'lib'}",
    ]  # fmt: skip
    build = ["cmake", "--build", str(BUILD), "--target", "fm3_sm90", "-j", str(len(os.sched_getaffinity(0)))]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    report = [sys.executable, str(ROOT / "tools" / "ptxas_report.py"), str(BUILD / "ops" / "cuda" / "ptxas")]
    done = subprocess.run(report, capture_output=True, text=True)
    print(done.stdout)  # shown by pytest -s, and when a test fails
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_kernel_is_in_the_report(build_log: str) -> None:
    sources = [*(ROOT / "ops" / "cuda").glob("sm90_*/instantiations/*.cu")]
    assert len(sources) >= 22
    for source in sources:
        assert f"{source.parent.parent.name}/{source.stem} " in build_log, f"{source} is missing:\n{build_log}"


def test_the_library_loads_and_refuses_as_it_should(build_log: str) -> None:
    assert build_log
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "test" / "cpu" / "test_sm90_errors.py")]
    environment = {**os.environ, "FM3_LIB_DIR": str(BUILD / "lib")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]


def test_the_library_needs_neither_driver_nor_runtime_at_load(build_log: str) -> None:
    assert build_log
    linked = subprocess.run(["ldd", str(BUILD / "lib" / "libfm3_sm90.so")], capture_output=True, text=True).stdout
    assert "libcuda" not in linked, linked
