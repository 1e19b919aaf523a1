# SPDX-License-Identifier: Apache-2.0
"""A second backward through one call: right where the operator is Paddle's own kind of op, and a clear error where it is a
PyLayer, of which Paddle keeps nothing. In processes of their own: left to itself Paddle ends the process there."""

from __future__ import annotations

import importlib

import pytest
from paddle.autograd import PyLayer
from program import run_program

SET_UP = """
import sys
import numpy as np
import paddle
from paddle_fm3 import flashmask_attention
from paddle_fm3.distributed.attention import flashmask_cp_attention, plan_attention

def attend(q):
    if sys.argv[1] == "op":
        return flashmask_attention(q, q, q, causal=True)
    plan = plan_attention(None, causal=True, num_ranks=1, s=q.shape[1])
    return flashmask_cp_attention(q, q, q, causal=True, plan=plan)

paddle.seed(0)
q = paddle.randn([1, 96, 2, 16])
q.stop_gradient = False
out = attend(q)
first, second = out.sum(), (out * out).sum()
"""


@pytest.mark.parametrize("way", ["op", "plan"])
def test_gradients_may_be_asked_for_again(way: str) -> None:
    ended = run_program(
        SET_UP
        + """
alone = [paddle.grad(loss, [q], retain_graph=True)[0] for loss in (first, second, first)]
together = paddle.grad(first + second, [q])[0]
np.testing.assert_array_equal(alone[0], alone[2])
np.testing.assert_allclose(alone[0] + alone[1], together, atol=1e-4)
print("done")
""",
        way,
    )
    assert ended.stdout == "done\n", ended.stderr[-2000:]


def test_a_second_backward_of_the_operator_adds_up() -> None:
    ended = run_program(
        SET_UP
        + """
wanted = paddle.grad(first + second, [q], retain_graph=True)[0].numpy()
first.backward(retain_graph=True)
second.backward()
np.testing.assert_allclose(q.grad.numpy(), wanted, atol=1e-4)
print("done")
""",
        "op",
    )
    assert ended.stdout == "done\n", ended.stderr[-2000:]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_second_backward_through_a_plan_says_what_to_do_instead(keeps: bool) -> None:
    ended = run_program(
        SET_UP
        + """
losses = (first, second) if sys.argv[2] == "True" else (out, out)
losses[0].backward(retain_graph=sys.argv[2] == "True")
try:
    losses[1].backward()
except Exception as error:
    print("add the losses up" in str(error))
q.clear_grad()
attend(q).sum().backward()
print(bool(paddle.isfinite(q.grad).all()))
""",
        "plan",
        str(keeps),
    )
    assert ended.stdout == "True\nTrue\n", (ended.returncode, ended.stdout, ended.stderr[-2000:])


def test_no_layer_of_the_package_is_forgotten() -> None:
    modules = ("attention", "distributed.planned", "distributed.planned_gpu", "distributed.collective",
               "distributed.shard", "integration.paddlenlp.corrections", "integration.paddlenlp.experts")  # fmt: skip
    for name in modules:
        importlib.import_module(f"paddle_fm3.{name}")
    layers = [layer for layer in PyLayer.__subclasses__() if layer.__module__.startswith("paddle_fm3.")]
    layers = [layer for layer in layers if not layer.__module__.startswith("paddle_fm3.testing")]
    assert {layer.__module__.removeprefix("paddle_fm3.") for layer in layers} == set(modules)
    assert all(hasattr(layer.forward, "__wrapped__") for layer in layers)
