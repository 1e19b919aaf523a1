# SPDX-License-Identifier: Apache-2.0
"""What a lost rank does to a process whose own work can no longer come to a right end.

The host has enqueued and gone on: it may be inside a call that waits for the device, where no exception reaches it, or
about to read results that mean nothing. If the program does not meet the error by itself, the process is ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

SAY_AFTER_S = 0.5  # for the program to meet the error by itself, and say it
EXIT_GRACE_S = 5.0  # for the program to end by itself
EXIT_STATUS = 70
_MOST_BETWEEN_S = 0.2  # looks of a thread that has room to run


class RunningTime:
    """Seconds in which this process has been running, for a thread that looks every few milliseconds. A job that was
    suspended goes on where it was: no rank could have come meanwhile."""

    def __init__(self) -> None:
        self._last_s, self._total_s = time.monotonic(), 0.0

    def look(self) -> float:
        now_s = time.monotonic()
        self._total_s += min(now_s - self._last_s, _MOST_BETWEEN_S)
        self._last_s = now_s
        return self._total_s


def end_process(failure: str, is_held: Callable[[], bool], was_raised: Callable[[], bool]) -> None:
    """Says why on stderr unless the program has, and ends the process if it is still held after a while.

    Args:
        is_held: whether this process still waits for what will not come, or has results that mean nothing.
        was_raised: whether the program has met the error.
    """
    time.sleep(SAY_AFTER_S)
    if is_held() and not was_raised():
        print(f"context parallelism: {failure}", file=sys.stderr, flush=True)
    time.sleep(EXIT_GRACE_S)
    if is_held():
        sys.stdout.flush()
        os._exit(EXIT_STATUS)


def end_process_now(failure: str) -> None:
    """Says why on stderr and ends the process."""
    print(f"context parallelism: {failure}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_STATUS)
