# SPDX-License-Identifier: Apache-2.0
"""Which key columns the Hopper forward visits: the schedule's own code on the host against dense masks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paddle_fm3.testing.cases import RawMask, benchmark_case
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES
from paddle_fm3.testing.native_call import NativeMask
from paddle_fm3.testing.reference import visible_plane

ROOT = Path(__file__).resolve().parents[2]
TILE_Q = 128
Spans = list[tuple[int, int, bool]]  # (k_begin, count of items, is_full)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("spans") / "spans.so"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{ROOT}", f"-I{ROOT}/ops/include"]
    subprocess.run([*command, str(ROOT / "test/cpp/sm90_spans.cc"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def planes(raw: RawMask, s_q: int, s_k: int) -> np.ndarray:
    """Visible pairs, [b * h_mask, s_q, s_k]."""
    bounds = raw.startend_row_indices
    assert bounds is not None
    lists = bounds.reshape(-1, *bounds.shape[2:])  # [b * h_mask, s_k, n]
    tiles = None if raw.block_mask is None else raw.block_mask.reshape(len(lists), *raw.block_mask.shape[2:])
    return np.stack(
        [
            visible_plane(one, raw.causal, s_q, s_k, None if tiles is None else tiles[idx])
            for idx, one in enumerate(lists)
        ]
    )


def spans_of(library: ctypes.CDLL, mask: NativeMask, list_idx: int, q_tile_idx: int, *, is_pair: bool = False) -> Spans:
    capacity = mask.s_k // library.item_cols(0) + 2
    triples = (ctypes.c_int32 * (3 * capacity))()
    view = mask.view
    count = library.spans(ctypes.byref(view), list_idx, q_tile_idx, int(is_pair), triples, capacity)
    assert count <= capacity - 1, f"{count} spans; the device keeps room for {capacity - 1}"
    return [(triples[3 * i], triples[3 * i + 1], bool(triples[3 * i + 2])) for i in range(count)]


def check_spans(spans: Spans, visible: np.ndarray, item_cols: int) -> None:
    """`visible`: rows of one query tile or of a pair of them, [rows, s_k]."""
    assert spans, "a tile needs at least one span"
    covered = np.zeros(visible.shape[1] + item_cols, bool)
    end = 0
    for k_begin, count, is_full in spans:
        assert count >= 1 and k_begin >= end, f"spans overlap or descend: {spans}"
        end = k_begin + count * item_cols
        covered[k_begin : min(end, len(covered))] = True
        if is_full:
            assert end <= visible.shape[1] and visible[:, k_begin:end].all(), f"FULL but something is hidden: {spans}"
    missed = visible.any(0) & ~covered[: visible.shape[1]]
    assert not missed.any(), f"visible columns {np.flatnonzero(missed)[:5]} are not visited: {spans}"


CASES = [case for case in HOSTILE_CASES if case.s_q > 0 and case.s_k > 0 and case.b > 0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_masks(library: ctypes.CDLL, case) -> None:
    raw = case.build_mask()
    if raw.startend_row_indices is None:
        mask = NativeMask.without_bounds(raw.causal, 1, case.s_q, case.s_k)
        visible = visible_plane(None, raw.causal, case.s_q, case.s_k)[None]
    else:
        mask = NativeMask.from_bounds(raw.startend_row_indices, raw.causal, case.s_q, raw.block_mask)
        visible = planes(raw, case.s_q, case.s_k)
    for list_idx, plane in enumerate(visible):
        for q_tile_idx in range(-(-case.s_q // TILE_Q)):
            rows = plane[q_tile_idx * TILE_Q : (q_tile_idx + 1) * TILE_Q]
            check_spans(spans_of(library, mask, list_idx, q_tile_idx), rows, library.item_cols(0))
            if q_tile_idx % 2 == 0:
                rows = plane[q_tile_idx * TILE_Q : (q_tile_idx + 2) * TILE_Q]
                pair = spans_of(library, mask, list_idx, q_tile_idx, is_pair=True)
                check_spans(pair, rows, library.item_cols(1))


@pytest.mark.parametrize("form", [(True, 1), (True, 2), (False, 2), (False, 4)], ids=["c1", "c2", "nc2", "nc4"])
def test_hulls_never_lie(library: ctypes.CDLL, form: tuple[bool, int]) -> None:
    causal, n = form
    rng = np.random.default_rng(n + causal)
    counts = [0, 0, 0]
    for _ in range(150):
        s_q, s_k = (int(x) for x in rng.integers(1, 500, 2))
        centre, spread = rng.integers(-5, s_q + 6, n), int(rng.choice([1, 5, 100]))
        bounds = (centre + rng.integers(0, spread, (1, 1, s_k, n))).astype(np.int32)
        mask = NativeMask.from_bounds(bounds, causal, s_q)
        visible = visible_plane(bounds[0, 0], causal, s_q, s_k)
        view = mask.view
        for q_begin in range(0, s_q, TILE_Q):
            q_end = min(q_begin + TILE_Q, s_q)
            for hull_idx in range(-(-s_k // library.hull_cols())):
                block = visible[q_begin:q_end, hull_idx * library.hull_cols() : (hull_idx + 1) * library.hull_cols()]
                found = library.hull_class(ctypes.byref(view), 0, hull_idx, q_begin, q_end)
                counts[found] += 1
                assert found != 0 or not block.any(), f"SKIP but visible: {s_q}x{s_k}, rows {q_begin}, hull {hull_idx}"
                assert found != 2 or block.all(), f"FULL but hidden: {s_q}x{s_k}, rows {q_begin}, hull {hull_idx}"
    assert min(counts) > 20, f"the random masks miss a class: {counts}"


def test_causal_list_is_as_short_as_can_be(library: ctypes.CDLL) -> None:
    mask = NativeMask.without_bounds(True, 1, 4096, 4096)
    for q_tile_idx in range(32):
        spans = spans_of(library, mask, 0, q_tile_idx)
        columns = (q_tile_idx + 1) * TILE_Q
        assert sum(count for _, count, _ in spans) == -(-columns // library.item_cols(0))
        assert sum(count for _, count, is_full in spans if not is_full) <= 2


def test_a_lost_or_moved_span_is_noticed(library: ctypes.CDLL) -> None:
    raw = benchmark_case("8k_causal_document").build_mask()
    bounds = np.ascontiguousarray(raw.startend_row_indices[:1])
    mask = NativeMask.from_bounds(bounds, raw.causal, 8192)
    visible = visible_plane(bounds[0, 0], raw.causal, 8192, 8192)[5 * TILE_Q : 6 * TILE_Q]
    spans = spans_of(library, mask, 0, 5)
    check_spans(spans, visible, library.item_cols(0))
    k_begin, count, _ = spans[0]
    for broken in (spans[:-1], [(k_begin + 16, count, False), *spans[1:]], [(k, n, True) for k, n, _ in spans]):
        with pytest.raises(AssertionError):
            check_spans(broken, visible, library.item_cols(0))
