# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults in the CPU kernels' source: each must turn the tests of this folder red.

A fault is one replaced piece of text. It is built in a copy of the sources, for the baseline target alone and
without optimisation for speed, and the named tests run against that library in a process of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
UNITS = (
    "ops/schedule/build_schedule.cc",
    "ops/dispatch/check_params.cc",
    "ops/dispatch/cpu_c_api.cc",
    "ops/cpu/attention.cc",
    "ops/cpu/thread_pool.cc",
    "ops/cpu/kernel_baseline.cc",
)
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
         "-fvisibility=hidden", "-DFM3_BASELINE_ONLY"]  # fmt: skip

ORACLE = "test_c_abi_oracle.py::test_hostile_cases"
NAN = "test_c_abi_nan.py"
RUNS = "test_c_abi_schedule.py::test_the_longest_runs_are_kept_and_ties_keep_the_lower_begin"
SCHEDULE = "test_c_abi_schedule.py::test_identical_to_the_python_twin"


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # header or unit with the replaced text
    old: str
    new: str
    tests: str
    unit: str = "ops/cpu/kernel_baseline.cc"  # what must be compiled again


FORWARD, BACKWARD, MASK = "ops/cpu/forward-inl.h", "ops/cpu/backward-inl.h", "ops/cpu/tile_mask-inl.h"
BUILDER, POOL, PACK = "ops/schedule/build_schedule.cc", "ops/cpu/thread_pool.cc", "ops/cpu/pack-inl.h"
FAULTS = [
    Fault("last key tile never visited", FORWARD, "k_tile_idx < num_k_tiles; ++k_tile_idx",
          "k_tile_idx < num_k_tiles - 1; ++k_tile_idx", ORACLE),
    Fault("lower interval one row longer", MASK, "tile->lt_end[k] = column.lt_end;",
          "tile->lt_end[k] = column.lt_end + 1;", ORACLE),
    Fault("upper interval one row shorter", MASK, "tile->ut_end[k] = column.ut_end;",
          "tile->ut_end[k] = column.ut_end - 1;", ORACLE),
    Fault("causal rule aligned top-left", MASK, "causal_end(k_begin + k, mask.s_q, mask.s_k)",
          "causal_end(k_begin + k, mask.s_q, mask.s_q)", ORACLE),
    Fault("span of a strip cut one row early", MASK, "(end <= tile.ut_end[k])", "(end <= tile.ut_end[k] + 1)", ORACLE),
    Fault("rows of a key strip cut", MASK, "rows.end = end - q_begin;", "rows.end = begin - q_begin + 1;", ORACLE),
    Fault("block_mask inverted", MASK, "k_tile_idx] == 0", "k_tile_idx] != 0", ORACLE),
    Fault("running sum not rescaled", FORWARD, "load(row_sum + q) * scale + sum", "load(row_sum + q) + sum", ORACLE),
    Fault("lse of an empty row is 0", FORWARD, "is_empty ? -kInfinity", "is_empty ? 0.0f", ORACLE),
    Fault("key head by remainder", FORWARD, "h_q_idx / (shape.h_q / shape.h_kv)", "h_q_idx % shape.h_kv", ORACLE),
    Fault("sign of dlse", BACKWARD, "- row_delta + row_dlse", "- row_delta - row_dlse", ORACLE),
    Fault("unseen part of a strip left dirty", BACKWARD, "for (int k = 0; k < keys.begin; k += kLanes)",
          "for (int k = 0; k < 0; k += kLanes)", ORACLE),
    Fault("dq of the first head only", BACKWARD, "h_q_idx < (h_kv_idx + 1) * group", "h_q_idx < h_kv_idx * group + 1",
          ORACLE),
    Fault("NaN value row kept in the product", FORWARD, "if (!is_finite) {", "if (false) {", NAN),
    Fault("NaN key row kept in the product", BACKWARD, "if (!is_finite) {", "if (false) {", NAN),
    Fault("visible NaN row of q or dout forgotten", BACKWARD, "special->rows[special->count++] = row;", "", NAN),
    Fault("hidden pair multiplied by zero, not selected", BACKWARD, "as_float(as_int(ds_vec) & ~is_hidden)",
          "ds_vec * __builtin_convertvector(1 + is_hidden, VecF)", NAN),
    Fault("bfloat16 truncated", PACK, "(bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16", "bits >> 16",
          "test_c_abi_oracle.py::test_rounding_of_outputs_is_to_nearest_even"),
    Fault("offset cut to 32 bits", PACK, "element(base, dtype, s_idx * stride_s)",
          "element(base, dtype, static_cast<int32_t>(s_idx * stride_s))",
          "test_c_abi_memory.py::test_offsets_beyond_two_to_the_31"),
    Fault("one element written past a row", PACK, "for (int c = 0; c < d; ++c) floats[c] = from[c] * scale;",
          "for (int c = 0; c <= d; ++c) floats[c] = from[c] * scale;",
          "test_c_abi_memory.py::test_only_outputs_are_written"),
    Fault("shortest runs kept", BUILDER, "return x.end - x.begin > y.end - y.begin;",
          "return x.end - x.begin < y.end - y.begin;", RUNS, BUILDER),
    Fault("second interval ignored in repeats", BUILDER, "std::equal(hidden_by, hidden_by + 3, previous",
          "std::equal(hidden_by, hidden_by + 2, previous", SCHEDULE, BUILDER),
    Fault("workers keep their own rounding mode", POOL, "std::fesetenv(&job->float_env);", "",
          "test_c_abi_threads.py::test_workers_share_the_callers_rounding_mode", POOL),
]  # fmt: skip


