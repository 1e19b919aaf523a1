# SPDX-License-Identifier: Apache-2.0
"""Collectives of one context-parallel group: post, then wait, with a bounded wait and a named culprit.

Tensors go through `paddle.distributed` collectives only here and in `device_nccl`. On gloo they run on a communication
thread, so that a transfer proceeds beside compute and a rank that stalls can be given up on; gloo lacks
reduce_scatter, which becomes all_reduce + slice, and its fp16 sum overflows to inf, so 16-bit sums travel as
fp32. On NCCL the native collectives run on the current stream, and small records go through the job's store.

Limits: a gloo collective cannot be cancelled. After a timeout the stuck thread is abandoned (it is a daemon and
gloo ends it by itself after 30 s), the communicator refuses further use, and the process should exit. gloo's own
limit of 30 s also caps longer timeouts, but for records once planned calls have connected the ranks: these travel
over the connections then. On NCCL a dead peer is Paddle's watchdog's business (PADDLE_PG_TIMEOUT).
"""

from __future__ import annotations

import atexit
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import collective

from paddle_fm3.distributed import groups, store_exchange
from paddle_fm3.distributed.record_exchange import RecordExchange
from paddle_fm3.distributed.transport import TransportError

T = TypeVar("T")

RECORD_BYTES = 2048  # fixed size of one rank's record in `exchange`
ANNOUNCE_AFTER_S = 1.0  # a rank that waits longer says so in the store, so that it is not taken for dead
ROLL_CALL_S = 3.0  # how long the survivors of a failure spend on finding out who is missing
END_TIMEOUT_S = 1.0  # how long the end of the process waits for the communication thread


class CommError(RuntimeError):
    """A collective did not complete: names this rank, the transfer, the cause and the ranks that are missing."""


class Pending(Generic[T]):
    """A posted collective. `wait` returns its result and may be called once."""

    def __init__(self, what: str, collect: Callable[[], T]) -> None:
        self._what = what
        self._collect = collect
        self._is_waited = False

    def wait(self) -> T:
        if self._is_waited:
            raise RuntimeError(f"Pending: wait() called twice on '{self._what}'")
        self._is_waited = True
        return self._collect()


@dataclass(eq=False)
class _GroupState:
    """What all communicators of a group share, whatever their timeouts."""

    group: Any
    num_posted: int = 0
    failure: str | None = None
    host_exchange: RecordExchange | None = None  # over connections of the ranks' own, once these are there
    in_use: threading.RLock = field(default_factory=threading.RLock)


