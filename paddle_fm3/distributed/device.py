# SPDX-License-Identifier: Apache-2.0
"""Device: the few things that context parallelism asks of a GPU, over addresses. No framework.

Streams, events and memory are integers (cudaStream_t, cudaEvent_t, addresses), so that tensors of any framework
serve. Everything with a `stream` is enqueued there and returns at once. `Sm90Device` is the real one; a model of
it on the CPU, with streams that run in any order the events allow, is in `paddle_fm3.testing.fake_device`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paddle_fm3._c_api import BwdParams, BwdSchedule, DType, FwdParams, MaskView
from paddle_fm3._device_api import (
    IPC_HANDLE_BYTES,
    SIGNATURES,
    CheckSameParams,
    LocalFirst,
    MergeParams,
    PackParams,
    PackWords,
    SumPartsParams,
    SumRowsParams,
    declare,
)

DTYPES = {"bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}
ELEM_BYTES = 2


class DeviceError(RuntimeError):
    """A call of the device library failed; the text is its own message."""


@dataclass(frozen=True)
class DeviceTensor:
    """A [b, s, h, d] tensor of 2-byte elements; the last axis is contiguous. Strides in elements."""

    address: int
    b: int
    s: int
    h: int
    d: int
    strides: tuple[int, int, int]

    @classmethod
    def contiguous(cls, address: int, b: int, s: int, h: int, d: int) -> DeviceTensor:
        return cls(address, b, s, h, d, (s * h * d, h * d, d))

    def rows(self, begin: int, end: int) -> DeviceTensor:
        """Rows [begin, end) of every batch entry."""
        address = self.address + begin * self.strides[1] * ELEM_BYTES
        return DeviceTensor(address, self.b, end - begin, self.h, self.d, self.strides)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == (self.s * self.h * self.d, self.h * self.d, self.d)

    @property
    def num_elems(self) -> int:
        return self.b * self.s * self.h * self.d

    def into(self, params: Any, name: str, stride_name: str) -> None:
        """Sets address and strides in a parameter struct of the C ABI."""
        setattr(params, name, self.address)
        strides = getattr(params, stride_name)
        strides.b, strides.s, strides.h = self.strides


@dataclass(frozen=True)
class ReadyRows:
    """Keys on their way: see FwdParams::ready_rows."""

    word: int
    status: int
    timeout_us: int


class Device(Protocol):
    """See the module. Addresses that calls take must stay valid until the stream has passed them."""

    def name(self) -> str:
        """Which GPU of the machine this is."""
        ...

    def malloc(self, num_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def upload(self, array: NDArray[Any]) -> int:
        """New device memory with the array's bytes; waits for the copy."""
        ...

    def host_register(self, address: int, num_bytes: int) -> int:
        """Host memory as the device addresses it."""
        ...

    def host_unregister(self, address: int) -> None: ...
    def reserve_sms(self, count: int) -> None:
        """Attention launched by this thread leaves so many multiprocessors free, from now on."""
        ...

    def ipc_export(self, address: int) -> bytes: ...
    def ipc_open(self, handle: bytes) -> int: ...
    def ipc_close(self, address: int) -> None: ...
    def stream_create(self) -> int: ...
    def stream_is_done(self, stream: int) -> bool: ...
    def event_create(self, has_time: bool = False) -> int: ...
    def event_elapsed_ms(self, begin: int, end: int) -> float:
        """Between two events with time; waits for `end`."""
        ...

    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_wait(self, event: int, stream: int) -> None: ...
    def copies(self, copies: list[tuple[int, int, int]]) -> Any:
        """(to, from, bytes) each, made ready for `copy`."""
        ...

    def copy(self, copies: Any, stream: int) -> None:
        """What `copies` gave: in no set order, beside any kernel."""
        ...

    def write_word(self, stream: int, word: int, value: int) -> None: ...
    def wait_word(self, stream: int, word: int, value: int) -> None:
        """Until int32(*word - value) >= 0."""
        ...

    def schedule(self, mask: MaskView, maybe_first: LocalFirst | None) -> int:
        """New device memory with the mask's prepared schedule, in the order that `maybe_first` asks for."""
        ...

    def bwd_schedule(self, mask: MaskView) -> BwdSchedule:
        """New device memory, at `data`, with the backward's prepared schedule of the mask."""
        ...

    def forward(self, params: FwdParams, stream: int) -> None:
        """`params.workspace` is set by the callee; one forward at a time a stream."""
        ...

    def backward(self, params: BwdParams, stream: int) -> None: ...
    def sum_parts(self, params: SumPartsParams, stream: int) -> None: ...
    def sum_rows(self, tensors: ctypes.Array[SumRowsParams], stream: int) -> None:
        """One or two tensors of the same b and dtypes."""
        ...

    def merge(self, params: MergeParams, stream: int) -> None: ...
    def pack(self, tensors: ctypes.Array[PackParams], words: PackWords | None, stream: int) -> None:
        """One or two tensors of the same b, and words that are written with it."""
        ...

    def check_same(self, params: CheckSameParams, stream: int) -> None: ...


