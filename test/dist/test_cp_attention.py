# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention under Paddle's launcher against the fp64 oracle, at 1, 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cp_cases import CASES, CpCase
from launch import finished_launch

from paddle_fm3.testing import reference
from paddle_fm3.testing.compare import assert_close_to_oracle

pytestmark = pytest.mark.dist
LAUNCH_TIMEOUT_S = 150
PAIR_CASE_IDX = 2  # run once more in each pair of ranks of a 4-rank launch
SEQUENCE_AXIS = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    return finished_launch("cp_worker.py", request.param, tmp_path_factory, LAUNCH_TIMEOUT_S)


@pytest.mark.parametrize("case_idx", range(len(CASES)), ids=[case.name for case in CASES])
def test_matches_the_oracle(finished_run: tuple[int, Path], case_idx: int) -> None:
    num_ranks, output_dir = finished_run
    compare(CASES[case_idx], [np.load(output_dir / f"case{case_idx}_rank{rank}.npz") for rank in range(num_ranks)])


def compare(case: CpCase, by_rank: list[dict[str, np.ndarray]]) -> None:
    num_ranks = len(by_rank)
    oracle, low_precision = oracle_of(case)
    partition = case.partition(num_ranks)
    for name, axis in SEQUENCE_AXIS.items():
        whole = np.zeros_like(getattr(oracle, name), dtype=np.float32)
        for rank in range(num_ranks):
            index = [slice(None)] * whole.ndim
            index[axis] = partition.rows_of(rank)
            whole[tuple(index)] = by_rank[rank][name]
        dtype = np.float32 if name == "lse" else DTYPES[case.dtype]
        # The kernel's precision is the business of its own tests. Here: 4 naive fp32 errors (about 1e-6, while one
        # wrong mask bit or a missing rank's share costs about 1e-1); in 16 bits, one more rounding a rank for dK, dV,
        # which every rank rounds before they are summed.
        factor = 4.0 if case.dtype == "float32" else 2.0 + num_ranks if name in ("dk", "dv") else 2.0
        assert_close_to_oracle(
            whole,
            getattr(oracle, name),
            getattr(low_precision, name),
            name,
            (num_ranks, case),
            dtype=dtype,
            factor=factor,
        )


def test_pairs_of_a_larger_world_are_groups_of_their_own(finished_run: tuple[int, Path]) -> None:
    num_ranks, output_dir = finished_run
    if num_ranks != 4:
        pytest.skip("two pairs need four ranks")
    for pair in range(2):
        by_rank = [np.load(output_dir / f"pair{pair}_rank{rank}.npz") for rank in range(2)]
        compare(CASES[PAIR_CASE_IDX], by_rank)


def oracle_of(case: CpCase) -> tuple[reference.AttentionResult, reference.AttentionResult]:
    dtype = DTYPES[case.dtype]
    tensors = case.tensors()
    q, k, v, dout = (tensors[name].astype(dtype).astype(np.float32) for name in ("q", "k", "v", "dout"))
    options = {"causal": case.causal, "dout": dout, "dlse": tensors["dlse"], "block_mask": case.block_mask()}
    options["softmax_scale"] = case.softmax_scale
    exact = reference.attention(q, k, v, case.bounds(), **options)
    return exact, reference.low_precision_attention(dtype, q, k, v, case.bounds(), **options)
