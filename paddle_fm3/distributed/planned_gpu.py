# SPDX-License-Identifier: Apache-2.0
"""Attention as a CpPlan says, on GPU ranks: Paddle's tensors, stream, allocator and autograd around `DeviceAttention`.

Nothing here waits for the device once a mask is known: shapes and masks are compared, planned and taken to the device
when a mask is first seen, and every later call with it enqueues and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.autograd import PyLayer

from paddle_fm3 import _native, _paddle, env
from paddle_fm3.distributed import agreement, planned
from paddle_fm3.distributed.comm import CommError, Communicator, communicator_for
from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.device import DTYPES, DeviceTensor, Sm90Device
from paddle_fm3.distributed.device_bind import Heads, PreparedWork
from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_nccl import NcclTransport
from paddle_fm3.distributed.device_style import choose_bwd_style
from paddle_fm3.distributed.device_transport import DeviceTransport
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.prepared import PreparedCache
from paddle_fm3.distributed.record_exchange import RecordExchange
from paddle_fm3.distributed.transport import TransportError, connect, machine_name

Describe = Callable[[], agreement.Record]

_attentions: dict[int | None, DeviceAttention] = {}  # by group id; None: a single rank
_exchanges: dict[int, RecordExchange] = {}  # by group id
_cache: PreparedCache[tuple[PreparedWork, Any]] = PreparedCache()


class PaddleDevice(Sm90Device):
    """The current GPU with memory from Paddle's allocator, so that the two do not take it from each other."""

    def __init__(self) -> None:
        super().__init__(_native.sm90_library())
        self._tensors: dict[int, paddle.Tensor] = {}  # by address

    def malloc(self, num_bytes: int) -> int:
        return self._keep(paddle.empty([max(num_bytes, 1)], "uint8"))

    def free(self, address: int) -> None:
        """NOTE: waits for the device, since other streams than Paddle's may still use the memory."""
        paddle.device.synchronize()
        del self._tensors[address]

    def upload(self, array: NDArray[Any]) -> int:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._keep(paddle.to_tensor(raw if raw.size else np.zeros(1, np.uint8)))

    def _keep(self, tensor: paddle.Tensor) -> int:
        address = int(tensor.data_ptr())
        self._tensors[address] = tensor
        return address