class Sm90Device:
    """The current CUDA device, through libfm3_sm90.so.

    Args:
        library: as `paddle_fm3._native.sm90_library()` gives it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = declare(library)
        names = ("fwd", "bwd", "build_schedule", "build_bwd_schedule", *SIGNATURES)
        self._functions = {name: getattr(library, f"fm3_sm90_{name}") for name in names}
        self._workspaces: dict[tuple[str, int], tuple[int, int]] = {}  # (direction, stream) -> address, bytes
        self._last_sizes: dict[int, tuple[Any, ...]] = {}  # by stream: of its last backward, whose sums are zeros again

    def _call(self, name: str, *arguments: Any) -> None:
        if self._functions[name](*arguments) != 0:
            raise DeviceError(self._library.fm3_sm90_last_error().decode())

    def _new(self, name: str, *arguments: Any) -> int:
        out = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(out))
        return out.value or 0

    def name(self) -> str:
        text = ctypes.create_string_buffer(64)
        self._call("device_name", text, len(text))
        return text.value.decode()

    # --- memory ----------------------------------------------------------------------------------

    def malloc(self, num_bytes: int) -> int:
        return self._new("malloc", max(num_bytes, 1))

    def free(self, address: int) -> None:
        self._call("free", address)

    def upload(self, array: NDArray[Any]) -> int:
        dense = np.ascontiguousarray(array)
        with self._filled(dense.nbytes) as (address, stream):
            if dense.nbytes:
                self.copy(self.copies([(address, dense.ctypes.data, dense.nbytes)]), stream)
        return address

    def host_register(self, address: int, num_bytes: int) -> int:
        return self._new("host_register", address, num_bytes)

    def host_unregister(self, address: int) -> None:
        self._call("host_unregister", address)

    def reserve_sms(self, count: int) -> None:
        self._call("reserve_sms", count)

    def ipc_export(self, address: int) -> bytes:
        handle = ctypes.create_string_buffer(IPC_HANDLE_BYTES)
        self._call("ipc_export", address, handle)
        return handle.raw

    def ipc_open(self, handle: bytes) -> int:
        return self._new("ipc_open", ctypes.create_string_buffer(handle, IPC_HANDLE_BYTES))

    def ipc_close(self, address: int) -> None:
        self._call("ipc_close", address)

    # --- streams ---------------------------------------------------------------------------------

    def stream_create(self) -> int:
        return self._new("stream_create")

    def stream_is_done(self, stream: int) -> bool:
        is_done = ctypes.c_int32()
        self._call("stream_is_done", stream, ctypes.byref(is_done))
        return bool(is_done.value)

    def event_create(self, has_time: bool = False) -> int:
        return self._new("event_create", int(has_time))

    def event_destroy(self, event: int) -> None:
        self._call("event_destroy", event)

    def event_record(self, event: int, stream: int) -> None:
        self._call("event_record", event, stream)

    def event_wait(self, event: int, stream: int) -> None:
        self._call("event_wait", event, stream)

    def event_elapsed_ms(self, begin: int, end: int) -> float:
        ms = ctypes.c_float()
        self._call("event_elapsed", begin, end, ctypes.byref(ms))
        return ms.value

    def copies(self, copies: list[tuple[int, int, int]]) -> Any:
        pointers, sizes = ctypes.c_void_p * len(copies), ctypes.c_int64 * len(copies)
        to, source, num_bytes = zip(*copies, strict=True)
        return pointers(*to), pointers(*source), sizes(*num_bytes), len(copies)

    def copy(self, copies: Any, stream: int) -> None:
        self._call("copy", *copies, stream)

    def write_word(self, stream: int, word: int, value: int) -> None:
        self._call("write_word", stream, word, value & 0xFFFFFFFF)

    def wait_word(self, stream: int, word: int, value: int) -> None:
        self._call("wait_word", stream, word, value & 0xFFFFFFFF)

    # --- kernels ---------------------------------------------------------------------------------

    def schedule(self, mask: MaskView, maybe_first: LocalFirst | None) -> int:
        with self._filled(self._library.fm3_sm90_schedule_bytes(ctypes.byref(mask))) as (schedule, stream):
            self._call("build_schedule", ctypes.byref(mask), schedule, stream)
            if maybe_first is not None:
                self._call("order_local_first", ctypes.byref(mask), schedule, ctypes.byref(maybe_first), stream)
        return schedule

    def bwd_schedule(self, mask: MaskView) -> BwdSchedule:
        num_bytes = self._library.fm3_sm90_bwd_schedule_bytes(ctypes.byref(mask))
        with self._filled(num_bytes) as (address, stream):
            made = BwdSchedule(mask, address, num_bytes)
            self._call("build_bwd_schedule", ctypes.byref(made), stream)
        return made

    @contextmanager
    def _filled(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """New device memory and a stream to fill it on, until that has run; both are given back if it fails."""
        address = self.malloc(num_bytes)
        try:
            stream = self.stream_create()
            try:
                yield address, stream
                while not self.stream_is_done(stream):
                    pass
            finally:
                self._call("stream_destroy", stream)
        except BaseException:
            self.free(address)
            raise

    def forward(self, params: FwdParams, stream: int) -> None:
        self._run("fwd", params, stream)

    def backward(self, params: BwdParams, stream: int) -> None:
        # The sums of dQ, up to all of its rows in float32, need not be cleared again: 3 % of a rank's backward.
        mask = params.mask
        sizes = (bytes(params.shape), params.dtype, params.is_deterministic, mask.b, mask.h_mask, mask.form,
                 params.bwd_schedule is not None)  # fmt: skip
        params.zero_sums = 2 if self._last_sizes.pop(stream, None) == sizes else 1
        self._run("bwd", params, stream)
        self._last_sizes[stream] = sizes

    def _run(self, direction: str, params: FwdParams | BwdParams, stream: int) -> None:
        ask = self._library.fm3_sm90_fwd_workspace_bytes if direction == "fwd" else (
            self._library.fm3_sm90_bwd_workspace_bytes)  # fmt: skip
        needed = ask(ctypes.byref(params))
        if needed < 0:
            raise DeviceError(self._library.fm3_sm90_last_error().decode())
        address, size = self._workspaces.get((direction, stream), (0, 0))
        if size < needed:
            # NOTE: freeing waits for the device; it happens when a larger call than ever before comes.
            if address:
                del self._workspaces[direction, stream]  # there may be no room for the larger one
                self.free(address)
            address, size = self.malloc(needed), needed
            self._workspaces[direction, stream] = address, size
            if direction == "bwd":
                params.zero_sums = 1  # new memory holds anything
        params.workspace, params.workspace_bytes = address, size
        self._call(direction, ctypes.byref(params), stream)

    def sum_parts(self, params: SumPartsParams, stream: int) -> None:
        self._call("sum_parts", ctypes.byref(params), stream)

    def sum_rows(self, tensors: ctypes.Array[SumRowsParams], stream: int) -> None:
        self._call("sum_rows", tensors, len(tensors), stream)

    def merge(self, params: MergeParams, stream: int) -> None:
        self._call("merge", ctypes.byref(params), stream)

    def pack(self, tensors: ctypes.Array[PackParams], words: PackWords | None, stream: int) -> None:
        self._call("pack", tensors, len(tensors), words, stream)

    def check_same(self, params: CheckSameParams, stream: int) -> None:
        self._call("check_same", ctypes.byref(params), stream)