def _compile(root: Path, unit: str, into: Path) -> None:
    command = ["g++", *FLAGS, f"-I{root}", f"-I{root}/ops/include", "-c", str(root / unit), "-o", str(into)]
    subprocess.run(command, check=True)


def _link(objects: list[Path], library: Path) -> None:
    subprocess.run(["g++", "-shared", "-pthread", *map(str, objects), "-o", str(library)], check=True)


def _tests_pass(library_dir: Path, tests: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"test/cpu/{tests}"]
    environment = {**os.environ, "FM3_LIB_DIR": str(library_dir)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    # 1: a test failed; negative: the fault crashed the process; anything else is pytest's own trouble.
    assert done.returncode <= 1, done.stdout + done.stderr
    return done.returncode == 0


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, Path]:
    """Object files of the unchanged sources."""
    if shutil.which("g++") is None:
        pytest.skip("building faults needs g++")
    folder = tmp_path_factory.mktemp("objects")
    built = {unit: folder / (Path(unit).stem + ".o") for unit in UNITS}
    for unit, into in built.items():
        _compile(REPOSITORY, unit, into)
    return built


def _survives(fault: Fault, root: Path, objects: dict[str, Path]) -> bool:
    """Builds the fault in `root` and says whether its tests stay green."""
    for part in ("cpu", "schedule", "dispatch", "include"):
        shutil.copytree(REPOSITORY / "ops" / part, root / "ops" / part)
    text = (root / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.name}: the text to replace occurs {text.count(fault.old)} times"
    (root / fault.file).write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    changed = root / "changed.o"
    _compile(root, fault.unit, changed)
    _link([changed if unit == fault.unit else built for unit, built in objects.items()], root / "libfm3_cpu.so")
    return _tests_pass(root, fault.tests)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_fault_is_caught(objects, tmp_path):
    _link(list(objects.values()), tmp_path / "libfm3_cpu.so")
    assert _tests_pass(tmp_path, ORACLE), "the unchanged sources must pass"
    with ThreadPoolExecutor(max_workers=2) as workers:
        survives = list(
            workers.map(lambda pair: _survives(pair[1], tmp_path / f"fault{pair[0]}", objects), enumerate(FAULTS))
        )
    survivors = [fault.name for fault, does_survive in zip(FAULTS, survives, strict=True) if does_survive]
    assert not survivors, f"no test noticed: {survivors}"
