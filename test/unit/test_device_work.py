# SPDX-License-Identifier: Apache-2.0
"""Tables of a rank's share of a plan: what they add up, and that a file keeps them."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
from plan_support import random_mask

from paddle_fm3.distributed.device_bind import Heads, needed_bytes
from paddle_fm3.distributed.device_work import DeviceWork, RowBatch, SumTable
from paddle_fm3.distributed.exchange import DST_ROW, ROWS, SRC_ROW
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing.device_work_file import load_work, save_work


def make(name: str, seed: int = 0) -> tuple[CpPlan, ColumnMask]:
    mask = random_mask(np.random.default_rng(seed), 192)
    plan = build_plan(
        mask, 4, topology=Topology.uniform(4, 2), strategy=name, options=PlanOptions(chunk_rows=16, num_stages=3)
    )
    return plan, mask


@pytest.mark.parametrize("is_wire_float32", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_sums_by_the_tables_are_the_sums_by_the_plan(name: str, is_wire_float32: bool) -> None:
    """Numbers instead of rows: every rank holds 4^rank for each of its key rows, and the owner must end with the sum
    over the ranks that hold the row."""
    plan, mask = make(name)
    rank_plans = [plan.rank_plan(rank, mask) for rank in range(4)]
    works = [DeviceWork.of(plan, rank_plan, is_wire_float32=is_wire_float32) for rank_plan in rank_plans]
    part = [np.full(work.num_k_rows, 4.0**rank) for rank, work in enumerate(works)]
    wire = [np.full(max(work.wire_rows), np.nan) for work in works]
    staged = [{"narrow": np.full(w.max_narrow_rows, np.nan), "wide": np.full(w.max_wide_rows, np.nan)} for w in works]

    def add_up(rank: int, sums: SumTable, out: np.ndarray) -> None:
        for out_row, part_row, begin, end in sums.rows.tolist():
            narrow, wide = staged[rank]["narrow"], staged[rank]["wide"]
            out[out_row] = part[rank][part_row] + sum(
                narrow[e] if e >= 0 else wide[-1 - e] for e in sums.entries[begin:end].tolist()
            )

    for at in range(len(works[0].reduce)):
        for rank, work in enumerate(works):
            sums = work.reduce[at].sums
            if sums is not None:
                add_up(rank, sums, wire[rank])
        for rank, work in enumerate(works):
            for piece in work.reduce[at].recvs:
                source = {"part": part, "wire": wire}[piece.peer_buffer][piece.peer]
                rows = source[piece.peer_row : piece.peer_row + piece.num_rows]
                assert not np.isnan(rows).any()
                staged[rank][piece.buffer][piece.row : piece.row + piece.num_rows] = rows
                back = [p for p in works[piece.peer].reduce[at].sends if (p.peer, p.peer_row) == (rank, piece.row)]
                assert any((p.buffer, p.row, p.peer_buffer) == (piece.peer_buffer, piece.peer_row, piece.buffer)
                           for p in back)  # fmt: skip
    holders = np.zeros(192)
    for rank, rank_plan in enumerate(rank_plans):
        np.add.at(holders, rank_plan.key_rows_global(), 4.0**rank)
    for rank, work in enumerate(works):
        own = np.full(work.num_own, np.nan)
        add_up(rank, work.own_sums, own)
        num_added = work.own_sums.rows[:, 3] - work.own_sums.rows[:, 2]
        assert not num_added[: work.num_plain_sums].any() and num_added[work.num_plain_sums :].all()
        assert np.array_equal(own, holders[rank_plans[rank].key_rows_global()[: work.num_own]])
        assert is_wire_float32 or work.max_wide_rows == 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_gather_pieces_are_the_plan_s(name: str) -> None:
    plan, mask = make(name, seed=1)
    works = [DeviceWork.of(plan, plan.rank_plan(rank, mask)) for rank in range(4)]
    sent = sorted((w.rank, p.peer, p.row, p.peer_row, p.num_rows) for w in works for b in w.gather for p in b.sends)
    got = sorted((p.peer, w.rank, p.peer_row, p.row, p.num_rows) for w in works for b in w.gather for p in b.recvs)
    wanted = sorted((int(t[2]), int(t[3]), int(t[SRC_ROW]), int(t[DST_ROW]), int(t[ROWS])) for t in plan.gather)
    assert sent == got == wanted
    assert len({tuple((b.stage, b.hop) for b in w.gather) for w in works}) == 1  # the same posts on every rank


def test_buffers_are_as_large_as_the_largest_rank_needs() -> None:
    plan, mask = make("dual_chunk_allgather")
    works = [DeviceWork.of(plan, plan.rank_plan(rank, mask)) for rank in range(4)]
    needed = [needed_bytes(work, Heads(2, 4, 2, 16, 8, "bfloat16")) for work in works]
    assert all(one == needed[0] for one in needed)
    assert needed[0]["key0_k"] >= 2 * 192 * 2 * 16 * 2 and needed[0]["key1_v"] >= 2 * 192 * 2 * 8 * 2
    assert needed[0]["wide_k"] >= 2 * works[0].max_wide_rows * 2 * 16 * 4


@pytest.mark.parametrize("name", ["fm3", "ring", "dual_chunk_allgather"])
def test_a_file_keeps_everything(name: str, tmp_path: Path) -> None:
    plan, mask = make(name)
    work = DeviceWork.of(plan, plan.rank_plan(2, mask), bwd_style="two")
    save_work(work, tmp_path / "work.npz")
    found = load_work(tmp_path / "work.npz")
    for field in fields(DeviceWork):
        same(getattr(work, field.name), getattr(found, field.name))


def same(a: object, b: object) -> None:
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    elif isinstance(a, SumTable):
        assert isinstance(b, SumTable)
        same(a.rows, b.rows)
        same(a.entries, b.entries)
    elif isinstance(a, RowBatch):
        for name in asdict(a):
            same(getattr(a, name), getattr(b, name))
    elif isinstance(a, tuple):
        assert isinstance(b, tuple) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b and type(a) is type(b)
