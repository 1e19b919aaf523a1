# SPDX-License-Identifier: Apache-2.0
"""Trace: what one rank computed, waited for, sent and received, and when; opens in Perfetto or chrome://tracing."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        self._sources: list[Callable[[], list[Span]]] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[Span]:
        """All so far; waits for those that a GPU has not ended yet."""
        with self._lock:
            for source in self._sources:
                self._spans += source()
            return list(self._spans)

    def add_source(self, source: Callable[[], list[Span]]) -> None:
        """Asked for new spans whenever the spans are read."""
        with self._lock:
            self._sources.append(source)

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


def span_of(trace: Trace | None, track: str, name: str) -> AbstractContextManager[None]:
    """`trace.span`, or nothing where nobody asked for a trace."""
    return nullcontext() if trace is None else trace.span(track, name)


def hidden_us(spans: Sequence[Span]) -> tuple[float, float]:
    """(time in which something moved, the part of it in which the rank computed as well)."""
    moving = _union([span for span in spans if span.track in ("send", "receive")])
    computing = _union([span for span in spans if span.track == "compute"])
    both, at = 0.0, 0
    for begin, end in moving:
        while at < len(computing) and computing[at][1] <= begin:
            at += 1
        for compute_begin, compute_end in itertools.takewhile(lambda c, end=end: c[0] < end, computing[at:]):
            both += min(end, compute_end) - max(begin, compute_begin)
    return sum(end - begin for begin, end in moving), both


def _union(spans: Sequence[Span]) -> list[list[float]]:
    """Disjoint ascending [begin_us, end_us] that cover the same time."""
    merged: list[list[float]] = []
    for span in sorted(spans, key=lambda span: span.begin_us):
        if merged and span.begin_us <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], span.end_us)
        else:
            merged.append([span.begin_us, span.end_us])
    return merged