class Communicator:
    """Bounded collectives over one group. All communicators of a group count their collectives together.

    Args:
        group: a Paddle ``Group`` of at least two ranks, this process among them.
        timeout_s: longest wait for one collective.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        self.group = group
        self.rank: int = group.rank
        self.num_ranks: int = group.nranks
        self.timeout_s = timeout_s
        self.is_gloo = groups.is_gloo(group)
        self._state = _state_of(group)

    @property
    def host_exchange(self) -> RecordExchange | None:
        """Carries small records over connections of the ranks' own, once some planned call has made these."""
        return self._state.host_exchange

    @host_exchange.setter
    def host_exchange(self, exchange: RecordExchange) -> None:
        self._state.host_exchange = exchange

    @contextmanager
    def one_call(self, who: str) -> Iterator[None]:
        """Refuses a second thread: its transfers would be taken for those of the first.

        Raises:
            RuntimeError: another thread of this process is inside, of the same group.
        """
        if not self._state.in_use.acquire(blocking=False):
            raise RuntimeError(
                f"{who}: another thread of rank {self.rank} is in a call of this group; ranks must make the same calls "
                "in the same order, one at a time (a group of its own for each thread, made by "
                "paddle.distributed.new_group, can run beside)"
            )
        try:
            yield
        finally:
            self._state.in_use.release()

    def post_all_gather(self, x: paddle.Tensor, what: str) -> Pending[list[paddle.Tensor]]:
        """Every rank's ``x`` (equal shapes), by rank."""
        gathered: list[paddle.Tensor] = []
        return self._post(lambda: dist.all_gather(gathered, x, group=self.group), lambda: gathered, what)

    def post_reduce_scatter(self, parts: paddle.Tensor, what: str) -> Pending[paddle.Tensor]:
        """Sum over ranks of ``parts[self.rank]``; ``parts`` is [num_ranks, ...] and is consumed.

        Summed in the dtype given, except that gloo sums 16-bit inputs in fp32; the result has parts' dtype.
        """
        dtype = parts.dtype
        if self.is_gloo:
            is_16_bit = dtype in (paddle.float16, paddle.bfloat16)
            total = parts.astype("float32") if is_16_bit else parts
            return self._post(
                lambda: dist.all_reduce(total, group=self.group), lambda: total[self.rank].astype(dtype), what
            )
        summed = paddle.empty(parts.shape[1:], dtype)
        return self._post(lambda: dist.reduce_scatter(summed, list(parts), group=self.group), lambda: summed, what)

    def post_all_reduce(self, x: paddle.Tensor, what: str) -> Pending[paddle.Tensor]:
        """Sum over ranks, in x's dtype (on gloo 16-bit inputs are summed in fp32); ``x`` is left as it is."""
        is_widened = self.is_gloo and x.dtype in (paddle.float16, paddle.bfloat16)
        total = x.astype("float32") if is_widened else x.clone()
        return self._post(lambda: dist.all_reduce(total, group=self.group), lambda: total.astype(x.dtype), what)

    def post_all_to_all(self, rows: paddle.Tensor, counts: np.ndarray, what: str) -> Pending[paddle.Tensor]:
        """Rows for every rank, in order of the rank, to the rank; returns the rows from every rank, in order of theirs.

        Args:
            rows: [sum of counts[self.rank], ...].
            counts: int [num_ranks, num_ranks], rows from (first axis) to (second axis); the same on every rank.
        """
        me, num_ranks = self.rank, self.num_ranks
        received = counts[:, me]
        if not self.is_gloo:
            out = paddle.empty([int(received.sum()), *rows.shape[1:]], rows.dtype)
            return self._post(
                lambda: dist.alltoall_single(out, rows, received.tolist(), counts[me].tolist(), group=self.group),
                lambda: out, what,
            )  # fmt: skip
        # gloo has no all-to-all: everybody gets everything, padded to one length.
        most = max(1, int(counts.sum(axis=1).max()))
        padded = paddle.zeros([most, *rows.shape[1:]], rows.dtype)
        if rows.shape[0]:
            padded[: rows.shape[0]] = rows
        begins = counts[:, :me].sum(axis=1)  # [num_ranks]: where each rank's rows for this one begin
        gathered: list[paddle.Tensor] = []

        def collect() -> paddle.Tensor:
            mine = (gathered[src][int(begins[src]) : int(begins[src] + received[src])] for src in range(num_ranks))
            return paddle.concat(list(mine))

        return self._post(lambda: dist.all_gather(gathered, padded, group=self.group), collect, what)

    def exchange(self, record: dict[str, Any], what: str) -> list[dict[str, Any]]:
        """Every rank's small JSON-able record, by rank."""
        if self.host_exchange is not None:
            try:
                return self.host_exchange(record, what, self.timeout_s)
            except TransportError as error:
                raise CommError(f"context parallelism: {error}") from error
        encoded = json.dumps(record).encode()
        if not self.is_gloo:
            return [json.loads(text) for text in self._exchange_by_store(encoded, what)]
        if len(encoded) > RECORD_BYTES:
            raise ValueError(f"exchange: the record of '{what}' takes {len(encoded)} bytes; at most {RECORD_BYTES}")
        padded = np.frombuffer(encoded.ljust(RECORD_BYTES), np.uint8).astype(np.int32)  # [RECORD_BYTES]
        gathered = self.post_all_gather(paddle.to_tensor(padded), what).wait()
        return [json.loads(row.numpy().astype(np.uint8).tobytes()) for row in gathered]

    def _exchange_by_store(self, encoded: bytes, what: str) -> list[bytes]:
        number = self._next_number(what)
        key = f"paddle_fm3/exchange/{self.group.id}/{number}"
        try:
            return store_exchange.exchange(
                collective._default_store, key, self.rank, self.num_ranks, encoded, self.timeout_s
            )
        except store_exchange.Missing as missing:
            self._give_up(number, what, f"no answer within {self.timeout_s:g} s", missing.ranks)

    def _next_number(self, what: str) -> int:
        if self._state.failure is not None:
            raise CommError(f"'{what}' refused: an earlier collective of this group failed: {self._state.failure}")
        self._state.num_posted += 1
        return self._state.num_posted

    def _post(self, run: Callable[[], Any], collect: Callable[[], T], what: str) -> Pending[T]:
        number = self._next_number(what)
        if not self.is_gloo:
            run()
            return Pending(what, collect)
        job = _Job(run)
        _gloo_thread().put(job)

        def wait_and_collect() -> T:
            began = time.monotonic()
            if not job.is_done.wait(min(ANNOUNCE_AFTER_S, self.timeout_s)):
                self._announce(number)
                if not job.is_done.wait(self.timeout_s - ANNOUNCE_AFTER_S):
                    self._fail(number, what, f"no answer within {self.timeout_s:g} s")
            if job.error is not None:
                gloo_words = " ".join(str(job.error).split())[-160:]
                cause = f"gloo gave up after {time.monotonic() - began:.1f} s ({gloo_words})"
                # gloo names the peer whose connection broke. Then nobody has to be asked, and there is no time: the
                # launcher ends this rank as soon as it sees that one dead.
                lost_peer = re.search(r"pair_rank = (\d+)", gloo_words)
                self._fail(number, what, cause, [int(lost_peer[1])] if lost_peer else None)
            return collect()

        return Pending(what, wait_and_collect)

    def _fail(self, number: int, what: str, cause: str, lost_peers: list[int] | None = None) -> NoReturn:
        self._give_up(number, what, cause, lost_peers or self._missing_ranks(number))

    def _give_up(self, number: int, what: str, cause: str, missing: list[int] | None) -> NoReturn:
        if missing is None:
            culprit = "the key-value store does not answer either (its host, global rank 0, is probably dead)"
        elif missing:
            culprit = f"rank {', '.join(map(str, missing))} did not arrive (dead or stalled)"
        else:
            culprit = "every rank is waiting in it"
        self._state.failure = (
            f"context parallelism: rank {self.rank} of {self.num_ranks} gave up on '{what}' "
            f"(collective {number}): {cause}; {culprit}"
        )
        raise CommError(self._state.failure)

    def _announce(self, number: int) -> None:
        store = collective._default_store
        key = self._announce_key(number, self.rank)
        # Threads of their own, here and below: asking the store of a dead host would block for minutes.
        threading.Thread(target=lambda: _asked(store, key, 1), daemon=True).start()

    def _announce_key(self, number: int, rank: int) -> str:
        return f"paddle_fm3/waiting/{self.group.id}/{number}/{rank}"

    def _missing_ranks(self, number: int) -> list[int] | None:
        """Ranks that did not announce themselves in the same collective; None if the store does not answer."""
        missing: list[int] = []
        is_answered = threading.Event()
        self._announce(number)

        def roll_call() -> None:
            store = collective._default_store
            time.sleep(ANNOUNCE_AFTER_S + 0.5)  # whoever arrived a moment ago still gets to announce itself
            missing.extend(
                rank for rank in range(self.num_ranks) if _asked(store, self._announce_key(number, rank), 0) == 0
            )
            is_answered.set()

        threading.Thread(target=roll_call, daemon=True).start()
        return missing if is_answered.wait(ROLL_CALL_S) else None


