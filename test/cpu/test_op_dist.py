# SPDX-License-Identifier: Apache-2.0
"""Dist tensors: batch and head shards stay sharded, values and gradients are those of whole tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import op_dist_worker
import op_support
import paddle
import paddle.distributed as dist
import pytest
from launch import launch

from paddle_fm3 import flashmask_attention
from paddle_fm3.testing.cases import make_inputs

NUM_CASES = len(op_dist_worker.HEADS) * len(op_dist_worker.MASKS) * len(op_dist_worker.SPLITS) + 8


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_split(num_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for op_support
    result = launch(Path(op_dist_worker.__file__), [str(tmp_path)], num_ranks, tmp_path, timeout_s=150)
    assert result.exit_code == 0, result.tail()
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    assert [len(report) for report in reports] == [NUM_CASES] * num_ranks


def test_callers_tensors_stay_as_they_are():
    """Paddle's own call would turn a plain tensor among dist tensors into a dist tensor, in place."""
    case = op_dist_worker.make_case("gqa", "h_mask_1")
    inputs = make_inputs(case)
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    q = dist.shard_tensor(op_support.to_tensor(inputs.q), mesh, [dist.Shard(0)])
    k, v = op_support.to_tensor(inputs.k), op_support.to_tensor(inputs.v)
    arguments = op_support.call_arguments(case)
    out = flashmask_attention(q, k, v, **arguments)
    assert out.is_dist()
    assert not any(x.is_dist() for x in (k, v, arguments["startend_row_indices"]))
    expected = flashmask_attention(op_support.to_tensor(inputs.q), k, v, **arguments)
    np.testing.assert_array_equal(out._local_value().numpy(), expected.numpy())


def test_no_gradient_wanted():
    mesh = dist.ProcessMesh([0], dim_names=["x"])
    q = dist.shard_tensor(paddle.randn([1, 5, 2, 8]), mesh, [dist.Replicate()])
    assert flashmask_attention(q, q, q).stop_gradient