def planned_attention_on_gpu(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    bounds: paddle.Tensor | None,
    block_mask: paddle.Tensor | None,
    causal: bool,
    choice: planned.PlanChoice,
    describe: Describe,
    group: Any | None,
    *,
    softmax_scale: float | None,
    deterministic: bool,
    reduce_dtype: str,
    timeout_s: float,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """out [b, s_local, h_q, d_v] and lse [b, h_q, s_local] of this rank's rows. See `flashmask_cp_attention`.

    Args:
        describe: makes this rank's side of the comparison; called when the mask is new.
    """
    communicator = None if group is None else communicator_for(group, timeout_s)
    attention = _attention_of(communicator, timeout_s)
    # A block_mask is held by the cache entry, so that its id stays its own.
    tiles = None if block_mask is None else (id(block_mask), block_mask.inplace_version)
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    key = (None if group is None else group.id, choice, causal, reduce_dtype, str(q.dtype), shapes, tiles)
    found = _cache.find(bounds, key)
    if found is None:
        plan, mask = planned.agree(_checked(describe(), q), communicator, bounds, block_mask, choice)
        rank_plan = plan.rank_plan(0 if communicator is None else communicator.rank, mask)
        cost = CostModel(h_q=q.shape[2], h_kv=k.shape[2], d=q.shape[3])
        work = DeviceWork.of(
            plan, rank_plan, is_wire_float32=reduce_dtype == "float32", bwd_style=choose_bwd_style(plan, cost)
        )
        found = attention.prepare(work), block_mask
        for evicted, _ in _cache.put(bounds, key, found):
            attention.discard(evicted)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = map(_with_dense_heads, (q, k, v))
    return _PlannedAttention.apply(q, k, v, attention, found[0], scale, deterministic)


def _checked(record: agreement.Record, q: paddle.Tensor) -> agreement.Record:
    if record["error"] is None and record["dtype"] not in DTYPES:
        return {"error": f"q.dtype is {record['dtype']}; plans run on GPUs with {' or '.join(DTYPES)}"}
    return record


def _attention_of(communicator: Communicator | None, timeout_s: float) -> DeviceAttention:
    if communicator is None:
        if None not in _attentions:
            _attentions[None] = DeviceAttention(PaddleDevice(), None, timeout_s=timeout_s)
        return _attentions[None]
    group_id = communicator.group.id
    if group_id not in _attentions:
        transport = _connect(communicator)
        planned.count_bytes_of(communicator.group, transport)
        _attentions[group_id] = DeviceAttention(PaddleDevice(), transport, timeout_s=timeout_s)
    communicator.host_exchange = _exchanges[group_id]
    return _attentions[group_id]


def _connect(communicator: Communicator) -> DeviceTransport:
    """Connects the hosts of the ranks, then their GPUs. Collective."""
    rank, num_ranks, timeout_s = communicator.rank, communicator.num_ranks, communicator.timeout_s
    what = "set-up of the transport between GPUs"
    try:
        control = connect(rank, num_ranks, lambda record: communicator.exchange(record, what), timeout_s)
        exchange = _exchanges[communicator.group.id] = RecordExchange(control, timeout_s)
        records = exchange({"machine": machine_name(), "wish": env.gpu_transport()}, what)
        wishes = sorted({record["wish"] for record in records})
        if len(wishes) > 1:
            raise TransportError(f"FM3_GPU_TRANSPORT differs between ranks: {', '.join(wishes)}")
        kind = wishes[0]
        if kind == "auto":
            kind = "ipc" if len({record["machine"] for record in records}) == 1 else "nccl"
        if kind == "ipc":  # memory that is shared must be CUDA's own
            device = Sm90Device(_native.sm90_library())
            return IpcTransport(device, rank, num_ranks, lambda record: exchange(record, what), timeout_s)
        return NcclTransport(communicator.group, PaddleDevice(), control, timeout_s)
    except TransportError as error:
        raise CommError(f"context parallelism: {error}") from error


class _PlannedAttention(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, attention: DeviceAttention,
        prepared: PreparedWork, scale: float, deterministic: bool,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:  # fmt: skip
        b, s_local, h_q, d_qk = q.shape
        heads = Heads(b, h_q, k.shape[2], d_qk, v.shape[3], str(q.dtype).removeprefix("paddle."))
        out = paddle.empty([b, s_local, h_q, v.shape[3]], q.dtype)  # [b, s_local, h_q, d_v]
        lse = paddle.empty([b, h_q, s_local], "float32")  # [b, h_q, s_local]
        tensors = [_device_tensor(x) for x in (q, k, v, out)]
        stream = _paddle.current_stream()
        _guarded(attention, attention.forward, prepared, heads, *tensors, _address(lse), scale, stream)
        ctx.attention, ctx.prepared, ctx.heads, ctx.scale, ctx.deterministic = (
            attention, prepared, heads, scale, deterministic,
        )  # fmt: skip
        ctx.is_wanted = tuple(not x.stop_gradient for x in (q, k, v))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, maybe_dout: paddle.Tensor | None, maybe_dlse: paddle.Tensor | None
    ) -> tuple[paddle.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensor()
        dout = _paddle.zeros_like(out) if maybe_dout is None else maybe_dout
        dout = dout if dout.dtype == q.dtype else dout.astype(q.dtype)
        dout = _with_dense_heads(dout)
        dlse = None if maybe_dlse is None else maybe_dlse.contiguous()
        grads = [paddle.empty(x.shape, x.dtype) for x in (q, k, v)]
        _guarded(
            ctx.attention, ctx.attention.backward, ctx.prepared, ctx.heads,
            *(_device_tensor(x) for x in (q, k, v, out)), _address(lse), _device_tensor(dout),
            None if dlse is None else _address(dlse), *(_device_tensor(x) for x in grads), ctx.scale,
            _paddle.current_stream(), ctx.deterministic,
        )  # fmt: skip
        return tuple(grad if is_wanted else None for grad, is_wanted in zip(grads, ctx.is_wanted, strict=True))


def _guarded(attention: DeviceAttention, action: Callable[..., None], *arguments: Any) -> None:
    """An error of this rank ends the transport, so that the others do not wait for it."""
    try:
        action(*arguments)
    except TransportError as error:
        raise CommError(f"context parallelism: {error}") from error
    except BaseException as error:
        if attention.transport is not None:
            rank = attention.transport.rank
            attention.transport.fail(f"rank {rank} stopped: {type(error).__name__}: {error}")
        raise


def _device_tensor(x: paddle.Tensor) -> DeviceTensor:
    b, s, h, d = x.shape
    if 0 in (b, s, h, d):  # its strides mean nothing, and Paddle 2.6 invents some
        return DeviceTensor.contiguous(_address(x), b, s, h, d)
    return DeviceTensor(_address(x), b, s, h, d, tuple(x.strides[:3]))


def _with_dense_heads(x: paddle.Tensor) -> paddle.Tensor:
    """The tensor itself if its last axis is contiguous, else a dense copy."""
    return x if x.strides[-1] == 1 or x.shape[-1] == 1 or 0 in x.shape else x.contiguous()


def _address(x: paddle.Tensor) -> int:
    return int(x.data_ptr() or 0)  # Paddle 2.6 has None for a tensor without elements
