# SPDX-License-Identifier: Apache-2.0
"""Rows that come in parts, each with a word: how they are cut, that no word says more than is in, and that a forward
goes on with each of them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from device_support import Group
from plan_support import random_mask
from test_device_execute import check, make_inputs
from test_device_ipc import Pair
from test_device_order import ROWS, SCALE, both_ways, group_of, inputs_of, pull_stream

from paddle_fm3._device_api import MOST_KEY_ENDS, LocalFirst
from paddle_fm3.distributed import device_bind
from paddle_fm3.distributed.device_bind import Heads, local_first, part_ends
from paddle_fm3.distributed.device_execute import _READY_WORDS
from paddle_fm3.distributed.device_transport import Batch, Part, Piece
from paddle_fm3.distributed.device_work import DeviceWork, RowBatch, RowPiece
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask import builders
from paddle_fm3.testing.fake_device import FakeDevice, view

HEADS = Heads(1, 64, 8, 128, 128, "bfloat16")  # 4096 bytes of K and V a row


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts as there may be, of rows as narrow as tests have them."""
    monkeypatch.setattr(device_bind, "PART_BYTES", 32)


def batch_of(*recvs: tuple[int, int, int]) -> RowBatch:
    """Of (peer, first row, rows) received; at the peer they begin at row 7."""
    pieces = tuple(RowPiece(peer, "key", row, num_rows, "key", 7) for peer, row, num_rows in recvs)
    return RowBatch("rows", 1, 0, (), pieces, ())


@pytest.mark.parametrize(
    ("recvs", "ends"),
    [
        ((), []),
        (((1, 8192, 1),), [8193]),
        (((1, 8192, 2047),), [10239]),  # less than two parts' bytes
        (((1, 8192, 2048),), [9216, 10240]),
        (((1, 8192, 471), (1, 8663, 2048), (1, 10711, 4096)), [9845, 11499, 13153, 14807]),
        (((1, 100, 100_000),), [25100, 50100, 75100, 100100]),
        (((1, 8192, 4096), (2, 12288, 4096)), [16384]),  # two peers
    ],
)  # fmt: skip
def test_rows_of_one_peer_come_in_parts(recvs: tuple, ends: list[int]) -> None:
    assert part_ends(batch_of(*recvs), HEADS) == ends


def test_all_batch_entries_count() -> None:
    assert part_ends(batch_of((1, 0, 1024)), Heads(2, 64, 8, 128, 128, "bfloat16")) == [512, 1024]


