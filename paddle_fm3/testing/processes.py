# SPDX-License-Identifier: Apache-2.0
"""Ends a process with everything it started. Linux only."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Process ids of the children of pid, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # "pid (name) state ppid ..."; the name may hold spaces and brackets.
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found.extend(frontier)
    return found


def kill_tree(process: subprocess.Popen) -> None:
    """Kills the process and its descendants, and reaps it. Harmless if it has ended.

    NOTE: Paddle's launcher puts every rank into a session of its own, so killing its process group is not enough,
    and it does not take them along when it is killed itself.
    """
    doomed = descendants(process.pid) if process.poll() is None else []
    if process.poll() is None:
        process.kill()
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
