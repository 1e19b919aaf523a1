# SPDX-License-Identifier: Apache-2.0
"""Runs one rank's share of a CpPlan on a GPU: enqueues copies, kernels and what must come before what, and returns.

Forward. The own rows of K and V go to the front of the key buffer, all batches of the gather are posted, and one
attention kernel runs over the whole buffer: once all rows are in ("whole"), or as soon as all peers have come to the
call, waiting itself for rows that are not there yet, if the transport can tell it ("rows"). Or there is one kernel a
step, and a merge ("steps").

Backward. K and V are gathered again, so that no layer keeps more than its own rows. Steps run in the plan's order on
one or two compute streams; the passes of a step that read no keys do not wait for them. Each leaves its own dQ part and
its rows of the dK/dV part buffer. What the plan lets go after a step is posted on a side stream, where sums to be
passed on are made. A single call begins with own keys, like the forward in "rows", and says before its end that its
received rows are done. The owner adds everything at the end; rows that nobody else adds to do not wait for the others.

The key buffer is double: the next phase fills one while peers may still read the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from paddle_fm3._c_api import FwdParams, MaskView
from paddle_fm3._device_api import MAX_PARTS, LocalFirst, MergeParams, PackWords, SumPartsParams, SumRowsParams
from paddle_fm3.distributed.device import DTYPES, ELEM_BYTES, Device, DeviceTensor, ReadyRows
from paddle_fm3.distributed.device_bind import (
    NUM_SLOTS,
    BoundWork,
    CallMask,
    Heads,
    PreparedWork,
    Tables,
    local_first,
    needed_bytes,
)
from paddle_fm3.distributed.device_style import MAX_WAITING_DIM
from paddle_fm3.distributed.device_trace import DeviceTrace, span_of
from paddle_fm3.distributed.device_transport import BUFFER_ALIGNMENT, Batch, DeviceTransport, Ticket
from paddle_fm3.distributed.device_work import DeviceWork, KeyRange
from paddle_fm3.env import GPU_FORWARDS

__all__ = ["DeviceAttention", "Heads", "PreparedWork"]
_MAX_BOUND = 64  # masks times sizes that are kept filled in
# Words of this executor, in bytes: how many rows are in, one a slot; what a kernel says that gives up; what a backward
# says when its received rows are done; what a forward over the whole buffer counts its tiles in.
_READY_WORDS, _STATUS_WORD, _SENT_WORD, _COUNTER_WORD = (0, 256), 128, 384, 512
_TELL_US = 5  # until a peer's copy begins after a backward has said so, less what sums of own rows take


class DeviceAttention:
    """One rank of a context-parallel group on the current device. Every call is collective over the group.

    Args:
        transport: None for a single rank.
        timeout_s: how long an attention kernel waits for a row.
        forward_mode: "rows", "whole" or "steps" (see the module). Default: a ring goes in steps; otherwise "rows" if
            the transport can write words, else "steps". "rows" needs such a transport, and a plan that overlaps and
            passes no rows on; elsewhere it means "whole".
        num_step_streams: 1 or 2; with 2 a backward step starts while the one before runs out, and has a workspace of
            its own. Default 2, or 1 without a side stream.
        has_side_stream: False keeps all work of this class on the caller's stream.

    Attributes:
        trace: where what is enqueued from now on leaves when it ran; None for nowhere. The transport has its own.
    """

    trace: DeviceTrace | None = None

    def __init__(
        self,
        device: Device,
        transport: DeviceTransport | None,
        *,
        timeout_s: float = 60.0,
        forward_mode: str | None = None,
        num_step_streams: int | None = None,
        has_side_stream: bool = True,
    ) -> None:
        if forward_mode is not None and forward_mode not in GPU_FORWARDS:
            raise ValueError(f"DeviceAttention: forward_mode={forward_mode!r} is none of {GPU_FORWARDS}")
        if num_step_streams is None:
            num_step_streams = 2 if has_side_stream else 1
        if num_step_streams not in (1, 2) or (num_step_streams == 2 and not has_side_stream):
            raise ValueError(f"DeviceAttention: num_step_streams={num_step_streams}; 1, or 2 with a side stream")
        if transport is not None:
            transport.attach()
        self.device, self.transport = device, transport
        self._timeout_us = int(timeout_s * 1.25e6)  # the transport's own watch speaks first
        self._forward_mode = forward_mode
        self._side = device.stream_create() if has_side_stream else None
        self._extra = [device.stream_create() for _ in range(num_step_streams - 1)]
        self._key_stream = device.stream_create() if has_side_stream else None
        self._own_event = device.event_create()
        self._keys_event = device.event_create()
        self._fork_event = device.event_create()
        self._sizes: dict[str, int] = {}
        self._buffers: dict[str, int] = {}
        self._bound: dict[tuple[int, Heads], BoundWork] = {}
        self._scratch: dict[str, tuple[int, int]] = {}
        self._words = device.upload(np.zeros(160, np.uint32))  # a cache line apart
        self._num_told = 0  # backward calls that say when their received rows are done
        self._slot = 0
        self._slot_tickets: list[list[Ticket]] = [[] for _ in range(NUM_SLOTS)]
        self._reduce_tickets: list[Ticket] = []
        self._num_forwards = 0

    def open_tickets(self) -> list[Ticket]:
        """What the last call has posted, in order."""
        return [*self._slot_tickets[self._slot], *self._reduce_tickets]

    # --- once a mask -----------------------------------------------------------------------------

    def prepare(self, work: DeviceWork, heads: Heads) -> PreparedWork:
        """Masks, schedules and sum tables on the device, as far as this executor needs them. Waits for the device.

        Args:
            heads: of the calls to come. Those of other heads are as right, and may wait longer for rows.
        """
        tables = Tables()
        whole = KeyRange((), 0, work.num_k_rows)
        steps = work.fwd_calls if self._has_forward_steps(work) else ()
        masks = {
            (call.k_begin, call.k_end): tables.add_mask(work, call)
            for call in (*(() if steps else (whole,)), *steps, *work.bwd_calls)
            if call.k_begin < call.k_end or call is whole
        }
        sums = [None if batch.sums is None else tables.add_sums(batch.sums) for batch in work.reduce]
        own_sums = tables.add_sums(work.own_sums)
        base = self.device.upload(tables.as_bytes())
        memory = [base]

        def call_mask(call: KeyRange, *, is_bwd: bool, first: LocalFirst | None = None) -> CallMask | None:
            found = masks.get((call.k_begin, call.k_end))
            if found is None:
                return None
            view = MaskView.from_buffer_copy(found)
            view.bounds = base + (found.bounds or 0)
            view.block_mask = None if work.block_mask is None else base + (found.block_mask or 0)
            if work.num_own == 0 or view.s_k == 0:
                return CallMask(view)
            if not is_bwd:
                memory.append(self.device.schedule(view, first))
                return CallMask(view, schedule=memory[-1])
            made = self.device.bwd_schedule(view)
            memory.append(made.data or 0)
            return CallMask(view, bwd_schedule=made)

        def at(addresses: tuple[int, int]) -> tuple[int, int]:
            return base + addresses[0], base + addresses[1]

        first = None
        if self.transport is not None and self.mode_of(work) == "rows" and work.num_k_rows > work.num_own:
            first = local_first(work, heads, self.transport.gb_per_s)
        return PreparedWork(
            work=work,
            whole=None if steps else call_mask(whole, is_bwd=False, first=first),
            fwd_masks=tuple(call_mask(call, is_bwd=False) for call in steps),
            bwd_masks=tuple(call_mask(call, is_bwd=True) for call in work.bwd_calls),
            sums=tuple(None if one is None else at(one) for one in sums),
            own_sums=at(own_sums),
            memory=tuple(memory),
        )

    def discard(self, prepared: PreparedWork) -> None:
        """Frees what `prepare` put on the device. Waits for the device, whose streams may still use it."""
        self._bound = {key: bound for key, bound in self._bound.items() if bound.prepared is not prepared}
        if self.transport is not None:
            self.transport.forget()
        for address in prepared.memory:
            self.device.free(address)

    # --- forward ---------------------------------------------------------------------------------

    def forward(
        self, prepared: PreparedWork, heads: Heads, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor,
        out: DeviceTensor, lse: int, scale: float, stream: int,
    ) -> int:  # fmt: skip
        """Own rows q [b, num_own, h_q, d_qk], k, v [b, num_own, h_kv, *] -> out [b, num_own, h_q, d_v] and
        lse float32 [b, h_q, num_own] over all keys; enqueued on `stream`, the same one in every call.

        Returns:
            the call's number, for its backward.

        Raises:
            TransportError: a rank was lost or stalled, now or in an earlier call.
            ValueError: tensors do not fit the work.
        """
        work = prepared.work
        self._check_tensors(work, heads, q=q, k=k, v=v, out=out)
        bound = self._bind(prepared, heads)
        slot = self._fill_own(bound, k, v, stream, stream)
        ready = self._ready_rows(work, slot)
        self._num_forwards += 1
        batches = list(enumerate(bound.gather[slot]))
        tickets = self._post_gather(bound, batches, stream, ready, self._num_forwards)
        if work.num_own == 0:
            return self._num_forwards
        whole = bound.whole[slot]
        if whole is None:
            with self._leaving_room(work):
                self._forward_steps(bound, slot, q, out, lse, scale, stream, tickets)
            return self._num_forwards
        whole.tile_counter = self._words + _COUNTER_WORD  # cleared as the own rows were packed
        if ready is not None:
            assert self.transport is not None
            with span_of(self.trace, "wait", "K/V rows: until peers come to them", stream):
                self.transport.wait_ready(tickets.values(), stream)
            self._forward_call("forward", whole, q, out, lse, scale, stream, ready)
            self._tell_status(ready, stream, self._side)
        else:
            with span_of(self.trace, "wait", "K/V rows: forward", stream):
                for call in work.fwd_calls:
                    self._wait_stages(work, tickets, call, stream)
            self._forward_call("forward", whole, q, out, lse, scale, stream)
        return self._num_forwards

    def mode_of(self, work: DeviceWork) -> str:
        """The forward mode that serves this work."""
        can_write = self.transport is not None and self.transport.raises_words
        mode = self._forward_mode or ("steps" if work.is_ring or not can_write else "rows")
        # The same on every rank. Without relays each stage is one batch, and its word counts.
        can_wait = can_write and work.is_overlapped and work.gather and not any(batch.hop for batch in work.gather)
        return "whole" if mode == "rows" and not can_wait else mode

    def _has_forward_steps(self, work: DeviceWork) -> bool:
        return len(work.fwd_calls) > 1 and self.mode_of(work) == "steps"

    def _ready_rows(self, work: DeviceWork, slot: int) -> ReadyRows | None:
        """Where the attention kernel sees which rows are in, if it is to wait for them itself."""
        transport = self.transport
        if transport is None or self.mode_of(work) != "rows":
            return None
        # One status for both slots: what a kernel has written, none after it takes back.
        return ReadyRows(self._words + _READY_WORDS[slot], self._words + _STATUS_WORD, self._timeout_us)

    def _tell_status(self, ready: ReadyRows, stream: int, maybe_side: int | None) -> None:
        """Hands the kernel's status on to where the transport's watch sees it, beside `stream` if there is another one.
        The kernel does not write there itself: CTAs that wait look at it again and again, and host memory is far."""
        assert self.transport is not None and self.transport.status_word is not None
        side = maybe_side if maybe_side is not None else stream
        self._fork(stream, [side])
        self.device.copy(self.device.copies([(self.transport.status_word, ready.status, 4)]), side)

    def _forward_steps(
        self, bound: BoundWork, slot: int, q: DeviceTensor, out: DeviceTensor, lse: int, scale: float, stream: int,
        tickets: dict[int, Ticket],
    ) -> None:  # fmt: skip
        work = bound.prepared.work
        calls = [(c, p) for c, p in zip(work.fwd_calls, bound.forward[slot], strict=True) if p is not None]
        if len(calls) > MAX_PARTS:
            raise ValueError(f"DeviceAttention: {len(calls)} steps; at most {MAX_PARTS} can be merged")
        parts = self._scratch_parts("out", len(calls), out.num_elems * ELEM_BYTES)
        lses = self._scratch_parts("lse", len(calls), out.b * out.h * out.s * 4)
        for at, (call, params) in enumerate(calls):
            with span_of(self.trace, "wait", f"K/V rows: forward step {at}", stream):
                self._wait_stages(work, tickets, call, stream)
            part = DeviceTensor.contiguous(parts[at], out.b, out.s, out.h, out.d)
            self._forward_call(f"forward step {at}", params, q, part, lses[at], scale, stream)
        merge = MergeParams(
            dtype=calls[0][1].dtype, num_parts=len(calls), b=out.b, s_q=out.s, h_q=out.h, d_v=out.d, lse=lse
        )
        out.into(merge, "out", "stride_out")
        merge.parts[: len(calls)], merge.lses[: len(calls)] = parts, lses
        with span_of(self.trace, "compute", "forward: merge of steps", stream):
            self.device.merge(merge, stream)

    def _forward_call(
        self, what: str, params: FwdParams, q: DeviceTensor, out: DeviceTensor, lse: int, scale: float, stream: int,
        ready: ReadyRows | None = None,
    ) -> None:  # fmt: skip
        q.into(params, "q", "stride_q")
        out.into(params, "out", "stride_out")
        params.lse, params.softmax_scale = lse, scale
        params.ready_rows = None if ready is None else ready.word
        if ready is not None:
            params.ready_status, params.ready_timeout_us = ready.status, ready.timeout_us
        with span_of(self.trace, "compute", what, stream):
            self.device.forward(params, stream)

    # --- backward --------------------------------------------------------------------------------

    def backward(
        self, prepared: PreparedWork, heads: Heads, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor,
        out: DeviceTensor, lse: int, dout: DeviceTensor, dlse: int | None,
        dq: DeviceTensor, dk: DeviceTensor, dv: DeviceTensor, scale: float, stream: int,
        is_deterministic: bool = False, call: int = 0,
    ) -> None:  # fmt: skip
        """dq, dk, dv of the own rows, summed over ranks; enqueued on `stream`. Inputs as in forward, and its number, so
        that ranks which come to the calls in different orders are told (0: not known).

        Raises:
            TransportError: a rank was lost or stalled, now or in an earlier call.
            ValueError: tensors do not fit the work, or a gradient is not contiguous.
        """
        work = prepared.work
        self._check_tensors(work, heads, q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
        for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
            if not grad.is_contiguous:
                raise ValueError(f"DeviceAttention.backward: {name} has strides {grad.strides}; it must be contiguous")
        bound = self._bind(prepared, heads)
        # A call's first passes do not wait for the own rows either.
        key_stream = self._key_stream if self._key_stream is not None and work.is_overlapped else stream
        self._fork(stream, [key_stream])
        slot = self._fill_own(bound, k, v, key_stream, stream)
        self.device.event_record(self._own_event, key_stream)
        ready = self._bwd_ready_rows(bound, slot)
        batches = [(at, bound.bwd_gather[slot][at]) for at in work.bwd_gather]
        tickets = self._post_gather(bound, batches, key_stream, ready, call)
        if self._reduce_tickets:
            assert self.transport is not None
            self.transport.wait_sent(self._reduce_tickets, stream)  # peers have read the part buffer's last content
            self._reduce_tickets = []
        # A rank without own rows computes zeros: it may have to pass on sums of others.
        num_calls = sum(params is not None for params in bound.backward[slot])
        dq_parts = self._scratch_parts("dq", num_calls if num_calls > 1 else 0, dq.num_elems * ELEM_BYTES)
        # Behind a single call that does not tell there is nothing that sums and messages would hold up.
        tells = self._tells(bound, slot)
        side = self._side if self._side is not None and (num_calls > 1 or tells) else stream
        # The first call takes the executor's own stream, whose blocks come before those of the caller's.
        streams = [*self._extra, stream] if num_calls > 1 else [stream]
        self._fork(stream, [*self._extra, side])
        num_called, next_batch = 0, 0
        for call_idx, params in enumerate(bound.backward[slot]):
            if params is not None:
                on = streams[num_called % len(streams)]
                what = f"backward step {call_idx}"
                params.keys_ready = self._keys_ready(
                    what, work, tickets, work.bwd_calls[call_idx], on, ready is not None
                )
                params.remote_begin = work.num_own
                params.ready_rows = None if ready is None else ready.word
                if ready is not None:
                    params.ready_status, params.ready_timeout_us = ready.status, ready.timeout_us
                for name, x in (("q", q), ("out", out), ("dout", dout), ("dq", dq)):
                    x.into(params, name, f"stride_{name}")
                if dq_parts:
                    params.dq = dq_parts[num_called]
                params.lse, params.dlse, params.softmax_scale = lse, dlse, scale
                params.is_deterministic = int(is_deterministic)
                if tells:
                    self._num_told += 1
                    params.sent_word, params.sent_value = self._words + _SENT_WORD, self._num_told % (1 << 32)
                    params.sent_lead_us = self._lead_us(bound)
                with self._leaving_room(work), span_of(self.trace, "compute", what, on):
                    self.device.backward(params, on)
                if tells:
                    with span_of(self.trace, "wait", "dK/dV of received rows", side):
                        self.device.wait_word(side, params.sent_word, params.sent_value)
                else:
                    self._fork(on, [side])
                if ready is not None:
                    self._tell_status(ready, on, self._key_stream)  # the side stream goes ahead of this kernel's end
                num_called += 1
            while next_batch < len(work.reduce) and work.reduce_after[next_batch] == call_idx:
                # The last backward's sums have been read by then, those to pass on too, so peers' may come.
                self._post_reduce(bound, next_batch, side, call, self._own_event if tells else None)
                next_batch += 1
        for extra in self._extra:
            self._fork(extra, [stream])
        if dq_parts:
            self._sum_parts(DTYPES[heads.dtype], dq_parts, dq, stream)
        self._sum_own("dK/dV of own rows", bound.plain_sums, dk, dv, stream)
        with span_of(self.trace, "wait", "dK/dV sums of peers", stream):
            for ticket in self._reduce_tickets:
                if ticket.batch.recvs:
                    assert self.transport is not None
                    self.transport.wait(ticket, stream)
        passes_on = any(sums is not None for sums in bound.wire_sums)
        if passes_on:  # these read what peers have sent; the next backward lets them send again
            self._fork(side, [stream])
        self._sum_own("dK/dV sums of own rows", bound.own_sums, dk, dv, stream)

    @staticmethod
    def _is_single(bound: BoundWork, slot: int) -> bool:
        """Whether one backward call takes all of the rank's keys."""
        return len(bound.backward[slot]) == 1 and bound.backward[slot][0] is not None

    def _bwd_ready_rows(self, bound: BoundWork, slot: int) -> ReadyRows | None:
        """Where a single backward call sees which rows are in, if its kernel is to wait for them itself."""
        work, heads = bound.prepared.work, bound.heads
        in_order = list(work.bwd_gather) == sorted(work.bwd_gather)  # the word counts rows from the first one on
        can_wait = max(heads.d_qk, heads.d_v) <= MAX_WAITING_DIM and work.num_own > 0 and self._key_stream is not None
        return self._ready_rows(work, slot) if self._is_single(bound, slot) and in_order and can_wait else None

    def _tells(self, bound: BoundWork, slot: int) -> bool:
        """Whether the backward says when its received rows are done, so that these leave while it goes on."""
        work = bound.prepared.work
        has_sends = any(batch.sends for batch in bound.reduce)
        can_tell = self._side is not None and work.is_overlapped and work.num_own > 0
        return self._is_single(bound, slot) and has_sends and can_tell

    def _lead_us(self, bound: BoundWork) -> int:
        """How long before its end a backward should have done its received rows: until all have arrived."""
        assert self.transport is not None
        return _TELL_US + int(bound.reduce_bytes / (self.transport.gb_per_s * 1e3))

    def _sum_own(
        self, what: str, both: ctypes.Array[SumRowsParams], dk: DeviceTensor, dv: DeviceTensor, stream: int
    ) -> None:
        if both[0].num_rows == 0:
            return
        for sums, grad in zip(both, (dk, dv), strict=True):
            sums.out = grad.address
        with span_of(self.trace, "compute", what, stream):
            self.device.sum_rows(both, stream)

    @contextmanager
    def _leaving_room(self, work: DeviceWork) -> Iterator[None]:
        """Attention launched inside leaves the transport's kernels room to run beside it."""
        count = 0 if self.transport is None or not work.is_overlapped else self.transport.num_sms
        if count:
            self.device.reserve_sms(count)
        try:
            yield
        finally:
            if count:
                self.device.reserve_sms(0)

    def _post_reduce(self, bound: BoundWork, at: int, side: int, call: int, recv_after: int | None) -> None:
        assert self.transport is not None
        for earlier in bound.prepared.work.reduce[at].after:
            self.transport.wait(self._reduce_tickets[earlier], side)
        wire_sums = bound.wire_sums[at]
        if wire_sums is not None:
            with span_of(self.trace, "compute", f"{bound.reduce[at].name}: to pass on", side):
                self.device.sum_rows(wire_sums, side)
        self._reduce_tickets.append(self.transport.post(bound.reduce[at], side, call=call, recv_after=recv_after))

    def _sum_parts(self, dtype: int, parts: list[int], out: DeviceTensor, stream: int) -> None:
        if len(parts) > MAX_PARTS:
            raise ValueError(f"DeviceAttention: {len(parts)} steps; at most {MAX_PARTS} can be added")
        params = SumPartsParams(dtype=dtype, num_parts=len(parts), num_elems=out.num_elems, out=out.address)
        params.parts[: len(parts)] = parts
        with span_of(self.trace, "compute", "dQ of all steps", stream):
            self.device.sum_parts(params, stream)

    # --- common ----------------------------------------------------------------------------------

    def _bind(self, prepared: PreparedWork, heads: Heads) -> BoundWork:
        """The work in buffers that are large enough for it on every rank. They grow on all ranks or on none."""
        key = (id(prepared), heads)
        bound = self._bound.get(key)
        if bound is not None and bound.prepared is prepared:
            return bound
        needed = needed_bytes(prepared.work, heads)
        if any(self._sizes.get(name, 0) < size for name, size in needed.items()):
            grown = {name: max(self._sizes.get(name, 0), size) for name, size in needed.items()}
            # Forgotten first: there may be no room for larger ones.
            old, self._buffers, self._sizes, self._bound = self._buffers, {}, {}, {}
            if self.transport is not None:
                self._buffers = self.transport.register(grown)
            else:
                for address in old.values():
                    self.device.free(address)
                for name, size in grown.items():
                    self._buffers[name] = self.device.malloc(size)
            self._sizes = grown
            self._slot_tickets, self._reduce_tickets = [[] for _ in range(NUM_SLOTS)], []
        if len(self._bound) >= _MAX_BOUND:
            self._bound = {}
            if self.transport is not None:
                self.transport.forget()
        bound = self._bound[key] = BoundWork(prepared, heads, self._buffers)
        return bound

    def _fill_own(self, bound: BoundWork, k: DeviceTensor, v: DeviceTensor, stream: int, caller: int) -> int:
        """Takes the next slot, once nobody reads it any more, and puts the own rows there."""
        work, transport = bound.prepared.work, self.transport
        self._slot = slot = (self._slot + 1) % NUM_SLOTS
        tickets, self._slot_tickets[slot] = self._slot_tickets[slot], []
        words = PackWords()
        words.begins[0] = self._words + _COUNTER_WORD
        # Also where this rank's kernel does not wait for rows itself. A ring passes on what it receives.
        if transport is not None and self.mode_of(work) == "rows" and not work.is_ring:
            beside = stream if self._key_stream is None else self._key_stream
            transport.wait_free(tickets, stream, beside)
            transport.announce(words, len(work.gather), (self._words + _READY_WORDS[slot], work.num_own), caller)
        elif transport is not None:
            transport.wait_sent(tickets, stream)
        for params, own in zip(bound.pack[slot], (k, v), strict=True):
            own.into(params, "from_", "stride_from")
        if work.num_own or words.num_ready:
            with span_of(self.trace, "compute", "own K/V rows to the key buffer", stream):
                self.device.pack(bound.pack[slot], words, stream)
        return slot

    def _post_gather(
        self, bound: BoundWork, batches: list[tuple[int, Batch]], stream: int, ready: ReadyRows | None, call: int
    ) -> dict[int, Ticket]:
        """Tickets by position in the gather's batches, as these are."""
        tickets: dict[int, Ticket] = {}
        if self.transport is None:
            return tickets
        work = bound.prepared.work
        for at, batch in batches:
            rows = work.gather[at]
            after = tuple(tickets[earlier] for earlier in rows.after)
            before, with_it = work.stage_rows[rows.stage : rows.stage + 2]
            word = None if ready is None else (ready.word, before, with_it)
            tickets[at] = self.transport.post(batch, stream, after, word, call)
        self._slot_tickets[self._slot] = list(tickets.values())
        return tickets

    def _wait_stages(self, work: DeviceWork, tickets: dict[int, Ticket], call: KeyRange, stream: int) -> None:
        """For what the call computes with."""
        for at, ticket in tickets.items():
            if work.gather[at].stage in call.stages and ticket.batch.recvs:
                assert self.transport is not None
                self.transport.wait(ticket, stream)

    def _keys_ready(
        self, what: str, work: DeviceWork, tickets: dict[int, Ticket], call: KeyRange, stream: int, waits_itself: bool
    ) -> int | None:
        """An event for when the call's keys are in, or, if its kernel waits for them itself, ready at the peers; what a
        backward does before it needs them goes on meanwhile."""
        if self._key_stream is None or not work.is_overlapped:
            with span_of(self.trace, "wait", f"K/V rows: {what}", stream):
                self._wait_stages(work, tickets, call, stream)
            return None
        if not any(work.gather[at].stage in call.stages and tickets[at].batch.recvs for at in tickets):
            return self._own_event
        if self.trace is not None:  # so that the wait is seen to begin where the stream comes to it
            self._fork(stream, [self._key_stream])
        with span_of(self.trace, "wait", f"K/V rows: {what}", self._key_stream):
            if waits_itself:
                assert self.transport is not None
                self.transport.wait_ready(tickets.values(), self._key_stream)
            else:
                self._wait_stages(work, tickets, call, self._key_stream)
        # One event serves: the backward waits for it as it is enqueued, before the next record.
        self.device.event_record(self._keys_event, self._key_stream)
        return self._keys_event

    def _fork(self, stream: int, others: list[int]) -> None:
        """What the others do from now on comes after what `stream` holds so far."""
        waiting = [other for other in others if other != stream]
        if waiting:
            # One event serves: a wait means the record before it, not later ones.
            self.device.event_record(self._fork_event, stream)
            for other in waiting:
                self.device.event_wait(self._fork_event, other)

    def _scratch_parts(self, name: str, count: int, num_bytes: int) -> list[int]:
        """`count` addresses in memory that calls on one stream share one after another."""
        size = -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        address, held = self._scratch.get(name, (0, 0))
        if held < count * size:
            # NOTE: freeing waits for the device; it happens when a larger call than ever before comes.
            if address:
                del self._scratch[name]  # there may be no room for the larger one
                self.device.free(address)
            address, held = self.device.malloc(count * size), count * size
            self._scratch[name] = address, held
        return [address + at * size for at in range(count)]

    @staticmethod
    def _check_tensors(work: DeviceWork, heads: Heads, **tensors: DeviceTensor) -> None:
        for name, x in tensors.items():
            is_q = name in ("q", "out", "dout", "dq")
            h = heads.h_q if is_q else heads.h_kv
            d = heads.d_v if name in ("v", "out", "dout", "dv") else heads.d_qk
            if (x.b, x.s, x.h, x.d) != (heads.b, work.num_own, h, d):
                raise ValueError(
                    f"DeviceAttention: {name} is [{x.b}, {x.s}, {x.h}, {x.d}]; rank {work.rank} of this plan wants "
                    f"[{heads.b}, {work.num_own}, {h}, {d}]"
                )
