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
        times |= {"transfers_fwd": (0.5, 0.5), "transfers_bwd": (1.0, 1.0)}
    lines = []
    for rank in range(2):
        own = {f"{name}_ms": [first, second if rank else first] for name, (first, second) in times.items()}
        errors = {name: 1e-3 * (rank + 1) for name in ("out", "dq")}
        lines.append(
            {"job": job["name"], "rank": rank, "forward_mode": "rows", "prepare_ms": rank + 0.5, "errors": errors}
            | {"bytes_received": 5_000_000 * (rank + 1), "overlapped_pct": 80.5 + rank}
            | own
            | ({"pairs": pairs_of(rank)} if job["has_parts"] else {})
        )
    return lines


def pairs_of(rank: int) -> dict:
    """Three turns. The clock falls evenly from step to step; ranks are the slowest in turns."""
    slower_ms = [0.0, 0.0, 0.1] if rank else [0.1, 0.1, 0.0]
    longer_ms = {"moving": (0.03, 0.06), "paced": (0.01, 0.06), "beside": (0.02, 0.0)}
    return {
        way: {
            phase: [
                [ms + 0.2 * turn - less, ms + 0.2 * turn + 0.1 + more - less, ms + 0.2 * turn + 0.2 - less]
                for turn, less in enumerate(slower_ms)
            ]
            for phase, ms, more in zip(("fwd", "bwd"), (1.0, 3.0), more_ms, strict=True)
        }
        for way, more_ms in longer_ms.items()
    }


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
    # Shown: 0.03 of the forward's 0.5 and 0.06 of the backward's 1.0; if ranks wait anyway 0.02 of the forward's.
    assert (
        record["fwd_shown_us"] == [30, 0] and record["bwd_shown_us"] == [60, 0] and record["fwd_beside_us"] == [20, 0]
    )
    assert record["comm_hidden_pct"] == pytest.approx(94.0) and record["comm_hidden_pct_error"] == 0
    assert record["copies_hidden_pct"] == pytest.approx(98.7) and record["refcheck"] == "pass"
    assert record["fwd_still_ms"] == pytest.approx(1.3) and record["num_turns"] == 3
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


def test_a_shown_time_has_an_error_and_outliers_do_not_move_it(gpu: ModuleType) -> None:
    from bench_cp_parts.shown import hidden_pct, robust_mean

    rng = np.random.default_rng(0)
    means, errors = zip(*(robust_mean(rng.normal(5.0, 10.0, 200)) for _ in range(400)), strict=True)
    assert np.mean(means) == pytest.approx(5.0, abs=0.15)
    assert np.std(means) == pytest.approx(np.mean(errors), rel=0.1)
    x = rng.normal(5.0, 10.0, 200)
    spoilt = np.where(np.arange(200) < 15, 5000.0, x)
    assert robust_mean(spoilt)[0] == pytest.approx(robust_mean(x)[0], abs=2.5)
    assert robust_mean(np.array([4.0]))[1] == np.inf  # one turn tells nothing of its error
    assert hidden_pct(15.0, 3.0, 0.15) == (90.0, 2.0)
    assert hidden_pct(-4.0, 3.0, 0.15)[0] == 100.0 and hidden_pct(400.0, 3.0, 0.15)[0] == 0.0
    assert hidden_pct(0.0, 0.0, 0.0) == (100.0, 0.0)
