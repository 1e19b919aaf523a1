# SPDX-License-Identifier: Apache-2.0
"""Plans the next batches on a thread of its own while this one trains."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import paddle
from paddle.base.framework import _current_expected_place, _set_expected_place

from paddle_fm3.integration.paddlenlp.collator import INDICES
from paddle_fm3.integration.paddlenlp.planning import BatchPlan

Item = TypeVar("Item")
Result = TypeVar("Result")
JOIN_S = 10.0  # a source that blocks longer keeps its (daemon) thread


class PlannedBatch(dict):
    """A batch with its plan: ``batch_plan``, and ``wait_ms``, how long training waited for it."""

    batch_plan: BatchPlan | None = None
    wait_ms: float = 0.0


class ReadAhead(Generic[Item, Result]):
    """Iterator over ``prepare(item)``, which runs on a thread of its own, at most `depth` results ahead.

    What an item or `prepare` raises is raised by the `next` that would have returned its result; nothing follows.
    `close` ends the thread; it is also what leaving a ``with`` block does. May be closed twice.
    """

    def __init__(self, items: Iterable[Item], prepare: Callable[[Item], Result], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"ReadAhead: depth={depth} must be >= 1")
        self._room = threading.Semaphore(depth)
        self._results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._end: tuple[str, Any] | None = None
        self.wait_ms = 0.0  # of the last `next`
        self._thread = threading.Thread(
            target=self._produce, args=(items, prepare), name="paddle_fm3-plan-ahead", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        if self._end is None:
            began = time.perf_counter()
            kind, value = self._results.get()
            self.wait_ms = (time.perf_counter() - began) * 1e3
            if kind == "result":
                self._room.release()
                return value
            self._end = (kind, value)
        kind, value = self._end
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        self._is_closed.set()
        self._room.release()  # in case the thread waits for it
        self._thread.join(JOIN_S)
        if self._end is None:
            self._end = ("end", None)

    def __enter__(self) -> ReadAhead[Item, Result]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _produce(self, items: Iterable[Item], prepare: Callable[[Item], Result]) -> None:
        try:
            source = iter(items)
            while True:
                self._room.acquire()
                if self._is_closed.is_set():
                    return
                try:
                    item = next(source)
                except StopIteration:
                    break
                self._results.put(("result", prepare(item)))
        except BaseException as error:  # noqa: BLE001  handed to whoever asks for the result
            self._results.put(("error", error))
        else:
            self._results.put(("end", None))


class PlanAheadLoader(paddle.io.DataLoader):
    """A DataLoader whose batches come as `PlannedBatch`. It *is* a DataLoader, because the Trainer asks.

    Args:
        loader: the real one; every attribute is looked up there.
        plan: mask of a batch -> its plan.
        depth: batches that the thread may be ahead.
    """

    def __init__(self, loader: paddle.io.DataLoader, plan: Callable[[Any], BatchPlan], depth: int) -> None:
        # NOTE: not super().__init__: the real loader is set up already.
        self._loader = loader
        self._plan = plan
        self._depth = depth
        self._open: set[ReadAhead[Any, Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[PlannedBatch]:
        place = _current_expected_place()
        is_placed = False

        def prepare(batch: Any) -> Any:
            nonlocal is_placed
            if not is_placed:
                _set_expected_place(place)  # Paddle keeps it a thread; a new one would use GPU 0
                is_placed = True
            if not isinstance(batch, dict) or batch.get(INDICES) is None:
                return batch
            planned = PlannedBatch(batch)
            planned.batch_plan = self._plan(batch[INDICES])
            return planned

        with ReadAhead(self._loader, prepare, self._depth) as batches:
            self._open.add(batches)
            for batch in batches:
                if isinstance(batch, PlannedBatch):
                    batch.wait_ms = batches.wait_ms
                yield batch
            self._open.discard(batches)

    def __call__(self) -> Iterator[PlannedBatch]:
        return iter(self)

    def close(self) -> None:
        """Ends every thread, also of iterations that were left in the middle."""
        while self._open:
            self._open.pop().close()
