# SPDX-License-Identifier: Apache-2.0
"""Attention as a CpPlan says, on GPU ranks: Paddle's tensors, stream, allocator and autograd around `DeviceAttention`.

Nothing here waits for the device once a mask is known: shapes and masks are compared, planned and taken to the device
when a mask is first seen, and every later call with it enqueues and returns. That it is still the same mask is looked
at on the device (`mask_guard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize

import paddle
from paddle.autograd import PyLayer

from paddle_fm3 import _native, _paddle, env
from paddle_fm3.distributed import agreement, planned
from paddle_fm3.distributed.comm import CommError, Communicator
from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.device import DTYPES, DeviceTensor, Sm90Device
from paddle_fm3.distributed.device_bind import Heads, PreparedWork
from paddle_fm3.distributed.device_execute import DeviceAttention
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_nccl import NcclTransport
from paddle_fm3.distributed.device_style import choose_bwd_style
from paddle_fm3.distributed.device_trace import DeviceTrace
from paddle_fm3.distributed.device_transport import DeviceTransport
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.mask_guard import NOTHING_KEPT, DeviceArray, Kept, MaskGuard
from paddle_fm3.distributed.paddle_device import PaddleDevice, address_of, array_of, spans_of
from paddle_fm3.distributed.prepared import PreparedCache, check_unwritten, is_read_each_time
from paddle_fm3.distributed.record_exchange import RecordExchange
from paddle_fm3.distributed.rendezvous import connect, machine_name
from paddle_fm3.distributed.trace import Trace
from paddle_fm3.distributed.transport import TransportError

Describe = Callable[[], agreement.Record]

_attentions: dict[int | None, DeviceAttention] = {}  # by group id; None: a single rank
_exchanges: dict[int, RecordExchange] = {}  # by group id
_guards: WeakKeyDictionary[DeviceAttention, MaskGuard] = WeakKeyDictionary()
_traces: WeakKeyDictionary[Trace, DeviceTrace] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class _Seen:
    """A mask that was prepared. It lives in the cache and in every graph whose backward is to come."""

    prepared: PreparedWork
    kept: Kept  # of the mask's own tensors those on the GPU, to be compared in later calls
    block_mask: paddle.Tensor | None  # held, so that its id stays its own


_cache: PreparedCache[_Seen] = PreparedCache()
_unused: list[Callable[[], None]] = []  # frees what masks that nobody holds any more have on the device


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
    trace: Trace | None = None,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """out [b, s_local, h_q, d_v] and lse [b, h_q, s_local] of this rank's rows. See `flashmask_cp_attention`.

    Args:
        describe: makes this rank's side of the comparison; called when the mask is new.
    """
    communicator = None if group is None else Communicator(group, timeout_s)
    attention = _attention_of(communicator, timeout_s)
    guard = _guard_of(attention)
    _guarded(attention, guard.check)
    tiles = None if block_mask is None else (id(block_mask), block_mask.inplace_version)
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    key = (None if group is None else group.id, choice, causal, reduce_dtype, str(q.dtype), shapes, tiles)
    watched = [x for x in (bounds, block_mask) if x is not None and not is_read_each_time(x)]
    found = _cache.find(bounds, key)
    if found is None:
        kept = guard.keep(*(x.numpy() for x in watched))  # before the mask is read for the plan
        plan, mask = planned.agree(_checked(describe(), q), communicator, bounds, block_mask, choice)
        rank_plan = plan.rank_plan(0 if communicator is None else communicator.rank, mask)
        cost = CostModel(h_q=q.shape[2], h_kv=k.shape[2], d=q.shape[3])
        work = DeviceWork.of(
            plan, rank_plan, is_wire_float32=reduce_dtype == "float32", bwd_style=choose_bwd_style(plan, cost)
        )
        found = _Seen(attention.prepare(work, _heads_of(q, k, v)), kept, block_mask)
        _free_unused()
        _free_with(found, attention, guard)
        _cache.put(bounds, key, found)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = map(_with_dense_heads, (q, k, v))
    given = tuple(map(array_of, watched))
    call = _Call(attention, guard, found, given, scale, deterministic, _device_trace(trace, attention))
    return _PlannedAttention.apply(q, k, v, call)


def _free_with(seen: _Seen, attention: DeviceAttention, guard: MaskGuard) -> None:
    prepared, kept = seen.prepared, seen.kept

    def free() -> None:
        attention.discard(prepared)
        guard.discard(kept)

    # Only noted when `seen` goes, which is at any time and in any thread.
    finalize(seen, _unused.append, free).atexit = False


def _free_unused() -> None:
    while _unused:
        _unused.pop()()


@dataclass(frozen=True)
class _Call:
    """One call of attention but for its tensors."""

    attention: DeviceAttention
    guard: MaskGuard
    seen: _Seen
    given: tuple[DeviceArray, ...]  # the tensors that `seen.kept` is of, as this call has them
    scale: float
    deterministic: bool
    trace: DeviceTrace | None = None

    def forward(self, *arguments: Any) -> int:
        """The forward's number, for its backward."""
        with self._tracing():
            return int(_guarded(self.attention, self.attention.forward, self.seen.prepared, *arguments))

    def backward(self, *arguments: Any) -> None:
        with self._tracing():
            _guarded(self.attention, self.attention.backward, self.seen.prepared, *arguments)

    def watch(
        self, kept: Kept, given: tuple[DeviceArray, ...], results: tuple[paddle.Tensor, ...], stream: int
    ) -> None:
        transport = self.attention.transport
        failed_word = None if transport is None else transport.failed_word
        _guarded(self.attention, self.guard.watch, kept, given, spans_of(*results), stream, failed_word)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        traced = [x for x in (self.attention, self.attention.transport) if x is not None]
        for x in traced:
            x.trace = self.trace
        try:
            yield
        finally:
            for x in traced:
                x.trace = None


