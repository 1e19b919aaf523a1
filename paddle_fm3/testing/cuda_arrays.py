# SPDX-License-Identifier: Apache-2.0
"""NumPy-like arrays on an NVIDIA GPU through the driver alone: what `native_call` makes parameters of.

For compute-sanitizer: no framework to start under it, and every tensor is an allocation of its own, so that one
element too far is seen.
"""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace

import numpy as np
from numpy.typing import DTypeLike, NDArray


class DriverError(RuntimeError):
    """A driver call failed; the text is the call and the driver's number."""


@functools.cache
def _driver() -> ctypes.CDLL:
    """libcuda with the first device's primary context current: the one that a statically linked runtime uses too."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), 0))
    _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    return driver


def _check(name: str, status: int) -> None:
    if status != 0:
        raise DriverError(f"{name}: CUresult {status}")


def synchronize() -> None:
    """Waits for all work; raises DriverError for what failed since."""
    _check("cuCtxSynchronize", _driver().cuCtxSynchronize())


class DeviceArray:
    """Contiguous array on the device, freed with the object. Has of ndarray what `native_call` reads."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.itemsize, self.size = self.dtype.itemsize, int(np.prod(shape))
        self.nbytes = self.itemsize * self.size
        self.strides = tuple(self.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        address = ctypes.c_void_p()
        if self.nbytes:
            _check("cuMemAlloc", _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(self.nbytes)))
            self._set(address, 0xFF)  # NaN in every float format: nothing may rely on what memory held
        self.ctypes = SimpleNamespace(data=address.value)

    @classmethod
    def of(cls, array: NDArray) -> DeviceArray:
        array = np.ascontiguousarray(array)
        copy = cls(array.shape, array.dtype)
        if copy.nbytes:
            source = ctypes.c_void_p(array.ctypes.data)
            status = _driver().cuMemcpyHtoD_v2(copy._address, source, ctypes.c_size_t(copy.nbytes))
            _check("cuMemcpyHtoD", status)
        return copy

    def numpy(self) -> NDArray:
        """A copy on the host, after all work enqueued so far."""
        array = np.empty(self.shape, self.dtype)
        if self.nbytes:
            target = ctypes.c_void_p(array.ctypes.data)
            _check("cuMemcpyDtoH", _driver().cuMemcpyDtoH_v2(target, self._address, ctypes.c_size_t(self.nbytes)))
        return array

    @property
    def _address(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.ctypes.data)

    def _set(self, address: ctypes.c_void_p, byte: int) -> None:
        _check("cuMemsetD8", _driver().cuMemsetD8_v2(address, ctypes.c_ubyte(byte), ctypes.c_size_t(self.nbytes)))

    def __del__(self) -> None:
        if getattr(self, "ctypes", None) is not None and self.ctypes.data:
            _driver().cuMemFree_v2(self._address)
