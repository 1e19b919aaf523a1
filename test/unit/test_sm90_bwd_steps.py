# SPDX-License-Identifier: Apache-2.0
"""Which row tiles a key tile of the Hopper backward visits, and the bounds it masks with: the kernels that list them,
run on the host, against dense masks."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from bwd_lists_support import (
    BLOCK_KS,
    BLOCK_Q,
    CUT_ALL_SIZES,
    FULL,
    PARTIAL,
    SKIP,
    Lists,
    build,
    compile_library,
)

from paddle_fm3.testing.cases import AttentionCase
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES
from paddle_fm3.testing.native_call import NativeMask
from paddle_fm3.testing.reference import visible_plane

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("lists"), CUT_ALL_SIZES)


def check_classes(
    classes: np.ndarray, k_begins: np.ndarray, q_rows: np.ndarray, visible: np.ndarray, block_k: int
) -> None:
    """`visible`: [s_q, s_k]."""
    for (k_tile, q_tile), found in np.ndenumerate(classes):
        (k_begin, k_end), (q_begin, q_end) = k_begins[k_tile : k_tile + 2], q_rows[q_tile]
        step = visible[q_begin:q_end, k_begin:k_end]
        if q_begin == q_end:
            assert found == SKIP, f"visited, but there is no row tile {q_tile}"
        where = f"keys {k_begin}.., rows {q_begin}.."
        assert found != SKIP or not step.any(), f"SKIP but something is visible: {where}"
        assert found != FULL or step.all(), f"FULL but something is hidden: {where}"
        assert found != FULL or k_begin + block_k == k_end, f"FULL but keys of other tiles are in it: {where}"


def check_tiles(lists: Lists, s_q: int, s_k: int, block_k: int) -> None:
    """They follow each other; the room that is left is empty."""
    for num_tiles, rows in zip(lists.num_q_tiles, lists.q_rows, strict=True):
        assert rows[0, 0] == 0 and rows[num_tiles - 1, 1] == s_q
        np.testing.assert_array_equal(rows[1:num_tiles, 0], rows[: num_tiles - 1, 1])
        sizes = rows[:, 1] - rows[:, 0]
        assert sizes.max() <= BLOCK_Q
        np.testing.assert_array_equal(sizes > 0, np.arange(len(rows)) < num_tiles)
    assert (lists.k_begins[:, 0] == 0).all()
    sizes = np.diff(lists.k_begins)
    for num_tiles, of_mask in zip(lists.num_tiles, sizes, strict=True):
        assert of_mask.sum() == s_k and of_mask.max() <= block_k
        np.testing.assert_array_equal(of_mask > 0, np.arange(len(of_mask)) < num_tiles)


def case_mask(case: AttentionCase) -> tuple[NativeMask, np.ndarray]:
    """The mask and what it shows, [b * h_mask, s_q, s_k]."""
    raw = case.build_mask()
    if raw.startend_row_indices is None:
        mask = NativeMask.without_bounds(raw.causal, 1, case.s_q, case.s_k)
        return mask, visible_plane(None, raw.causal, case.s_q, case.s_k)[None]
    lists = raw.startend_row_indices.reshape(-1, *raw.startend_row_indices.shape[2:])
    tiles = [None] * len(lists) if raw.block_mask is None else raw.block_mask.reshape(-1, *raw.block_mask.shape[2:])
    mask = NativeMask.from_bounds(raw.startend_row_indices, raw.causal, case.s_q, raw.block_mask)
    planes = [visible_plane(*pair) for pair in ((one, raw.causal, case.s_q, case.s_k, tile) for one, tile in zip(lists, tiles, strict=True))]  # fmt: skip
    return mask, np.stack(planes)


CASES = [case for case in HOSTILE_CASES if case.s_q > 0 and case.s_k > 0 and case.b > 0]


@pytest.mark.parametrize("block_k", BLOCK_KS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_cover_what_is_visible(library: ctypes.CDLL, case: AttentionCase, block_k: int) -> None:
    mask, visible = case_mask(case)
    lists = build(library, mask, block_k)
    check_tiles(lists, case.s_q, case.s_k, block_k)
    for classes, k_begins, q_rows, plane in zip(lists.classes, lists.k_begins, lists.q_rows, visible, strict=True):
        check_classes(classes, k_begins, q_rows, plane, block_k)


@pytest.mark.parametrize("block_k", BLOCK_KS)
@pytest.mark.parametrize(("num_bounds", "is_causal"), [(1, True), (2, True), (2, False), (4, False)], ids=str)
def test_steps_of_random_masks(library: ctypes.CDLL, num_bounds: int, is_causal: bool, block_k: int) -> None:
    draw, counts = np.random.default_rng(num_bounds + 8 * is_causal), np.zeros(3, int)
    for _ in range(40):
        s_q, s_k = (int(x) for x in draw.integers(1, 800, 2))
        centre = np.repeat(draw.integers(-5, s_q + 6, (-(-s_k // 200), num_bounds)), 200, axis=0)[:s_k]
        bounds = (centre + draw.integers(0, int(draw.choice([1, 5, 100])), (s_k, num_bounds))).astype(np.int32)
        mask = NativeMask.from_bounds(bounds[None, None], is_causal, s_q, None)
        lists = build(library, mask, block_k)
        check_tiles(lists, s_q, s_k, block_k)
        classes = lists.classes[0]
        visible = visible_plane(bounds, is_causal, s_q, s_k)
        check_classes(classes, lists.k_begins[0], lists.q_rows[0], visible, block_k)
        counts += np.bincount(classes.ravel(), minlength=3)
    assert counts.min() > 20, f"the random masks miss a class: {counts}"


@pytest.mark.parametrize("block_k", BLOCK_KS)
@pytest.mark.parametrize("case", [case for case in CASES if "block_mask" not in case.name], ids=lambda case: case.name)
def test_two_intervals_hide_what_the_mask_hides(library: ctypes.CDLL, case: AttentionCase, block_k: int) -> None:
    mask, visible = case_mask(case)
    padded = case.s_q + BLOCK_Q - 1  # wherever the last row tile begins
    row = np.arange(padded)[:, None]
    lists = build(library, mask, block_k)
    for found, k_begins, plane in zip(lists.bounds, lists.k_begins, visible, strict=True):
        is_key = np.arange(block_k) < np.diff(k_begins)[:, None]
        rows, past_keys = found[is_key], found[~is_key]
        np.testing.assert_array_equal(past_keys, np.tile([0, padded, 0, 0], (len(past_keys), 1)))
        assert (rows[:, 0] <= rows[:, 1]).all() and (rows[:, 2] <= rows[:, 3]).all()  # lengths are unsigned there
        hidden = (row >= rows[:, 0]) & (row < rows[:, 1]) | (row >= rows[:, 2]) & (row < rows[:, 3])
        np.testing.assert_array_equal(~hidden[: case.s_q], plane)
        assert hidden[case.s_q :, ~plane.any(0)].all(), "a row past the last one sees a key that no row sees"


def test_causal_visits_half_and_masks_the_diagonal(library: ctypes.CDLL) -> None:
    classes = build(library, NativeMask.without_bounds(True, 1, 4096, 4096), 128).classes[0]
    k_tile, q_tile = np.indices(classes.shape)
    np.testing.assert_array_equal(classes == SKIP, q_tile < 2 * k_tile)
    np.testing.assert_array_equal(classes == PARTIAL, (q_tile == 2 * k_tile) | (q_tile == 2 * k_tile + 1))


def test_a_wrong_class_is_noticed(library: ctypes.CDLL) -> None:
    mask = NativeMask.without_bounds(True, 1, 1000, 1000)
    visible = visible_plane(None, True, 1000, 1000)
    lists = build(library, mask, 128)
    classes, k_begins, q_rows = lists.classes[0], lists.k_begins[0], lists.q_rows[0]
    check_classes(classes, k_begins, q_rows, visible, 128)
    for at, wrong in (((0, 0), SKIP), ((0, 0), FULL), ((7, 15), FULL)):
        broken = classes.copy()
        broken[at] = wrong
        with pytest.raises(AssertionError):
            check_classes(broken, k_begins, q_rows, visible, 128)