def _device_trace(trace: Trace | None, attention: DeviceAttention) -> DeviceTrace | None:
    """All calls that share a trace share its clock."""
    if trace is None:
        return None
    if trace not in _traces:
        _traces[trace] = DeviceTrace(attention.device, trace)
    return _traces[trace]


def _guard_of(attention: DeviceAttention) -> MaskGuard:
    if attention not in _guards:
        _guards[attention] = MaskGuard(attention.device)
    return _guards[attention]


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
        mode = env.gpu_forward()
        transport = _connect(communicator)
        planned.count_bytes_of(communicator.group, transport)
        _attentions[group_id] = DeviceAttention(PaddleDevice(), transport, timeout_s=timeout_s, forward_mode=mode)
    communicator.host_exchange = _exchanges[group_id]
    return _attentions[group_id]


def _connect(communicator: Communicator) -> DeviceTransport:
    """Connects the hosts of the ranks, then their GPUs. Collective."""
    rank, num_ranks, timeout_s = communicator.rank, communicator.num_ranks, communicator.timeout_s
    what = "set-up of the transport between GPUs"
    try:
        control = connect(rank, num_ranks, lambda record: communicator.exchange(record, what), timeout_s)
        exchange = _exchanges[communicator.group.id] = RecordExchange(control, timeout_s)
        wishes = {"FM3_GPU_TRANSPORT": env.gpu_transport(), "FM3_GPU_FORWARD": env.gpu_forward() or "auto"}
        records = exchange({"machine": machine_name(), "wishes": wishes}, what)
        for name in wishes:
            found = sorted({record["wishes"][name] for record in records})
            if len(found) > 1:
                raise TransportError(f"{name} differs between ranks: {', '.join(found)}")
        kind = wishes["FM3_GPU_TRANSPORT"]
        if kind == "auto":
            kind = "ipc" if len({record["machine"] for record in records}) == 1 else "nccl"
        if kind == "ipc":  # memory that is shared must be CUDA's own
            device = Sm90Device(_native.sm90_library())
            return IpcTransport(device, rank, num_ranks, lambda record: exchange(record, what), timeout_s)
        return NcclTransport(communicator.group, PaddleDevice(), control, timeout_s)
    except TransportError as error:
        raise CommError(f"context parallelism: {error}") from error


