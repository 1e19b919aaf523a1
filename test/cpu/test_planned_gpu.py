# SPDX-License-Identifier: Apache-2.0
"""The Paddle side of planned context parallelism on GPUs, on the CPU: tensors, autograd and caches around the model of a
device, one rank. What runs on several GPUs is test/gpu/test_paddle_cp_gpu.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest
from plan_cases import CASES, PlanCase

from paddle_fm3 import _paddle
from paddle_fm3.distributed import agreement, planned_gpu
from paddle_fm3.distributed.device import DeviceTensor
from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.distributed.planned import PlanChoice
from paddle_fm3.distributed.prepared import CACHE_ENTRIES, content_digest
from paddle_fm3.distributed.strategy import FM3
from paddle_fm3.testing import reference
from paddle_fm3.testing.compare import assert_close_to_oracle
from paddle_fm3.testing.fake_device import FakeDevice, FakeWorld

SINGLE = [case for case in CASES if case.call.frame == "whole" and case.idle_rank is None]
# The outputs that get a gradient.
CALLS = [*((case, ("out", "lse")) for case in SINGLE), (SINGLE[0], ("out",)), (SINGLE[0], ("lse",))]
OUTPUTS = ("out", "lse", "dq", "dk", "dv")


class ModelAttention(DeviceAttention):
    """Runs what a call enqueued as soon as it returns, as a waiting reader would see it."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(FakeDevice(world), None)
        self.world = world
        self.discarded: list[Any] = []
        self.num_prepared = 0

    def forward(self, *arguments: Any) -> None:
        super().forward(*arguments)
        self.world.run()

    def backward(self, *arguments: Any) -> None:
        super().backward(*arguments)
        self.world.run()

    def prepare(self, work: Any) -> Any:
        self.num_prepared += 1
        return super().prepare(work)

    def discard(self, prepared: Any) -> None:
        super().discard(prepared)
        self.discarded.append(prepared)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> ModelAttention:
    world = FakeWorld(0)
    stream, model = world.new_stream(), ModelAttention(world)
    monkeypatch.setattr(_paddle, "current_stream", lambda: stream)
    monkeypatch.setattr(planned_gpu, "_attention_of", lambda communicator, timeout_s: model)
    monkeypatch.setattr(planned_gpu, "_cache", planned_gpu.PreparedCache())
    return model


def fp16_case(case: PlanCase) -> PlanCase:
    return replace(case, call=replace(case.call, dtype="float16"))


def attend(
    case: PlanCase, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, bounds: paddle.Tensor | None
) -> tuple[paddle.Tensor, paddle.Tensor]:
    tiles = case.call.block_mask()
    block_mask = None if tiles is None else paddle.to_tensor(tiles)
    causal = case.call.causal

    def describe() -> dict[str, Any]:
        record = dict.fromkeys(agreement.SHARED_FIELDS)
        record.update(b=q.shape[0], dtype=str(q.dtype).removeprefix("paddle."), causal=causal)
        return {
            **record,
            "error": None,
            "s_local": q.shape[1],
            "s_bounds": None if bounds is None else bounds.shape[2],
            "mask_digest": content_digest(bounds, causal, block_mask),
        }

    return planned_gpu.planned_attention_on_gpu(
        q, k, v, bounds, block_mask, causal, PlanChoice(case.plan(1), FM3), describe, None, softmax_scale=None,
        deterministic=True, reduce_dtype=case.call.reduce_dtype, timeout_s=5.0,
    )  # fmt: skip


def tensors_of(case: PlanCase) -> tuple[dict[str, np.ndarray], list[paddle.Tensor]]:
    arrays = {name: x if name == "dlse" else x.astype(np.float16) for name, x in case.call.tensors().items()}
    return arrays, [paddle.to_tensor(arrays[name], stop_gradient=False) for name in "qkv"]


def bounds_of(case: PlanCase) -> paddle.Tensor | None:
    bounds = case.call.bounds()
    return None if bounds is None else paddle.to_tensor(bounds)


