# SPDX-License-Identifier: Apache-2.0
"""Plans run by processes that fetch each other's rows over CUDA IPC, against one GPU. Several ranks may share a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cp_support import MAX_RELATIVE_ERROR, Jobs  # noqa: E402

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.distributed.native import planner  # noqa: E402
from paddle_fm3.distributed.strategy import STRATEGIES, Strategy  # noqa: E402


def has_planner() -> bool:
    try:
        planner()
    except ImportError:
        return False
    return True


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so"),
    pytest.mark.skipif(not has_planner(), reason="needs the compiled planner"),
]


def devices(num_ranks: int) -> list[int]:
    return [rank % torch.cuda.device_count() for rank in range(num_ranks)]


def check(lines: list[dict]) -> None:
    for line in lines:
        assert all(error <= MAX_RELATIVE_ERROR for error in line["errors"].values()), line
        assert line["received_bytes"] == line["planned_bytes"], line
        assert line["repeats_equal"], line


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_strategy_against_one_gpu(tmp_path: Path, num_ranks: int) -> None:
    jobs = Jobs(tmp_path, devices(num_ranks))
    names = [jobs.add("check", num_ranks, name, "causal_document", 4096) for name in STRATEGIES if name != "paper"]
    for mask in ("document", "prefix_document", "window"):
        names.append(jobs.add("check", num_ranks, "fm3", mask, 5000))
    for options in ({"forward_mode": "steps"}, {"num_step_streams": 1}, {"has_side_stream": False}):
        names.append(jobs.add("check", num_ranks, "fm3_no_pruning", "causal_document", 4096, options=options))
    found = jobs.run(timeout_s=240)
    assert set(found) == set(names)
    for name in names:
        assert len(found[name]) == num_ranks
        check(found[name])


@pytest.mark.parametrize("kind", ["stall", "kill"])
def test_a_lost_rank_ends_the_step_on_the_others(tmp_path: Path, kind: str) -> None:
    jobs = Jobs(tmp_path, devices(2))
    name = jobs.add(kind, 2, "fm3_no_pruning", "causal_document", 4096, victim=1, timeout_s=3.0)
    lines = {line["rank"]: line for line in jobs.run(timeout_s=120)[name]}
    said = lines[0]["message"]
    if kind == "kill":
        assert said == "rank 0 of 2: the process of rank 1 has ended" and lines[0]["seconds"] < 3.0
    else:
        assert said.startswith("rank 0 of 2: gave up on 'K/V rows stage ")
        assert said.endswith("after 3 s: nothing came from rank 1 (stalled)")
        assert lines[0]["seconds"] < 6.0 and lines[1]["message"] == said


def test_a_rank_that_only_sends_is_told_of_a_stalled_one(tmp_path: Path) -> None:
    """Forwards alone, causal: rank 0 needs no rows of rank 1, and waits for it to have fetched its own."""
    jobs = Jobs(tmp_path, devices(2))
    one_way = Strategy("one_way", "contiguous")
    name = jobs.add("stall", 2, one_way, "causal", 4096, victim=1, timeout_s=3.0, has_backward=False)
    lines = {line["rank"]: line for line in jobs.run(timeout_s=120)[name]}
    said = lines[0]["message"]
    assert said.startswith("rank 0 of 2: gave up on 'K/V rows stage ")
    assert said.endswith("after 3 s: rank 1 has not fetched it (stalled)")
    assert lines[0]["seconds"] < 6.0 and lines[1]["message"] == said
