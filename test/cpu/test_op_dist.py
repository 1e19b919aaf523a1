# SPDX-License-Identifier: Apache-2.0
"""Dist tensors: batch and head shards stay sharded, values and gradients are those of whole tensors."""

from __future__ import annotations

import json
import subprocess
import sys
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


STATIC_AUTO_PARALLEL = """
import numpy as np, paddle, paddle.distributed as dist
from paddle_fm3 import flashmask_attention

mesh = dist.ProcessMesh([0], dim_names=["x"])
dist.auto_parallel.set_mesh(mesh)

class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = paddle.nn.Linear(16, 48), paddle.nn.Linear(16, 1)
        self.qkv.weight = dist.shard_tensor(self.qkv.weight, mesh, [dist.Shard(1)])

    def forward(self, x):
        packed = self.qkv(x).reshape([0, 0, 6, 8])
        out = flashmask_attention(packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:], causal=True)
        return self.head(out.reshape([0, 0, 16])).mean([1, 2])

class Samples(paddle.io.Dataset):
    def __getitem__(self, idx):
        rng = np.random.default_rng(idx)
        return rng.standard_normal((8, 16), np.float32), np.float32(rng.standard_normal())

    def __len__(self):
        return 12

def losses(is_static):
    paddle.seed(1)
    net = Net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    loader = dist.shard_dataloader(paddle.io.DataLoader(Samples(), batch_size=4), meshes=[mesh])
    loss_of = lambda out, label: ((out - label) ** 2).mean()
    if is_static:
        step = dist.to_static(net, loader, loss_of, optimizer)
        step.train()
        return [float(step(x, y)) for x, y in loader]
    found = []
    for x, y in loader:
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        found.append(float(loss))
    return found

dynamic, static = losses(False), losses(True)
np.testing.assert_allclose(static, dynamic, rtol=1e-5)
assert len(set(dynamic)) == 3, dynamic
print("agree", dynamic)
"""


def test_static_auto_parallel_trains_as_dygraph():
    """One rank: Paddle's static engine on CPU starts no second one. The later losses depend on gradients."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STATIC_AUTO_PARALLEL],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0 and "agree" in result.stdout, result.stderr[-3000:]
