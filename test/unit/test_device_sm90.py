# SPDX-License-Identifier: Apache-2.0
"""Sm90Device passes what the C ABI takes: every method, against a library of stubs with the ABI's own types."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_fm3 import _c_api, _device_api
from paddle_fm3._c_api import BwdParams, FwdParams, MaskView
from paddle_fm3._device_api import (
    CheckSameParams,
    LocalFirst,
    MergeParams,
    PackParams,
    PackWords,
    SumPartsParams,
    SumRowsParams,
)
from paddle_fm3.distributed.device import Device, DeviceError, Sm90Device


class StubLibrary:
    """Functions that convert their arguments as ctypes does, note the call, and return `status`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 0
        self.num_bytes = 128  # of any workspace and schedule
        self.failing: str | None = None  # the one function that returns 1
        self._functions: dict[str, Any] = {}
        self.declared: dict[str, Any] = {}
        _c_api.declare(self, "sm90")  # type: ignore[arg-type]
        _device_api.declare(self)  # type: ignore[arg-type]
        for name, slot in self.declared.items():
            self._functions[name] = self._stub(name, slot.restype, slot.argtypes)

    def _stub(self, name: str, restype: Any, argtypes: list[Any]) -> Any:
        def called(*arguments: Any) -> int:
            self.calls.append(name.removeprefix("fm3_sm90_"))
            if name.endswith(("malloc", "create", "open", "host_register")):
                arguments[-1][0] = 4096
            if name.endswith("is_done"):
                arguments[-1][0] = 1
            if name.endswith("bytes"):
                return self.num_bytes
            return 1 if name == f"fm3_sm90_{self.failing}" else self.status

        if name.endswith("last_error"):
            return lambda: b"fm3_sm90: no"
        kinds = [a if a is not ctypes.POINTER(ctypes.c_void_p) else ctypes.POINTER(ctypes.c_size_t) for a in argtypes]
        function = ctypes.CFUNCTYPE(restype, *kinds)(called)
        return lambda *given: function(*(_as(kind, x) for kind, x in zip(kinds, given, strict=True)))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("fm3_sm90_"):
            raise AttributeError(name)
        if name in self._functions:
            return self._functions[name]
        return self.declared.setdefault(name, SimpleNamespace())


def _as(kind: Any, x: Any) -> Any:
    return ctypes.cast(x, kind) if kind is ctypes.POINTER(ctypes.c_size_t) else x


@pytest.fixture
def library() -> StubLibrary:
    return StubLibrary()


def test_every_method_reaches_its_function(library: StubLibrary) -> None:
    device: Device = Sm90Device(library)  # type: ignore[arg-type]
    assert device.malloc(10) == 4096 and device.name() == ""
    assert device.upload(np.arange(5, dtype=np.int32)) == 4096
    assert device.upload(np.empty(0, np.int32)) == 4096
    assert device.host_register(4096, 100) == 4096
    device.host_unregister(4096)
    assert device.ipc_open(device.ipc_export(4096)) == 4096
    device.ipc_close(4096)
    stream, event = device.stream_create(), device.event_create()
    assert device.stream_is_done(stream)
    device.event_record(event, stream)
    device.event_wait(event, stream)
    device.reserve_sms(8)
    device.copy(device.copies([(4096, 8192, 16), (4112, 8208, 16)]), stream)
    device.write_word(stream, 4096, (1 << 32) + 5)
    device.wait_word(stream, 4096, 7)
    assert device.schedule(MaskView(), None) == device.schedule(MaskView(), LocalFirst()) == 4096
    made = device.bwd_schedule(MaskView(s_q=7))
    assert (made.data, made.bytes, made.mask.s_q) == (4096, 128, 7)
    device.forward(FwdParams(), stream)
    device.backward(BwdParams(), stream)
    device.sum_parts(SumPartsParams(), stream)
    device.sum_rows((SumRowsParams * 2)(), stream)
    device.merge(MergeParams(), stream)
    device.pack((PackParams * 2)(), PackWords(), stream)
    device.check_same(CheckSameParams(), stream)
    device.free(4096)
    timed = Sm90Device(library)  # type: ignore[arg-type]
    timed.event_elapsed_ms(timed.event_create(has_time=True), timed.event_create(has_time=True))
    timed.event_destroy(event)
    unused = {name.removeprefix("fm3_sm90_") for name in library.declared} - set(library.calls)
    assert unused <= {"last_error"}


def test_a_status_becomes_the_library_s_message(library: StubLibrary) -> None:
    device = Sm90Device(library)  # type: ignore[arg-type]
    library.status = 3
    for call in (lambda: device.malloc(1), lambda: device.pack((PackParams * 1)(), None, 1), lambda: device.free(1)):
        with pytest.raises(DeviceError, match="fm3_sm90: no"):
            call()


@pytest.mark.parametrize("failing", ["build_schedule", "build_bwd_schedule", "copy", "order_local_first"])
def test_what_cannot_be_filled_is_given_back(library: StubLibrary, failing: str) -> None:
    device = Sm90Device(library)  # type: ignore[arg-type]
    library.failing = failing
    with pytest.raises(DeviceError, match="fm3_sm90: no"):
        device.upload(np.arange(5))
        device.schedule(MaskView(), LocalFirst())
        device.bwd_schedule(MaskView())
    assert library.calls[-3:] == [failing, "stream_destroy", "free"]


def test_workspaces_grow_and_are_kept_by_stream(library: StubLibrary) -> None:
    device = Sm90Device(library)  # type: ignore[arg-type]
    params = FwdParams()
    for stream in (1, 1, 2):
        device.forward(params, stream)
    assert library.calls.count("malloc") == 2 and (params.workspace, params.workspace_bytes) == (4096, 128)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_workspace_that_cannot_grow_is_forgotten(library: StubLibrary, direction: str) -> None:
    """It is given back before a larger one is asked for: a smaller call afterwards must not use it."""
    device = Sm90Device(library)  # type: ignore[arg-type]
    params = FwdParams() if direction == "forward" else BwdParams()
    call = getattr(device, direction)
    call(params, 1)
    library.failing, library.num_bytes = "malloc", 1000
    with pytest.raises(DeviceError):
        call(params, 1)
    library.failing, library.num_bytes = None, 128
    before = library.calls.count("malloc")
    call(params, 1)
    assert library.calls.count("malloc") == before + 1 and library.calls.count("free") == 1
    assert params.workspace == 4096


def test_sums_of_a_kept_workspace_are_cleared_once(library: StubLibrary) -> None:
    """Calls of the same sizes on one stream find zeros where the last one left them; after one that failed, or of other
    sizes, they do not know."""
    device = Sm90Device(library)  # type: ignore[arg-type]

    def zero_sums(stream: int, **changes: int) -> int:
        params = BwdParams(mask=MaskView(b=changes.pop("b_mask", 1)), **changes)
        device.backward(params, stream)
        return params.zero_sums

    assert [zero_sums(1) for _ in range(3)] == [1, 2, 2]
    assert zero_sums(2) == 1 and zero_sums(1) == 2
    for changes in ({"is_deterministic": 1}, {"dtype": 2}, {"b_mask": 3}, {"bwd_schedule": 4096}):
        assert [zero_sums(1, **changes), zero_sums(1, **changes), zero_sums(1)] == [1, 2, 1]
    library.num_bytes = 1000  # lists of another mask take more room: new memory, which holds anything
    assert [zero_sums(1), zero_sums(1)] == [1, 2]
    library.failing = "bwd"
    with pytest.raises(DeviceError):
        zero_sums(1)
    library.failing = None
    assert zero_sums(1) == 1
