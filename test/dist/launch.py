# SPDX-License-Identifier: Apache-2.0
"""Starts a worker script on several ranks with Paddle's launcher, with a bounded wait and readable failures."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paddle_fm3.testing.processes import kill_tree

REPO_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LaunchResult:
    """Exit code of the launcher and each rank's log."""

    exit_code: int
    logs: list[str]  # [num_ranks]

    def tail(self, num_chars: int = 2500) -> str:
        """The end of every log, for failure messages."""
        return "\n".join(f"--- rank {rank} ---\n{log[-num_chars:]}" for rank, log in enumerate(self.logs))


def launch(script: Path, args: list[str], num_ranks: int, work_dir: Path, timeout_s: float) -> LaunchResult:
    """Runs ``script args`` on num_ranks processes of this machine; kills them all after timeout_s.

    The launcher picks free loopback ports itself. A single rank runs without the launcher, as a user would run it.
    """
    log_dir = work_dir / f"log_{num_ranks}"
    log_dir.mkdir(parents=True, exist_ok=True)
    environment = _environment()
    command = [sys.executable, str(script), *args]
    if num_ranks > 1:
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks), "--log_dir", str(log_dir)]
        command = [sys.executable, *launcher, str(script), *args]
    output_path = log_dir / "launcher.log"
    with output_path.open("w") as output:
        process = subprocess.Popen(command, cwd=work_dir, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = -signal.SIGKILL
        finally:
            kill_tree(process)
    if num_ranks == 1:
        return LaunchResult(exit_code, [output_path.read_text()])
    logs = [log_dir / f"workerlog.{rank}" for rank in range(num_ranks)]
    return LaunchResult(exit_code, [log.read_text() if log.exists() else "" for log in logs])


def launch_unsupervised(
    script: Path, args: list[str], num_ranks: int, work_dir: Path, timeout_s: float
) -> LaunchResult:
    """As `launch`, but nobody watches the ranks: a rank that dies leaves the others to themselves.

    So it is across machines, whose launchers do not see each other's ranks. The exit code is rank 0's.
    """
    ports = _free_ports(num_ranks)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    processes = []
    try:
        for rank in range(num_ranks):
            environment = _environment()
            environment.update(
                PADDLE_TRAINER_ID=str(rank),
                PADDLE_TRAINERS_NUM=str(num_ranks),
                PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
                PADDLE_CURRENT_ENDPOINT=endpoints[rank],
                PADDLE_MASTER=endpoints[0],
                PADDLE_DISTRI_BACKEND="gloo",
            )
            with (work_dir / f"rank{rank}.log").open("w") as log:
                command = [sys.executable, str(script), *args]
                process = subprocess.Popen(command, cwd=work_dir, env=environment, stdout=log, stderr=subprocess.STDOUT)
                processes.append(process)
        try:
            exit_code = processes[0].wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = -signal.SIGKILL
    finally:
        for process in processes:
            kill_tree(process)
    return LaunchResult(exit_code, [(work_dir / f"rank{rank}.log").read_text() for rank in range(num_ranks)])


def finished_launch(
    worker: str, num_ranks: int, tmp_path_factory: pytest.TempPathFactory, timeout_s: float
) -> tuple[int, Path]:
    """One launch of a worker of this folder, which runs all cases: start-up costs more than they. Where it wrote."""
    output_dir = tmp_path_factory.mktemp(f"{Path(worker).stem}{num_ranks}")
    result = launch(Path(__file__).with_name(worker), [str(output_dir)], num_ranks, output_dir, timeout_s)
    assert result.exit_code == 0, f"{num_ranks} ranks ended with {result.exit_code}\n{result.tail()}"
    return num_ranks, output_dir


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not re.match("PADDLE_|FLAGS_", name)}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO_ROOT), environment.get("PYTHONPATH", "")])
    environment["OMP_NUM_THREADS"] = "1"
    return environment


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
