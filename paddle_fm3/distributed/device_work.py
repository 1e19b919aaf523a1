# SPDX-License-Identifier: Apache-2.0
"""DeviceWork: one rank's share of a CpPlan as tables of rows, for an executor that enqueues and decides nothing.

Pure: NumPy only. Rows become bytes when tensor sizes are known (`device_bind`).

Partial sums of dK and dV. A message whose rows nobody has added to yet is the kernel's own output and travels as
it is, from the *part* buffer. A message that passes on received sums is made first: `sum_table` says which staged rows
are added to which part rows, and the *wire* buffer holds the result. A receiver stages messages in *narrow* (the
kernel's dtype) or *wide* (float32) rows, and adds them in plan order, once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.exchange import DST, DST_ROW, HOP, ROWS, SRC, SRC_ROW, STAGE, Exchange, Message
from paddle_fm3.distributed.localize import compact_bounds
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.rank_plan import RankPlan, Step

Int32Array = NDArray[np.int32]


BWD_STYLES = ("plan", "two", "one")


@dataclass(frozen=True)
class KeyRange:
    """One attention call over buffer rows [k_begin, k_end), once these stages of the gather are in. May be empty."""

    stages: tuple[int, ...]
    k_begin: int
    k_end: int


@dataclass(frozen=True)
class RowPiece:
    """Rows of one message. `buffer` is "key", "part", "wire", "narrow" or "wide", for K and V (or dK and dV) alike."""

    peer: int
    buffer: str
    row: int
    num_rows: int
    peer_buffer: str
    peer_row: int


@dataclass(frozen=True, eq=False)
class SumTable:
    """out[rows[i, 0]] = part[rows[i, 1]] + staged rows entries[rows[i, 2] : rows[i, 3]].

    Attributes:
        rows: int32 [n, 4].
        entries: int32; e >= 0 is narrow row e, e < 0 wide row -1 - e.
    """

    rows: Int32Array
    entries: Int32Array


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The messages of one (stage, hop), as this rank sends and receives them.

    Attributes:
        after: earlier batches of the phase whose recvs these sends pass on.
        sums: reduce: what to add up before sending; None if nothing.
    """

    name: str
    stage: int
    hop: int
    sends: tuple[RowPiece, ...]
    recvs: tuple[RowPiece, ...]
    after: tuple[int, ...]
    sums: SumTable | None = None

    @property
    def num_recv_rows(self) -> int:
        return sum(piece.num_rows for piece in self.recvs)


