# SPDX-License-Identifier: Apache-2.0
"""Runs one rank's share of a CpPlan on a GPU: enqueues copies, kernels and what must come before what, and returns.

Forward. The own rows of K and V go to the front of the key buffer, all batches of the gather are posted, and one
attention kernel runs over the whole buffer, waiting itself for rows that are not there yet, if the transport can
tell it ("rows"); otherwise one kernel a step and a merge ("steps").

Backward. K and V are gathered again, so that no layer keeps more than its own rows. Steps run in the plan's order on
one or two compute streams; each leaves its own dQ part and its rows of the dK/dV part buffer. What the plan lets go
after a step is posted on a side stream, where sums to be passed on are made. The owner adds everything at the end.

The key buffer is double: the next phase fills one while peers may still read the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_fm3._c_api import BoundForm, BwdParams, FwdParams, MaskView, Shape
from paddle_fm3._device_api import MAX_PARTS, MergeParams, PackParams, SumPartsParams, SumRowsParams
from paddle_fm3.distributed.device import DTYPES, ELEM_BYTES, Device, DeviceTensor, ReadyRows
from paddle_fm3.distributed.device_transport import BUFFER_ALIGNMENT, Batch, DeviceTransport, Piece, Ticket
from paddle_fm3.distributed.device_work import DeviceWork, RowBatch, RowPiece, SumTable
from paddle_fm3.distributed.plan import Step

NUM_SLOTS = 2
FORWARD_MODES = ("rows", "steps")
_BYTES = {"key": ELEM_BYTES, "part": ELEM_BYTES, "narrow": ELEM_BYTES, "wide": 4}  # "wire" depends on the work


@dataclass(frozen=True)
class Heads:
    """Sizes of one attention call apart from its rows."""

    b: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    dtype: str  # "bfloat16" or "float16"

    def elems(self, is_v: bool) -> int:
        """Elements of a K or V row."""
        return self.h_kv * (self.d_v if is_v else self.d_qk)


@dataclass(frozen=True, eq=False)
class StepMask:
    """A step's mask on the device."""

    view: MaskView
    schedule: int | None


@dataclass(frozen=True, eq=False)
class PreparedWork:
    """A DeviceWork with what belongs to it on the device; made once a mask, used by every layer."""

    work: DeviceWork
    whole: StepMask  # over the whole key buffer, tiles that need own rows only first
    fwd_masks: tuple[StepMask | None, ...]  # None: no key rows
    bwd_masks: tuple[StepMask | None, ...]
    sums: tuple[tuple[int, int] | None, ...]  # by reduce batch: addresses of rows and entries
    own_sums: tuple[int, int]


