# SPDX-License-Identifier: Apache-2.0
"""How the row kernels divide: the device's own arithmetic on the host, beside Python's whole numbers."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from host_library import compile_for_host

LIMIT = 2**31  # of n and of the divisor

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host("row_divisor.cc", tmp_path_factory.mktemp("divisor"))


def check(library: ctypes.CDLL, divisor: int, n: np.ndarray) -> None:
    """n: int64 [count], all in [0, LIMIT)."""
    given = np.ascontiguousarray(n, np.uint32)
    quotients, remainders = np.zeros_like(given), np.zeros_like(given)
    library.divide(divisor, len(given), *(ctypes.c_void_p(x.ctypes.data) for x in (given, quotients, remainders)))
    wrong = np.flatnonzero((quotients != n // divisor) | (remainders != n % divisor))
    assert not len(wrong), [(int(n[at]), int(quotients[at]), int(remainders[at])) for at in wrong[:5]]


def test_small_divisors_and_numbers(library: ctypes.CDLL) -> None:
    for divisor in range(1, 600):
        check(library, divisor, np.arange(4096))


def test_next_to_multiples(library: ctypes.CDLL) -> None:
    """Where a quotient changes, up to the largest numbers; divisors next to powers of two and at random."""
    rng = np.random.default_rng(0)
    near_powers = [2**power + by for power in range(2, 31) for by in (-1, 0, 1)]
    for divisor in {1, 2, 3, LIMIT - 2, LIMIT - 1, *near_powers, *rng.integers(1, LIMIT, 500).tolist()}:
        top = (LIMIT - 1) // divisor
        quotients = np.unique(np.concatenate([rng.integers(0, top, 200, endpoint=True), [0, 1, top - 1, top]]))
        n = (quotients.clip(0)[:, None] * divisor + np.array([-1, 0, 1, divisor - 1])).ravel()
        check(library, divisor, n[(n >= 0) & (n < LIMIT)])
    check(library, 7, np.arange(LIMIT - 4096, LIMIT))
