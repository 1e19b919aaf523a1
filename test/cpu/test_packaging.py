# SPDX-License-Identifier: Apache-2.0
"""The sdist builds a wheel, and the wheel works where there is no checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # a whole native build, on a machine that may be busy
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "build", "build-*", "dist", "runs", "_lib", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)

USE_IT = """
import numpy as np, paddle, paddle_fm3
from paddle_fm3.mask import causal_document
assert "site" in paddle_fm3.__file__, paddle_fm3.__file__
q = paddle.randn([1, 40, 2, 16])
q.stop_gradient = False
with paddle_fm3.enabled():
    out = paddle.nn.functional.flashmask_attention(q, q, q, causal_document([15, 25]))
out.sum().backward()
np.testing.assert_allclose(out[0, 15].numpy(), q[0, 15].numpy(), rtol=1e-6)  # a document's first row sees itself
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}, timeout=800
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> tuple[Path, Path]:
    """(sdist, wheel built from it)."""
    work = tmp_path_factory.mktemp("packaging")
    source = work / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    build_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(work)!r})"
    run(sys.executable, "-c", build_sdist, cwd=source, PATH=path)
    (sdist,) = work.glob("*.tar.gz")
    shutil.rmtree(source)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-w", str(work)]
    run(sys.executable, "-m", "pip", "wheel", *options, str(sdist), cwd=work, PATH=path)
    (wheel,) = work.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(packages, tmp_path):
    _, wheel = packages
    site = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    run(sys.executable, "-c", USE_IT, cwd=tmp_path, PYTHONPATH=str(site))
    info = run(sys.executable, "-m", "paddle_fm3", "info", cwd=tmp_path, PYTHONPATH=str(site))
    assert f"libraries in {site / 'paddle_fm3' / '_lib'}" in info and "cpu   serves" in info


@pytest.mark.slow
def test_wheel_holds_what_it_should(packages):
    _, wheel = packages
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("_lib/libfm3_cpu.so", "_lib/libfm3_op.so", "_lib/fm3_op.json", "testing/paper_documents.json"):
        assert f"paddle_fm3/{wanted}" in names
    top_level = {name.partition("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"paddle_fm3"}
    assert re.fullmatch(
        rf"paddle_fm3-[\d.]+-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_\w+\.whl", wheel.name
    )
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.slow
def test_sdist_holds_sources_and_nothing_built(packages):
    sdist, _ = packages
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    for wanted in ("CMakeLists.txt", "LICENSE", "README.md", "ops/include/fm3/c_api.h", "ops/binding/register.cc"):
        assert wanted in names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith("build")]


@pytest.mark.slow
def test_libraries_do_not_point_into_the_build_machine(packages, tmp_path):
    _, wheel = packages
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for library in (tmp_path / "paddle_fm3" / "_lib").glob("*.so"):
        dynamic = run("readelf", "-d", str(library), cwd=tmp_path)
        paths = re.findall(r"(?:RPATH|RUNPATH).*\[(.*)\]", dynamic)
        assert set(paths) <= {"$ORIGIN"}, f"{library.name}: {paths}"


def test_versions_agree():
    """requirements.txt, the build requirements of pyproject.toml and the Paddle this suite runs on."""
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)\s*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    (requires,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    build = dict(re.findall(r'"([\w-]+)==([\w.]+)"', requires))
    assert set(build) == {"setuptools", "wheel", "cmake", "ninja", "pybind11", "paddlepaddle"}
    for name, version in build.items():
        assert pins[name] == version, name
    import paddle

    assert paddle.version.full_version == pins["paddlepaddle"]


def test_every_requirement_is_pinned():
    for name in ("requirements.txt", "requirements-paddlenlp.txt", "requirements-dev.txt", "constraints.txt"):
        for line in (ROOT / name).read_text().splitlines():
            assert not line or line.startswith("#") or re.match(r"[\w.-]+==[\w.]+( ;|$)", line), f"{name}: {line}"


@pytest.mark.parametrize(
    "target", ["setup", "build", "demo", "test", "test-unit", "test-gpu", "test-dist", "lint", "bench", "clean"]
)
def test_makefile_has_every_verb(target):
    run("make", "-n", target, cwd=ROOT)
