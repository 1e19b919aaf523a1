# SPDX-License-Identifier: Apache-2.0
"""The Hopper backward's lists of a mask, as its own kernels make them on the host, taken apart."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from host_library import compile_for_host

from paddle_fm3.testing.native_call import NativeMask

SKIP, PARTIAL, FULL = 0, 1, 2
BLOCK_Q = 64
BLOCK_KS = (128, 64)  # head dims to 128, above


CUT_ALL_SIZES = "-DFM3_CUT_ALL_SIZES"  # key tiles of small masks, too, begin at documents


def compile_library(folder: Path, *flags: str) -> ctypes.CDLL:
    """test/cpp/sm90_bwd_lists.cc as a library in `folder`."""
    # Fibers jump between stacks, which the checked longjmp refuses.
    library = compile_for_host("sm90_bwd_lists.cc", folder, "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", *flags)
    library.lists_bytes.restype = ctypes.c_int64
    return library


@dataclass(frozen=True, eq=False)
class Lists:
    """Of key tiles of one size, of all masks: num_masks = b * h_mask."""

    k_begins: np.ndarray  # int32 [num_masks, num_k_tiles + 1]
    num_tiles: np.ndarray  # int32 [num_masks]; the others are empty
    bounds: np.ndarray  # int32 [num_masks, num_k_tiles, block_k, 4]
    visited: np.ndarray  # bool [num_masks, num_k_tiles, num_q_tiles]
    partial: np.ndarray  # likewise
    stray: int  # bits set past the last row tile
    chunks: np.ndarray  # int32 [num_masks, num_k_tiles, 2]
    steps: np.ndarray  # int32 [num_masks, num_k_tiles]
    by_length: np.ndarray  # likewise
    summaries: np.ndarray  # int32 [num_masks, 7]: steps, of one at most, late, visiting, apart up, apart down, tiles
    visitors: np.ndarray  # uint32 [num_masks, num_k_words, num_q_tiles, 2]: bits, before
    visits: np.ndarray  # int32 [num_masks, num_q_tiles, 2]: visiting key tiles, first row
    shared_rows: np.ndarray  # int32 [num_masks]
    q_rows: np.ndarray  # int32 [num_masks, num_q_tiles, 2]: rows [first, last) of each row tile
    num_q_tiles: np.ndarray  # int32 [num_masks]; the others are empty
    row_places: np.ndarray | None  # int32 [num_masks, ceil(s_q / 64), 4] where row tiles may leave the grid

    @property
    def classes(self) -> np.ndarray:
        """[num_masks, num_k_tiles, num_q_tiles]"""
        return np.where(self.visited, np.where(self.partial, PARTIAL, FULL), SKIP)


def build(library: ctypes.CDLL, mask: NativeMask, block_k: int) -> Lists:
    """Those of key tiles of `block_k` keys, made on the host."""
    view = mask.view
    blob = np.full(library.lists_bytes(ctypes.byref(view)) + 256, 0xA5, np.uint8)
    blob = blob[-blob.ctypes.data % 256 :][: len(blob) - 256]
    library.build_lists(ctypes.byref(view), ctypes.c_void_p(blob.ctypes.data))
    return take_apart(library, mask, blob, block_k)


def take_apart(library: ctypes.CDLL, mask: NativeMask, blob: np.ndarray, block_k: int) -> Lists:
    """Those of key tiles of `block_k` keys in a prepared schedule's bytes."""
    view, offsets = mask.view, (ctypes.c_int64 * 14)()
    library.lists_offsets(ctypes.byref(view), block_k, offsets)
    at = iter(offsets)

    def part(dtype: type, *shape: int) -> np.ndarray:
        begin = next(at)
        return blob[begin : begin + 4 * int(np.prod(shape))].view(dtype).reshape(shape)

    masks, on_grid = mask.b * mask.h_mask, -(-mask.s_q // BLOCK_Q)
    q_tiles = library.room_of_row_tiles(ctypes.byref(view))
    k_tiles = library.room_of_tiles(ctypes.byref(view), block_k)
    k_begins, num_tiles = part(np.int32, masks, k_tiles + 1), part(np.int32, masks)
    padded = part(np.int32, masks, -(-k_tiles * block_k // 128) * 128, 4)
    bounds = padded[:, : k_tiles * block_k].reshape(masks, k_tiles, block_k, 4)
    words = part(np.uint32, masks, k_tiles, -(-q_tiles // 32), 2)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)  # [.., num_q_chunks, 2, 32]
    flat = bits.swapaxes(2, 3).reshape(masks, k_tiles, 2, -1)
    tail = (
        part(np.int32, masks, k_tiles, 2), part(np.int32, masks, k_tiles), part(np.int32, masks, k_tiles),
        part(np.int32, masks, 8)[:, [0, 2, 3, 4, 5, 6, 7]], part(np.uint32, masks, -(-k_tiles // 32), q_tiles, 2),
        part(np.int32, masks, q_tiles, 2), part(np.int32, masks),
    )  # fmt: skip
    begins = np.minimum(np.arange(on_grid + 1) * BLOCK_Q, mask.s_q)
    rows = np.stack([np.stack([begins[:-1], begins[1:]], -1)] * masks), np.full(masks, on_grid), None
    if q_tiles > on_grid:
        rows = part(np.int32, masks, q_tiles, 2), part(np.int32, masks), part(np.int32, masks, on_grid, 4)
    visited, partial = flat[:, :, 0, :q_tiles], flat[:, :, 1, :q_tiles]
    return Lists(k_begins, num_tiles, bounds, visited, partial, int(flat[..., q_tiles:].sum()), *tail, *rows)
