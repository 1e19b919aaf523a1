# SPDX-License-Identifier: Apache-2.0
"""Schedules that a GPU prepared against those of the same kernels run on the host thread by thread, which
test/unit/test_sm90_spans.py compares with dense masks."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_support import documents_case, lengths_case, needs_sm90  # noqa: E402
from schedule_support import Schedule, build, compile_library, mask_of, take_apart  # noqa: E402

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, benchmark_case  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES  # noqa: E402

pytestmark = [*needs_sm90, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
CASES = [
    *(case for case in HOSTILE_CASES if case.s_q > 0 and case.s_k > 0 and case.b > 0),
    *(benchmark_case(f"128k_{kind}") for kind in ("causal_document", "global_window", "random_eviction")),
    *(documents_case(is_causal, (2, 2), (128, 128)) for is_causal in (True, False)),
    lengths_case(
        "one_without_pairs",
        [[8192], [7000, 1192], [1042, 1645, 1796, 517, 1000, 1300, 892]] * 2,
        True,
        (2, 2),
        (128, 128),
    ),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("schedule"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_device_and_host_make_the_same_lists(library: ctypes.CDLL, case: AttentionCase) -> None:
    mask = mask_of(case)
    on_host = take_apart(library, mask, build(library, mask))
    sm90, gpu_mask = Sm90(_native.sm90_library()), GpuMask.of(case)
    schedule = sm90.build_schedule(gpu_mask)
    for _ in range(3):  # nothing may rely on what the schedule holds
        schedule.fill_(0xA5)
        sm90.fill_schedule(gpu_mask, schedule)
        assert_same(on_host, take_apart(library, mask, schedule.cpu().numpy()))


def assert_same(wanted: Schedule, found: Schedule) -> None:
    assert wanted.totals == found.totals
    for one, other in zip(wanted.lists, found.lists, strict=True):
        np.testing.assert_array_equal(one.begins, other.begins)
        np.testing.assert_array_equal(one.costs, other.costs)
        np.testing.assert_array_equal(one.order, other.order)
        is_written = np.arange(one.spans.shape[2]) <= one.num_spans[:, :, None]  # spans and the end
        np.testing.assert_array_equal(one.spans[is_written], other.spans[is_written])
    if wanted.has_cuts:
        np.testing.assert_array_equal(wanted.rest, found.rest)