@pytest.mark.parametrize(("case", "given"), CALLS, ids=lambda x: x.name if isinstance(x, PlanCase) else "_".join(x))
def test_values_and_gradients(attention: ModelAttention, case: PlanCase, given: tuple[str, ...]) -> None:
    case = fp16_case(case)
    call = case.call
    arrays, (q, k, v) = tensors_of(case)
    out, lse = attend(case, q, k, v, bounds_of(case))
    outputs = {"out": out, "lse": lse}
    paddle.autograd.backward(
        [outputs[name] for name in given], [paddle.to_tensor(arrays["d" + name]) for name in given]
    )
    arguments = {"startend_row_indices": call.bounds(), "causal": call.causal, "block_mask": call.block_mask()}
    for name in ("out", "lse"):
        arguments["d" + name] = arrays["d" + name] if name in given else np.zeros_like(arrays["d" + name])
    exact = reference.attention(arrays["q"], arrays["k"], arrays["v"], **arguments)
    naive = reference.low_precision_attention(np.float16, arrays["q"], arrays["k"], arrays["v"], **arguments)
    for name, x in zip(OUTPUTS, (out, lse, q.grad, k.grad, v.grad), strict=True):
        assert_close_to_oracle(x.numpy(), getattr(exact, name), getattr(naive, name), name, case.name, factor=3.0)


def test_strided_inputs_and_unwanted_gradients(attention: ModelAttention) -> None:
    case = fp16_case(SINGLE[0])
    arrays, (q, k, v) = tensors_of(case)
    wanted = [x.numpy() for x in attend(case, q, k, v, bounds_of(case))]
    swapped = [paddle.to_tensor(arrays[name].swapaxes(1, 2).copy()).transpose([0, 2, 1, 3]) for name in "qkv"]
    assert not swapped[0].is_contiguous()
    swapped[1].stop_gradient = False
    out, lse = attend(case, *swapped, bounds_of(case))
    for x, y in zip((out, lse), wanted, strict=True):
        assert np.array_equal(x.numpy(), y)
    paddle.autograd.backward([out], [paddle.to_tensor(arrays["dout"])])
    assert swapped[1].grad is not None and swapped[0].grad is None and swapped[2].grad is None


def test_a_mask_is_prepared_once_and_leaves_the_device(attention: ModelAttention) -> None:
    case = fp16_case(SINGLE[0])
    _, (q, k, v) = tensors_of(case)
    bounds = bounds_of(case)
    for _ in range(3):
        attend(case, q, k, v, bounds)
    assert attention.num_prepared == 1
    for _ in range(CACHE_ENTRIES):
        attend(case, q, k, v, bounds_of(case))  # a new tensor each: a new mask, for all that is known
    assert attention.num_prepared == 1 + CACHE_ENTRIES and len(attention.discarded) >= 1
    bounds[:] = bounds + 0
    before = attention.num_prepared
    attend(case, q, k, v, bounds)
    assert attention.num_prepared == before + 1  # written to in place


def test_float32_is_refused_by_name(attention: ModelAttention) -> None:
    case = SINGLE[0]
    q, k, v = (paddle.to_tensor(x) for x in list(case.call.tensors().values())[:3])
    with pytest.raises(ValueError, match="q.dtype is float32; plans run on GPUs with bfloat16 or float16"):
        attend(case, q, k, v, bounds_of(case))


def test_a_rank_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without elements reach the executor with strides that make sense, in both directions."""
    monkeypatch.setattr(_paddle, "current_stream", lambda: 1)
    seen: list[Any] = []

    class Noting:
        transport = None

        def forward(self, *arguments: Any) -> None:
            seen.extend(x for x in arguments if isinstance(x, DeviceTensor))

        backward = forward

    q, k, v = (paddle.to_tensor(np.zeros((1, 0, h, 8), np.float16), stop_gradient=False) for h in (4, 2, 2))
    arguments = (Noting(), None, 1.0, False)
    out, lse = planned_gpu._PlannedAttention.apply(q, k, v, *arguments)
    assert out.shape == [1, 0, 4, 8] and lse.shape == [1, 4, 0]
    dout, dlse = (paddle.to_tensor(np.zeros(x.shape, dtype)) for x, dtype in ((out, np.float16), (lse, np.float32)))
    paddle.autograd.backward([out, lse], [dout, dlse])
    assert len(seen) == 4 + 8 and all(x.is_contiguous for x in seen), seen
