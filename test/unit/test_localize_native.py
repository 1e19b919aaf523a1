# SPDX-License-Identifier: Apache-2.0
"""Theorem 1: localised masks against dense tables, over any partition and any selection of key columns."""

from __future__ import annotations

import numpy as np
import pytest
from plan_support import dense_visible, random_mask, random_partition

from paddle_fm3.distributed.localize import local_rows_before, localize_columns, localize_mask
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.mask.column_mask import ColumnMask


def test_ten_thousand_masks_against_dense() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        s = int(rng.integers(1, 41))
        num_ranks = int(rng.integers(1, 5))
        partition = random_partition(rng, s, num_ranks)
        mask = random_mask(rng, s, b=1 + int(rng.random() < 0.2), h_mask=1 + int(rng.random() < 0.2))
        rank = int(rng.integers(num_ranks))
        begins = rng.integers(0, s, 3)
        ranges = np.array([(begin, rng.integers(0, s - begin + 1)) for begin in begins], np.int32)
        keys = np.concatenate([np.arange(begin, begin + rows) for begin, rows in ranges])
        local = localize_columns(mask, partition, rank, ranges)
        assert not local.is_causal and local.s_q == partition.num_rows(rank)
        expected = dense_visible(mask)[:, :, partition.rows_of(rank)][:, :, :, keys]
        assert np.array_equal(dense_visible(local), expected), (mask, partition, rank, ranges)


def test_bounds_are_counts_of_rows_before() -> None:
    """The four bounds are loc() of the global ones wherever no causal rule is folded in."""
    rng = np.random.default_rng(1)
    for s in (1, 64, 200, 5000):
        bounds = rng.integers(0, s + 1, (4, 1, 1, s)).astype(np.int32)
        mask = ColumnMask(*bounds, s_q=s, is_causal=False)
        for _ in range(5):
            partition = random_partition(rng, s, 3)
            rows_before = local_rows_before(partition, 1)
            local = localize_mask(mask, partition, 1)
            for name in ("lt_begin", "lt_end", "ut_begin", "ut_end"):
                np.testing.assert_array_equal(getattr(local, name), rows_before[getattr(mask, name)])


def test_result_is_read_only_and_passes_the_constructor() -> None:
    mask = random_mask(np.random.default_rng(2), 30)
    local = localize_mask(mask, Partition((0, 7, 30), (0, 1), 2), 1)
    again = ColumnMask(local.lt_begin, local.lt_end, local.ut_begin, local.ut_end, s_q=local.s_q, is_causal=False)
    assert np.array_equal(again.lt_end, local.lt_end)
    with pytest.raises(ValueError, match="read-only"):
        local.lt_begin[0, 0, 0] = 1


def test_ranges_are_checked() -> None:
    mask = random_mask(np.random.default_rng(3), 30)
    partition = Partition((0, 30), (0,), 1)
    for bad in ([[20, 11]], [[-1, 3]], [[0, -1]]):
        with pytest.raises(ValueError, match="leaves the mask's columns"):
            localize_columns(mask, partition, 0, np.array(bad, np.int32))
    with pytest.raises(ValueError, match="wrong width"):
        localize_columns(mask, partition, 0, np.zeros((2, 3), np.int32))


def test_block_mask_ranges_must_be_whole_tiles() -> None:
    s = 300
    block_mask = np.ones((1, 1, 3, 3), np.int32)
    mask = ColumnMask.from_bounds(np.full((1, 1, s, 1), s, np.int32), is_causal=True, s_q=s, block_mask=block_mask)
    partition = Partition((0, 128, 300), (0, 1), 2)
    assert localize_columns(mask, partition, 1, np.array([[128, 128], [256, 44]], np.int32)).block_mask.shape == (
        1,
        1,
        2,
        2,
    )
    for bad in ([[0, 100]], [[256, 44], [0, 128]]):
        with pytest.raises(ValueError, match="cuts a block_mask tile"):
            localize_columns(mask, partition, 1, np.array(bad, np.int32))
