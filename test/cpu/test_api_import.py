# SPDX-License-Identifier: Apache-2.0
"""Import does nothing: no output, no environment, no Paddle, no native library, and fast."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_import_is_silent_and_leaves_no_trace():
    code = """
import json, os, sys, threading
before = dict(os.environ)
import paddle_fm3
assert dict(os.environ) == before, "environment changed"
assert threading.active_count() == 1, "a thread was started"
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] in ("paddle", "paddle_fm3", "numpy"))))
"""
    result = run_python(code)
    assert result.returncode == 0 and result.stderr == ""
    assert json.loads(result.stdout) == ["paddle_fm3"]


def test_attention_import_adds_nothing_but_paddle():
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import paddle
environment, modules = dict(os.environ), set(sys.modules)
import paddle_fm3
paddle_fm3.flashmask_attention
assert dict(os.environ) == environment, "environment changed"
assert not any("libfm3" in line for line in open("/proc/self/maps")), "a native library was loaded"
print(sorted(name for name in set(sys.modules) - modules if not name.startswith("paddle_fm3")))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    new_modules = result.stdout.splitlines()[-1]
    assert "paddlenlp" not in new_modules and "matplotlib" not in new_modules


def test_import_takes_less_than_300_ms_beyond_paddle():
    code = """
import time, warnings
warnings.simplefilter("ignore")
import paddle
begin = time.perf_counter()
import paddle_fm3
paddle_fm3.flashmask_attention, paddle_fm3.mask, paddle_fm3.schedule
print(time.perf_counter() - begin)
"""
    times = []
    for _ in range(5):  # a busy machine delays some of them; the work itself is what one quick run shows
        times.append(float(run_python(code).stdout.splitlines()[-1]))
        if times[-1] < 0.3:
            return
    raise AssertionError(f"import took {times} s beyond Paddle's")


@pytest.mark.parametrize("module", ["mask", "schedule", "testing", "distributed"])
def test_planning_works_without_paddle(module):
    code = f"""
import sys
sys.modules["paddle"] = None  # every import of it fails
import paddle_fm3
assert paddle_fm3.{module}.__name__ == "paddle_fm3.{module}"
import paddle_fm3.testing.cases, paddle_fm3.testing.reference, paddle_fm3.distributed.partition
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_names():
    code = """
import paddle_fm3
listed = set(dir(paddle_fm3))
assert set(paddle_fm3.__all__) <= listed
for name in paddle_fm3.__all__:
    getattr(paddle_fm3, name)
try:
    paddle_fm3.nothing
except AttributeError as error:
    print(error)
"""
    result = run_python(code, "-W", "ignore")
    assert result.returncode == 0, result.stderr
    assert "module 'paddle_fm3' has no attribute 'nothing'" in result.stdout


def test_environment_is_read_in_one_file_only():
    package = ROOT / "paddle_fm3"
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"""(environ|getenv)[^\n]*FM3_""", path.read_text())
    }
    assert readers == {"env.py"}


def test_environment_values(monkeypatch, tmp_path):
    from paddle_fm3 import env

    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert env.num_threads() == 0 and env.lib_dir() == ROOT / "paddle_fm3" / "_lib"
    monkeypatch.setenv("FM3_NUM_THREADS", "3")
    monkeypatch.setenv("FM3_LIB_DIR", str(tmp_path))
    assert env.num_threads() == 3 and env.lib_dir() == tmp_path
    monkeypatch.setenv("FM3_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="FM3_NUM_THREADS='many': expected a whole number >= 0"):
        env.num_threads()
    assert env.gpu_transport() == "auto" and env.gpu_forward() is None
    for value, mode in (("auto", None), ("rows", "rows"), ("steps", "steps")):
        monkeypatch.setenv("FM3_GPU_FORWARD", value)
        assert env.gpu_forward() == mode
    monkeypatch.setenv("FM3_GPU_FORWARD", "row")
    with pytest.raises(ValueError, match="FM3_GPU_FORWARD='row': expected one of auto, rows, whole, steps"):
        env.gpu_forward()


def test_broken_library_says_which_and_what_to_do(tmp_path):
    (tmp_path / "libfm3_cpu.so").write_bytes(b"not a library")
    code = "from paddle_fm3 import _native; _native.cpu_library()"
    result = run_python(code, FM3_LIB_DIR=str(tmp_path))
    last_line = result.stderr.splitlines()[-1]
    assert str(tmp_path / "libfm3_cpu.so") in last_line and "make build" in last_line


def test_op_built_for_another_paddle_is_refused(tmp_path):
    for library in (ROOT / "paddle_fm3" / "_lib").glob("libfm3_*.so"):
        (tmp_path / library.name).symlink_to(library)
    (tmp_path / "fm3_op.json").write_text(json.dumps({"paddle_version": "9.9.9"}))
    result = run_python("import paddle_fm3; paddle_fm3.load_op()", "-W", "ignore", FM3_LIB_DIR=str(tmp_path))
    assert re.search(r"built for Paddle 9\.9\.9 and this is Paddle 3\.", result.stderr), result.stderr
