# SPDX-License-Identifier: Apache-2.0
"""A few lines of Python in a process of their own, for what ends a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_program(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `code`, which may be indented and finds the modules that this process finds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
