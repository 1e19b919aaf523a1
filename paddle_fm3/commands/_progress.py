# SPDX-License-Identifier: Apache-2.0
"""A progress line on stderr for whatever takes longer than two seconds; nothing for what does not."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

QUIET_S = 2.0
BAR_WIDTH = 24


class Progress:
    """``with Progress("plans", total=15) as progress: ... progress.step("doc_32k")``.

    A terminal gets one line that is redrawn; a file or a pipe gets a line every two seconds at most.

    Args:
        label: what is being done.
        total: number of steps.
        stream: default stderr, so that stdout stays parseable.
        clock: seconds; for tests.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None, clock=time.monotonic) -> None:
        self.label, self.total, self.done = label, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._begin_s = clock()
        self._last_shown_s: float | None = None

    def step(self, note: str = "") -> None:
        """One step is about to be done; `note` names it. Call before each step, so that a slow first one shows."""
        self._show(note)
        self.done += 1

    def _show(self, note: str) -> None:
        now_s = self._clock()
        is_terminal = self._stream.isatty()
        if now_s - self._begin_s < QUIET_S:
            return
        if not is_terminal and self._last_shown_s is not None and now_s - self._last_shown_s < QUIET_S:
            return
        self._last_shown_s = now_s
        filled = BAR_WIDTH * self.done // max(1, self.total)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        line = f"{self.label} [{bar}] {self.done}/{self.total} {now_s - self._begin_s:.0f} s {note}".rstrip()
        self._stream.write(f"\r{line:<100}" if is_terminal else line + "\n")
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._last_shown_s is None:
            return
        if error is None:
            self._last_shown_s = None  # the closing line is always written
            self._show("done")
        if self._stream.isatty():
            self._stream.write("\n")
            self._stream.flush()