def works_of(num_ranks: int, **options: object) -> list[DeviceWork]:
    mask = builders.document([9000, 8000, 9000, 6768])
    plan = build_plan(mask, num_ranks, options=PlanOptions(**options))
    return [DeviceWork.of(plan, plan.rank_plan(rank, mask)) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_forward_begins_with_tiles_of_rows_that_come_first(num_stages: int) -> None:
    for work in works_of(2, num_stages=num_stages):
        first = local_first(work, HEADS, 300.0)
        ends = [end for batch in work.gather for end in part_ends(batch, HEADS)]
        assert len(ends) > 1 and ends == sorted(set(ends)) and ends[-1] == work.num_k_rows
        wanted = [work.num_own, *ends[:-1]][:MOST_KEY_ENDS]
        assert list(first.k_ends[: first.num_ends]) == wanted


def test_the_time_of_the_transfers_is_filled() -> None:
    """28 MB take 95 us at 300 GB/s; a GPU makes 700 TFLOP/s."""
    work = works_of(2, num_stages=1)[0]
    num_bytes = 4096 * (work.num_k_rows - work.num_own)
    for heads, share in ((HEADS, 1.0), (Heads(1, 32, 8, 128, 128, "bfloat16"), 2.0)):
        first = local_first(work, heads, 300.0)
        flop = first.num_cols * heads.h_q * 128 * 256 * 2
        transfers_us = num_bytes / 300e3
        assert transfers_us < flop / 700e6 < 1.1 * transfers_us + 50
        assert first.num_cols == pytest.approx(share * local_first(work, HEADS, 300.0).num_cols, rel=1e-3)
    assert local_first(work, HEADS, 30.0).num_cols > 5 * local_first(work, HEADS, 300.0).num_cols


@pytest.mark.parametrize(("mode", "is_ordered"), [("rows", True), ("whole", False)])
def test_only_a_forward_that_waits_itself_has_an_order_of_its_own(mode: str, is_ordered: bool) -> None:
    asked: list[LocalFirst | None] = []

    class Device(FakeDevice):
        def schedule(self, mask: object, maybe_first: LocalFirst | None) -> int:
            asked.append(maybe_first)
            return super().schedule(mask, maybe_first)  # type: ignore[arg-type]

    mask, plan = both_ways(num_stages=1)
    group = Group(2, 0, make_device=Device, forward_mode=mode)
    try:
        group.step(plan, mask, inputs_of(mask, 0), SCALE, has_backward=False)
        group.world.run()
    finally:
        group.close()
    assert [first is not None for first in asked] == [is_ordered] * 2
    assert not is_ordered or [first.k_ends[0] for first in asked if first] == [ROWS] * 2


def rows_in(group: Group, rank: int, work: DeviceWork, slot: int) -> int:
    """Up to which row those received are in, K and V. (Those of its own are before its kernel begins.)"""
    buffers = group.ranks[rank].attention._buffers
    keys = [view(buffers[f"key{slot}_{name}"], (work.num_k_rows, 8), np.float16) for name in "kv"]
    is_missing = np.isnan(np.concatenate(keys, axis=1)).any(axis=1)[work.num_own :]
    return work.num_own + int(np.argmax(is_missing)) if is_missing.any() else work.num_k_rows


def word_of(group: Group, rank: int, slot: int) -> int:
    return ctypes.c_int32.from_address(group.ranks[rank].attention._words + _READY_WORDS[slot]).value


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_word_says_more_than_is_in(small_parts: None, seed: int, num_stages: int) -> None:
    """And on the way it says every part."""
    mask, plan = both_ways(num_stages=num_stages)
    works = [DeviceWork.of(plan, plan.rank_plan(rank, mask)) for rank in range(2)]
    heads = Heads(1, 2, 1, 8, 8, "float16")
    group = Group(2, seed, forward_mode="rows", timeout_s=20.0)
    try:
        group.step(plan, mask, inputs_of(mask, 0), SCALE, has_backward=False)  # buffers have their size then
        group.world.run()
        inputs = inputs_of(mask, 1)
        collect = group.step(plan, mask, inputs, SCALE, has_backward=False)
        seen: list[set[int]] = [set(), set()]
        while group.world._step():
            for rank, work in enumerate(works):
                slot = group.ranks[rank].attention._slot
                said = word_of(group, rank, slot)
                assert said <= rows_in(group, rank, work, slot)
                seen[rank].add(said)
        for rank, work in enumerate(works):
            ends = {end for batch in work.gather for end in part_ends(batch, heads)}
            assert len(ends) >= min(4, 2 * num_stages) and ends | {work.num_own} <= seen[rank] <= ends | {
                work.num_own,
                0,
            }
        check(collect(), inputs, mask, has_backward=False)
    finally:
        group.close()


def test_a_forward_goes_on_with_each_part(small_parts: None) -> None:
    """Its copies stop behind the second of four; a kernel that needs no more ends."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2, forward_mode="rows") as group:
        group.step(plan, mask, inputs_of(mask, 0), SCALE, has_backward=False)
        group.world.run()
        for needed, has_run in ((ROWS + ROWS // 2, True), (ROWS + ROWS // 2 + 1, False)):
            group.ranks[0].device.needed_rows = needed
            begin, pull = len(group.world.history), pull_stream(group, 0)
            group.step(plan, mask, inputs_of(mask, 1), SCALE, has_backward=False)
            num_copies = 0
            while num_copies < 2 or group.world.head(pull) != "copy":
                assert group.world._step()
                num_copies = group.world.history[begin:].count((pull, "copy"))
            group.world.hold(pull)
            group.world.run_until_stuck()
            assert ((group.ranks[0].stream, "forward") in group.world.history[begin:]) == has_run
            group.world.hold()
            group.world.run()


@pytest.mark.parametrize("seed", range(6))
def test_parts_change_no_result_and_no_byte(small_parts: None, seed: int) -> None:
    """Of forwards with one sender and with several, and backwards, which come in one part; buffers are used again."""
    rng = np.random.default_rng(seed)
    num_ranks = (2, 4)[seed % 2]
    strategy = ("fm3", "fm3_no_pruning", "fm3_no_hierarchy")[seed % 3]
    group = Group(num_ranks, seed, timeout_s=20.0)
    try:
        cases, num_bytes = [], 0
        for _ in range(4):
            s, b = int(rng.integers(100, 300)), int(rng.integers(1, 3))
            mask = random_mask(rng, s, b=b)
            plan = build_plan(
                mask, num_ranks, topology=Topology.uniform(num_ranks, 2), strategy=strategy,
                options=PlanOptions(chunk_rows=16, num_stages=int(rng.integers(1, 4))),
            )  # fmt: skip
            inputs = make_inputs(rng, b, s, 2, 1, 8, 8)
            cases.append((group.step(plan, mask, inputs, SCALE, has_backward=False), inputs, mask))
            num_bytes += int(plan.gather[:, 5].sum()) * b * 16 * 2
            cases.append((group.step(plan, mask, inputs, SCALE), inputs, mask))
            num_bytes += int(plan.gather[:, 5].sum()) * b * 16 * 2
        group.world.run()
        for at, (collect, inputs, mask) in enumerate(cases):
            check(collect(), inputs, mask, has_backward=at % 2 == 1)
    finally:
        group.close()


def test_a_backward_s_rows_come_in_one_part(small_parts: None) -> None:
    mask, plan = both_ways(num_stages=1)
    with group_of(2, forward_mode="rows") as group:
        group.step(plan, mask, inputs_of(mask, 0), SCALE, bwd_styles=("one", "one"))
        group.world.run()
        # Four parts and the status of the forward, one of the backward's keys and its status, sums.
        assert group.world.history.count((pull_stream(group, 0), "copy")) == 4 + 1 + 1


def parts_of(rank: int) -> Batch:
    """256 bytes in two parts of a quarter and three."""
    pieces = [Piece(1 - rank, "x", 768 + at, size, "x", at) for at, size in ((0, 256), (0, 64), (64, 192))]
    send = Piece(1 - rank, "x", 0, 256, "x", 768)
    return Batch("rows", (send,), pieces[:1], (Part((pieces[1],), 5), Part((pieces[2],), 9)))


@pytest.mark.parametrize("has_word", [True, False])
def test_the_transport_says_each_part_where_there_is_a_word(has_word: bool) -> None:
    pair = Pair()
    try:
        word = pair.world.new_memory(4)
        ctypes.c_uint32.from_address(word).value = 0
        zero, one = pair.transports
        zero.post(parts_of(0), pair.streams[0], word=(word, 100, 109) if has_word else None)
        one.post(parts_of(1), pair.streams[1])
        seen, last = [], view(pair.addresses[0], (1024,), np.uint8)[768:]
        while pair.world._step():
            seen.append((ctypes.c_uint32.from_address(word).value, int((last == 1).sum())))
        assert seen[-1] == (109 if has_word else 0, 256)
        assert all(num_bytes >= {105: 64, 109: 256}.get(value, 0) for value, num_bytes in seen)
        values = list(dict.fromkeys(value for value, _ in seen))
        assert values == ([0, 100, 105, 109] if has_word else [0])
        copies = [pair.world.history.count((t._pull_stream, "copy")) for t in pair.transports]
        assert copies == [2 if has_word else 1, 1]
        assert zero.received_bytes == [0, 256]
    finally:
        pair.close()


def test_wrong_pieces_of_parts_are_refused() -> None:
    pair = Pair()
    try:
        wrong = Batch("wrong", (), (), (Part((Piece(1, "x", 1000, 100, "x", 0),), 1),))
        with pytest.raises(Exception, match="are not inside"):
            pair.transports[0].post(wrong, pair.streams[0])
    finally:
        pair.close()
