# SPDX-License-Identifier: Apache-2.0
"""BoundWork: a rank's work with tensor sizes and buffers known. Rows become bytes, and the parameter structs of all
kernel calls are filled but for the caller's own tensors, so that a call of attention sets a few addresses and enqueues.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3._c_api import BoundForm, BwdParams, BwdSchedule, FwdParams, MaskView, Shape
from paddle_fm3._device_api import MOST_KEY_ENDS, LocalFirst, PackParams, SumRowsParams
from paddle_fm3.distributed.device import DTYPES, ELEM_BYTES, DeviceTensor
from paddle_fm3.distributed.device_transport import BUFFER_ALIGNMENT, Batch, Part, Piece
from paddle_fm3.distributed.device_work import DeviceWork, KeyRange, RowBatch, RowPiece, SumTable

NUM_SLOTS = 2  # key buffers, filled in turn
# Rows of a batch come in up to so many parts of at least so many bytes (14 us at 300 GB/s), each with a word of its own
# for a forward that waits for it. A part takes 6 us more (two H200s).
MOST_PARTS, PART_BYTES, _PART_US = 4, 4 << 20, 6
_COME_US = 16  # until the first part is under way, and from the last one's end until kernels see it
_MFLOP_PER_US = 700  # of a forward
_SUM_ROW_BYTES = 16  # of SumTable.rows
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
class CallMask:
    """A call's mask on the device, and what is prepared of it: for the forward, or for the backward."""

    view: MaskView
    schedule: int | None = None
    bwd_schedule: BwdSchedule | None = None


@dataclass(frozen=True, eq=False)
class PreparedWork:
    """A DeviceWork with what belongs to it on the device; made once a mask, used by every layer."""

    work: DeviceWork
    whole: CallMask | None  # over the whole key buffer, tiles that need own rows only first; None if it goes in steps
    fwd_masks: tuple[CallMask | None, ...]  # of the steps, if it goes in steps; None: no key rows
    bwd_masks: tuple[CallMask | None, ...]
    sums: tuple[tuple[int, int] | None, ...]  # by reduce batch: addresses of rows and entries
    own_sums: tuple[int, int]
    memory: tuple[int, ...]  # what all of it lies in


def _row_bytes(heads: Heads) -> int:
    """Of a K and a V row, in all batch entries."""
    return heads.b * (heads.elems(False) + heads.elems(True)) * ELEM_BYTES


