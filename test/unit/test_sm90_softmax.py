# SPDX-License-Identifier: Apache-2.0
"""The online softmax of the Hopper forward, compiled for the host, against a softmax in fp64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from host_library import compile_for_host

STEPS, ROWS, SCALE = 5, 16, 0.3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host("sm90_softmax.cc", Path(tmp_path_factory.mktemp("softmax")))


def plain(scores: np.ndarray) -> int:
    return 0


def outgrown(scores: np.ndarray) -> int:
    scores[3, 5] += 400.0  # 2^173 above the reference: the step is computed again
    return 1


def growing(scores: np.ndarray) -> int:
    scores += 25.0 * np.arange(STEPS, dtype=np.float32)[:, None, None]  # 2^11 a step: too far after two
    return 2


def late(scores: np.ndarray) -> int:
    scores[:3, 4:9] = -np.inf  # no reference for three steps
    scores[:, 11] = -np.inf  # nor ever
    return 0


def attend(library: ctypes.CDLL, scores: np.ndarray, values: np.ndarray, *, is_slow: bool = False):  # type: ignore[no-untyped-def]
    """out and lse [rows], and how many steps were computed again."""
    out, lse = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (scores, values, out, lse)]
    slow_steps = library.softmax_rows(scores.shape[2], STEPS, ctypes.c_float(SCALE), is_slow, *pointers)
    return out, lse, slow_steps


def inputs(cols: int) -> tuple[np.ndarray, np.ndarray]:
    """scores [steps, rows, cols] with 30 % hidden, values [steps, cols]."""
    rng = np.random.default_rng(cols)
    scores = rng.standard_normal((STEPS, ROWS, cols)).astype(np.float32) * 5
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    return scores, rng.standard_normal((STEPS, cols)).astype(np.float32)


@pytest.mark.parametrize("cols", [80, 160, 176])
@pytest.mark.parametrize("change", [plain, outgrown, growing, late])
def test_rows_are_their_softmax(library: ctypes.CDLL, cols: int, change: Callable[[np.ndarray], int]) -> None:
    scores, values = inputs(cols)
    slow_steps = change(scores)
    out, lse, found = attend(library, scores, values)
    assert found == slow_steps

    rows = scores.astype(np.float64).transpose(1, 0, 2).reshape(ROWS, -1) * SCALE
    seen = np.isfinite(rows).any(1)
    weights = np.exp(rows[seen] - rows[seen].max(1, keepdims=True))
    np.testing.assert_allclose(lse[seen], np.log(weights.sum(1)) + rows[seen].max(1), atol=1e-4)
    wanted = weights @ values.reshape(-1) / weights.sum(1)
    np.testing.assert_allclose(out[seen], wanted, atol=0.02)  # P is cut to bf16
    assert (lse[~seen] == -np.inf).all()


@pytest.mark.parametrize("cols", [80, 160, 176])
def test_both_ways_have_equal_bits(library: ctypes.CDLL, cols: int) -> None:
    scores, values = inputs(cols)
    for fast, slow in zip(attend(library, scores, values), attend(library, scores, values, is_slow=True), strict=True):
        np.testing.assert_array_equal(fast, slow)
