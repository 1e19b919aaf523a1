# SPDX-License-Identifier: Apache-2.0
"""Named context-parallel cases: their global inputs are made from a seed, the same in every process. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.partition import Partition, contiguous_partition, dual_chunk_partition

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class CpCase:
    """One call. `frame` says whether ranks pass all mask columns or their own; `split` how the rows are cut."""

    name: str
    mask: str
    s: int
    b: int = 1
    h_q: int = 2
    h_kv: int = 2
    h_mask: int = 1
    d_qk: int = 16
    d_v: int = 16
    frame: str = "whole"
    split: str = "dual_chunk"
    dtype: str = "float32"
    seed: int = 0
    has_block_mask: bool = False
    reduce_dtype: str = "float32"
    softmax_scale: float | None = None

    @property
    def causal(self) -> bool:
        return MASKS[self.mask][1]

    def partition(self, num_ranks: int) -> Partition:
        if self.split == "dual_chunk":
            return dual_chunk_partition(self.s, num_ranks)
        if self.split == "contiguous":
            return contiguous_partition(self.s, num_ranks)
        # "scattered": unequal chunks dealt at random, as a planner may decide; rank 0 gets none if it can be spared.
        rng = np.random.default_rng(self.seed + 99)
        cuts = np.sort(rng.choice(np.arange(1, self.s), 6, replace=False))
        lowest = 1 if num_ranks > 1 else 0
        return Partition((0, *map(int, cuts), self.s), tuple(map(int, rng.integers(lowest, num_ranks, 7))), num_ranks)

    def bounds(self) -> Int32Array | None:
        """startend_row_indices [b, h_mask, s, n]."""
        build = MASKS[self.mask][0]
        if build is None:
            return None
        rng = np.random.default_rng(self.seed + 7)
        planes = [[build(rng, self.s) for _ in range(self.h_mask)] for _ in range(self.b)]
        return np.ascontiguousarray(np.array(planes, np.int32))

    def block_mask(self) -> Int32Array | None:
        """[b, h_mask, s/128, s/128]; about a third of the 128 x 128 tiles are dropped."""
        if not self.has_block_mask:
            return None
        num_tiles = -(-self.s // 128)
        rng = np.random.default_rng(self.seed + 5)
        return (rng.random((self.b, self.h_mask, num_tiles, num_tiles)) > 0.33).astype(np.int32)

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Global q, k, v, dout, dlse; values are exact in the case's dtype only after the test rounds them."""
        rng = np.random.default_rng(self.seed + 1)
        shapes = {
            "q": (self.b, self.s, self.h_q, self.d_qk),
            "k": (self.b, self.s, self.h_kv, self.d_qk),
            "v": (self.b, self.s, self.h_kv, self.d_v),
            "dout": (self.b, self.s, self.h_q, self.d_v),
            "dlse": (self.b, self.h_q, self.s),
        }
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _document_ends(rng: np.random.Generator, s: int, num_documents: int) -> tuple[Int32Array, Int32Array]:
    """Begin and end of each column's document; the first is longer than half the sequence."""
    inner = np.sort(rng.choice(np.arange(max(s * 5 // 8, 1), s), max(min(num_documents - 1, s - s * 5 // 8), 0), False))
    cuts = np.concatenate([[0], inner, [s]]).astype(np.int32)
    document = np.searchsorted(cuts, np.arange(s), side="right") - 1
    return cuts[document], cuts[document + 1]


def _causal_documents(rng: np.random.Generator, s: int) -> Int32Array:
    return _document_ends(rng, s, 4)[1][:, None]


def _documents(rng: np.random.Generator, s: int) -> Int32Array:
    begins, ends = _document_ends(rng, s, 4)
    return np.stack([ends, begins], axis=-1)


def _single_token_documents(rng: np.random.Generator, s: int) -> Int32Array:
    """One document longer than half the sequence among documents of one token each."""
    begin = int(rng.integers(1, s // 3))
    ends = np.arange(1, s + 1, dtype=np.int32)
    ends[begin : begin + s * 5 // 9] = begin + s * 5 // 9
    return ends[:, None]


def _causal_window(rng: np.random.Generator, s: int) -> Int32Array:
    return np.minimum(np.arange(s) + max(s // 5, 1), s)[:, None]


def _padded_causal_documents(rng: np.random.Generator, s: int) -> Int32Array:
    """The last quarter is padding that nothing sees and that sees nothing: its rows are fully hidden."""
    bounds = _causal_documents(rng, s)
    real = s - s // 4
    bounds = np.minimum(bounds, real)
    bounds[real:] = 0
    return bounds


def _random_bounds(num_bounds: int):  # noqa: ANN202
    def build(rng: np.random.Generator, s: int) -> Int32Array:
        return rng.integers(-2, s + 3, (s, num_bounds))

    return build


def _global_window(rng: np.random.Generator, s: int) -> Int32Array:
    """Three keys and rows see all, the others a window of s//6 to each side."""
    key = np.arange(s)
    reach, num_global = max(s // 6, 1), 3
    bounds = np.stack([np.minimum(key + reach + 1, s), np.full(s, s), np.full(s, num_global), key - reach], axis=-1)
    bounds[:num_global] = (s, s, 0, 0)
    return bounds


# name -> (builder of one [s, n] plane, or None for no indices; causal)
MASKS = {
    "none_causal": (None, True),
    "none_full": (None, False),
    "causal_documents": (_causal_documents, True),
    "documents": (_documents, False),
    "single_token_documents": (_single_token_documents, True),
    "causal_window": (_causal_window, True),
    "padded_causal_documents": (_padded_causal_documents, True),
    "random_c1": (_random_bounds(1), True),
    "random_c2": (_random_bounds(2), True),
    "random_nc2": (_random_bounds(2), False),
    "random_nc4": (_random_bounds(4), False),
    "global_window": (_global_window, False),
}

CASES = [
    CpCase("causal, no indices", "none_causal", 64),
    CpCase("full, no indices, contiguous", "none_full", 48, split="contiguous"),
    CpCase("causal documents, one longer than s/cp, GQA", "causal_documents", 96, h_q=4, h_kv=2, seed=1),
    CpCase("causal documents, own columns, batch 2", "causal_documents", 96, b=2, frame="own", seed=2),
    CpCase("documents, mask per kv head", "documents", 64, h_q=4, h_kv=2, h_mask=2, seed=3),
    CpCase("documents, contiguous, own columns", "documents", 64, split="contiguous", frame="own", seed=4),
    CpCase("causal window, d_v != d_qk", "causal_window", 80, d_v=24, seed=5),
    CpCase("padded tail with fully hidden rows, uneven", "padded_causal_documents", 77, seed=6),
    CpCase("length 53, own columns", "random_c1", 53, frame="own", seed=7),
    CpCase("two bounds, causal", "random_c2", 61, seed=8),
    CpCase("two bounds, own scale", "random_nc2", 61, h_mask=2, softmax_scale=0.6, seed=9),
    CpCase("four bounds", "random_nc4", 61, b=2, seed=10),
    CpCase("global and window", "global_window", 96, seed=11),
    CpCase("scattered chunks, a rank without rows", "causal_documents", 90, split="scattered", seed=12),
    CpCase("scattered chunks, own columns", "random_nc4", 90, split="scattered", frame="own", seed=13),
    CpCase("shorter than the ranks", "none_causal", 3, seed=14),
    CpCase("bf16", "causal_documents", 96, h_q=4, h_kv=1, d_qk=32, d_v=32, dtype="bfloat16", seed=15),
    CpCase("bf16, summed in bf16", "documents", 64, dtype="bfloat16", reduce_dtype="input", seed=17),
    # 1,536 rows in 1, 2, 3 or 4 equal chunks: no chunk cuts a tile.
    CpCase("block mask", "causal_documents", 1536, h_q=1, h_kv=1, split="contiguous", has_block_mask=True, seed=18),
    CpCase("fp16", "documents", 64, d_qk=32, d_v=32, dtype="float16", seed=16),
]
