# SPDX-License-Identifier: Apache-2.0
"""Planned context parallelism on GPUs through Paddle, one process a GPU: values, bytes, and what a lost rank does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_fm3 import _native
from paddle_fm3.testing.processes import kill_tree

paddle = pytest.importorskip("paddle")

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("paddle_cp_worker.py")
NUM_GPUS = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
TRANSPORTS = ("nccl", "ipc")
LAUNCH_S = 60

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs and a GPU build of Paddle"),
    pytest.mark.skipif(
        _native.build_info().get("paddle_with_cuda") != "ON" or not _native.is_built("fm3_sm90"),
        reason="needs libfm3_op.so built for a GPU Paddle: make build CUDA=ON PADDLE=<its paddle folder>",
    ),
]


def launch(mode: str, transport: str, work_dir: Path, worker: Path = WORKER) -> tuple[int, list[str], float]:
    """Exit code of the launcher, each rank's log, and the seconds it took."""
    environment = {name: value for name, value in os.environ.items() if not re.match("PADDLE_|FLAGS_", name)}
    paths = [str(ROOT), str(ROOT / "test" / "dist"), environment.get("PYTHONPATH", "")]
    environment.update(PYTHONPATH=os.pathsep.join(paths), FM3_GPU_TRANSPORT=transport)
    devices = ",".join(map(str, range(NUM_GPUS)))
    command = [
        sys.executable, "-m", "paddle.distributed.launch", "--devices", devices, "--log_dir", str(work_dir / "log"),
        str(worker), mode,
    ]  # fmt: skip
    began = time.monotonic()
    for _ in range(3):
        exit_code, texts = run_once(command, work_dir, environment)
        # Launchers that start together may draw the same port for their store.
        if not any(re.search(r"Bind network on .* failed", text) for text in texts):
            break
    return exit_code, texts, time.monotonic() - began


def run_once(command: list[str], work_dir: Path, environment: dict[str, str]) -> tuple[int, list[str]]:
    shutil.rmtree(work_dir / "log", ignore_errors=True)
    with (work_dir / "launcher.log").open("w") as output:
        process = subprocess.Popen(command, cwd=work_dir, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            exit_code = process.wait(LAUNCH_S)
        except subprocess.TimeoutExpired:
            exit_code = -9
        finally:
            kill_tree(process)
    logs = [work_dir / "log" / f"workerlog.{rank}" for rank in range(NUM_GPUS)]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    return exit_code, texts


def tails(logs: list[str]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{log[-3000:]}" for rank, log in enumerate(logs))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_strategy_and_mask_kind(transport: str, tmp_path: Path) -> None:
    exit_code, logs, _ = launch("check", transport, tmp_path)
    assert exit_code == 0, tails(logs)
    for log in logs:
        assert re.search(r"^passed \d+ cases$", log, re.MULTILINE), tails(logs)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["killed", "killed_new_mask", "stalled"])
def test_a_lost_rank_ends_the_others_with_one_message(mode: str, transport: str, tmp_path: Path) -> None:
    exit_code, logs, _ = launch(mode, transport, tmp_path)
    assert exit_code not in (0, -9), tails(logs)
    lost = NUM_GPUS - 1
    for log in logs[:lost]:
        assert "first step done" in log and "second step done" not in log, tails(logs)
        messages = re.findall(r"context parallelism: [^{\n].*", log)  # not the line of code in a traceback
        assert len(set(messages)) == 1 and f"rank {lost}" in messages[0], tails(logs)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mask_refilled_unseen_is_refused_on_every_rank(transport: str, tmp_path: Path) -> None:
    exit_code, logs, _ = launch("refilled", transport, tmp_path)
    assert exit_code not in (0, -9), tails(logs)
    for log in logs:
        assert "stale outputs are NaN" in log and "second step done" not in log, tails(logs)
        assert "the mask of an earlier call was written to after it had been prepared" in log, tails(logs)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_steps_agree(transport: str, tmp_path: Path) -> None:
    """Another mask, and so another plan, each step."""
    exit_code, logs, _ = launch("train", transport, tmp_path, WORKER.with_name("paddle_training_worker.py"))
    assert exit_code == 0 and all(re.search("^passed$", log, re.MULTILINE) for log in logs), tails(logs)
