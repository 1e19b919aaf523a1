# SPDX-License-Identifier: Apache-2.0
"""Prepared schedules of the Hopper kernels, taken apart: as a GPU wrote them, as the same kernels write them on the
host thread by thread, and the lists alone as made one granule after the other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from host_library import compile_for_host

from paddle_fm3.testing.cases import AttentionCase
from paddle_fm3.testing.native_call import NativeMask

TILE_Q = 128
SHORT_COLS = 80  # of the last item of a list that ends short
Spans = list[tuple[int, int, bool, bool]]  # (k_begin, count of items, is_full, ends_short)


def compile_library(folder: Path) -> ctypes.CDLL:
    """test/cpp/sm90_schedule.cc as a library in `folder`."""
    # Fibers jump between stacks, which the checked longjmp refuses.
    library = compile_for_host("sm90_schedule.cc", folder, "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE")
    library.schedule_bytes.restype = ctypes.c_int64
    return library


def mask_of(case: AttentionCase) -> NativeMask:
    raw = case.build_mask()
    if raw.startend_row_indices is None:
        return NativeMask.without_bounds(raw.causal, case.b, case.s_q, case.s_k)
    return NativeMask.from_bounds(raw.startend_row_indices, raw.causal, case.s_q, raw.block_mask)


@dataclass(frozen=True, eq=False)
class Lists:
    """Of single query tiles, or of pairs of them."""

    order: np.ndarray  # int32 [b * h_mask, count, 2]: tile, head of its list
    costs: np.ndarray  # int32 [b * h_mask, count, 2]: items, head of the list
    spans: np.ndarray  # uint32 [b * h_mask, count, max_spans], packed

    @property
    def num_spans(self) -> np.ndarray:
        return self.costs[:, :, 1] & (1 << 28) - 1

    @property
    def shifts(self) -> np.ndarray:
        """By how many columns a list's items begin later than its spans say."""
        return self.costs[:, :, 1] >> 28 & 15


def build(library: ctypes.CDLL, mask: NativeMask) -> np.ndarray:
    """A schedule's bytes, by the kernels on the host."""
    view = mask.view
    num_bytes = library.schedule_bytes(ctypes.byref(view))
    blob = np.full(num_bytes + 256, 0xA5, np.uint8)
    blob = blob[-blob.ctypes.data % 256 :][:num_bytes]
    library.build_schedule(ctypes.byref(view), ctypes.c_void_p(blob.ctypes.data))
    return blob


def take_apart(library: ctypes.CDLL, mask: NativeMask, blob: np.ndarray) -> tuple[list[int], list[Lists]]:
    """Totals, and lists of tiles and of pairs, in a schedule's bytes."""
    view = mask.view
    offsets = (ctypes.c_int64 * 8)()
    library.schedule_offsets(ctypes.byref(view), offsets)

    def part(offset: int, dtype: type, *shape: int) -> np.ndarray:
        return blob[offset : offset + 4 * int(np.prod(shape))].view(dtype).reshape(shape)

    num_tiles = -(-mask.s_q // TILE_Q)
    lists = []
    for idx, count in enumerate((num_tiles, -(-num_tiles // 2))):
        order, costs, spans = offsets[1 + 3 * idx : 4 + 3 * idx]
        shape = (mask.b * mask.h_mask, count)
        lists.append(Lists(part(order, np.int32, *shape, 2), part(costs, np.int32, *shape, 2),
                           part(spans, np.uint32, *shape, offsets[7])))  # fmt: skip
    return [int(x) for x in part(offsets[0], np.uint32, 4)[::2]], lists


def unpack(packed: np.ndarray) -> Spans:
    return [(int(x >> 12) * 16, int(x >> 2 & 1023), bool(x & 1), bool(x & 2)) for x in packed]


def plain_spans(
    library: ctypes.CDLL, mask: NativeMask, list_idx: int, entry: int, *, is_pair: bool
) -> tuple[np.ndarray, int]:
    """Spans of a list, packed, and its head."""
    packed = np.empty(mask.s_k // library.item_cols(0) + 3, np.uint32)
    view = mask.view
    address = packed.ctypes.data_as(ctypes.c_void_p)
    tile = 2 * entry if is_pair else entry
    head = library.plain_spans(ctypes.byref(view), list_idx, tile, int(is_pair), address, len(packed))  # int32
    return packed[: head & (1 << 28) - 1], head
