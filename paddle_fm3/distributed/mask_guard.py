# SPDX-License-Identifier: Apache-2.0
"""MaskGuard: a mask on a GPU that was planned once and written to since is never used in silence.

Paddle counts most writes to a tensor (`inplace_version`), and a mask whose count has changed is prepared anew. Not
counted are `set_value` and `copy_`, and what other frameworks and kernels write through DLPack or an address. The host
could see those only by waiting for the device at every call. So a small kernel, enqueued behind each attention,
compares the mask with the copy that was kept when it was prepared. Where they differ it fills the outputs with NaN and
raises a word in host memory, and the next call raises the error.

The same kernel makes outputs NaN that were computed with rows that never came: a transport that has failed lets
streams run to their end, and a reader that waits for the device sees the results before any exception can reach it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from paddle_fm3._device_api import CheckSameParams
from paddle_fm3.distributed.device import Device


@dataclass(frozen=True)
class DeviceArray:
    """An int32 tensor of up to four axes on the device; strides in elements."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """What a mask held when it was prepared: dense copies on the device, one a tensor of the mask."""

    addresses: tuple[int, ...]


NOTHING_KEPT = Kept(())


class MaskGuard:
    """See the module. One for each stream that attention runs on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint32)
        self._raised = page[:1]
        self._word = device.host_register(page.ctypes.data, mmap.PAGESIZE)
        finalize(self, _unregister, device, page).atexit = False
        self._claim = device.upload(np.zeros(1, np.uint32))
        self._number = 0

    def keep(self, *arrays: NDArray[np.int32]) -> Kept:
        return Kept(tuple(self._device.upload(np.ascontiguousarray(array, np.int32)) for array in arrays))

    def discard(self, kept: Kept) -> None:
        for address in kept.addresses:
            self._device.free(address)

    def watch(
        self,
        kept: Kept,
        given: tuple[DeviceArray, ...],
        outputs: tuple[tuple[int, int], ...],
        stream: int,
        failed_word: int | None = None,
    ) -> None:
        """Enqueues the comparison, where there is something to compare or to fail.

        Args:
            given: the same tensors as `kept`, as they are passed now.
            outputs: (address, bytes) of what was computed with what was kept, earlier on the stream.
            failed_word: see `DeviceTransport.failed_word`.
        """
        self._number += 1
        params = CheckSameParams(
            claim=self._claim, word=self._word, failed=failed_word, number=self._number, num_outputs=len(outputs)
        )
        for at, (output, num_bytes) in enumerate(outputs):
            params.outputs[at], params.output_bytes[at] = output, num_bytes
        for address, array in zip(kept.addresses, given, strict=True):
            missing = 4 - len(array.sizes)
            params.sizes[:] = [1] * missing + list(array.sizes)
            params.stride_given[:] = [0] * missing + list(array.strides)
            params.given, params.kept = array.address, address
            self._device.check_same(params, stream)
        if not given and failed_word is not None:
            self._device.check_same(params, stream)

    def check(self) -> None:
        """Looks at host memory only.

        Raises:
            ValueError: a mask of an earlier call was not what had been prepared. Once for each time it is seen.
        """
        if int(self._raised[0]):
            self._raised[0] = 0
            raise ValueError(
                "flashmask_cp_attention: the mask of an earlier call was written to after it had been prepared, in a "
                "way that its write count does not show (set_value, copy_, DLPack, an address); that call's outputs "
                "are NaN. Refill a mask with mask[:] = ..., or pass a new tensor"
            )


def _unregister(device: Device, page: NDArray[np.uint32]) -> None:
    device.host_unregister(page.ctypes.data)
