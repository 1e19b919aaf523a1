# SPDX-License-Identifier: Apache-2.0
"""Trace: what one rank computed, waited for, sent and received, and when; opens in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TRACKS = ("compute", "wait", "send", "receive")  # one line each in the picture; the last two are transfers


@dataclass(frozen=True)
class Span:
    """Something that took from begin_us to end_us (monotonic clock, comparable between processes of a machine)."""

    track: str
    name: str
    begin_us: float
    end_us: float


def now_us() -> float:
    return time.monotonic_ns() / 1e3


class Trace:
    """Collects the spans of one rank; pass it as ``trace=`` to `flashmask_cp_attention`. Thread-safe."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def add(self, track: str, name: str, begin_us: float) -> None:
        """A span from begin_us to now."""
        span = Span(track, name, begin_us, now_us())
        with self._lock:
            self._spans.append(span)

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        begin_us = now_us()
        try:
            yield
        finally:
            self.add(track, name, begin_us)

    def to_chrome(self, rank: int) -> str:
        """Chrome's trace format: one process a rank, one thread a track."""
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        ]
        for tid, track in enumerate(TRACKS):
            events.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": track}})
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": TRACKS.index(span.track),
                    "name": span.name,
                    "ts": span.begin_us,
                    "dur": span.end_us - span.begin_us,
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def save(self, path: Path | str, rank: int) -> None:
        Path(path).write_text(self.to_chrome(rank), encoding="utf-8")
