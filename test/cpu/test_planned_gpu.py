# SPDX-License-Identifier: Apache-2.0
"""The Paddle side of planned context parallelism on GPUs, on the CPU: tensors, autograd and caches around the model of a
device, one rank. What runs on several GPUs is test/gpu/test_paddle_cp_gpu.py."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from plan_cases import CASES, PlanCase

from paddle_fm3 import _paddle
from paddle_fm3.distributed import agreement, collective, planned_gpu, prepared
from paddle_fm3.distributed.comm import CommError
from paddle_fm3.distributed.device import DeviceTensor
from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.distributed.device_transport import DeviceTransport
from paddle_fm3.distributed.mask_guard import MaskGuard
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.planned import PlanChoice, plan_attention
from paddle_fm3.distributed.prepared import CACHE_ENTRIES, content_digest
from paddle_fm3.distributed.strategy import FM3
from paddle_fm3.distributed.trace import TRACKS, Trace, now_us
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

    def forward(self, *arguments: Any) -> int:
        number = super().forward(*arguments)
        self.world.run()
        return number

    def backward(self, *arguments: Any) -> None:
        super().backward(*arguments)
        self.world.run()

    def prepare(self, work: Any, heads: Any) -> Any:
        self.num_prepared += 1
        return super().prepare(work, heads)

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
    monkeypatch.setattr(planned_gpu, "_unused", [])
    watch = MaskGuard.watch

    def watch_and_run(self: MaskGuard, *arguments: Any) -> None:
        """While the tensors live: CPU memory is not freed in the order of a stream."""
        watch(self, *arguments)
        world.run()

    monkeypatch.setattr(MaskGuard, "watch", watch_and_run)
    # Masks count as a GPU's: nobody reads them but to prepare them.
    for module in (prepared, planned_gpu):
        monkeypatch.setattr(module, "is_read_each_time", lambda tensor: False)
    return model


def fp16_case(case: PlanCase) -> PlanCase:
    return replace(case, call=replace(case.call, dtype="float16"))


def attend(
    case: PlanCase,
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None = None,
    trace: Trace | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    tiles = case.call.block_mask()
    if tiles is not None and block_mask is None:
        block_mask = paddle.to_tensor(tiles)
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
        trace=trace,
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
    for _ in range(CACHE_ENTRIES + 2):
        attend(case, q, k, v, bounds_of(case))  # a new tensor each: a new mask, for all that is known
    assert attention.num_prepared == 1 + CACHE_ENTRIES + 2 and len(attention.discarded) >= 1
    bounds[:] = bounds + 0
    before = attention.num_prepared
    attend(case, q, k, v, bounds)
    assert attention.num_prepared == before + 1  # written to in place


def test_a_mask_stays_until_the_backward_that_needs_it(attention: ModelAttention) -> None:
    """More masks than the cache holds are under way, as in the warm-up of a pipeline."""
    case = fp16_case(SINGLE[0])
    arrays, (q, k, v) = tensors_of(case)
    out, _ = attend(case, q, k, v, bounds_of(case))
    (first,) = planned_gpu._cache._entries.values()
    work = first[1].prepared
    del first
    masks = [bounds_of(case) for _ in range(CACHE_ENTRIES + 3)]
    for mask in masks[1:]:
        attend(case, q.detach(), k.detach(), v.detach(), mask)
    assert work not in attention.discarded
    paddle.autograd.backward([out], [paddle.to_tensor(arrays["dout"])])
    del out
    gc.collect()
    attend(case, q.detach(), k.detach(), v.detach(), masks[0])
    assert work in attention.discarded


def refill(mask: paddle.Tensor, values: np.ndarray) -> None:
    """A write that Paddle does not count, as by `copy_`, DLPack or a kernel of one's own."""
    count = mask.inplace_version
    ctypes.memmove(mask.data_ptr(), np.ascontiguousarray(values).ctypes.data, values.nbytes)
    assert mask.inplace_version == count


