# SPDX-License-Identifier: Apache-2.0
"""PaddleDevice: Paddle's current GPU as a `Device`, and Paddle's tensors as the device takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_fm3 import _native
from paddle_fm3._c_api import BwdSchedule, MaskView
from paddle_fm3._device_api import LocalFirst
from paddle_fm3.distributed.device import Sm90Device
from paddle_fm3.distributed.mask_guard import DeviceArray


class PaddleDevice(Sm90Device):
    """Its memory is from Paddle's allocator, so that the two do not take it from each other."""

    def __init__(self) -> None:
        super().__init__(_native.sm90_library())
        self._tensors: dict[int, paddle.Tensor] = {}  # by address

    def malloc(self, num_bytes: int) -> int:
        return self._keep(paddle.empty([max(num_bytes, 1)], "uint8"))

    def free(self, address: int) -> None:
        """NOTE: waits for the device, since other streams than Paddle's may still use the memory."""
        paddle.device.synchronize()
        del self._tensors[address]

    def upload(self, array: NDArray[Any]) -> int:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self._keep(paddle.to_tensor(raw if raw.size else np.zeros(1, np.uint8)))
        # NOTE: CUDA may return from a copy of pageable memory before it has landed, and no stream but Paddle's own is
        # ordered behind it: a schedule made at once on another could be that of whatever lay there before.
        paddle.device.synchronize()
        return address

    def schedule(self, mask: MaskView, maybe_first: LocalFirst | None) -> int:
        # NOTE: for what Paddle's stream still does with the memory that Paddle is about to give.
        paddle.device.synchronize()
        return super().schedule(mask, maybe_first)

    def bwd_schedule(self, mask: MaskView) -> BwdSchedule:
        paddle.device.synchronize()  # as above
        return super().bwd_schedule(mask)

    def _keep(self, tensor: paddle.Tensor) -> int:
        address = int(tensor.data_ptr())
        self._tensors[address] = tensor
        return address


def address_of(x: paddle.Tensor) -> int:
    return int(x.data_ptr() or 0)  # Paddle 2.6 has None for a tensor without elements


def array_of(x: paddle.Tensor) -> DeviceArray:
    return DeviceArray(address_of(x), tuple(x.shape), tuple(x.strides))


def spans_of(*tensors: paddle.Tensor) -> tuple[tuple[int, int], ...]:
    """(address, bytes) of contiguous tensors, those without elements left out."""
    return tuple((address_of(x), x.size * x.element_size()) for x in tensors if x.size)
