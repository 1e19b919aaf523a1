# SPDX-License-Identifier: Apache-2.0
"""Rows that a step may leave out are exactly those before the first and after the last that see a key."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_fm3.distributed.query_range import seen_query_rows, select_query_rows
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask


def random_mask(rng: np.random.Generator, with_block_mask: bool = False) -> ColumnMask:
    b, h_mask, s_q, s_k = (int(rng.integers(1, high)) for high in (3, 3, 40, 20))
    if with_block_mask:
        s_q, s_k = s_q * 11, s_k * 9
    bounds = rng.integers(-2, s_q + 3, (4, b, h_mask, s_k)).astype(np.int32)
    if rng.random() < 0.7:  # hidden from most rows at both ends
        bounds[0], bounds[1] = rng.integers(s_q // 2, s_q + 1), s_q
        bounds[2], bounds[3] = 0, rng.integers(0, s_q // 2 + 1)
    tiles = None
    if with_block_mask:
        tiles = rng.integers(0, 2, (b, h_mask, -(-s_q // 128), -(-s_k // 128)))
    return ColumnMask(*bounds, s_q=s_q, is_causal=False, block_mask=tiles)


@pytest.mark.parametrize("seed", range(200))
def test_range_is_that_of_the_visible_rows(seed: int) -> None:
    mask = random_mask(np.random.default_rng(seed))
    seen = np.flatnonzero(mask.dense().any(axis=(0, 1, 3)))
    wanted = (int(seen[0]), int(seen[-1]) + 1) if seen.size else (0, 0)
    assert seen_query_rows(mask) == wanted


@pytest.mark.parametrize("seed", range(50))
def test_selected_rows_see_what_they_saw(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, with_block_mask=seed % 2 == 1)
    if mask.block_mask is None:
        q_begin, q_end = sorted(rng.integers(0, mask.s_q + 1, 2).tolist())
    else:
        begin, end = seen_query_rows(mask)
        rows_seen = np.flatnonzero(mask.dense().any(axis=(0, 1, 3)))
        assert begin % 128 == 0 and (end % 128 == 0 or end == mask.s_q)
        assert not rows_seen.size or (begin <= rows_seen[0] and rows_seen[-1] < end)
        q_begin, q_end = begin, end
    part = select_query_rows(mask, q_begin, q_end)
    assert part.s_q == q_end - q_begin and not part.is_causal
    np.testing.assert_array_equal(part.dense(), mask.dense()[:, :, q_begin:q_end])


def test_refusals() -> None:
    causal = builders.causal(10)
    for call in (lambda: seen_query_rows(causal), lambda: select_query_rows(causal, 0, 5)):
        with pytest.raises(ValueError, match="localise it first"):
            call()
    zeros = np.zeros((1, 1, 256), np.int32)
    tiled = ColumnMask(zeros, zeros, zeros, zeros, 256, False, np.ones((1, 1, 2, 2), np.int32))
    with pytest.raises(ValueError, match=r"\[100, 256\) divides a tile"):
        select_query_rows(tiled, 100, 256)