class DeviceAttention:
    """One rank of a context-parallel group on the current device. Every call is collective over the group.

    Args:
        transport: None for a single rank.
        timeout_s: how long an attention kernel waits for a row.
        forward_mode: "rows" or "steps" (see the module); default "rows" where the transport can, except in a ring.
        num_step_streams: 1 or 2; with 2 a backward step starts while the one before runs out.
        has_side_stream: False keeps all work of this class on the caller's stream.
    """

    def __init__(
        self,
        device: Device,
        transport: DeviceTransport | None,
        *,
        timeout_s: float = 60.0,
        forward_mode: str | None = None,
        num_step_streams: int = 1,
        has_side_stream: bool = True,
    ) -> None:
        if forward_mode is not None and forward_mode not in FORWARD_MODES:
            raise ValueError(f"DeviceAttention: forward_mode={forward_mode!r} is none of {FORWARD_MODES}")
        if num_step_streams not in (1, 2) or (num_step_streams == 2 and not has_side_stream):
            raise ValueError(f"DeviceAttention: num_step_streams={num_step_streams}; 1, or 2 with a side stream")
        self.device, self.transport = device, transport
        self._timeout_us = int(timeout_s * 1.25e6)  # the transport's own watch speaks first
        self._forward_mode = forward_mode
        self._side = device.stream_create() if has_side_stream else None
        self._extra = [device.stream_create() for _ in range(num_step_streams - 1)]
        self._events: list[int] = []
        self._num_events_used = 0
        self._sizes: dict[str, int] = {}
        self._buffers: dict[str, int] = {}
        self._scratch: dict[str, tuple[int, int]] = {}
        self._words = device.upload(np.zeros(NUM_SLOTS * 64, np.uint32))  # a cache line apart
        self._slot = 0
        self._slot_tickets: list[list[Ticket]] = [[] for _ in range(NUM_SLOTS)]
        self._reduce_tickets: list[Ticket] = []

    def open_tickets(self) -> list[Ticket]:
        """What the last call has posted, in order."""
        return [*self._slot_tickets[self._slot], *self._reduce_tickets]

    # --- once a mask -----------------------------------------------------------------------------

    def prepare(self, work: DeviceWork) -> PreparedWork:
        """Masks, schedules and sum tables on the device. Waits for the device."""
        whole = Step(work.stage_rows and len(work.stage_rows) - 2, 0, work.num_k_rows)
        has_remote = work.num_k_rows > work.num_own

        def masks(steps: tuple[Step, ...], has_schedule: bool) -> tuple[StepMask | None, ...]:
            return tuple(
                self._upload_mask(work, step, None, has_schedule) if step.k_begin < step.k_end else None
                for step in steps
            )

        return PreparedWork(
            work=work,
            whole=self._upload_mask(work, whole, work.num_own if has_remote else None, True),
            fwd_masks=masks(work.fwd_steps, True),
            bwd_masks=masks(work.bwd_steps, False),
            sums=tuple(None if batch.sums is None else self._upload_sums(batch.sums) for batch in work.reduce),
            own_sums=self._upload_sums(work.own_sums),
        )

    def discard(self, prepared: PreparedWork) -> None:
        """Frees what `prepare` put on the device. Waits for the device, whose streams may still use it."""
        for mask in (prepared.whole, *prepared.fwd_masks, *prepared.bwd_masks):
            if mask is not None:
                for address in (mask.view.bounds, mask.view.block_mask, mask.schedule):
                    if address:
                        self.device.free(address)
        for sums in (*prepared.sums, prepared.own_sums):
            for address in sums or ():
                self.device.free(address)

    def _upload_mask(self, work: DeviceWork, step: Step, num_local: int | None, has_schedule: bool) -> StepMask:
        bounds, block_mask = work.step_bounds(step)
        b, h_mask, s_k, num_bounds = bounds.shape
        view = MaskView(
            bounds=self.device.upload(bounds),
            block_mask=None if block_mask is None else self.device.upload(block_mask),
            form=BoundForm.OUTER2 if num_bounds == 2 else BoundForm.BOTH4,
            is_causal=0,
            b=b,
            h_mask=h_mask,
            s_q=work.num_own,
            s_k=s_k,
        )
        is_empty = work.num_own == 0 or s_k == 0 or not has_schedule
        return StepMask(view, None if is_empty else self.device.schedule(view, num_local))

    def _upload_sums(self, sums: SumTable) -> tuple[int, int]:
        return self.device.upload(sums.rows), self.device.upload(sums.entries)

    # --- forward ---------------------------------------------------------------------------------

    def forward(
        self, prepared: PreparedWork, heads: Heads, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor,
        out: DeviceTensor, lse: int, scale: float, stream: int,
    ) -> None:  # fmt: skip
        """Own rows q [b, num_own, h_q, d_qk], k, v [b, num_own, h_kv, *] -> out [b, num_own, h_q, d_v] and
        lse float32 [b, h_q, num_own] over all keys; enqueued on `stream`.

        Raises:
            TransportError: a rank was lost or stalled, now or in an earlier call.
            ValueError: tensors do not fit the work.
        """
        work = prepared.work
        self._check_tensors(work, heads, q=q, k=k, v=v, out=out)
        self._ensure(work, heads)
        keys, values, slot = self._fill_own(work, heads, k, v, stream)
        mode = self._forward_mode or ("steps" if work.is_ring else "rows")
        is_waiting = mode == "rows" and work.is_overlapped and self.transport is not None
        is_waiting = is_waiting and self.transport is not None and self.transport.raises_words
        word = self._words + slot * 256 if is_waiting else None
        if word is not None:
            self.device.write_word(stream, word, work.num_own)
        tickets = self._post_gather(work, heads, slot, range(len(work.gather)), stream, word)
        if work.num_own == 0:
            return
        if word is not None:
            assert self.transport is not None and self.transport.status_word is not None
            ready = ReadyRows(word, self.transport.status_word, self._timeout_us)
            self._forward_call(heads, q, keys, values, prepared.whole, out, lse, scale, stream, ready)
        elif len(work.fwd_steps) == 1:
            self._wait_stages(work, tickets, work.fwd_steps[0], stream)
            self._forward_call(heads, q, keys, values, prepared.whole, out, lse, scale, stream)
        else:
            self._forward_steps(prepared, heads, q, keys, values, out, lse, scale, stream, tickets)

    def _forward_steps(
        self, prepared: PreparedWork, heads: Heads, q: DeviceTensor, keys: DeviceTensor, values: DeviceTensor,
        out: DeviceTensor, lse: int, scale: float, stream: int, tickets: dict[int, Ticket],
    ) -> None:  # fmt: skip
        work = prepared.work
        steps = [(s, m) for s, m in zip(work.fwd_steps, prepared.fwd_masks, strict=True) if m is not None]
        if len(steps) > MAX_PARTS:
            raise ValueError(f"DeviceAttention: {len(steps)} steps; at most {MAX_PARTS} can be merged")
        lse_bytes = heads.b * heads.h_q * work.num_own * 4
        parts = self._scratch_parts("out", len(steps), out.num_elems * ELEM_BYTES)
        lses = self._scratch_parts("lse", len(steps), lse_bytes)
        for at, (step, mask) in enumerate(steps):
            self._wait_stages(work, tickets, step, stream)
            part = DeviceTensor.contiguous(parts[at], out.b, out.s, out.h, out.d)
            rows = step.k_begin, step.k_end
            self._forward_call(heads, q, keys.rows(*rows), values.rows(*rows), mask, part, lses[at], scale, stream)
        params = MergeParams(
            dtype=DTYPES[heads.dtype], num_parts=len(steps), b=out.b, s_q=out.s, h_q=out.h, d_v=out.d,
            out=out.address, stride_out=out.c_strides, lse=lse,
        )  # fmt: skip
        params.parts[: len(steps)], params.lses[: len(steps)] = parts, lses
        self.device.merge(params, stream)

    def _forward_call(
        self, heads: Heads, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor, mask: StepMask, out: DeviceTensor,
        lse: int, scale: float, stream: int, ready: ReadyRows | None = None,
    ) -> None:  # fmt: skip
        params = FwdParams(
            shape=Shape(heads.b, q.s, k.s, heads.h_q, heads.h_kv, heads.d_qk, heads.d_v),
            dtype=DTYPES[heads.dtype], softmax_scale=scale, mask=mask.view, schedule=mask.schedule, lse=lse,
            **_pointers(q=q, k=k, v=v, out=out),
        )  # fmt: skip
        if ready is not None:
            params.ready_rows, params.ready_status = ready.word, ready.status
            params.ready_timeout_us = ready.timeout_us
        self.device.forward(params, stream)

    # --- backward --------------------------------------------------------------------------------

    def backward(
        self, prepared: PreparedWork, heads: Heads, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor,
        out: DeviceTensor, lse: int, dout: DeviceTensor, dlse: int | None,
        dq: DeviceTensor, dk: DeviceTensor, dv: DeviceTensor, scale: float, stream: int,
        is_deterministic: bool = False,
    ) -> None:  # fmt: skip
        """dq, dk, dv of the own rows, summed over ranks; enqueued on `stream`. Inputs as in forward.

        Raises:
            TransportError: a rank was lost or stalled, now or in an earlier call.
            ValueError: tensors do not fit the work, or a gradient is not contiguous.
        """
        work, device = prepared.work, self.device
        self._check_tensors(work, heads, q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
        for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
            if not grad.is_contiguous:
                raise ValueError(f"DeviceAttention.backward: {name} has strides {grad.strides}; it must be contiguous")
        self._ensure(work, heads)
        keys, values, slot = self._fill_own(work, heads, k, v, stream)
        tickets = self._post_gather(work, heads, slot, work.bwd_gather, stream, None)
        self._wait_all_sent(self._reduce_tickets, stream)  # peers have read the part buffer's last content
        self._reduce_tickets = []
        parts = {is_v: self._buffer_tensor("part", work, heads, is_v) for is_v in (False, True)}
        # A rank without own rows computes zeros: it may have to pass on sums of others.
        masked = enumerate(zip(work.bwd_steps, prepared.bwd_masks, strict=True))
        steps = [(at, step, mask) for at, (step, mask) in masked if mask is not None]
        dq_parts = self._scratch_parts("dq", len(steps) if len(steps) > 1 else 0, dq.num_elems * ELEM_BYTES)
        side = self._side if self._side is not None else stream
        streams = [stream, *self._extra]
        self._fork(stream, [*self._extra, side])
        next_call, next_batch = 0, 0
        for step_idx in range(len(work.bwd_steps)):
            if next_call < len(steps) and steps[next_call][0] == step_idx:
                _, step, mask = steps[next_call]
                on = streams[next_call % len(streams)]
                self._wait_stages(work, tickets, step, on)
                rows = step.k_begin, step.k_end
                params = BwdParams(
                    shape=Shape(heads.b, q.s, step.k_end - step.k_begin, heads.h_q, heads.h_kv, heads.d_qk, heads.d_v),
                    dtype=DTYPES[heads.dtype], softmax_scale=scale, is_deterministic=int(is_deterministic),
                    mask=mask.view, lse=lse, dlse=dlse,
                    **_pointers(
                        q=q, k=keys.rows(*rows), v=values.rows(*rows), out=out, dout=dout,
                        dq=dq if not dq_parts else DeviceTensor.contiguous(dq_parts[next_call], dq.b, dq.s, dq.h, dq.d),
                        dk=parts[False].rows(*rows), dv=parts[True].rows(*rows),
                    ),
                )  # fmt: skip
                device.backward(params, on)
                self._fork(on, [side])
                next_call += 1
            while next_batch < len(work.reduce) and work.reduce[next_batch].stage == step_idx:
                self._post_reduce(prepared, heads, next_batch, side)
                next_batch += 1
        for extra in self._extra:
            self._fork(extra, [stream])
        if dq_parts:
            self._sum_parts(heads, dq_parts, dq, stream)
        if self.transport is not None:
            for ticket in self._reduce_tickets:
                if ticket.batch.recvs:
                    self.transport.wait(ticket, stream)
        if work.num_own:
            for is_v, grad in ((False, dk), (True, dv)):
                self._sum_rows(work.own_sums, prepared.own_sums, heads, is_v, work, grad.address, grad.s, False, stream)

    def _post_reduce(self, prepared: PreparedWork, heads: Heads, at: int, side: int) -> None:
        work, batch = prepared.work, prepared.work.reduce[at]
        assert self.transport is not None
        addresses = prepared.sums[at]
        if batch.sums is not None and addresses is not None:
            for earlier in batch.after:
                self.transport.wait(self._reduce_tickets[earlier], side)
            for is_v in (False, True):
                self._sum_rows(
                    batch.sums, addresses, heads, is_v, work, self._buffers[_name("wire", is_v)],
                    work.wire_rows[work.rank], work.is_wire_float32, side,
                )  # fmt: skip
        self._reduce_tickets.append(self.transport.post(self._batch(batch, work, heads, None), side))

    def _sum_rows(
        self, sums: SumTable, addresses: tuple[int, int], heads: Heads, is_v: bool, work: DeviceWork, out: int,
        out_rows: int, is_float32: bool, stream: int,
    ) -> None:  # fmt: skip
        elems = heads.elems(is_v)
        params = SumRowsParams(
            dtype=DTYPES[heads.dtype], is_out_float32=int(is_float32), b=heads.b, num_rows=len(sums.rows),
            row_elems=elems, rows=addresses[0], entries=addresses[1], part=self._buffers[_name("part", is_v)],
            narrow=self._buffers[_name("narrow", is_v)], wide=self._buffers[_name("wide", is_v)], out=out,
            part_stride_b=work.num_k_rows * elems, narrow_stride_b=work.max_narrow_rows * elems,
            wide_stride_b=work.max_wide_rows * elems, out_stride_b=out_rows * elems,
        )  # fmt: skip
        self.device.sum_rows(params, stream)

    def _sum_parts(self, heads: Heads, parts: list[int], out: DeviceTensor, stream: int) -> None:
        if len(parts) > MAX_PARTS:
            raise ValueError(f"DeviceAttention: {len(parts)} steps; at most {MAX_PARTS} can be added")
        params = SumPartsParams(
            dtype=DTYPES[heads.dtype], num_parts=len(parts), num_elems=out.num_elems, out=out.address
        )
        params.parts[: len(parts)] = parts
        self.device.sum_parts(params, stream)

    # --- common ----------------------------------------------------------------------------------

    def _fill_own(
        self, work: DeviceWork, heads: Heads, k: DeviceTensor, v: DeviceTensor, stream: int
    ) -> tuple[DeviceTensor, DeviceTensor, int]:
        """Takes the next slot, once nobody reads it any more, and puts the own rows there."""
        self._slot = slot = (self._slot + 1) % NUM_SLOTS
        self._wait_all_sent(self._slot_tickets[slot], stream)
        self._slot_tickets[slot] = []
        tensors = []
        for is_v, own in ((False, k), (True, v)):
            buffer = self._buffer_tensor(f"key{slot}", work, heads, is_v)
            tensors.append(buffer)
            if work.num_own:
                params = PackParams(
                    b=own.b, s=own.s, h=own.h, d=own.d, from_=own.address, stride_from=own.c_strides,
                    to=buffer.address, to_stride_b=buffer.strides[0],
                )  # fmt: skip
                self.device.pack(params, stream)
        return tensors[0], tensors[1], slot

    def _post_gather(
        self, work: DeviceWork, heads: Heads, slot: int, order: Any, stream: int, word: int | None
    ) -> dict[int, Ticket]:
        """Tickets by position in work.gather."""
        tickets: dict[int, Ticket] = {}
        if self.transport is None:
            return tickets
        for at in order:
            batch = work.gather[at]
            after = tuple(tickets[earlier] for earlier in batch.after)
            is_last = at + 1 == len(work.gather) or work.gather[at + 1].stage != batch.stage
            raised = (word, work.stage_rows[batch.stage + 1]) if word is not None and is_last else None
            tickets[at] = self.transport.post(self._batch(batch, work, heads, slot), stream, after, raised)
        self._slot_tickets[slot] = list(tickets.values())
        return tickets

    def _wait_stages(self, work: DeviceWork, tickets: dict[int, Ticket], step: Step, stream: int) -> None:
        """For what the step computes with: its stage, or everything if it spans several."""
        is_all = not work.is_overlapped
        for at, ticket in tickets.items():
            if (is_all or work.gather[at].stage == step.stage) and ticket.batch.recvs:
                assert self.transport is not None
                self.transport.wait(ticket, stream)

    def _wait_all_sent(self, tickets: list[Ticket], stream: int) -> None:
        peers: set[int] = set()
        for ticket in reversed(tickets):  # the last batch to a peer stands for those before it
            newly = {piece.peer for piece in ticket.batch.sends} - peers
            if newly:
                assert self.transport is not None
                self.transport.wait_sent(ticket, stream)
                peers |= newly

    def _fork(self, stream: int, others: list[int]) -> None:
        """What the others do from now on comes after what `stream` holds so far."""
        waiting = [other for other in others if other != stream]
        if waiting:
            # Reused at once: a wait means the record before it, not later ones.
            if not self._events:
                self._events.append(self.device.event_create())
            self.device.event_record(self._events[0], stream)
            for other in waiting:
                self.device.event_wait(self._events[0], other)

    def _batch(self, batch: RowBatch, work: DeviceWork, heads: Heads, slot: int | None) -> Batch:
        """Rows become bytes: one piece a tensor and batch entry."""
        return Batch(
            batch.name,
            tuple(piece for rows in batch.sends for piece in self._pieces(rows, work, heads, slot, is_send=True)),
            tuple(piece for rows in batch.recvs for piece in self._pieces(rows, work, heads, slot, is_send=False)),
        )

    def _pieces(self, rows: RowPiece, work: DeviceWork, heads: Heads, slot: int | None, is_send: bool) -> list[Piece]:
        suffix = "" if slot is None else str(slot)
        pieces = []
        for is_v in (False, True):
            # Both ends move the same bytes; the sender's buffer says how wide a value is.
            source = rows.buffer if is_send else rows.peer_buffer
            row_bytes = heads.elems(is_v) * self._value_bytes(source, work)
            here, there = (_name(name + suffix, is_v) for name in (rows.buffer, rows.peer_buffer))
            for entry in range(heads.b):
                own_row = entry * self._rows(rows.buffer, work, work.rank) + rows.row
                peer_row = entry * self._rows(rows.peer_buffer, work, rows.peer) + rows.peer_row
                pieces.append(
                    Piece(rows.peer, here, own_row * row_bytes, rows.num_rows * row_bytes, there, peer_row * row_bytes)
                )
        return pieces

    @staticmethod
    def _value_bytes(buffer: str, work: DeviceWork) -> int:
        if buffer == "wire":
            return 4 if work.is_wire_float32 else ELEM_BYTES
        return _BYTES[buffer]

    @staticmethod
    def _rows(buffer: str, work: DeviceWork, rank: int) -> int:
        """Rows of one batch entry of a rank's buffer."""
        if buffer in ("key", "part"):
            return work.k_rows[rank]
        if buffer == "wire":
            return work.wire_rows[rank]
        return work.max_narrow_rows if buffer == "narrow" else work.max_wide_rows

    def _buffer_tensor(self, buffer: str, work: DeviceWork, heads: Heads, is_v: bool) -> DeviceTensor:
        d = heads.d_v if is_v else heads.d_qk
        return DeviceTensor.contiguous(self._buffers[_name(buffer, is_v)], heads.b, work.num_k_rows, heads.h_kv, d)

    def _ensure(self, work: DeviceWork, heads: Heads) -> None:
        """Buffers large enough for this work on every rank. Grows on all ranks or on none."""
        needed: dict[str, int] = {}
        for is_v in (False, True):
            row_bytes = heads.b * heads.elems(is_v) * ELEM_BYTES
            for slot in range(NUM_SLOTS):
                needed[_name(f"key{slot}", is_v)] = work.max_k_rows * row_bytes
            needed[_name("part", is_v)] = work.max_k_rows * row_bytes
            needed[_name("wire", is_v)] = work.max_wire_rows * row_bytes * (2 if work.is_wire_float32 else 1)
            needed[_name("narrow", is_v)] = work.max_narrow_rows * row_bytes
            needed[_name("wide", is_v)] = work.max_wide_rows * row_bytes * 2
        if all(self._sizes.get(name, 0) >= size for name, size in needed.items()):
            return
        grown = {
            name: max(self._sizes.get(name, 0), -(-max(size, 1) // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT)
            for name, size in needed.items()
        }
        if self.transport is not None:
            self._buffers = self.transport.register(grown)
        else:
            for address in self._buffers.values():
                self.device.free(address)
            self._buffers = {name: self.device.malloc(size) for name, size in grown.items()}
        self._sizes = grown
        self._slot_tickets, self._reduce_tickets = [[] for _ in range(NUM_SLOTS)], []

    def _scratch_parts(self, name: str, count: int, num_bytes: int) -> list[int]:
        """`count` addresses in memory that calls on one stream share one after another."""
        size = -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        address, held = self._scratch.get(name, (0, 0))
        if held < count * size:
            # NOTE: freeing waits for the device; it happens when a larger call than ever before comes.
            if address:
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


def _name(buffer: str, is_v: bool) -> str:
    return f"{buffer}_{'v' if is_v else 'k'}"


def _pointers(**tensors: DeviceTensor) -> dict[str, Any]:
    fields: dict[str, Any] = {name: x.address for name, x in tensors.items()}
    fields.update({f"stride_{name}": x.c_strides for name, x in tensors.items()})
    return fields
