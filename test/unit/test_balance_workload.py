# SPDX-License-Identifier: Apache-2.0
"""Tiles per chunk against a dense count, against BlockSchedule, and at a million tokens."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from plan_support import dense_visible, random_mask, random_partition

from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.workload import scan_mask
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.schedule import TileClass, build_schedule

TILE = 128


def dense_tiles(mask: ColumnMask, begins: tuple[int, ...]) -> list[list[int]]:
    visible = dense_visible(mask)
    counts = []
    for begin, end in itertools.pairwise(begins):
        visited = full = 0
        for q in range(begin, end, TILE):
            for k in range(0, mask.s_k, TILE):
                tile = visible[:, :, q : min(q + TILE, end), k : k + TILE]
                visited += int(tile.any(axis=(2, 3)).sum())
                full += int(tile.all(axis=(2, 3)).sum())
        counts.append([visited, full])
    return counts


def test_counts_match_dense() -> None:
    rng = np.random.default_rng(0)
    for _ in range(120):
        s = int(rng.integers(1, 700))
        mask = random_mask(rng, s, b=1 + int(rng.random() < 0.3), h_mask=1 + int(rng.random() < 0.3))
        if rng.random() < 0.25:
            tiles = -(-s // TILE)
            block_mask = rng.integers(0, 2, (mask.b, mask.h_mask, tiles, tiles)).astype(np.int32)
            bounds = (mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end)
            mask = ColumnMask(*bounds, s_q=s, is_causal=mask.is_causal, block_mask=block_mask)
        begins = random_partition(rng, s, 2).chunk_begins_global
        got = scan_mask(mask, np.asarray(begins, np.int32)).chunk_tiles()
        assert got.tolist() == dense_tiles(mask, begins), (mask, begins)


@pytest.mark.parametrize("documents", [[700, 1, 300, 23, 1024], [2048]])
def test_counts_match_block_schedule(documents: list[int]) -> None:
    for mask in (
        builders.document(documents),
        builders.causal_document(documents),
        builders.causal_blockwise(documents),
    ):
        counts = build_schedule(mask, TILE, TILE).counts()
        got = scan_mask(mask, np.array([0, mask.s_q], np.int32)).chunk_tiles()[0]
        full = int(counts[TileClass.FULL].sum())
        assert got.tolist() == [int(counts[TileClass.PARTIAL].sum()) + full, full]


def test_weights_follow_the_cost_table() -> None:
    mask = builders.causal(1024)
    scan = scan_mask(mask, np.array([0, 512, 1024], np.int32))
    cost = CostModel(partial_tile_cost=2.0)
    partial, full = cost.weights(1)
    assert abs(partial - 2 * full) <= 1  # rounded to integers
    assert scan.chunk_weights(cost).tolist() == [4 * partial + 6 * full, 4 * partial + 22 * full]


MILLION = """
import resource, numpy as np
from paddle_fm3.distributed.workload import scan_mask
from paddle_fm3.mask import builders
s = 1 << 20
mask = builders.causal_document([s // 64] * 64)
before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tiles = scan_mask(mask, np.arange(0, s + 1, 2048, dtype=np.int32)).chunk_tiles()
print(tiles[:, 0].sum(), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024)
"""


def test_a_million_tokens_take_memory_of_order_s() -> None:
    # In a process of its own: the peak of this one may lie far above what is measured.
    printed = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=True).stdout
    num_tiles, grown_bytes = map(int, printed.split())
    per_document = (1 << 14) // TILE
    assert num_tiles == 64 * per_document * (per_document + 1) // 2
    assert grown_bytes < 8 * (1 << 20), f"{grown_bytes} bytes for 1M tokens"


def test_errors() -> None:
    mask = builders.causal(100)
    for begins in ([0, 50], [0, 60, 50, 100], [1, 100], [0]):
        with pytest.raises(ValueError, match="must ascend strictly from 0 to s_q=100"):
            scan_mask(mask, np.array(begins, np.int32))
