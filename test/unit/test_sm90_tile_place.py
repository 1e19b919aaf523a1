# SPDX-License-Identifier: Apache-2.0
"""The order in which the Hopper forward works on query tiles: the kernel's own arithmetic on the host."""

from __future__ import annotations

import ctypes
import itertools
import shutil

import numpy as np
import pytest
from host_library import compile_for_host

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host("sm90_tile_place.cc", tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize(
    ("h_q", "heads_per_group", "team_heads"),
    [(1, 1, 1), (8, 8, 1), (8, 2, 1), (7, 3, 1), (12, 4, 1), (8, 8, 2), (8, 2, 2), (12, 8, 2), (2, 2, 2)],
)
@pytest.mark.parametrize(("count", "num_late"), [(1, 0), (1, 1), (9, 0), (9, 4), (9, 9), (64, 33)])
def test_order(
    library: ctypes.CDLL, b: int, h_q: int, heads_per_group: int, team_heads: int, count: int, num_late: int
) -> None:
    places = np.full((b * h_q // team_heads * count, 3), -1, np.int32)
    to = places.ctypes.data_as(ctypes.c_void_p)
    library.tile_places(b, h_q, count, heads_per_group, num_late, team_heads, to)

    def key(place: tuple[int, ...]) -> tuple:
        b_idx, h_idx, rank = place
        return rank >= count - num_late, b_idx, h_idx // heads_per_group, rank, h_idx

    every = itertools.product(range(b), range(0, h_q, team_heads), range(count))
    assert [tuple(place) for place in places.tolist()] == sorted(every, key=key)
