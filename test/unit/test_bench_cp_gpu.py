# SPDX-License-Identifier: Apache-2.0
"""The host side of `tools/bench_cp.py --device gpu`: plans in a folder, lines of ranks into records, traces into one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paddle_fm3.testing.device_work_file import load_work

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("bench_cp_parts.gpu")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def folder(gpu: ModuleType, tmp_path: Path) -> Path:
    cases = [gpu.Case(impl, 2, 1024, "32/4", "causal_document") for impl in ("fm3", "fm3+plan", "ring")]
    sys.path.insert(0, str(TOOLS))
    try:
        gpu.make_plans(cases, tmp_path, {1024: 3}, 2, [0, 1])
    finally:
        sys.path.remove(str(TOOLS))
    return tmp_path


def lines_of(job: dict) -> list[dict]:
    """Of two ranks, the second slower in the second of two loops."""
    times = {"fwd": (1.0, 1.4), "bwd": (3.0, 3.2), "total": (3.9, 4.3)}
    if job["has_parts"]:
        times |= {"still_fwd": (0.9, 1.3), "still_bwd": (3.0, 3.0), "transfers_fwd": (0.5, 0.5)}
        times |= {"paced_fwd": (1.0, 1.4), "paced_bwd": (3.0, 3.1), "transfers_bwd": (1.0, 1.0)}
    lines = []
    for rank in range(2):
        own = {f"{name}_ms": [first, second if rank else first] for name, (first, second) in times.items()}
        errors = {name: 1e-3 * (rank + 1) for name in ("out", "dq")}
        lines.append(
            {"job": job["name"], "rank": rank, "forward_mode": "rows", "prepare_ms": rank + 0.5, "errors": errors}
            | {"bytes_received": 5_000_000 * (rank + 1), "overlapped_pct": 80.5 + rank}
            | own
        )
    return lines


def test_plans_are_complete(gpu: ModuleType, folder: Path) -> None:
    jobs = json.loads((folder / "config.json").read_text())["jobs"]
    assert [job["fields"]["impl"] for job in jobs] == ["fm3", "fm3+plan", "ring"]
    for job in jobs:
        works = [load_work(folder / f"{job['work']}_rank{rank}.npz") for rank in range(2)]
        rows = [np.load(folder / f"{job['work']}_rank{rank}_rows.npy") for rank in range(2)]
        assert sorted(np.concatenate(rows).tolist()) == list(range(2048))
        assert [work.num_own for work in works] == [len(own) for own in rows]
        assert works[0].is_ring == (job["fields"]["impl"] == "ring")
        assert job["has_parts"] == (job["fields"]["impl"] == "fm3")
    assert len({job["case"] for job in jobs}) == 1  # timed in turns


def test_a_number_of_backward_calls_that_fm3_has_itself_is_not_run_twice(gpu: ModuleType, tmp_path: Path) -> None:
    sys.path.insert(0, str(TOOLS))
    try:
        for mask in ("causal_document", "document"):
            cases = [gpu.Case(impl, 2, 1024, "8/1", mask) for impl in ("fm3", "fm3+two", "fm3+one")]
            gpu.make_plans(cases, tmp_path, {1024: 3}, 2, [0, 1])
            jobs = json.loads((tmp_path / "config.json").read_text())["jobs"]
            styles = [job["fields"]["bwd_style"] for job in jobs]
            assert len(jobs) == 2 and sorted(styles) == ["one", "two"], mask
            assert jobs[1]["fields"]["impl"] == f"fm3+{styles[1]}" and jobs[1]["has_parts"]
    finally:
        sys.path.remove(str(TOOLS))


def test_a_record_takes_the_slowest_rank_of_each_loop(gpu: ModuleType, folder: Path) -> None:
    jobs = json.loads((folder / "config.json").read_text())["jobs"]
    lines = [line for job in jobs[:2] for line in lines_of(job)]
    lines += lines_of(jobs[2])[:1]  # the other rank did not end: no record
    records = list(gpu.records_of(folder, lines, "a GPU", "abc"))
    assert [record["impl"] for record in records] == ["fm3", "fm3+plan"]
    record = records[0]
    assert record["fwd_ms"] == 1.2 and record["bwd_ms"] == 3.1 and record["total_ms"] == 4.1
    assert record["total_ms_spread"] == [3.9, 4.3] and record["mb_moved"] == 15.0
    # Shown: 0.1 of the forward's 0.5 and 0.1 of the backward's 1.0; if ranks wait anyway 0.05 of the backward's.
    assert record["comm_hidden_pct"] == pytest.approx(86.7) and record["refcheck"] == "pass"
    assert record["copies_hidden_pct"] == pytest.approx(96.7) and record["bwd_paced_ms"] == 3.05
    assert record["overlapped_pct"] == 80.5
    assert "comm_hidden_pct" not in records[1]
    assert record["max_relative_error"] == 2e-3 and record["prepare_ms"] == 1.5 and record["forward_mode"] == "rows"
    gflop = jobs[0]["fields"]["gflop_fwd"]
    assert record["tflops_per_gpu"] == pytest.approx(gflop * 3.5 / 4.1 / 2, abs=0.06)


def test_a_wrong_result_is_not_passed(gpu: ModuleType, folder: Path) -> None:
    job = json.loads((folder / "config.json").read_text())["jobs"][0]
    lines = lines_of(job)
    lines[1]["errors"]["dq"] = float("nan")
    assert next(gpu.records_of(folder, lines, "a GPU", "abc"))["refcheck"] != "pass"


def test_traces_of_all_ranks_go_into_one_file(gpu: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for rank in range(2):
            text = json.dumps({"traceEvents": [{"pid": rank, "name": name}], "displayTimeUnit": "ms"})
            (tmp_path / f"trace_{name}_rank{rank}.json").write_text(text)
    gpu.merge_traces(tmp_path, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.json", "b.json"]
    merged = json.loads((tmp_path / "out" / "b.json").read_text())
    assert merged["traceEvents"] == [{"pid": 0, "name": "b"}, {"pid": 1, "name": "b"}]
