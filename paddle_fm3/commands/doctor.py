# SPDX-License-Identifier: Apache-2.0
"""Is this installation sound? Versions, libraries, a self-check of the operator, and of the ranks under a launcher.

    python -m paddle_fm3 doctor                      this process
    python -m paddle_fm3 doctor --ranks 4            four processes on this machine, started by Paddle's launcher
    python -m paddle.distributed.launch --nnodes 2 ... "$(python -m paddle_fm3 doctor --script)" --config NAME

The operator's outputs and gradients are compared with a float64 oracle on small hostile cases for at most --seconds.
Under a launcher the context-parallel groups are made as the trainer would (--config, or --cp), every collective that
context parallelism uses is checked by value, and attention over the split sequence is compared with the oracle.
The exit status is 0 if nothing failed, on any rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from paddle_fm3.commands import _doctor_checks as checks
from paddle_fm3.commands._doctor_checks import Check

HELP = "check versions, libraries, the operator against an oracle, and the ranks under a launcher"
RANK_SCRIPT = Path(__file__).with_name("_doctor_rank.py")
LAUNCH_LIMIT_S = 180.0  # start-up of many processes on a busy machine included
MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="limit of the operator's self-check")
    parser.add_argument("--device", choices=("cpu", "gpu"), default=None, help="default: Paddle's current device")
    parser.add_argument(
        "--ranks", type=int, default=None, metavar="N", help="start N processes here and check them together"
    )
    parser.add_argument(
        "--cp", type=int, default=None, metavar="N", help="context-parallel degree (default: every rank)"
    )
    parser.add_argument("--config", default=None, metavar="NAME", help="make the groups of this shipped config or file")
    parser.add_argument(
        "--script", action="store_true", help="print the path of the script to give to a launcher, and stop"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    if arguments.script:
        print(RANK_SCRIPT)
        return 0
    wrong = _wrong_argument(arguments)
    if wrong:
        print(f"doctor: {wrong}", file=sys.stderr)
        return 2
    if arguments.ranks is not None and arguments.ranks > 1:
        return _launch(arguments)
    found = checks.version_checks() + checks.library_checks()
    found += checks.operator_checks(arguments.seconds, arguments.device)
    if checks.num_launched_ranks() > 1:
        from paddle_fm3.commands import _doctor_group

        rank, group_checks = _doctor_group.group_checks(arguments.cp, arguments.config, found)
        found += group_checks
        if rank != 0:  # its checks went to rank 0, which reports for all
            return _status(found)
    report = json.dumps(_as_dict(found)) if arguments.json else _text(found)
    if checks.num_launched_ranks() > 1:  # marked, because Paddle writes to the same log
        report = f"{checks.REPORT_BEGIN}\n{report}\n{checks.REPORT_END}"
    print(report, flush=True)
    return _status(found)


def _wrong_argument(arguments: argparse.Namespace) -> str:
    """What would be asked for and not be checked, or "". Under a launcher the ranks find it together."""
    if arguments.ranks is not None and arguments.ranks < 1:
        return f"--ranks {arguments.ranks} must be >= 1"
    num_ranks = max(arguments.ranks or 1, checks.num_launched_ranks())
    for name in ("cp", "config"):
        if num_ranks == 1 and getattr(arguments, name) not in (None, 1):
            return f"--{name} {getattr(arguments, name)} is for several ranks; start them by --ranks N or a launcher"
    return ""


def _status(found: list[Check]) -> int:
    return 1 if any(check.verdict == "fail" for check in found) else 0


def _as_dict(found: list[Check]) -> dict[str, object]:
    return {"is_sound": _status(found) == 0, "checks": [asdict(check) for check in found]}


def _text(found: list[Check]) -> str:
    width = max(len(check.name) for check in found)
    lines = [f"{MARKS[check.verdict]} {check.name:<{width}}  {check.detail}" for check in found]
    failed = [check.name for check in found if check.verdict == "fail"]
    return "\n".join([*lines, f"FAILED: {', '.join(failed)}" if failed else "sound"])


def _launch(arguments: argparse.Namespace) -> int:
    """Runs the rank script under Paddle's launcher on this machine; rank 0's report comes through."""
    passed = ["--seconds", str(arguments.seconds)]
    for name in ("device", "cp", "config"):
        if getattr(arguments, name) is not None:
            passed += [f"--{name}", str(getattr(arguments, name))]
    if arguments.json:
        passed.append("--json")
    with tempfile.TemporaryDirectory() as log_dir:
        command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(arguments.ranks)]
        command += ["--log_dir", log_dir, str(RANK_SCRIPT), *passed]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
        status, output = _run_bounded(command, environment, LAUNCH_LIMIT_S + arguments.seconds)
        report = Path(log_dir, "workerlog.0")
        text = (report.read_text(errors="replace") if report.exists() else "") or output
    _, mark, rest = text.partition(checks.REPORT_BEGIN)
    print(rest.partition(checks.REPORT_END)[0].strip() if mark else f"the ranks printed no report:\n{text[-2000:]}")
    return status if mark else 1


def _run_bounded(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int, str]:
    """Exit status and output; the launcher and all that it started are ended after the limit."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the workers share the launcher's session
        output, _ = process.communicate()
        return 1, f"{output}\nno end within {limit_s:g} s; the ranks were stopped"
    return process.returncode, output
