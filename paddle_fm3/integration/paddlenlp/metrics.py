# SPDX-License-Identifier: Apache-2.0
"""What context parallelism cost since the last log, as figures that the Trainer logs beside the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle.distributed as dist

from paddle_fm3.distributed.planned import transport_bytes
from paddle_fm3.distributed.trace import Trace, hidden_us
from paddle_fm3.integration.paddlenlp.planning import BatchPlan

MEGA = 1e6


class StepMetrics:
    """Sums over the batches since `take`. `trace` collects the spans of the batch that is being trained.

    Args:
        timeline: folder for the timeline of the last batch before each `take`, a file a rank; empty: none.
    """

    def __init__(self, timeline: str = "") -> None:
        self.trace = Trace()
        self._timeline = timeline
        self._bytes_before: tuple[int, int] | None = None
        self._clear()

    def begin_batch(self, batch_plan: BatchPlan, wait_ms: float, group: Any) -> None:
        """The batch before this one is over."""
        if self._bytes_before is None:
            self._bytes_before = _bytes(group)
        self._fold()
        self._num_batches += 1
        self._imbalance += batch_plan.imbalance
        self._plan_ms += batch_plan.plan_ms
        self._plan_wait_ms += wait_ms

    def take(self, group: Any) -> dict[str, float]:
        """Means a batch since the last call, and start anew; empty if there was no planned batch.

        cp_imbalance: latest rank over the mean rank, minus 1, by planned work (the same on every rank).
        cp_plan_ms, cp_plan_wait_ms: making a plan, and how long training waited for it.
        cp_sent_mb, cp_received_mb: rows of K, V, dK, dV to and from other ranks, in 10^6 bytes (this rank).
        And, from the trace that is taken on CPU ranks:
        cp_hidden_share: part of the time in which rows moved that this rank computed attention as well.
        cp_wait_ms: this rank waited for rows.
        """
        self._write_timeline()
        self._fold()
        num_batches = self._num_batches
        if num_batches == 0:
            return {}
        sent, received = (now - before for now, before in zip(_bytes(group), self._bytes_before or (0, 0), strict=True))
        figures = {
            "cp_imbalance": self._imbalance / num_batches,
            "cp_plan_ms": self._plan_ms / num_batches,
            "cp_plan_wait_ms": self._plan_wait_ms / num_batches,
        }
        if sent + received > 0:
            figures["cp_sent_mb"] = sent / MEGA / num_batches
            figures["cp_received_mb"] = received / MEGA / num_batches
        if self._moving_us > 0:
            figures["cp_wait_ms"] = self._wait_us / 1e3 / num_batches
            figures["cp_hidden_share"] = self._hidden_us / self._moving_us
        self._bytes_before = _bytes(group)
        self._clear()
        return {name: round(value, 6) for name, value in figures.items()}

    def _write_timeline(self) -> None:
        if self._timeline and self.trace.spans:
            rank = dist.get_rank()
            Path(self._timeline).mkdir(parents=True, exist_ok=True)
            self.trace.save(Path(self._timeline) / f"cp_timeline_rank{rank}.json", rank)

    def _fold(self) -> None:
        """Adds up the spans of the batch that ended; they would fill the memory of a long run."""
        spans = self.trace.spans
        moving, hidden = hidden_us(spans)
        self._moving_us += moving
        self._hidden_us += hidden
        self._wait_us += sum(span.end_us - span.begin_us for span in spans if span.track == "wait")
        self.trace = Trace()

    def _clear(self) -> None:
        self._num_batches = 0
        self._imbalance = self._plan_ms = self._plan_wait_ms = 0.0
        self._moving_us = self._hidden_us = self._wait_us = 0.0


def _bytes(group: Any) -> tuple[int, int]:
    sent, received = transport_bytes(group)
    return sum(sent), sum(received)
