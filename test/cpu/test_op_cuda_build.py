# SPDX-License-Identifier: Apache-2.0
"""The Paddle op's GPU branch compiles against the headers of the Paddle that is installed, as a GPU build of it would
have them. Compiled only: that Paddle runs on no GPU here. Needs nvcc's headers, and no cuBLAS, cuDNN or the like."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paddle
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "ops" / "binding").glob("*.cc"))


def cuda_includes() -> list[Path]:
    """Folders of CUDA's headers beside nvcc; empty without nvcc."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        return []
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    folders = map(Path, re.findall(r'-I([^"\s]+)', said) + re.findall(r'"-isystem" "([^"]+)"', said))
    return [folder.resolve() for folder in folders if folder.is_dir()]


INCLUDES = cuda_includes()
pytestmark = pytest.mark.skipif(
    not INCLUDES or shutil.which("g++") is None, reason="needs g++ and CUDA's headers (nvcc; PyPI: nvidia-cuda-nvcc)"
)


def test_the_whole_binding_compiles_with_cuda() -> None:
    assert len(SOURCES) >= 7
    include = Path(paddle.sysconfig.get_include())
    command = [
        "g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-I{ROOT / 'ops' / 'include'}",
        *(f"-isystem{folder}" for folder in (include, include / "third_party", *INCLUDES)),
        "-DPADDLE_WITH_CUDA", "-DPADDLE_NO_PYTHON", "-DPADDLE_WITH_CUSTOM_KERNEL", "-DFM3_WITH_SM90",
        f"-DFM3_PADDLE_MAJOR={paddle.version.major}",
    ]  # fmt: skip
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(
            pool.map(lambda source: subprocess.run([*command, source], capture_output=True, text=True), SOURCES)
        )
    for source, done in zip(SOURCES, results, strict=True):
        assert done.returncode == 0, f"{source.name}:\n{done.stderr[-3000:]}"


def test_the_gpu_branch_is_what_was_compiled() -> None:
    """Without the two macros the branch is not there: the names that it needs are missing from the object."""
    include = Path(paddle.sysconfig.get_include())
    text = subprocess.run(
        ["g++", "-std=c++17", "-E", f"-I{ROOT / 'ops' / 'include'}", *(f"-isystem{f}" for f in (include, include / "third_party", *INCLUDES)),
         "-DPADDLE_WITH_CUDA", "-DPADDLE_NO_PYTHON", "-DPADDLE_WITH_CUSTOM_KERNEL", "-DFM3_WITH_SM90",
         f"-DFM3_PADDLE_MAJOR={paddle.version.major}", ROOT / "ops" / "binding" / "backend.cc"],
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert "cudaMemsetAsync(data, 0, num_bytes" in text and "fm3_sm90_fwd," in text
