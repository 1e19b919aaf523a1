# SPDX-License-Identifier: Apache-2.0
"""A model of `distributed.device.Device` on the CPU: streams whose work runs in any order that events, words and each
stream's own order allow, over real memory that is NaN until written. A missing wait shows as a wrong number.

All ranks live in one process and share one FakeWorld; `run` then executes what they have enqueued, in a random order
drawn from a seed. float16 only, which NumPy has.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3._c_api import BwdParams, BwdSchedule, DType, FwdParams, MaskView, Strides
from paddle_fm3._device_api import (
    CheckSameParams,
    LocalFirst,
    MergeParams,
    PackParams,
    PackWords,
    SumPartsParams,
    SumRowsParams,
)
from paddle_fm3.testing import native_call

_ALIGNMENT = 256
_numbers = itertools.count()


class Deadlock(RuntimeError):
    """Work is left and none of it may run; the message lists what each stream waits for."""


@dataclass(eq=False)
class _Op:
    what: str
    is_ready: Callable[[], bool]
    run: Callable[[], None]


class FakeWorld:
    """Streams and events of all ranks. Thread-safe."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: list[deque[_Op]] = []
        self._weights: list[float] = []  # some streams run far ahead of others
        self._recorded: list[int] = []  # by event: records enqueued
        self._done: list[set[int]] = []  # by event: those that have run; a wait means one record, as in CUDA
        self._when: dict[int, int] = {}  # by event: num_run at its last record that has run
        self._memory: list[NDArray[np.uint8]] = []
        self.live: set[int] = set()  # addresses that nobody has freed
        self._held: set[int] = set()
        self.num_run = 0
        self.history: list[tuple[int, str]] = []  # stream and what, of all that has run
        self.freed_while_mapped: list[int] = []  # what one rank freed and another had open
        self._num_mappings: Counter[int] = Counter()  # by address

    def new_stream(self) -> int:
        with self._lock:
            self._streams.append(deque())
            self._weights.append(self._random.choice((1.0, 1.0, 100.0)))
            return len(self._streams)  # 0 is the default stream, which nothing here may use

    def enqueue(
        self, stream: int, what: str, run: Callable[[], None], is_ready: Callable[[], bool] | None = None
    ) -> None:
        with self._lock:
            self._streams[stream - 1].append(_Op(what, is_ready or (lambda: True), run))

    def new_event(self) -> int:
        with self._lock:
            self._recorded.append(0)
            self._done.append(set())
            return len(self._recorded)

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self._recorded[event - 1] += 1
            version = self._recorded[event - 1]

            def run() -> None:
                self._done[event - 1].add(version)
                self._when[event] = self.num_run

            self.enqueue(stream, f"record event {event}", run)

    def when(self, event: int) -> int:
        """How much had run before the event's last record; runs until it is known."""
        while event not in self._when:
            if not self._step():
                raise Deadlock(f"event {event} is asked for its time and does not come")
        return self._when[event]

    def wait(self, event: int, stream: int) -> None:
        with self._lock:
            version = self._recorded[event - 1]
            if version == 0:
                return  # never recorded: nothing to wait for
            self.enqueue(stream, f"wait event {event}", lambda: None, lambda: version in self._done[event - 1])

    def is_done(self, stream: int) -> bool:
        """Whether the stream is empty; if not, something somewhere is run first."""
        with self._lock:
            self._step()
            return not self._streams[stream - 1]

    def run(self, timeout_s: float = 5.0) -> None:
        """Executes everything.

        Raises:
            Deadlock: for timeout_s nothing could run.
        """
        since_s = time.monotonic()
        while any(self._streams):
            if self._step():
                since_s = time.monotonic()
            elif time.monotonic() - since_s > timeout_s:
                heads = [f"stream {at + 1}: {ops[0].what}" for at, ops in enumerate(self._streams) if ops]
                raise Deadlock("; ".join(heads))
            else:
                time.sleep(1e-3)

    def hold(self, *streams: int) -> None:
        """From now on nothing on these streams runs, until `hold` is called with others or none."""
        with self._lock:
            self._held = {stream - 1 for stream in streams}

    def run_until_stuck(self) -> None:
        """Executes all that can run."""
        while self._step():
            pass

    def head(self, stream: int) -> str:
        """What the stream comes to next; "" if it is empty."""
        with self._lock:
            return self._streams[stream - 1][0].what if self._streams[stream - 1] else ""

    def _step(self) -> bool:
        with self._lock:
            ready = [at for at, ops in enumerate(self._streams) if ops and at not in self._held and ops[0].is_ready()]
            if not ready:
                return False
            chosen = self._random.choices(ready, [self._weights[at] for at in ready])[0]
            op = self._streams[chosen].popleft()
            op.run()
            self.num_run += 1
            self.history.append((chosen + 1, op.what))
            return True

    def new_memory(self, num_bytes: int) -> int:
        array = np.full(num_bytes + _ALIGNMENT, 0xFF, np.uint8)  # NaN in every float format
        address = -(-array.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._memory.append(array)
            self.live.add(address)
        return address

    def map(self, address: int, change: int) -> None:
        """Another rank opens memory, or closes it."""
        with self._lock:
            self._num_mappings[address] += change

    def free(self, address: int) -> None:
        """Kept all the same: what still uses it reads what was there last."""
        with self._lock:
            assert address in self.live, f"{address:#x} is freed, which is not taken"
            self.live.remove(address)
            if self._num_mappings[address]:
                self.freed_while_mapped.append(address)

    def rank_device(self) -> FakeDevice:
        return FakeDevice(self)


def view(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Memory at an address as an array."""
    count = int(np.prod(shape))
    if count == 0:
        return np.empty(shape, dtype)
    raw = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype).reshape(shape)


def _tensor(address: int | None, b: int, s: int, h: int, d: int, strides: Strides) -> NDArray[np.float16]:
    """A strided [b, s, h, d] view."""
    if address is None or b * s * h * d == 0:
        return np.empty((b, s, h, d), np.float16)
    span = (b - 1) * strides.b + (s - 1) * strides.s + (h - 1) * strides.h + d
    flat = view(address, (span,), np.float16)
    steps = (strides.b * 2, strides.s * 2, strides.h * 2, 2)
    return np.lib.stride_tricks.as_strided(flat, (b, s, h, d), steps)


class FakeDevice:
    """One rank's device.

    Attributes:
        needed_rows: what forwards enqueued from now on wait for, for a mask that hides the keys behind; None: all.
    """

    needed_rows: int | None = None

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.num_copied_bytes = 0
        self.gpu = f"model {next(_numbers)}"
        self.num_reserved_sms = 0

    def name(self) -> str:
        return self.gpu

    # --- memory ----------------------------------------------------------------------------------

    def malloc(self, num_bytes: int) -> int:
        return self.world.new_memory(max(num_bytes, 1))

    def free(self, address: int) -> None:
        self.world.free(address)

    def upload(self, array: NDArray[Any]) -> int:
        address = self.malloc(array.nbytes)
        view(address, array.shape, array.dtype)[...] = array
        return address

    def host_register(self, address: int, num_bytes: int) -> int:
        return address

    def host_unregister(self, address: int) -> None:
        pass

    def reserve_sms(self, count: int) -> None:
        self.num_reserved_sms = count

    def ipc_export(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def ipc_open(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        self.world.map(address, 1)
        return address

    def ipc_close(self, address: int) -> None:
        self.world.map(address, -1)

    # --- streams ---------------------------------------------------------------------------------

    def stream_create(self) -> int:
        return self.world.new_stream()

    def stream_is_done(self, stream: int) -> bool:
        return self.world.is_done(stream)

    def event_create(self, has_time: bool = False) -> int:
        return self.world.new_event()

    def event_elapsed_ms(self, begin: int, end: int) -> float:
        """A millisecond for each thing that ran between the two records, on any stream."""
        return float(self.world.when(end) - self.world.when(begin))

    def event_destroy(self, event: int) -> None:
        pass

    def event_record(self, event: int, stream: int) -> None:
        self.world.record(event, stream)

    def event_wait(self, event: int, stream: int) -> None:
        self.world.wait(event, stream)

    def copies(self, copies: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return list(copies)

    def copy(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        def run() -> None:
            for to, source, num_bytes in copies:
                ctypes.memmove(to, source, num_bytes)
                self.num_copied_bytes += num_bytes

        self.world.enqueue(stream, "copy", run)

    def write_word(self, stream: int, word: int, value: int) -> None:
        def run() -> None:
            ctypes.c_uint32.from_address(word).value = value

        self.world.enqueue(stream, f"write word {word:#x}", run)

    def wait_word(self, stream: int, word: int, value: int) -> None:
        self.world.enqueue(stream, f"wait word {word:#x} >= {value}", lambda: None, lambda: _reached(word, value))

    # --- kernels ---------------------------------------------------------------------------------

    def schedule(self, mask: MaskView, maybe_first: LocalFirst | None) -> int:
        return self.malloc(1)

    def bwd_schedule(self, mask: MaskView) -> BwdSchedule:
        return BwdSchedule(mask, self.malloc(1), 1)

    def forward(self, params: FwdParams, stream: int) -> None:
        params = FwdParams.from_buffer_copy(params)  # what the call holds now counts, as in C
        ready = params.ready_rows

        def run() -> None:
            if params.tile_counter:
                counter = ctypes.c_int32.from_address(params.tile_counter)
                assert counter.value == 0, f"a forward begins to count its tiles at {counter.value}"
                counter.value = 99
            q, k, v, out = (_of(params, name) for name in ("q", "k", "v", "out"))
            shape = params.shape
            lse = view(params.lse or 0, (shape.b, shape.h_q, shape.s_q), np.float32)
            if q.size:
                out[...], lse[...] = native_call.forward(*map(_f32, (q, k, v)), _mask(params), params.softmax_scale)

        rows = params.shape.s_k if self.needed_rows is None else self.needed_rows
        self.world.enqueue(stream, "forward", run, None if ready is None else lambda: _reached(ready, rows))

    def backward(self, params: BwdParams, stream: int) -> None:
        params = BwdParams.from_buffer_copy(params)
        if params.bwd_schedule is not None:  # as the library refuses it
            made_for = BwdSchedule.from_address(params.bwd_schedule).mask
            assert bytes(made_for) == bytes(params.mask), f"schedule of {made_for}, call with {params.mask}"
        if params.ready_rows is not None or params.sent_word is not None:
            assert 0 <= params.remote_begin <= params.shape.s_k, f"{params.remote_begin=} of {params.shape.s_k} keys"
            assert params.sent_lead_us >= 0, f"{params.sent_lead_us=}"
        if params.ready_rows is not None:
            assert params.ready_status is not None and params.ready_timeout_us > 0, f"{params.ready_timeout_us=}"
        self.world.enqueue(stream, "backward, first passes", lambda: None)
        if params.keys_ready is not None:
            self.world.wait(params.keys_ready, stream)
        # What is not yet written is NaN: the rows that a call tells of until it does, the others until it ends.
        sent = slice(params.shape.s_k if params.sent_word is None else params.remote_begin, None)
        kept = slice(0, sent.start)
        grads: list[NDArray[np.float32]] = []

        def poison() -> None:
            for name in ("dq", "dk", "dv"):
                _of(params, name)[...] = np.nan

        def compute() -> None:
            q, k, v, out, dout = (_of(params, name) for name in ("q", "k", "v", "out", "dout"))
            shape = params.shape
            rows = (shape.b, shape.h_q, shape.s_q)
            if not q.size:
                grads.extend(np.zeros(_of(params, name).shape, np.float32) for name in ("dq", "dk", "dv"))
            else:
                lse = view(params.lse, rows, np.float32)
                dlse = None if params.dlse is None else view(params.dlse, rows, np.float32)
                grads.extend(
                    native_call.backward(
                        *map(_f32, (q, k, v)), _mask(params), _f32(out), lse, _f32(dout), dlse, params.softmax_scale
                    )
                )
            for name, grad in zip(("dk", "dv"), grads[1:], strict=True):
                _of(params, name)[:, sent] = grad[:, sent]
            if params.sent_word is not None:
                ctypes.c_uint32.from_address(params.sent_word).value = params.sent_value

        def end() -> None:
            _of(params, "dq")[...] = grads[0]
            for name, grad in zip(("dk", "dv"), grads[1:], strict=True):
                _of(params, name)[:, kept] = grad[:, kept]

        self.world.enqueue(stream, "backward begins", poison)
        ready, all_rows = params.ready_rows, params.shape.s_k
        is_ready = None if ready is None else lambda: _reached(ready, all_rows)
        self.world.enqueue(stream, "backward, rows it tells of", compute, is_ready)
        self.world.enqueue(stream, "backward", end)

    def sum_parts(self, params: SumPartsParams, stream: int) -> None:
        params = SumPartsParams.from_buffer_copy(params)

        def run() -> None:
            parts = [view(params.parts[at], (params.num_elems,), np.float16) for at in range(params.num_parts)]
            view(params.out, (params.num_elems,), np.float16)[...] = np.sum([_f32(x) for x in parts], axis=0)

        self.world.enqueue(stream, "sum_parts", run)

    def sum_rows(self, tensors: ctypes.Array[SumRowsParams], stream: int) -> None:
        copies = [SumRowsParams.from_buffer_copy(params) for params in tensors]

        def sum_one(params: SumRowsParams) -> None:
            rows = view(params.rows, (params.num_rows, 4), np.int32)
            if not len(rows):
                return
            counts = rows[:, 3] - rows[:, 2]
            target = np.repeat(np.arange(len(rows)), counts)
            at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(rows[:, 2], counts)
            entry = view(params.entries, (int(rows[:, 3].max()),), np.int32)[at]
            is_wide = entry < 0
            for b_idx in range(params.b):
                total = _rows(params.part, b_idx * params.part_stride_b, rows[:, 1], params.row_elems, np.float16)
                staged = np.zeros((len(entry), params.row_elems), np.float32)
                narrow_at, wide_at = b_idx * params.narrow_stride_b, b_idx * params.wide_stride_b
                staged[~is_wide] = _rows(params.narrow, narrow_at, entry[~is_wide], params.row_elems, np.float16)
                staged[is_wide] = _rows(params.wide, wide_at, -1 - entry[is_wide], params.row_elems, np.float32)
                np.add.at(total, target, staged)  # one after another, in order
                dtype = np.dtype(np.float32 if params.is_out_float32 else np.float16)
                begin = params.out + b_idx * params.out_stride_b * dtype.itemsize
                view(begin, (int(rows[:, 0].max()) + 1, params.row_elems), dtype)[rows[:, 0]] = total

        def run() -> None:
            for params in copies:
                sum_one(params)

        self.world.enqueue(stream, "sum_rows", run)

    def merge(self, params: MergeParams, stream: int) -> None:
        params = MergeParams.from_buffer_copy(params)

        def run() -> None:
            shape, rows = (params.b, params.s_q, params.h_q, params.d_v), (params.b, params.h_q, params.s_q)
            lses = np.stack([view(params.lses[at], rows, np.float32) for at in range(params.num_parts)])
            outs = np.stack([_f32(view(params.parts[at], shape, np.float16)) for at in range(params.num_parts)])
            top = lses.max(axis=0)
            weights = np.exp(lses - np.where(np.isneginf(top), 0, top))  # [parts, b, h, s]
            total = weights.sum(axis=0)
            share = (weights / np.where(total > 0, total, 1)).swapaxes(2, 3)[..., None]
            out = _tensor(params.out, *shape, params.stride_out)
            out[...] = (np.where(share > 0, outs, 0) * share).sum(axis=0)
            with np.errstate(divide="ignore"):
                view(params.lse, rows, np.float32)[...] = np.where(np.isneginf(top), 0, top) + np.log(total)

        self.world.enqueue(stream, "merge", run)

    def pack(self, tensors: ctypes.Array[PackParams], words: PackWords | None, stream: int) -> None:
        copies = [PackParams.from_buffer_copy(params) for params in tensors]
        told = PackWords() if words is None else PackWords.from_buffer_copy(words)

        def begin() -> None:
            for word, value in zip(told.begins, told.begin_values, strict=True):
                if word is not None:
                    ctypes.c_uint32.from_address(word).value = value

        def run() -> None:
            for params in copies:
                size = (params.b, params.s, params.h, params.d)
                dense = Strides(params.to_stride_b, params.h * params.d, params.d)
                _tensor(params.to, *size, dense)[...] = _tensor(params.from_, *size, params.stride_from)
            for at in range(told.num_ready):
                ctypes.c_uint32.from_address(told.ready[at] or 0).value = told.ready_value + at

        if words is not None:
            self.world.enqueue(stream, "pack begins", begin)
        self.world.enqueue(stream, "pack", run)

    def check_same(self, params: CheckSameParams, stream: int) -> None:
        params = CheckSameParams.from_buffer_copy(params)

        def run() -> None:
            sizes = tuple(params.sizes)
            is_same = True
            if 0 not in sizes:
                span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, params.stride_given, strict=True))
                steps = tuple(stride * 4 for stride in params.stride_given)
                given = np.lib.stride_tricks.as_strided(view(params.given, (span,), np.int32), sizes, steps)
                is_same = np.array_equal(given, view(params.kept, sizes, np.int32))
            if not is_same:
                ctypes.c_uint32.from_address(params.word).value = params.number
            if not is_same or (params.failed and ctypes.c_uint32.from_address(params.failed).value):
                for at in range(params.num_outputs):
                    view(params.outputs[at] or 0, (params.output_bytes[at],), np.uint8)[...] = 0xFF

        self.world.enqueue(stream, "check_same", run)


def _reached(word: int, value: int) -> bool:
    return (ctypes.c_uint32.from_address(word).value - value) % (1 << 32) < 1 << 31


def _rows(address: int, begin: int, rows: NDArray[np.int32], elems: int, dtype: Any) -> NDArray[np.float32]:
    """Rows of `elems` values each, counted from value `begin`."""
    if not len(rows):
        return np.empty((0, elems), np.float32)
    first = address + begin * np.dtype(dtype).itemsize
    return _f32(view(first, (int(rows.max()) + 1, elems), dtype)[rows])


def _f32(x: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(x, np.float32)


def _of(params: FwdParams | BwdParams, name: str) -> NDArray[np.float16]:
    """The tensor of that name; its memory, not a copy."""
    shape = params.shape
    assert params.dtype == DType.FLOAT16, "the model knows float16 only"
    s, h = (shape.s_q, shape.h_q) if name in ("q", "out", "dout", "dq") else (shape.s_k, shape.h_kv)
    d = shape.d_v if name in ("v", "out", "dout", "dv") else shape.d_qk
    return _tensor(getattr(params, name), shape.b, s, h, d, getattr(params, f"stride_{name}"))


def _mask(params: FwdParams | BwdParams) -> native_call.NativeMask:
    mask = params.mask
    num_bounds = {3: 2, 4: 4}[mask.form]
    bounds = view(mask.bounds, (mask.b, mask.h_mask, mask.s_k, num_bounds), np.int32)
    tiles = (mask.b, mask.h_mask, -(-mask.s_q // 128), -(-mask.s_k // 128))
    block_mask = None if mask.block_mask is None else view(mask.block_mask, tiles, np.int32).copy()
    return native_call.NativeMask.from_bounds(bounds.copy(), False, mask.s_q, block_mask)
