# SPDX-License-Identifier: Apache-2.0
"""The C++ schedule builder: identical to paddle_fm3/schedule.py, exact by brute force, and usable as input."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from c_abi_support import assert_same_bits, expected, native_mask, run
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fm3 import schedule
from paddle_fm3._c_api import KeyTileSummary
from paddle_fm3._native import cpu_library
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing import native_call
from paddle_fm3.testing.cases import HOSTILE_CASES, paper_mask
from paddle_fm3.testing.native_call import NativeMask

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


def native_runs(mask: NativeMask, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    """(hidden_runs, clear_runs) int32 [b, h_mask, num_k_tiles, 4, 2] as the C++ builder writes them."""
    num_k_tiles = -(-mask.s_k // block_k)
    runs = np.full((mask.b, mask.h_mask, num_k_tiles, 2, 4, 2), -7, np.int32)
    assert runs.nbytes == mask.b * mask.h_mask * num_k_tiles * ctypes.sizeof(KeyTileSummary)
    view = mask.view
    native_call.check(cpu_library().fm3_cpu_build_schedule(ctypes.byref(view), block_k, runs.ctypes.data))
    return runs[..., 0, :, :], runs[..., 1, :, :]


def assert_twins_agree(bounds: np.ndarray, causal: bool, s_q: int, block_k: int) -> None:
    hidden, clear = native_runs(NativeMask.from_bounds(bounds, causal, s_q), block_k)
    twin = schedule.build_schedule(ColumnMask.from_bounds(bounds, is_causal=causal, s_q=s_q), 128, block_k)
    np.testing.assert_array_equal(hidden, twin.hidden_runs)
    np.testing.assert_array_equal(clear, twin.clear_runs)


@st.composite
def masks(draw):
    s_q, s_k = draw(st.integers(0, 80)), draw(st.integers(1, 70))
    causal, n = draw(st.sampled_from(FORMS))
    b, h_mask = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    run_length = draw(st.sampled_from([1, 5, 16, 40]))
    bounds = rng.integers(-4, s_q + 5, (b, h_mask, -(-s_k // run_length), n))
    if n in (2, 4) and draw(st.booleans()):  # short intervals leave many runs: more than a summary holds
        length = rng.integers(1, 4, bounds[..., ::2].shape)
        bounds[..., 1::2] = bounds[..., ::2] + length
    bounds = np.repeat(bounds, run_length, axis=2)[:, :, :s_k].astype(np.int32)
    return bounds, causal, s_q, draw(st.sampled_from([1, 3, 16, 64, 128]))


@settings(max_examples=400)
@given(masks())
def test_identical_to_the_python_twin(mask):
    assert_twins_agree(*mask)


@pytest.mark.parametrize("seed", range(20))
def test_identical_to_the_python_twin_with_more_runs_than_fit(seed):
    """Short hidden (or visible) intervals of several columns leave up to ten runs of few distinct lengths."""
    rng = np.random.default_rng(seed)
    s_q, s_k = 120, 24
    begin = rng.integers(0, s_q, (1, 1, s_k, 2))
    bounds = np.stack([begin[..., 0], begin[..., 0] + 3, begin[..., 1], begin[..., 1] + 5], axis=-1).astype(np.int32)
    _, clear = native_runs(NativeMask.from_bounds(bounds, False, s_q), 4)
    assert (clear[..., 3, 1] > 0).any(), "no tile has four runs: this test would prove nothing"
    assert_twins_agree(bounds, False, s_q, 4)


def test_the_longest_runs_are_kept_and_ties_keep_the_lower_begin():
    """Six columns hide rows 2i^2+3 and 2i^2+4: seven clear runs of lengths 3, 0, 4, 8, 12, 16, 25."""
    first = 2 * np.arange(6) ** 2 + 3
    bounds = np.stack([first, first + 2, first * 0, first * 0], axis=-1).astype(np.int32)[None, None]
    _, clear = native_runs(NativeMask.from_bounds(bounds, False, 80), 6)
    assert clear[0, 0, 0].tolist() == [[13, 21], [23, 35], [37, 53], [55, 80]]
    first = 10 * np.arange(6)  # rows 10i hidden: six clear runs of nine
    bounds = np.stack([first, first + 1, first * 0, first * 0], axis=-1).astype(np.int32)[None, None]
    _, clear = native_runs(NativeMask.from_bounds(bounds, False, 60), 6)
    assert clear[0, 0, 0].tolist() == [[1, 10], [11, 20], [21, 30], [31, 40]]


@pytest.mark.parametrize("kind", ["window", "document", "global_window", "qk_sparse", "random_eviction"])
def test_identical_to_the_python_twin_on_paper_masks(kind):
    mask = paper_mask("8k", kind)
    bounds, causal = mask.to_bounds()
    for block_k in (64, 128):
        assert_twins_agree(bounds, causal, mask.s_q, block_k)


def _runs_of(flags: np.ndarray) -> list[tuple[int, int]]:
    """Maximal runs of True, by walking: longest four, earlier first on ties, ascending."""
    runs, begin = [], None
    for idx, flag in enumerate([*flags.tolist(), False]):
        if flag and begin is None:
            begin = idx
        if not flag and begin is not None:
            runs.append((begin, idx))
            begin = None
    kept = sorted(runs, key=lambda run: (run[0] - run[1], run[0]))[:4]
    return [*sorted(kept), *[(0, 0)] * (4 - len(kept))]


@settings(max_examples=200)
@given(masks())
def test_runs_match_brute_force(mask):
    bounds, causal, s_q, block_k = mask
    hidden_runs, clear_runs = native_runs(NativeMask.from_bounds(bounds, causal, s_q), block_k)
    from paddle_fm3.testing.reference import visible_plane

    s_k = bounds.shape[2]
    for b_idx, h_idx in np.ndindex(bounds.shape[:2]):
        visible = visible_plane(bounds[b_idx, h_idx], causal, s_q, s_k)
        for tile_idx, k_begin in enumerate(range(0, s_k, block_k)):
            tile = visible[:, k_begin : k_begin + block_k]
            where = (b_idx, h_idx, tile_idx)
            assert [tuple(run) for run in hidden_runs[where].tolist()] == _runs_of(~tile.any(axis=1)), where
            assert [tuple(run) for run in clear_runs[where].tolist()] == _runs_of(tile.all(axis=1)), where


def test_a_tile_covered_only_by_the_union_of_both_intervals_is_skipped():
    """Neither interval alone covers rows [128, 256) in every column; together they do."""
    s = 256
    even = (np.arange(s) % 2 == 0)[:, None]
    bounds = np.where(even, [100, 200, 190, 256], [190, 256, 100, 200]).astype(np.int32)[None, None]
    hidden_runs, _ = native_runs(NativeMask.from_bounds(bounds, False, s), 128)
    assert hidden_runs[0, 0, 0, 0].tolist() == [100, 256]


@pytest.mark.parametrize(
    "name", ["many_hidden_runs", "many_clear_runs", "documents_mixed_causal", "block_mask_hides_rows"]
)
def test_a_prepared_schedule_gives_the_same_bits(name):
    case = next(case for case in HOSTILE_CASES if case.name == name)
    inputs, _, _ = expected(case, "float32")
    mask = native_mask(case)
    built = run(case, inputs)
    num_k_tiles = -(-case.s_k // 128)
    summaries = (KeyTileSummary * (mask.b * mask.h_mask * num_k_tiles))()
    view = mask.view
    native_call.check(cpu_library().fm3_cpu_build_schedule(ctypes.byref(view), 128, ctypes.byref(summaries)))
    scale = case.d_qk**-0.5
    out, lse = np.empty_like(built["out"]), np.empty_like(built["lse"])
    params = native_call.forward_params(inputs.q, inputs.k, inputs.v, mask, scale, out, lse)
    params.schedule = ctypes.addressof(summaries)
    native_call.check(cpu_library().fm3_cpu_fwd(ctypes.byref(params)))
    grads = [np.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)]
    params = native_call.backward_params(
        inputs.q, inputs.k, inputs.v, mask, scale, out, lse, inputs.dout, inputs.dlse, *grads
    )
    params.schedule = ctypes.addressof(summaries)
    native_call.check(cpu_library().fm3_cpu_bwd(ctypes.byref(params)))
    prepared = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    assert_same_bits(built, prepared, name)

    for summary in summaries:  # hide everything: the schedule given is the one that is used
        summary.hidden_runs[0].begin, summary.hidden_runs[0].end = 0, case.s_q
    native_call.check(cpu_library().fm3_cpu_bwd(ctypes.byref(params)))
    assert not any(grad.any() for grad in grads)