def part_ends(batch: RowBatch, heads: Heads) -> list[int]:
    """Up to which row the key buffer is in after each part of what this rank receives; [] if that is nothing.

    Of rows that several peers send there is one part: in the buffer's order all ranks would fetch from the same peer.
    """
    if not batch.recvs:
        return []
    end = max(piece.row + piece.num_rows for piece in batch.recvs)
    num_rows = batch.num_recv_rows
    has_one_peer = len({piece.peer for piece in batch.recvs}) == 1
    most = min(MOST_PARTS, num_rows * _row_bytes(heads) // PART_BYTES, num_rows)
    num_parts = max(1, most) if has_one_peer else 1
    return [end - num_rows + num_rows * part // num_parts for part in range(1, num_parts + 1)]


def local_first(work: DeviceWork, heads: Heads, gb_per_s: float) -> LocalFirst:
    """What a forward that waits for rows itself should begin with: enough to fill the time until all of them are in."""
    ends = [end for batch in work.gather for end in part_ends(batch, heads)]
    num_rows = sum(batch.num_recv_rows for batch in work.gather)
    first = LocalFirst(num_cols=first_cols(heads, num_rows, len(ends), gb_per_s))
    known = [work.num_own, *ends[:-1]][:MOST_KEY_ENDS]
    first.num_ends, first.k_ends[: len(known)] = len(known), known
    return first


def first_cols(heads: Heads, num_rows: int, num_parts: int, gb_per_s: float) -> int:
    """Columns of each list that take the time in which so many rows come."""
    time_us = _COME_US + num_parts * _PART_US + num_rows * _row_bytes(heads) / (gb_per_s * 1e3)
    flop_of_column = 2 * 128 * (heads.d_qk + heads.d_v) * heads.b * heads.h_q  # over all heads
    return min(int(1.1 * time_us * _MFLOP_PER_US * 1e6 / flop_of_column), 1 << 30)


def buffer_name(buffer: str, is_v: bool) -> str:
    return f"{buffer}_{'v' if is_v else 'k'}"


def needed_bytes(work: DeviceWork, heads: Heads) -> dict[str, int]:
    """Registered buffers, the same sizes on every rank."""
    needed: dict[str, int] = {}
    for is_v in (False, True):
        row_bytes = heads.b * heads.elems(is_v) * ELEM_BYTES
        for slot in range(NUM_SLOTS):
            needed[buffer_name(f"key{slot}", is_v)] = work.max_k_rows * row_bytes
        needed[buffer_name("part", is_v)] = work.max_k_rows * row_bytes
        needed[buffer_name("wire", is_v)] = work.max_wire_rows * row_bytes * (2 if work.is_wire_float32 else 1)
        needed[buffer_name("narrow", is_v)] = work.max_narrow_rows * row_bytes
        needed[buffer_name("wide", is_v)] = work.max_wide_rows * row_bytes * 2
    return {name: -(-max(size, 1) // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT for name, size in needed.items()}


class Tables:
    """Arrays on their way to the device in one piece. Addresses are offsets into it until then."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.uint8]] = []
        self._num_bytes = 0

    def add(self, array: NDArray[Any]) -> int:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset, padding = self._num_bytes, -raw.nbytes % BUFFER_ALIGNMENT
        self._arrays += [raw, np.zeros(padding, np.uint8)]
        self._num_bytes += raw.nbytes + padding
        return offset

    def add_mask(self, work: DeviceWork, call: KeyRange) -> MaskView:
        bounds, block_mask = work.call_bounds(call)
        b, h_mask, s_k, num_bounds = bounds.shape
        return MaskView(
            bounds=self.add(bounds),
            block_mask=None if block_mask is None else self.add(block_mask),
            form=BoundForm.OUTER2 if num_bounds == 2 else BoundForm.BOTH4,
            is_causal=0,
            b=b,
            h_mask=h_mask,
            s_q=work.num_own,
            s_k=s_k,
        )

    def add_sums(self, sums: SumTable) -> tuple[int, int]:
        return self.add(sums.rows), self.add(sums.entries)

    def as_bytes(self) -> NDArray[np.uint8]:
        return np.concatenate([*self._arrays, np.zeros(BUFFER_ALIGNMENT, np.uint8)])


class BoundWork:
    """See the module.

    Attributes:
        gather, bwd_gather: by slot: the batches of the gather; a forward's come in parts.
        reduce: the batches of the reduction.
        pack: by slot: own K rows, own V rows into the key buffer.
        whole: by slot: one forward over the whole key buffer, or None if it goes in steps.
        forward, backward: by slot: of the steps; None where a call has no key rows. dq is the caller's.
        reduce_bytes: of all batches, what this rank sends or receives, the larger one.
        wire_sums: by reduce batch: sums of K and V rows to pass on, or None.
        plain_sums, own_sums: of dK and dV, rows without and with sums of other ranks; out is the caller's.
    """

    def __init__(self, prepared: PreparedWork, heads: Heads, buffers: dict[str, int]) -> None:
        self.prepared, self.heads, self._buffers = prepared, heads, buffers
        work = self._work = prepared.work
        self.gather = [[self._gather(batch, str(slot)) for batch in work.gather] for slot in range(NUM_SLOTS)]
        self.bwd_gather = [[replace(batch, parts=()) for batch in batches] for batches in self.gather]
        self.reduce = [self._batch(batch, "") for batch in work.reduce]
        self.reduce_bytes = max(
            sum(piece.num_bytes for batch in self.reduce for piece in batch.sends),
            sum(piece.num_bytes for batch in self.reduce for piece in batch.recvs),
        )
        self.pack = [(PackParams * 2)(*(self._pack(slot, is_v) for is_v in (False, True))) for slot in range(NUM_SLOTS)]
        whole = KeyRange((), 0, work.num_k_rows)
        self.whole = [
            None if prepared.whole is None else self._forward(slot, whole, prepared.whole) for slot in range(NUM_SLOTS)
        ]
        steps = work.fwd_calls if prepared.whole is None else ()
        self.forward = [
            [None if mask is None else self._forward(slot, call, mask)
             for call, mask in zip(steps, prepared.fwd_masks, strict=True)]
            for slot in range(NUM_SLOTS)
        ]  # fmt: skip
        self.backward = [
            [None if mask is None else self._backward(slot, call, mask)
             for call, mask in zip(work.bwd_calls, prepared.bwd_masks, strict=True)]
            for slot in range(NUM_SLOTS)
        ]  # fmt: skip
        self.wire_sums = [
            None if batch.sums is None or addresses is None else self._wire_sums(batch.sums, addresses)
            for batch, addresses in zip(work.reduce, prepared.sums, strict=True)
        ]
        plain, all_rows = work.num_plain_sums, len(work.own_sums.rows)
        self.plain_sums, self.own_sums = (
            (SumRowsParams * 2)(
                *(self._sums(rows, prepared.own_sums, is_v, work.num_own, is_float32=False) for is_v in (False, True))
            )
            for rows in (range(plain), range(plain, all_rows))
        )

    # --- kernel calls ----------------------------------------------------------------------------

    def _tensor(self, buffer: str, is_v: bool) -> DeviceTensor:
        """A buffer of key rows."""
        heads, d = self.heads, self.heads.d_v if is_v else self.heads.d_qk
        address = self._buffers[buffer_name(buffer, is_v)]
        return DeviceTensor.contiguous(address, heads.b, self._work.num_k_rows, heads.h_kv, d)

    def _pack(self, slot: int, is_v: bool) -> PackParams:
        to = self._tensor(f"key{slot}", is_v)
        return PackParams(b=to.b, s=self._work.num_own, h=to.h, d=to.d, to=to.address, to_stride_b=to.strides[0])

    def _common(self, slot: int, call: KeyRange, mask: CallMask) -> dict[str, Any]:
        heads = self.heads
        shape = Shape(
            heads.b, self._work.num_own, call.k_end - call.k_begin, heads.h_q, heads.h_kv, heads.d_qk, heads.d_v
        )
        return {"shape": shape, "dtype": DTYPES[heads.dtype], "mask": mask.view, "schedule": mask.schedule}

    def _set_keys(self, params: FwdParams | BwdParams, slot: int, call: KeyRange) -> None:
        for name, is_v in (("k", False), ("v", True)):
            self._tensor(f"key{slot}", is_v).rows(call.k_begin, call.k_end).into(params, name, f"stride_{name}")

    def _forward(self, slot: int, call: KeyRange, mask: CallMask) -> FwdParams:
        params = FwdParams(**self._common(slot, call, mask))
        self._set_keys(params, slot, call)
        return params

    def _backward(self, slot: int, call: KeyRange, mask: CallMask) -> BwdParams:
        params = BwdParams(**self._common(slot, call, mask))
        if mask.bwd_schedule is not None:
            params.bwd_schedule = ctypes.addressof(mask.bwd_schedule)  # kept by `prepared`
        self._set_keys(params, slot, call)
        for name, is_v in (("dk", False), ("dv", True)):
            self._tensor("part", is_v).rows(call.k_begin, call.k_end).into(params, name, f"stride_{name}")
        return params

    def _sums(
        self, rows: range, addresses: tuple[int, int], is_v: bool, out_rows: int, is_float32: bool
    ) -> SumRowsParams:
        """Of these rows of the SumTable at the addresses."""
        work, elems = self._work, self.heads.elems(is_v)
        part, narrow, wide = (self._buffers[buffer_name(name, is_v)] for name in ("part", "narrow", "wide"))
        return SumRowsParams(
            dtype=DTYPES[self.heads.dtype], is_out_float32=int(is_float32), b=self.heads.b, num_rows=len(rows),
            row_elems=elems, rows=addresses[0] + rows.start * _SUM_ROW_BYTES, entries=addresses[1], part=part,
            narrow=narrow, wide=wide, part_stride_b=work.num_k_rows * elems,
            narrow_stride_b=work.max_narrow_rows * elems, wide_stride_b=work.max_wide_rows * elems,
            out_stride_b=out_rows * elems,
        )  # fmt: skip

    def _wire_sums(self, sums: SumTable, addresses: tuple[int, int]) -> ctypes.Array[SumRowsParams]:
        work, found = self._work, (SumRowsParams * 2)()
        for at, is_v in enumerate((False, True)):
            rows = range(len(sums.rows))
            found[at] = self._sums(rows, addresses, is_v, work.wire_rows[work.rank], work.is_wire_float32)
            found[at].out = self._buffers[buffer_name("wire", is_v)]
        return found

    # --- messages --------------------------------------------------------------------------------

    def _batch(self, batch: RowBatch, slot: str) -> Batch:
        """One piece a message, tensor and batch entry."""
        return Batch(
            batch.name,
            tuple(piece for rows in batch.sends for piece in self._pieces(rows, slot, is_send=True)),
            tuple(piece for rows in batch.recvs for piece in self._pieces(rows, slot, is_send=False)),
        )

    def _gather(self, rows: RowBatch, slot: str) -> Batch:
        batch, ends = self._batch(rows, slot), part_ends(rows, self.heads)
        if len(ends) < 2:
            return batch
        first = min(piece.row for piece in rows.recvs)
        parts = []
        for begin, end in zip([first, *ends], ends, strict=False):
            cut = (_between(piece, begin, end) for piece in rows.recvs)
            pieces = [x for piece in cut if piece is not None for x in self._pieces(piece, slot, is_send=False)]
            parts.append(Part(tuple(pieces), end - first))
        return replace(batch, parts=tuple(parts))

    def _pieces(self, rows: RowPiece, slot: str, is_send: bool) -> list[Piece]:
        work, pieces = self._work, []
        # Both ends move the same bytes; the sender's buffer says how wide a value is.
        source = rows.buffer if is_send else rows.peer_buffer
        value_bytes = (4 if work.is_wire_float32 else ELEM_BYTES) if source == "wire" else _BYTES[source]
        for is_v in (False, True):
            row_bytes = self.heads.elems(is_v) * value_bytes
            here, there = (buffer_name(name + slot, is_v) for name in (rows.buffer, rows.peer_buffer))
            for entry in range(self.heads.b):
                own_row = entry * self._rows(rows.buffer, work.rank) + rows.row
                peer_row = entry * self._rows(rows.peer_buffer, rows.peer) + rows.peer_row
                pieces.append(
                    Piece(rows.peer, here, own_row * row_bytes, rows.num_rows * row_bytes, there, peer_row * row_bytes)
                )
        return pieces

    def _rows(self, buffer: str, rank: int) -> int:
        """Rows of one batch entry of a rank's buffer."""
        work = self._work
        if buffer in ("key", "part"):
            return work.k_rows[rank]
        if buffer == "wire":
            return work.wire_rows[rank]
        return work.max_narrow_rows if buffer == "narrow" else work.max_wide_rows


def _between(rows: RowPiece, begin: int, end: int) -> RowPiece | None:
    """Those that come to rows [begin, end) here."""
    first, last = max(begin, rows.row), min(end, rows.row + rows.num_rows)
    if first >= last:
        return None
    return replace(rows, row=first, num_rows=last - first, peer_row=rows.peer_row + first - rows.row)
