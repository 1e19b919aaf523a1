# SPDX-License-Identifier: Apache-2.0
"""Times attention on this machine beside its peers in the same run; every timed result is checked.

    python -m paddle_fm3 bench                                        # the default cases on the CPU
    python -m paddle_fm3 bench --case 8k_window --case 8k_causal --impl fm3
    python -m paddle_fm3 bench --memory --json

`tools/bench_attention.py` of a checkout measures the same; its --json PATH keeps the records. The exit status is 0 if
every result agreed with its reference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from paddle_fm3.commands._bench_run import prepared_environment

HELP = "time attention beside its peers; every timed result is checked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    for name, meaning in (("case", "case name"), ("impl", "fm3 or a peer"), ("dtype", "float32, bfloat16 or float16")):
        text = f"{meaning}; may be repeated (default: the device's own choice)"
        parser.add_argument(f"--{name}", action="append", default=[], help=text)
    parser.add_argument("--repeats", type=int, default=None, metavar="N", help="timings of each call")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="CPU threads of every impl")
    parser.add_argument("--json", action="store_true", help="print the records as one JSON array instead of a table")


def run(arguments: argparse.Namespace) -> int:
    names = ("device", "memory", "case", "impl", "dtype", "repeats", "threads")
    wanted = {name: getattr(arguments, name) for name in names}
    threads = arguments.threads or len(os.sched_getaffinity(0))
    records: list[dict[str, Any]] = []
    columns: list[str] = []
    # A process of its own: thread counts must be set before NumPy and Paddle are imported. It shows its own progress.
    with subprocess.Popen(
        measuring_command(wanted), stdout=subprocess.PIPE, text=True, env=prepared_environment(threads)
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if "columns" in message:
                columns = message["columns"]
            else:
                records.append(message)
    if process.returncode != 0:
        return process.returncode
    from paddle_fm3.testing import bench

    print(json.dumps(records) if arguments.json else bench.format_table(records, columns))
    return 0 if records and all(record["refcheck"] == "pass" for record in records) else 1


def measuring_command(wanted: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "paddle_fm3.commands._bench_run", json.dumps(wanted)]