@dataclass(frozen=True, eq=False)
class DeviceWork:
    """See the module.

    Attributes:
        num_own, num_k_rows: rows this rank owns, and of its key buffer; the own rows come first.
        max_k_rows, max_wire_rows, max_narrow_rows, max_wide_rows: largest buffer over all ranks, so that all ranks
            agree on when a buffer must grow.
        k_rows: rows of each rank's key buffer.
        wire_rows: rows of each rank's wire buffer.
        is_wire_float32: sums travel in float32, otherwise in the kernel's dtype.
        fwd_calls, bwd_calls: the attention calls.
        reduce_after: by batch of the reduction: the backward call after which it is posted.
        gather, reduce: the same (stage, hop)s on every rank, in the order of posting in forward, or backward.
        bwd_gather: positions in `gather`, in the order of posting in backward.
        own_sums: the last sum, into dK and dV of the own rows; first those rows to which nothing is added.
        bounds: int32 [b, h_mask, num_k_rows, 2 or 4], local query rows, causal rule included.
        block_mask: int32 [b, h_mask, ceil(num_own/128), ceil(num_k_rows/128)] or None.
    """

    rank: int
    num_ranks: int
    num_own: int
    num_k_rows: int
    k_rows: tuple[int, ...]
    wire_rows: tuple[int, ...]
    max_narrow_rows: int
    max_wide_rows: int
    is_wire_float32: bool
    is_overlapped: bool
    is_ring: bool
    stage_rows: tuple[int, ...]
    fwd_calls: tuple[KeyRange, ...]
    bwd_calls: tuple[KeyRange, ...]
    reduce_after: tuple[int, ...]
    gather: tuple[RowBatch, ...]
    bwd_gather: tuple[int, ...]
    reduce: tuple[RowBatch, ...]
    own_sums: SumTable
    bounds: Int32Array
    block_mask: Int32Array | None

    @property
    def max_k_rows(self) -> int:
        return max(self.k_rows)

    @property
    def max_wire_rows(self) -> int:
        return max(self.wire_rows)

    @property
    def num_plain_sums(self) -> int:
        """Rows of `own_sums` that need nothing from other ranks."""
        rows = self.own_sums.rows
        return int((rows[:, 2] == rows[:, 3]).sum())

    def call_bounds(self, call: KeyRange) -> tuple[Int32Array, Int32Array | None]:
        """Bounds and block_mask of the call's key rows, contiguous."""
        bounds = np.ascontiguousarray(self.bounds[:, :, call.k_begin : call.k_end])
        if self.block_mask is None:
            return bounds, None
        if call.k_begin % 128 or (call.k_end % 128 and call.k_end != self.num_k_rows):
            raise ValueError(f"DeviceWork: keys [{call.k_begin}, {call.k_end}) divide a tile of the block_mask")
        tiles = slice(call.k_begin // 128, -(-call.k_end // 128))
        return bounds, np.ascontiguousarray(self.block_mask[:, :, :, tiles])

    @classmethod
    def of(
        cls, plan: CpPlan, rank_plan: RankPlan, *, is_wire_float32: bool = True, bwd_style: str = "plan"
    ) -> DeviceWork:
        """Tables of one rank. Deterministic; ranks need not talk about it, and may differ in `bwd_style`.

        Args:
            bwd_style: backward calls: "plan" as the plan's steps, "two" for received and for own rows, or "one". Fewer
                calls hide less of the transfers and cost less themselves.
        """
        bwd_calls, reduce_after = _bwd_calls(plan, rank_plan, bwd_style)
        reduce = _ReduceLayout(plan, is_wire_float32)
        exchange = Exchange.of(plan.reduce, rank_plan.rank)
        gather = _gather_batches(plan, rank_plan.rank)
        stage_order = plan.bwd_stages() if plan.strategy.is_overlapped else range(1, plan.num_stages + 1)
        return cls(
            rank=rank_plan.rank,
            num_ranks=plan.num_ranks,
            num_own=rank_plan.num_q_rows,
            num_k_rows=rank_plan.num_k_rows,
            k_rows=tuple(plan.stage_rows[:, -1].tolist()),
            wire_rows=tuple(reduce.wire_rows.tolist()),
            max_narrow_rows=int(reduce.narrow_rows.max()),
            max_wide_rows=int(reduce.wide_rows.max()),
            is_wire_float32=is_wire_float32,
            is_overlapped=plan.strategy.is_overlapped,
            is_ring=plan.strategy.move == "ring",
            stage_rows=rank_plan.stage_rows,
            fwd_calls=tuple(_as_call(plan, step) for step in rank_plan.fwd_steps),
            bwd_calls=bwd_calls,
            reduce_after=reduce_after,
            gather=gather,
            bwd_gather=tuple(at for stage in stage_order for at, batch in enumerate(gather) if batch.stage == stage),
            reduce=_reduce_batches(plan, rank_plan.rank, exchange, reduce),
            own_sums=_plain_first(_sum_table([(0, rank_plan.num_q_rows, 0, exchange.recvs)], reduce)),
            bounds=compact_bounds(rank_plan.mask),
            block_mask=rank_plan.mask.block_mask,
        )


def _as_call(plan: CpPlan, step: Step) -> KeyRange:
    is_all = not plan.strategy.is_overlapped
    stages = tuple(range(1, plan.num_stages + 1)) if is_all else (step.stage,) if step.stage else ()
    return KeyRange(stages, step.k_begin, step.k_end)


def _bwd_calls(plan: CpPlan, rank_plan: RankPlan, style: str) -> tuple[tuple[KeyRange, ...], tuple[int, ...]]:
    if style not in BWD_STYLES:
        raise ValueError(f"DeviceWork: bwd_style={style!r} is none of {BWD_STYLES}")
    steps = rank_plan.bwd_steps
    everything = tuple(range(1, plan.num_stages + 1))
    num_own, num_k_rows = rank_plan.num_q_rows, rank_plan.num_k_rows
    if style == "plan" or len(steps) == 1:
        calls = tuple(_as_call(plan, step) for step in steps)
        call_of = list(range(len(steps)))
    elif style == "two":
        calls = (KeyRange(everything, num_own, num_k_rows), KeyRange((), 0, num_own))
        return calls, (0,) * len(_phases(plan.reduce))  # own rows are in no message
    else:
        calls = (KeyRange(everything, 0, num_k_rows),)
        call_of = [0] * len(steps)
    # A batch may go once all steps up to its own are done.
    after = tuple(max(call_of[: stage + 1]) for stage, _ in _phases(plan.reduce))
    return calls, after


def _phases(table: Int32Array) -> list[tuple[int, int]]:
    return [(stage, hop) for stage, hop in np.unique(table[:, [STAGE, HOP]], axis=0).tolist()]


def _gather_batches(plan: CpPlan, rank: int) -> tuple[RowBatch, ...]:
    exchange = Exchange.of(plan.gather, rank)
    phases = _phases(plan.gather)
    batch_of = [phases.index((recv.stage, recv.hop)) for recv in exchange.recvs]
    batches = []
    for stage, hop in phases:
        sends = [m for m in exchange.sends if (m.stage, m.hop) == (stage, hop)]
        recvs = [m for m in exchange.recvs if (m.stage, m.hop) == (stage, hop)]
        batches.append(
            RowBatch(
                name=f"K/V rows stage {stage} hop {hop}",
                stage=stage,
                hop=hop,
                sends=tuple(
                    RowPiece(m.peer, "key", m.row, m.num_rows, "key", int(plan.gather[m.tag, DST_ROW])) for m in sends
                ),
                recvs=tuple(
                    RowPiece(m.peer, "key", m.row, m.num_rows, "key", int(plan.gather[m.tag, SRC_ROW])) for m in recvs
                ),
                after=tuple(sorted({batch_of[at] for m in sends for at in m.after})),
            )
        )
    return tuple(batches)


class _ReduceLayout:
    """Where each message of the reduction lies in wire and staging buffers, on every rank alike."""

    def __init__(self, plan: CpPlan, is_wire_float32: bool) -> None:
        table = plan.reduce
        self.is_sum = np.zeros(len(table), bool)  # the sender adds received rows to these first
        for rank in range(plan.num_ranks):
            for send in Exchange.of(table, rank).sends:
                self.is_sum[send.tag] = bool(send.after)
        self.is_wide = self.is_sum & is_wire_float32
        self.wire_row, self.wire_rows = _stack(table, SRC, self.is_sum, plan.num_ranks)
        narrow_row, self.narrow_rows = _stack(table, DST, ~self.is_wide, plan.num_ranks)
        wide_row, self.wide_rows = _stack(table, DST, self.is_wide, plan.num_ranks)
        self.staged_row = np.where(self.is_wide, wide_row, narrow_row)

    def entry(self, tag: int) -> tuple[int, int]:
        """First entry of a message's staged rows, and the step to the next."""
        row = int(self.staged_row[tag])
        return (-1 - row, -1) if self.is_wide[tag] else (row, 1)


def _stack(table: Int32Array, column: int, is_used: NDArray[np.bool_], num_ranks: int) -> tuple[Int32Array, Int32Array]:
    """First row of each used message, stacked in table order on the rank in `column`; and each rank's rows."""
    first, totals = np.zeros(len(table), np.int32), np.zeros(num_ranks, np.int32)
    for tag in np.flatnonzero(is_used).tolist():
        rank = table[tag, column]
        first[tag] = totals[rank]
        totals[rank] += table[tag, ROWS]
    return first, totals


def _reduce_batches(plan: CpPlan, rank: int, exchange: Exchange, layout: _ReduceLayout) -> tuple[RowBatch, ...]:
    phases = _phases(plan.reduce)
    batch_of = [phases.index((recv.stage, recv.hop)) for recv in exchange.recvs]
    batches = []
    for stage, hop in phases:
        sends = [m for m in exchange.sends if (m.stage, m.hop) == (stage, hop)]
        recvs = [m for m in exchange.recvs if (m.stage, m.hop) == (stage, hop)]
        summed = [m for m in sends if layout.is_sum[m.tag]]
        targets = [
            (m.row, m.num_rows, int(layout.wire_row[m.tag]), tuple(exchange.recvs[at] for at in m.after))
            for m in summed
        ]
        batches.append(
            RowBatch(
                name=f"dK/dV sums step {stage} hop {hop}",
                stage=stage,
                hop=hop,
                sends=tuple(_reduce_piece(m, plan.reduce, layout, is_send=True) for m in sends),
                recvs=tuple(_reduce_piece(m, plan.reduce, layout, is_send=False) for m in recvs),
                after=tuple(sorted({batch_of[at] for m in summed for at in m.after})),
                sums=_sum_table(targets, layout) if targets else None,
            )
        )
    return tuple(batches)


def _reduce_piece(message: Message, table: Int32Array, layout: _ReduceLayout, is_send: bool) -> RowPiece:
    tag = message.tag
    is_sum = bool(layout.is_sum[tag])
    source = ("wire", int(layout.wire_row[tag])) if is_sum else ("part", int(table[tag, SRC_ROW]))
    staged = ("wide" if layout.is_wide[tag] else "narrow", int(layout.staged_row[tag]))
    here, there = (source, staged) if is_send else (staged, source)
    return RowPiece(message.peer, *here, message.num_rows, *there)


def _sum_table(targets: list[tuple[int, int, int, tuple[Message, ...]]], layout: _ReduceLayout) -> SumTable:
    """Targets are (first part row, rows, first out row, receives to add, in table order)."""
    rows, entries, num_entries = [np.empty((0, 4), np.int32)], [np.empty(0, np.int32)], 0
    for row, num_rows, out_row, recvs in targets:
        added = np.full((num_rows, max(1, len(recvs))), np.iinfo(np.int32).max, np.int64)
        for at, recv in enumerate(recvs):
            begin, end = max(row, recv.row), min(row + num_rows, recv.row + recv.num_rows)
            if begin < end:
                first, step = layout.entry(recv.tag)
                added[begin - row : end - row, at] = first + step * np.arange(begin - recv.row, end - recv.row)
        is_entry = added != np.iinfo(np.int32).max
        counts = is_entry.sum(axis=1)
        ends = num_entries + np.cumsum(counts)
        begins = ends - counts
        index = np.arange(num_rows)
        rows.append(np.stack([out_row + index, row + index, begins, ends], axis=1).astype(np.int32))
        entries.append(added[is_entry].astype(np.int32))
        num_entries += int(counts.sum())
    return SumTable(np.concatenate(rows), np.concatenate(entries))


def _plain_first(sums: SumTable) -> SumTable:
    return SumTable(sums.rows[np.argsort(sums.rows[:, 3] > sums.rows[:, 2], kind="stable")], sums.entries)
