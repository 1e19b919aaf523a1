# SPDX-License-Identifier: Apache-2.0
"""The lists that the Hopper backward prepares once a mask: made by its own kernels on the host, against what follows
from which key tile visits which row tile. That these visits are right is test_sm90_bwd_steps.py's question."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from bwd_lists_support import BLOCK_KS, CUT_ALL_SIZES, Lists, build, compile_library

from paddle_fm3.testing.native_call import NativeMask

SAMPLE_STEP = 7

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module", params=[(), (CUT_ALL_SIZES,)], ids=["grid", "cut"])
def library(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("lists"), *request.param)


def check(lists: Lists) -> None:
    assert lists.stray == 0 and not (lists.partial & ~lists.visited).any()
    np.testing.assert_array_equal(lists.steps, lists.visited.sum(2))
    visits = lists.visits[:, :, 0]
    np.testing.assert_array_equal(visits, lists.visited.sum(1))
    np.testing.assert_array_equal(lists.visits[:, :, 1], lists.q_rows[:, :, 0])
    np.testing.assert_array_equal(lists.shared_rows, (visits > 1).sum(1))
    for mask_idx, visited in enumerate(lists.visited):
        rows = [np.flatnonzero(tile) for tile in visited]
        for chunks, row in zip(lists.chunks[mask_idx], rows, strict=True):
            assert tuple(chunks) == ((row[0] // 32, row[-1] // 32 + 1) if len(row) else (0, 0))
        steps = lists.steps[mask_idx]
        np.testing.assert_array_equal(lists.by_length[mask_idx], np.argsort(-steps, kind="stable"))
        at = [min(SAMPLE_STEP, len(row) - 1) for row in rows]
        up = np.array([row[x] if len(row) else -1 for row, x in zip(rows, at, strict=True)])
        down = np.array([row[-1 - x] if len(row) else -1 for row, x in zip(rows, at, strict=True)])
        num_tiles = lists.num_tiles[mask_idx]
        wanted = [steps.sum(), steps.max(), steps[num_tiles // 2 :].max(), (steps > 0).sum(),
                  (np.diff(up[:num_tiles]) != 0).sum(), (np.diff(down[:num_tiles]) != 0).sum(), num_tiles]  # fmt: skip
        np.testing.assert_array_equal(lists.summaries[mask_idx], wanted)


def turns(library: ctypes.CDLL, lists: Lists, mask_idx: int) -> np.ndarray:
    """[num_k_tiles, num_q_tiles]: visitors of a row tile before a key tile, as the kernel reads them."""
    return np.array([
        [library.visitors_before(ctypes.c_uint32(int(bits)), int(before), k_tile)
         for bits, before in lists.visitors[mask_idx, k_tile // 32]]
        for k_tile in range(lists.visited.shape[1])
    ])  # fmt: skip


def check_turns(library: ctypes.CDLL, lists: Lists) -> None:
    for mask_idx, visited in enumerate(lists.visited):
        wanted = np.cumsum(visited, axis=0) - visited
        np.testing.assert_array_equal(turns(library, lists, mask_idx), wanted)


def random_mask(seed: int) -> NativeMask:
    """Two mask heads of two sequences; pieces of equal, of growing, and of free bounds."""
    draw = np.random.default_rng(seed)
    s_q, s_k = (int(x) for x in draw.integers(1, 3000, 2))
    num_bounds, is_causal = [(1, True), (2, True), (2, False), (4, False)][seed % 4]
    bounds = draw.integers(-20, s_q + 20, (2, 2, s_k, num_bounds)).astype(np.int32)
    cuts = [0, *sorted(draw.integers(0, s_k, 6).tolist()), s_k]
    for idx, (begin, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        if idx % 3 == 0 and begin < end:
            bounds[:, :, begin:end] = bounds[:, :, begin : begin + 1]
        elif idx % 3 == 1 and begin < end:
            bounds[:, :, begin:end] = (np.arange(begin, end)[:, None] + draw.integers(0, 300, num_bounds)) % (s_q + 5)
    has_block_mask = seed % 3 == 0
    tiles = (draw.random((2, 2, -(-s_q // 128), -(-s_k // 128))) < 0.7).astype(np.int32) if has_block_mask else None
    return NativeMask.from_bounds(bounds, is_causal, s_q, tiles)


@pytest.mark.parametrize("block_k", BLOCK_KS)
@pytest.mark.parametrize("seed", range(12))
def test_lists_follow_from_the_visits(library: ctypes.CDLL, seed: int, block_k: int) -> None:
    lists = build(library, random_mask(seed), block_k)
    check(lists)
    check_turns(library, lists)


@pytest.mark.parametrize("block_k", BLOCK_KS)
def test_long_lists(library: ctypes.CDLL, block_k: int) -> None:
    """More than 32 chunks of row tiles, and more key tiles than a CTA turns or ranks in one go."""
    s_q, s_k = 70_000, 300_000 if block_k == 128 else 140_000
    end = np.minimum(np.arange(s_k) * 7 % 50_000 // 128 * 128 + 20_000, s_q)
    mask = NativeMask.from_bounds(
        np.stack([end, np.maximum(end - 3000, 0)], -1).astype(np.int32)[None, None], False, s_q
    )
    lists = build(library, mask, block_k)
    assert lists.visited.shape[2] > 1024 and lists.visited.shape[1] > 2048
    check(lists)
    np.testing.assert_array_equal(lists.visitors[0, 1:, :, 1], np.cumsum(
        lists.visited[0, : len(lists.visited[0]) // 32 * 32].reshape(-1, 32, lists.visited.shape[2]).sum(1), 0,
    )[: len(lists.visitors[0]) - 1])  # fmt: skip


def test_a_wrong_list_is_noticed(library: ctypes.CDLL) -> None:
    mask = random_mask(1)
    for name in ("steps", "visits", "by_length", "shared_rows", "summaries", "chunks"):
        lists = build(library, mask, 128)
        check(lists)
        getattr(lists, name).flat[0] += 1
        with pytest.raises(AssertionError):
            check(lists)
    lists = build(library, mask, 128)
    lists.visitors.flat[1] += 1
    with pytest.raises(AssertionError):
        check_turns(library, lists)
