# SPDX-License-Identifier: Apache-2.0
"""The C++ schedule builder gives the Python one's summaries. Needs the CPU library (`make build`)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from paddle_fm3 import _c_api
from paddle_fm3 import mask as masks
from paddle_fm3._native import cpu_library
from paddle_fm3.mask import ColumnMask
from paddle_fm3.schedule import build_schedule

FORMS = {
    (True, 1): _c_api.BoundForm.LOWER1,
    (True, 2): _c_api.BoundForm.LOWER2,
    (False, 2): _c_api.BoundForm.OUTER2,
    (False, 4): _c_api.BoundForm.BOTH4,
}


def native_runs(bounds: np.ndarray, is_causal: bool, s_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    """hidden and clear runs ``[b, h_mask, num_k_tiles, 4, 2]`` of fm3_cpu_build_schedule."""
    library = cpu_library()
    b, h_mask, s_k, n = bounds.shape
    view = _c_api.MaskView(
        bounds=bounds.ctypes.data, block_mask=None, form=FORMS[is_causal, n], is_causal=is_causal,
        b=b, h_mask=h_mask, s_q=s_q, s_k=s_k,
    )  # fmt: skip
    summaries = np.full((b, h_mask, -(-s_k // block_k), 2, _c_api.MAX_RUNS, 2), -7, np.int32)
    status = library.fm3_cpu_build_schedule(ctypes.byref(view), block_k, summaries.ctypes.data)
    assert status == 0, library.fm3_cpu_last_error()
    return summaries[..., 0, :, :], summaries[..., 1, :, :]


def check(bounds: np.ndarray, is_causal: bool, s_q: int, block_k: int) -> None:
    schedule = build_schedule(ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q), 128, block_k)
    hidden, clear = native_runs(bounds, is_causal, s_q, block_k)
    np.testing.assert_array_equal(hidden, schedule.hidden_runs)
    np.testing.assert_array_equal(clear, schedule.clear_runs)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"causal{form[0]}_n{form[1]}")
def test_random_masks(form):
    is_causal, n = form
    rng = np.random.default_rng(n + is_causal)
    for _ in range(400):
        s_q, s_k, block_k = int(rng.integers(0, 60)), int(rng.integers(1, 60)), int(rng.integers(1, 20))
        bounds = np.ascontiguousarray(rng.integers(-3, s_q + 5, (1, 2, s_k, n)).astype(np.int32))
        check(bounds, is_causal, s_q, block_k)


@pytest.mark.parametrize(
    "mask",
    [
        masks.sliding_window(5000, 70),
        masks.document([1, 1500, 1, 77, 3000]),
        masks.global_sliding_window(3000, 9, 100, 50),
        masks.random_eviction(4000, seed=1, first_row=2000, b=2, h_mask=2),
        masks.prefix_lm_document([900, 2, 700], [300, 1, 0]),
    ],
    ids=["window", "document", "global_window", "eviction", "prefix"],
)
@pytest.mark.parametrize("block_k", [64, 80, 128])
def test_named_masks(mask, block_k):
    bounds, is_causal = mask.to_bounds()
    check(np.ascontiguousarray(bounds), is_causal, mask.s_q, block_k)
