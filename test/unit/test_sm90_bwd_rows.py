# SPDX-License-Identifier: Apache-2.0
"""lse and delta as operands of the Hopper backward's products, and what bounds hide of a thread's scores: the
kernel's own code on the host."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from host_library import compile_for_host

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HIDDEN_ROW = 8192  # P = 2**-8192 = 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compile_for_host("sm90_bwd_rows.cc", tmp_path_factory.mktemp("rows"))
    library.exponent_scale.argtypes, library.exponent_scale.restype = [ctypes.c_float], ctypes.c_float
    library.score_start.argtypes = [ctypes.c_float, ctypes.c_int32, ctypes.c_float]
    library.score_start.restype, library.hidden_scores.restype = ctypes.c_float, ctypes.c_uint32
    return library


def pieces_of(library: ctypes.CDLL, x: np.ndarray, is_marked: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Three float32 pieces of each number [n, 3], and the words besides: mark and zeros [n, 3]."""
    x, words = np.ascontiguousarray(x, np.float32), np.empty((len(x), 4), np.uint32)
    library.pieces(x.ctypes.data_as(ctypes.c_void_p), len(x), int(is_marked), words.ctypes.data_as(ctypes.c_void_p))
    high = np.stack([words[:, 0] << 16, words[:, 0] & 0xFFFF0000, words[:, 1] << 16], 1)
    return high.view(np.float32), np.concatenate([words[:, 1:2] >> 16, words[:, 2:]], 1)


def test_pieces_are_bfloat16_and_add_up_exactly(library: ctypes.CDLL) -> None:
    draw = np.random.default_rng(0)
    x = (draw.choice([-1, 1], 20000) * np.exp2(draw.uniform(-105, 127.9, 20000))).astype(np.float32)
    x = np.concatenate([x, [0, -0.0, 1, np.finfo(np.float32).max, -np.finfo(np.float32).max]]).astype(np.float32)
    pieces, rest = pieces_of(library, x)
    np.testing.assert_array_equal(pieces.astype(np.float64).sum(1), x.astype(np.float64))
    assert (rest == 0).all()


def test_what_is_not_finite_stays_so_and_a_mark_is_no_number(library: ctypes.CDLL) -> None:
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001], np.uint32)  # infinities and NaNs
    with np.errstate(invalid="ignore"):
        assert np.isnan(pieces_of(library, bits.view(np.float32))[0].sum(1)).all()
    pieces, rest = pieces_of(library, np.array([3.5, 0]), is_marked=True)
    assert (rest[:, 0] != 0).all() and (rest[:, 1:] == 0).all() and pieces.sum(1).tolist() == [3.5, 0]
    assert (rest[:, 0] & 0x7F80 != 0x7F80).all()  # 0 times the mark is 0


@pytest.mark.parametrize("scale", [128**-0.5, -0.3, 1, 1e4, 1e-30, -1e-36, 1e-40, 0.0])
@pytest.mark.parametrize("lse", [0.0, 7.25, -30.0, 900.0])
def test_scores_that_begin_at_lse_give_p(library: ctypes.CDLL, lse: float, scale: float) -> None:
    """Down to scales of 0: there only scores below 2**80 are promised, and they make no difference."""
    draw, scale = np.random.default_rng(1), float(np.float32(scale))
    if abs(scale) > 1e-20:
        scores = (lse + draw.uniform(-40, 0, 1000)) / scale
    else:
        scores = draw.uniform(-1, 1, 1000) * 2.0**79
    start = library.score_start(lse * np.log2(np.e), 0, scale)
    p = np.exp2((scores + start) * library.exponent_scale(scale))
    np.testing.assert_allclose(p, np.exp(scores * scale - lse), rtol=2.0**-22 * (40 + abs(lse)))


@pytest.mark.parametrize("scale", [128**-0.5, -0.3, 1e4, 0.0, -0.0])
def test_a_row_that_is_none_has_p_0(library: ctypes.CDLL, scale: float) -> None:
    start = library.score_start(float("inf"), 1, scale)
    assert np.isfinite(start)
    exponents = (start + np.array([-(2.0**123), -1e30, 0, 1e30, 2.0**123])) * library.exponent_scale(scale)
    assert (exponents <= -HIDDEN_ROW).all(), "scores of any size come through"


def test_hidden_scores_are_those_that_the_bounds_hide(library: ctypes.CDLL) -> None:
    draw = np.random.default_rng(2)
    seen = 0
    for _ in range(4000):
        q_first, width = int(draw.integers(0, 500)), int(draw.choice([1, 10, 100, 600]))
        lt, ut = np.sort(draw.integers(q_first - width, q_first + 64 + width, (2, 2)), axis=1).clip(0)
        found = library.hidden_scores((ctypes.c_int32 * 4)(*lt.tolist(), *ut.tolist()), q_first)
        rows = q_first + 8 * np.arange(8)[None] + np.arange(2)[:, None]  # [e, j]
        hidden = (rows >= lt[0]) & (rows < lt[1]) | (rows >= ut[0]) & (rows < ut[1])
        assert found == int((hidden.ravel() << np.arange(16)).sum()), f"{lt} {ut} from {q_first}"
        seen += 0 < hidden.sum() < 16
    assert seen > 500