@_paddle.backward_once
class _PlannedAttention(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, call: _Call
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        heads = _heads_of(q, k, v)
        b, s_local, h_q, _ = q.shape
        out = paddle.empty([b, s_local, h_q, v.shape[3]], q.dtype)  # [b, s_local, h_q, d_v]
        lse = paddle.empty([b, h_q, s_local], "float32")  # [b, h_q, s_local]
        tensors = [_device_tensor(x) for x in (q, k, v, out)]
        stream = _paddle.current_stream()
        ctx.number = call.forward(heads, *tensors, address_of(lse), call.scale, stream)
        call.watch(call.seen.kept, call.given, (out, lse), stream)
        ctx.call, ctx.heads = call, heads
        ctx.is_wanted = tuple(not x.stop_gradient for x in (q, k, v))
        # Detached: the outputs themselves would hold their own graph, for good if its backward never runs.
        saved = (q, k, v, out.detach(), lse.detach())
        ctx.save_for_backward(*saved)
        ctx.versions = [x.inplace_version for x in saved]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, maybe_dout: paddle.Tensor | None, maybe_dlse: paddle.Tensor | None
    ) -> tuple[paddle.Tensor | None, ...]:
        call: _Call = ctx.call
        _guarded(call.attention, call.guard.check)
        q, k, v, out, lse = saved = ctx.saved_tensor()
        for name, x, version in zip(("q", "k", "v", "out", "lse"), saved, ctx.versions, strict=True):
            _guarded(call.attention, check_unwritten, name, x, version)
        dout = _paddle.zeros_like(out) if maybe_dout is None else maybe_dout
        dout = dout if dout.dtype == q.dtype else dout.astype(q.dtype)
        dout = _with_dense_heads(dout)
        dlse = None if maybe_dlse is None else maybe_dlse.contiguous()
        grads = [paddle.empty(x.shape, x.dtype) for x in (q, k, v)]
        stream = _paddle.current_stream()
        call.backward(
            ctx.heads, *(_device_tensor(x) for x in (q, k, v, out)), address_of(lse), _device_tensor(dout),
            None if dlse is None else address_of(dlse), *(_device_tensor(x) for x in grads), call.scale,
            stream, call.deterministic, ctx.number,
        )  # fmt: skip
        call.watch(NOTHING_KEPT, (), tuple(grads), stream)
        return tuple(grad if is_wanted else None for grad, is_wanted in zip(grads, ctx.is_wanted, strict=True))


def _guarded(attention: DeviceAttention, action: Callable[..., Any], *arguments: Any) -> Any:
    """An error of this rank ends the transport, so that the others do not wait for it."""
    try:
        return action(*arguments)
    except TransportError as error:
        raise CommError(f"context parallelism: {error}") from error
    except BaseException as error:
        if attention.transport is not None:
            attention.transport.fail(f"{type(error).__name__}: {error}")
        raise


def _heads_of(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> Heads:
    b, _, h_q, d_qk = q.shape
    return Heads(b, h_q, k.shape[2], d_qk, v.shape[3], str(q.dtype).removeprefix("paddle."))


def _device_tensor(x: paddle.Tensor) -> DeviceTensor:
    b, s, h, d = x.shape
    if 0 in (b, s, h, d):  # its strides mean nothing, and Paddle 2.6 invents some
        return DeviceTensor.contiguous(address_of(x), b, s, h, d)
    return DeviceTensor(address_of(x), b, s, h, d, tuple(x.strides[:3]))


def _with_dense_heads(x: paddle.Tensor) -> paddle.Tensor:
    """The tensor itself if its last axis is contiguous, else a dense copy."""
    return x if x.strides[-1] == 1 or x.shape[-1] == 1 or 0 in x.shape else x.contiguous()