def test_a_mask_refilled_unseen_gives_nan_and_then_an_error(attention: ModelAttention) -> None:
    case = fp16_case(SINGLE[0])
    arrays, (q, k, v) = tensors_of(case)
    bounds = bounds_of(case)
    before = bounds.numpy()
    wanted = attend(case, q, k, v, bounds)
    after = before.copy()
    after[0, 0, -1, 0] += 1  # one value, the last
    refill(bounds, after)
    out, lse = attend(case, q, k, v, bounds)
    assert attention.num_prepared == 1
    assert np.isnan(out.numpy()).all() and np.isnan(lse.numpy()).all()
    with pytest.raises(ValueError, match=r"the mask of an earlier call was written to .* outputs are NaN"):
        attend(case, q, k, v, bounds)
    refill(bounds, before)
    for x, y in zip(attend(case, q, k, v, bounds), wanted, strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_backward_reports_a_refilled_mask_too(attention: ModelAttention) -> None:
    case = fp16_case(SINGLE[0])
    arrays, (q, k, v) = tensors_of(case)
    bounds = bounds_of(case)
    attend(case, q, k, v, bounds)
    refill(bounds, bounds.numpy() + 1)
    out, _ = attend(case, q, k, v, bounds)
    with pytest.raises((ValueError, OSError), match="the mask of an earlier call"):  # Paddle's autograd wraps it
        paddle.autograd.backward([out], [paddle.to_tensor(arrays["dout"])])


@pytest.mark.parametrize("at", range(5), ids=["q", "k", "v", "out", "lse"])
def test_what_backward_needs_must_not_be_written_to(attention: ModelAttention, at: int) -> None:
    case = fp16_case(SINGLE[0])
    arrays, qkv = tensors_of(case)
    out, lse = attend(case, *qkv, bounds_of(case))
    written = (*qkv, out, lse)[at].detach()
    written[:] = 0
    with pytest.raises((ValueError, OSError), match=f"{'q k v out lse'.split()[at]} was written to in place"):
        paddle.autograd.backward([out], [paddle.to_tensor(arrays["dout"])])


def test_a_timeline_of_both_directions(attention: ModelAttention) -> None:
    case = fp16_case(SINGLE[0])
    arrays, (q, k, v) = tensors_of(case)
    trace = Trace()
    out, _ = attend(case, q, k, v, bounds_of(case), trace=trace)
    num_forward = len(trace.spans)
    paddle.autograd.backward([out], [paddle.to_tensor(arrays["dout"])])
    spans = trace.spans
    assert 0 < num_forward < len(spans)
    assert all(span.track in TRACKS and span.begin_us < span.end_us <= now_us() + 1e6 for span in spans)
    assert attention.trace is None, "later calls are not traced"
    attend(case, q, k, v, bounds_of(case))
    assert len(trace.spans) == len(spans)


@pytest.mark.parametrize("has_bounds", [True, False])
def test_what_a_failed_transport_gives_is_nan(attention: ModelAttention, has_bounds: bool) -> None:
    """A transport that fails lets streams run on with contents that mean nothing: nobody is to take these for results."""
    case = fp16_case(SINGLE[0])
    arrays, (q, k, v) = tensors_of(case)
    bounds = bounds_of(case) if has_bounds else None
    if not has_bounds:
        plan = plan_attention(None, causal=case.call.causal, num_ranks=1, s=q.shape[1], b=q.shape[0])
        case = SimpleNamespace(call=case.call, plan=lambda num_ranks: plan)
    attend(case, q, k, v, bounds)
    transport = attention.transport = DeviceTransport(0, 1)
    failed = np.zeros(1, np.uint32)
    transport.failed_word = failed.ctypes.data
    out, lse = attend(case, q, k, v, bounds)
    assert np.isfinite(out.numpy()).all() and np.isfinite(lse.numpy()).all()
    failed[0] = 1
    paddle.autograd.backward([out], [paddle.to_tensor(arrays["dout"])])
    assert all(np.isnan(x.grad.numpy()).all() for x in (q, k, v))
    assert all(np.isnan(x.numpy()).all() for x in attend(case, q, k, v, bounds))


def test_what_is_watched_of_a_mask(attention: ModelAttention) -> None:
    """A block_mask as well, and bounds that are a strided view; a mask that was not written to raises nothing."""
    case = fp16_case(next(case for case in SINGLE if case.call.block_mask() is not None))
    _, (q, k, v) = tensors_of(case)
    wide = paddle.to_tensor(np.pad(case.call.bounds(), ((0, 0), (0, 0), (0, 0), (0, 3)), constant_values=7))
    bounds, tiles = wide[:, :, :, :-3], paddle.to_tensor(case.call.block_mask())
    assert not bounds.is_contiguous()
    for _ in range(2):
        attend(case, q, k, v, bounds, tiles)
    attend(case, q, k, v, bounds, tiles)
    flipped = tiles.numpy()
    flipped.flat[-1] ^= 1
    refill(tiles, flipped)
    attend(case, q, k, v, bounds, tiles)
    with pytest.raises(ValueError, match="the mask of an earlier call"):
        attend(case, q, k, v, bounds, tiles)


def test_without_a_plan_a_refilled_mask_is_told_as_well(
    attention: ModelAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`collective_attention` on one rank, which has all keys; NCCL compares masks only when they are new."""
    monkeypatch.setattr(collective, "_cache", collective.PreparedCache())
    guard = MaskGuard(attention.device)
    monkeypatch.setattr(collective, "_guard", lambda: guard)
    monkeypatch.setattr(collective, "is_read_each_time", lambda tensor: False)
    monkeypatch.setattr(collective._GatherKeysValues, "apply", lambda k, v, *_: (k, v))
    case, partition = fp16_case(SINGLE[0]), Partition((0, 64), (0,), 1)
    arrays = case.call.tensors()
    q, k, v = (paddle.to_tensor(arrays[name][:, :64]) for name in "qkv")
    bounds = paddle.to_tensor(np.full((q.shape[0], 1, 64, 1), 64, np.int32))
    record = {"error": None, "b": q.shape[0], "s_local": 64, "s_bounds": 64, "causal": True, "is_prepared": False}
    record = {**dict.fromkeys(agreement.SHARED_FIELDS), **record, "mask_digest": "0" * 16}
    communicator = SimpleNamespace(
        group=SimpleNamespace(id=-1), is_gloo=False, rank=0, num_ranks=1, exchange=lambda record, what: [record]
    )

    def call() -> list[paddle.Tensor]:
        return collective.collective_attention(
            q, k, v, bounds, True, None, partition, lambda digest: record, communicator, reduce_dtype="input",
            keep_gathered=True,
        )  # fmt: skip

    first, again = call(), call()
    for x, y in zip(first, again, strict=True):
        assert np.isfinite(x.numpy()).all() and np.array_equal(x.numpy(), y.numpy())
    refill(bounds, np.full((q.shape[0], 1, 64, 1), 32, np.int32))
    assert all(np.isnan(x.numpy()).all() for x in call())
    with pytest.raises(ValueError, match="the mask of an earlier call"):
        call()


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
        transport = device = trace = None

        def forward(self, *arguments: Any) -> int:
            seen.extend(x for x in arguments if isinstance(x, DeviceTensor))
            return 7

        def backward(self, *arguments: Any) -> None:
            self.forward(*arguments)
            assert arguments[-1] == 7, "whose backward it is"

    q, k, v = (paddle.to_tensor(np.zeros((1, 0, h, 8), np.float16), stop_gradient=False) for h in (4, 2, 2))
    guard = MaskGuard(FakeDevice(FakeWorld(0)))
    call = planned_gpu._Call(Noting(), guard, planned_gpu._Seen(None, guard.keep(), None), (), 1.0, False)
    out, lse = planned_gpu._PlannedAttention.apply(q, k, v, call)
    assert out.shape == [1, 0, 4, 8] and lse.shape == [1, 4, 0]
    dout, dlse = (paddle.to_tensor(np.zeros(x.shape, dtype)) for x, dtype in ((out, np.float16), (lse, np.float32)))
    paddle.autograd.backward([out, lse], [dout, dlse])
    assert len(seen) == 4 + 8 and all(x.is_contiguous for x in seen), seen


def test_the_variable_says_how_a_group_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(planned_gpu, "_connect", lambda communicator: SimpleNamespace())
    monkeypatch.setattr(planned_gpu, "PaddleDevice", SimpleNamespace)
    monkeypatch.setattr(planned_gpu.planned, "count_bytes_of", lambda group, transport: None)
    monkeypatch.setattr(planned_gpu, "DeviceAttention", lambda *given, **options: modes.append(options["forward_mode"]))
    for name in ("_attentions", "_exchanges"):
        monkeypatch.setattr(planned_gpu, name, {1: None} if name == "_exchanges" else {})
    communicator = SimpleNamespace(group=SimpleNamespace(id=1), host_exchange=None)
    for value in ("", "steps"):
        monkeypatch.setenv("FM3_GPU_FORWARD", value)
        planned_gpu._attentions.clear()
        planned_gpu._attention_of(communicator, 1.0)
    assert modes == [None, "steps"]


@pytest.mark.parametrize("name", ["FM3_GPU_TRANSPORT", "FM3_GPU_FORWARD"])
def test_ranks_with_different_variables_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for rows in different ways would wait for words that nobody writes."""
    own = {"FM3_GPU_TRANSPORT": "auto", "FM3_GPU_FORWARD": "auto"}
    other = {**own, name: {"FM3_GPU_TRANSPORT": "ipc", "FM3_GPU_FORWARD": "whole"}[name]}

    def exchange(record: dict[str, Any], what: str) -> list[dict[str, Any]]:
        return [record, {**record, "wishes": other}]

    for variable in own:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(planned_gpu, "connect", lambda *given: SimpleNamespace())
    monkeypatch.setattr(planned_gpu, "RecordExchange", lambda *given: exchange)
    monkeypatch.setattr(planned_gpu, "_exchanges", {})
    communicator = SimpleNamespace(rank=0, num_ranks=2, timeout_s=1.0, group=SimpleNamespace(id=1), exchange=None)
    with pytest.raises(CommError, match=f"{name} differs between ranks: auto, {other[name]}"):
        planned_gpu._connect(communicator)
