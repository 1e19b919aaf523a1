# SPDX-License-Identifier: Apache-2.0
"""Which row tiles a key tile of the Hopper backward visits, and the bounds it masks with: the kernel's own
code on the host against dense masks."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from host_library import compile_for_host

from paddle_fm3.testing.cases import AttentionCase
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES
from paddle_fm3.testing.native_call import NativeMask
from paddle_fm3.testing.reference import visible_plane

SKIP, PARTIAL, FULL = 0, 1, 2
BLOCK_KS = (128, 64)  # head dims to 128, above

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host("sm90_bwd_steps.cc", tmp_path_factory.mktemp("steps"))


def step_classes(library: ctypes.CDLL, mask: NativeMask, list_idx: int, block_k: int) -> np.ndarray:
    """[num_k_tiles, num_q_tiles]"""
    shape = (-(-mask.s_k // block_k), -(-mask.s_q // library.block_q()))
    classes = np.full(shape, -1, np.int32)
    view = mask.view
    library.step_classes(ctypes.byref(view), list_idx, block_k, classes.ctypes.data_as(ctypes.c_void_p))
    return classes


def check_classes(classes: np.ndarray, visible: np.ndarray, block_q: int, block_k: int) -> None:
    """`visible`: [s_q, s_k]."""
    s_q, s_k = visible.shape
    for (k_tile, q_tile), found in np.ndenumerate(classes):
        k_begin, q_begin = k_tile * block_k, q_tile * block_q
        step = visible[q_begin : q_begin + block_q, k_begin : k_begin + block_k]
        where = f"keys {k_begin}.., rows {q_begin}.."
        assert found != SKIP or not step.any(), f"SKIP but something is visible: {where}"
        assert found != FULL or step.all(), f"FULL but something is hidden: {where}"
        assert found != FULL or k_begin + block_k <= s_k, f"FULL but keys past s_k are in it: {where}"


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
    for list_idx, plane in enumerate(visible):
        check_classes(step_classes(library, mask, list_idx, block_k), plane, library.block_q(), block_k)


@pytest.mark.parametrize("case", [case for case in CASES if "block_mask" not in case.name], ids=lambda case: case.name)
def test_two_intervals_hide_what_the_mask_hides(library: ctypes.CDLL, case: AttentionCase) -> None:
    mask, visible = case_mask(case)
    view = mask.view
    row = np.arange(case.s_q)[:, None]
    for list_idx, plane in enumerate(visible):
        rows = np.empty((case.s_k, 4), np.int32)
        library.folded_bounds(ctypes.byref(view), list_idx, rows.ctypes.data_as(ctypes.c_void_p))
        assert (rows[:, 0] <= rows[:, 1]).all() and (rows[:, 2] <= rows[:, 3]).all()  # lengths are unsigned there
        hidden = (row >= rows[:, 0]) & (row < rows[:, 1]) | (row >= rows[:, 2]) & (row < rows[:, 3])
        np.testing.assert_array_equal(~hidden, plane)
        # The short way of the kernel: what shows is [ut_end, lt_begin), where it says so.
        is_one = [bool(library.shows_one_interval(int(key[1]), int(key[2]), case.s_q)) for key in rows]
        shown = (row >= rows[:, 3]) & (row < rows[:, 0])
        np.testing.assert_array_equal(shown[:, is_one], plane[:, is_one])


def test_common_masks_show_one_interval_a_key(library: ctypes.CDLL) -> None:
    """Full, causal, window and document masks take the kernel's short way for every key."""
    s, column = 1000, np.arange(1000, dtype=np.int32)
    end, begin = np.minimum((column // 300 + 1) * 300, s), column // 300 * 300
    for bounds, causal in (((end,), True), ((np.minimum(column + 64, s),), True), ((end, begin), False)):
        mask = NativeMask.from_bounds(np.stack(bounds, -1).astype(np.int32)[None, None], causal, s, None)
        rows = np.empty((s, 4), np.int32)
        view = mask.view
        library.folded_bounds(ctypes.byref(view), 0, rows.ctypes.data_as(ctypes.c_void_p))
        assert all(library.shows_one_interval(int(key[1]), int(key[2]), s) for key in rows)


def test_causal_visits_half_and_masks_the_diagonal(library: ctypes.CDLL) -> None:
    classes = step_classes(library, NativeMask.without_bounds(True, 1, 4096, 4096), 0, 128)
    k_tile, q_tile = np.indices(classes.shape)
    np.testing.assert_array_equal(classes == SKIP, q_tile < 2 * k_tile)
    np.testing.assert_array_equal(classes == PARTIAL, (q_tile == 2 * k_tile) | (q_tile == 2 * k_tile + 1))


def test_a_wrong_class_is_noticed(library: ctypes.CDLL) -> None:
    mask = NativeMask.without_bounds(True, 1, 1000, 1000)
    visible = visible_plane(None, True, 1000, 1000)
    classes = step_classes(library, mask, 0, 128)
    check_classes(classes, visible, library.block_q(), 128)
    for at, wrong in (((0, 0), SKIP), ((0, 0), FULL), ((7, 15), FULL)):
        broken = classes.copy()
        broken[at] = wrong
        with pytest.raises(AssertionError):
            check_classes(broken, visible, library.block_q(), 128)
