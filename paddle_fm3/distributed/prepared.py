# SPDX-License-Identifier: Apache-2.0
"""PreparedMask: a mask made ready for one rank, once a batch, and found again by every layer of the model."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import paddle

from paddle_fm3.distributed.localize import compact_bounds, localize_mask
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.mask.column_mask import ColumnMask

T = TypeVar("T")

CACHE_ENTRIES = 8  # a step uses one mask, or two where window and full layers alternate; the rest is slack


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """What one rank needs to run attention for its rows over all keys.

    Attributes:
        partition: who owns which rows.
        rank: the rank this was made for.
        bounds_local: int32 [b, h_mask, s, n]; local query rows, key columns in global order, not causal.
        block_mask_local: int32 [b, h_mask, ceil(s_local/128), ceil(s/128)] or None.
        digest: of the whole mask and the partition; equal on all ranks of a step.
    """

    partition: Partition
    rank: int
    bounds_local: paddle.Tensor  # [b, h_mask, s, n]
    block_mask_local: paddle.Tensor | None
    digest: str


def prepare_mask(mask_global: ColumnMask, partition: Partition, rank: int, digest: str) -> PreparedMask:
    """Localises the mask for the rank and hands the result to Paddle."""
    local = localize_mask(mask_global, partition, rank)
    bounds = compact_bounds(local)
    block_mask = None if local.block_mask is None else paddle.to_tensor(local.block_mask)
    return PreparedMask(partition, rank, paddle.to_tensor(bounds), block_mask, digest)


def global_mask(
    bounds: np.ndarray | None, causal: bool, partition: Partition, b: int, block_mask: np.ndarray | None
) -> ColumnMask:
    """The mask over the whole sequence; bounds is int32 [b, h_mask, s, n] or None for no hidden interval."""
    if bounds is not None:
        return ColumnMask.from_bounds(bounds, is_causal=causal, s_q=partition.s, block_mask=block_mask)
    nothing = np.zeros((b, 1, partition.s), np.int32)  # [b, h_mask, s]
    return ColumnMask(nothing, nothing, nothing, nothing, partition.s, causal, block_mask)


def digest_of(*parts: Any) -> str:
    """Short content digest of arrays and plain values."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            hasher.update(repr((part.shape, part.dtype.str)).encode())
            hasher.update(np.ascontiguousarray(part).tobytes())
        else:
            hasher.update(repr(part).encode())
    return hasher.hexdigest()


def content_digest(bounds: paddle.Tensor | None, causal: bool, block_mask: paddle.Tensor | None = None) -> str:
    """Of a mask as it was given; reads it, which on a GPU waits for the device."""
    return digest_of(*(None if x is None else x.numpy() for x in (bounds, block_mask)), causal)


def check_unwritten(name: str, x: paddle.Tensor, version: int) -> None:
    """Raises ValueError if the tensor, lent to backward, was written to since it had this inplace_version."""
    if x.inplace_version != version:
        raise ValueError(
            f"flashmask_cp_attention: {name} was written to in place between forward and backward (write count "
            f"{version} then, {x.inplace_version} now); backward needs what it held"
        )


def is_read_each_time(tensor: paddle.Tensor) -> bool:
    """Whether a mask's content is looked at in every call. On a GPU it is not: that would wait for the device."""
    return tensor.place.is_cpu_place()


def state_of(tensor: paddle.Tensor) -> tuple[int, int | str]:
    """Changes when the tensor is written to; on a GPU for the writes that Paddle counts.

    NOTE: not counted by Paddle 2.6.2 and 3.3.1: set_value, copy_, get_tensor().set, and writes through an address or
    DLPack. A GPU mask that is refilled so is noticed by `MaskGuard`.
    """
    content = digest_of(tensor.numpy()) if is_read_each_time(tensor) else int(tensor.data_ptr() or 0)
    return tensor.inplace_version, content


class PreparedCache(Generic[T]):
    """Finds what was prepared for a bounds tensor by identity, so that layers pay nothing after the first.

    A tensor counts as the same only while it is alive and its `state_of` is the same.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[Any, ...], tuple[Any, T]] = OrderedDict()

    def find(self, bounds: paddle.Tensor | None, key: tuple[Any, ...]) -> T | None:
        entry = self._entries.get(self._full_key(bounds, key))
        if entry is None:
            return None
        reference, prepared = entry
        return prepared if reference is None or reference() is bounds else None

    def put(self, bounds: paddle.Tensor | None, key: tuple[Any, ...], prepared: T) -> list[T]:
        """Keeps it; returns what had to go for it."""
        reference = None if bounds is None else weakref.ref(bounds)
        full_key = self._full_key(bounds, key)
        gone = [self._entries.pop(full_key)[1]] if full_key in self._entries else []
        self._entries[full_key] = (reference, prepared)
        return gone + [self._entries.popitem(last=False)[1][1] for _ in range(len(self._entries) - CACHE_ENTRIES)]

    @staticmethod
    def _full_key(bounds: paddle.Tensor | None, key: tuple[Any, ...]) -> tuple[Any, ...]:
        if bounds is None:
            return key
        return (id(bounds), *state_of(bounds), *key)
