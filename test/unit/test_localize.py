# SPDX-License-Identifier: Apache-2.0
"""localize_mask against a dense table: rows of the global table, picked by index, must equal the local table."""

from __future__ import annotations

import numpy as np
import pytest
from plan_support import dense_visible

from paddle_fm3.distributed.localize import local_rows_before, localize_mask
from paddle_fm3.distributed.partition import Partition, contiguous_partition, dual_chunk_partition
from paddle_fm3.mask.column_mask import ColumnMask


def random_partition(rng: np.random.Generator, s: int, num_ranks: int) -> Partition:
    num_chunks = int(rng.integers(1, min(s, 9) + 1))
    cuts = np.sort(rng.choice(np.arange(1, s), num_chunks - 1, replace=False)) if num_chunks > 1 else []
    return Partition((0, *map(int, cuts), s), tuple(int(r) for r in rng.integers(0, num_ranks, num_chunks)), num_ranks)


@pytest.mark.parametrize("is_causal, num_bounds", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_matches_dense_rows(is_causal: bool, num_bounds: int) -> None:
    rng = np.random.default_rng(num_bounds + 10 * is_causal)
    for _ in range(150):
        s = int(rng.integers(1, 40))
        s_k = s + int(rng.integers(-3, 4)) if rng.random() < 0.3 else s
        s_k = max(s_k, 1)
        num_ranks = int(rng.integers(1, 5))
        partition = random_partition(rng, s, num_ranks)
        bounds = rng.integers(-3, s + 4, (2, 2, s_k, num_bounds)).astype(np.int32)
        mask = ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s)
        hidden_global = ~dense_visible(mask)
        for rank in range(num_ranks):
            local = localize_mask(mask, partition, rank)
            assert not local.is_causal and local.s_q == partition.num_rows(rank)
            np.testing.assert_array_equal(~dense_visible(local), hidden_global[:, :, partition.rows_of(rank)])


def test_causal_with_second_interval() -> None:
    """A causal mask may carry both intervals; it localises exactly or says which column does not fit."""
    rng = np.random.default_rng(7)
    num_exact = num_refused = 0
    for _ in range(400):
        s = int(rng.integers(2, 24))
        bounds = rng.integers(0, s + 1, (4, 1, 1, s)).astype(np.int32)
        if rng.random() < 0.5:
            bounds = np.sort(bounds, axis=0)  # two intervals that do not overlap
        mask = ColumnMask(*np.ascontiguousarray(bounds), s_q=s, is_causal=True)
        partition = random_partition(rng, s, 2)
        for rank in range(2):
            expected = ~dense_visible(mask)[:, :, partition.rows_of(rank)]
            try:
                local = localize_mask(mask, partition, rank)
            except ValueError as error:
                column = int(str(error).split("column k=")[1].split(" ")[0])
                runs = np.diff(np.pad(expected[0, 0, :, column].astype(int), 1))
                assert (runs == 1).sum() == 3, "refused a column that two intervals can hold"
                num_refused += 1
            else:
                np.testing.assert_array_equal(~dense_visible(local), expected)
                num_exact += 1
    assert num_exact > 100 and num_refused > 50, (num_exact, num_refused)


def test_block_mask_rows_follow_the_chunks() -> None:
    rng = np.random.default_rng(3)
    s = 128 * 7 + 40
    block_mask = rng.integers(0, 2, (1, 1, 8, 8)).astype(np.int32)
    mask = ColumnMask.from_bounds(np.full((1, 1, s, 1), s, np.int32), is_causal=True, s_q=s, block_mask=block_mask)
    partition = Partition((0, 256, 384, 640, s), (1, 0, 1, 0), 2)
    for rank in range(2):
        local = localize_mask(mask, partition, rank)
        np.testing.assert_array_equal(~dense_visible(local), ~dense_visible(mask)[:, :, partition.rows_of(rank)])
    with pytest.raises(ValueError, match=r"chunk \[0, 468\) cuts a block_mask tile"):
        localize_mask(mask, contiguous_partition(s, 2), 0)


def test_counts_and_errors() -> None:
    partition = dual_chunk_partition(10, 2)  # chunks [0,2) [2,5) [5,7) [7,10): rank 0 owns the outer two
    assert local_rows_before(partition, 0).tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 5]
    mask = ColumnMask.from_bounds(np.full((1, 1, 8, 1), 8, np.int32), is_causal=True, s_q=8)
    with pytest.raises(ValueError, match="s_q=8 query rows; the partition cuts 10 rows"):
        localize_mask(mask, partition, 0)
    mask = ColumnMask.from_bounds(np.full((1, 1, 10, 1), 10, np.int32), is_causal=True, s_q=10)
    with pytest.raises(ValueError, match=r"rank=2 is not in \[0, 2\)"):
        localize_mask(mask, partition, 2)
