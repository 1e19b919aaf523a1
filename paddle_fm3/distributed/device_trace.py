# SPDX-License-Identifier: Apache-2.0
"""DeviceTrace: what a GPU's streams did when, as spans of a `Trace`. Enqueueing does not wait; reading the spans does.

A span is what lies between two events on one stream. Times are the device's, put onto the host's monotonic clock at
one moment when both were read, which is good to some 10 us; so ranks of one machine are comparable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary

from paddle_fm3.distributed.device import Device
from paddle_fm3.distributed.trace import Span, Trace, now_us

NUM_READINGS = 5  # of both clocks; the quickest counts
_idle_streams: WeakKeyDictionary[Device, int] = WeakKeyDictionary()  # on which a record is at once done


class DeviceTrace:
    """Adds to `trace`, whenever that is read, the spans enqueued so far."""

    def __init__(self, device: Device, trace: Trace) -> None:
        self._device = device
        self._pending: list[tuple[str, str, int, int]] = []  # track, name, begin event, end event
        if device not in _idle_streams:
            _idle_streams[device] = device.stream_create()
        readings = [_read_clocks(device, _idle_streams[device]) for _ in range(NUM_READINGS)]
        _, self._origin_us, self._origin = min(readings)
        for _, _, event in readings:
            if event != self._origin:
                device.event_destroy(event)
        trace.add_source(self._collect)

    @contextmanager
    def span(self, track: str, name: str, stream: int) -> Iterator[None]:
        """What is enqueued inside on the stream. Tracks are those of `trace`."""
        begin, end = (self._device.event_create(has_time=True) for _ in range(2))
        self._device.event_record(begin, stream)
        try:
            yield
        finally:
            self._device.event_record(end, stream)
            self._pending.append((track, name, begin, end))

    def _collect(self) -> list[Span]:
        pending, self._pending = self._pending, []
        spans = []
        for track, name, *events in pending:
            begin_us, end_us = (
                self._origin_us + 1e3 * self._device.event_elapsed_ms(self._origin, event) for event in events
            )
            spans.append(Span(track, name, begin_us, end_us))
            for event in events:
                self._device.event_destroy(event)
        return spans


def _read_clocks(device: Device, stream: int) -> tuple[float, float, int]:
    """(uncertainty in us, host's time in us, event of that time)."""
    event = device.event_create(has_time=True)
    before_us = now_us()
    device.event_record(event, stream)
    while not device.stream_is_done(stream):
        pass
    after_us = now_us()
    return after_us - before_us, (before_us + after_us) / 2, event


def span_of(trace: DeviceTrace | None, track: str, name: str, stream: int) -> AbstractContextManager[None]:
    """`trace.span`, or nothing where no trace is taken."""
    return nullcontext() if trace is None else trace.span(track, name, stream)