def _asked(store: Any, key: str, amount: int) -> int:
    with groups.store_lock:
        return store.add(key, amount)


class _Job:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.is_done = threading.Event()
        self.error: BaseException | None = None


_job_queue: queue.SimpleQueue[_Job | None] | None = None


def _gloo_thread() -> queue.SimpleQueue[_Job | None]:
    """The queue of the process's one communication thread; one thread keeps all groups' collectives in order."""
    global _job_queue
    if _job_queue is None:
        _job_queue = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(_job_queue,), name="paddle_fm3-gloo", daemon=True)
        thread.start()
        atexit.register(_end_gloo_thread, _job_queue, thread)
    return _job_queue


def _end_gloo_thread(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    """Before the libraries whose thread-local state it holds are taken down. One stuck in gloo is left to die."""
    jobs.put(None)
    thread.join(END_TIMEOUT_S)


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.run()
        except BaseException as error:  # noqa: BLE001  handed to the waiting thread, which raises
            job.error = error
        job.is_done.set()
        del job  # else the last transfer's tensors would live until the next


_states: dict[int, _GroupState] = {}  # by group id


def _state_of(group: Any) -> _GroupState:
    state = _states.get(group.id)
    if state is None or state.group is not group:  # ids are given anew once all groups have been destroyed
        groups.settle_job_store()
        state = _states[group.id] = _GroupState(group)
    return state
