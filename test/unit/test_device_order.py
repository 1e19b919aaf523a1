# SPDX-License-Identifier: Apache-2.0
"""What the GPU executor must wait for, and must not, when one rank lags behind: streams are held on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from device_support import Group, Results
from test_device_execute import check, make_inputs

from paddle_fm3.distributed import device_execute
from paddle_fm3.distributed.device_ipc import IpcTransport
from paddle_fm3.distributed.device_transport import TransportError
from paddle_fm3.distributed.device_work import DeviceWork
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.strategy import Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask

ROWS = 64  # of a rank
SCALE = 8**-0.5
ONE_WAY = Strategy("one_way", "contiguous")  # later ranks need keys of earlier ones


@contextmanager
def group_of(num_ranks: int, **options: object) -> Iterator[Group]:
    group = Group(num_ranks, seed=1, timeout_s=20.0, **options)
    try:
        yield group
    finally:
        group.close()


def inputs_of(mask: ColumnMask, seed: int) -> dict:
    return make_inputs(np.random.default_rng(seed), 1, mask.s_q, 2, 1, 8, 8)


def pull_stream(group: Group, rank: int) -> int:
    transport = group.ranks[rank].transport
    assert isinstance(transport, IpcTransport)
    return transport._pull_stream


def both_ways(*, chunk_rows: int = 16, **options: int) -> tuple[ColumnMask, CpPlan]:
    """Causal over two ranks, each of which is sent all keys of the other."""
    mask = builders.causal(2 * ROWS)
    return mask, build_plan(mask, 2, strategy="fm3_no_pruning", options=PlanOptions(chunk_rows=chunk_rows, **options))


def one_way() -> tuple[ColumnMask, CpPlan]:
    """Causal over two ranks, of which the second alone is sent keys."""
    mask = builders.causal(2 * ROWS)
    return mask, build_plan(mask, 2, strategy=ONE_WAY, options=PlanOptions(num_stages=1))


def sees_only(reader: int, seen: int) -> tuple[ColumnMask, CpPlan]:
    """Causal over three ranks; beyond its own keys, rank `reader` sees those of rank `seen`, and no one else any."""
    s = 3 * ROWS
    begin, end = np.full((1, 1, s), s, np.int32), np.full((1, 1, s), s, np.int32)
    for rank in range(3):
        columns = slice(rank * ROWS, (rank + 1) * ROWS)
        begin[..., columns] = (rank + 1) * ROWS
        if rank == seen:
            end[..., columns] = reader * ROWS
    mask = ColumnMask.from_bounds(np.stack([begin, end], axis=-1), is_causal=True, s_q=s)
    plan = build_plan(mask, 3, strategy=ONE_WAY, options=PlanOptions(num_stages=1))
    assert plan.gather[:, 2:4].tolist() == [[seen, reader]]
    return mask, plan


@pytest.mark.parametrize("num_step_streams", [1, 2])
def test_sums_stay_until_the_owner_has_fetched_them(num_step_streams: int) -> None:
    """Rank 2 owes rank 0 sums when its next step, with rank 1 alone, comes to the same memory."""
    first, second = sees_only(2, 0), sees_only(2, 1)
    with group_of(3, num_step_streams=num_step_streams) as group:
        for mask, plan in (first, second):  # buffers have their size then
            group.step(plan, mask, inputs_of(mask, 0), SCALE)
        group.world.run()
        cases = [(mask, inputs_of(mask, seed), plan) for seed, (mask, plan) in enumerate((first, second), 1)]
        collects = [group.step(plan, mask, inputs, SCALE) for mask, inputs, plan in cases]
        group.world.hold(pull_stream(group, 0))
        group.world.run_until_stuck()
        group.world.hold()
        group.world.run()
        for collect, (mask, inputs, _) in zip(collects, cases, strict=True):
            check(collect(), inputs, mask)


def test_a_rank_may_be_one_phase_ahead_and_not_two() -> None:
    """Rank 0 owes rank 1 keys of its last forward: the next goes into the other key buffer, the one after waits."""
    mask, plan = one_way()
    with group_of(2) as group:
        group.step(plan, mask, inputs_of(mask, 0), SCALE)
        group.world.run()
        group.world.hold(pull_stream(group, 1))
        inputs = [inputs_of(mask, seed) for seed in (1, 2, 3)]
        collects = [group.step(plan, mask, one, SCALE, has_backward=False) for one in inputs]
        group.world.run_until_stuck()

        def is_known(results: Results, rank: int) -> bool:
            return bool(np.isfinite(results.lse[:, :, rank * ROWS : (rank + 1) * ROWS]).all())

        assert [is_known(collect(), 0) for collect in collects] == [True, True, False]
        assert not any(is_known(collect(), 1) for collect in collects)
        group.world.hold()
        group.world.run()
        for collect, one in zip(collects, inputs, strict=True):
            check(collect(), one, mask, has_backward=False)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_an_attention_that_waits_for_rows_starts_when_peers_have_them(num_stages: int) -> None:
    """It holds the GPU: it must not wait for what a peer has yet to compute, only for copies."""
    mask, plan = both_ways(num_stages=num_stages)
    with group_of(2, forward_mode="rows") as group:
        group.step(plan, mask, inputs_of(mask, 0), SCALE)
        group.world.run()
        streams = [rank.stream for rank in group.ranks]
        group.world.hold(streams[1])
        inputs = inputs_of(mask, 1)
        collect = group.step(plan, mask, inputs, SCALE)
        group.world.run_until_stuck()
        assert group.world.head(streams[0]).startswith("wait")
        group.world.hold(pull_stream(group, 0), streams[1])
        group.world.hold()
        group.world.run()
        check(collect(), inputs, mask)


def test_a_backward_s_first_passes_do_not_wait_for_keys() -> None:
    """They read none: the wait is handed to the backward itself."""
    mask, plan = both_ways()
    with group_of(2) as group:
        group.step(plan, mask, inputs_of(mask, 0), SCALE, bwd_styles=("one", "one"))
        group.world.run()
        inputs = inputs_of(mask, 1)
        collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("one", "one"))
        begin = len(group.world.history)
        ran: list[str] = []
        while "forward" not in ran:
            assert group.world._step()
            ran = [what for _, what in group.world.history[begin:]]
        # One rank is behind its forward, the other one before it: no rows for a backward have moved.
        group.world.hold(*(pull_stream(group, rank) for rank in range(2)))
        group.world.run_until_stuck()
        ran = [what for _, what in group.world.history[begin:]]
        assert "backward, first passes" in ran and "backward" not in ran
        group.world.hold()
        group.world.run()
        check(collect(), inputs, mask)


def test_a_backward_s_first_passes_do_not_wait_for_own_rows() -> None:
    """These are copied into the key buffer beside them."""
    mask, plan = both_ways()
    with group_of(2) as group:
        inputs = inputs_of(mask, 1)
        collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("one", "one"))
        group.world.hold(*(rank.attention._key_stream for rank in group.ranks))
        group.world.run_until_stuck()
        for rank in group.ranks:
            ran = [what for stream, what in group.world.history if stream == rank.stream]
            assert ran.count("pack") == 1 and "backward, first passes" in ran and "backward" not in ran
        group.world.hold()
        group.world.run()
        check(collect(), inputs, mask)


def test_rows_that_nobody_adds_to_do_not_wait_for_sums() -> None:
    """Rank 1 sees the second half of rank 0's keys."""
    mask = builders.causal_document([ROWS // 2, 3 * ROWS // 2])
    plan = build_plan(mask, 2, strategy=ONE_WAY, options=PlanOptions(num_stages=1))
    with group_of(2, forward_mode="whole") as group:
        inputs = inputs_of(mask, 1)
        collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("one", "one"))
        group.world.hold(pull_stream(group, 0))  # which fetches nothing else
        group.world.run_until_stuck()
        summed = (group.ranks[0].stream, "sum_rows")
        assert group.world.history.count(summed) == 1  # dK and dV of the first half
        group.world.hold()
        group.world.run()
        assert group.world.history.count(summed) == 2
        check(collect(), inputs, mask)


def test_sums_travel_while_a_backward_in_two_calls_still_computes() -> None:
    """Received keys come first: their dK and dV are under way before the call of the own keys has run."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2) as group:
        inputs = inputs_of(mask, 1)
        collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("two", "two"))
        first, own = zip(*((rank.attention._extra[0], rank.stream) for rank in group.ranks), strict=True)
        held: list[int] = []
        while len(held) < 2:
            assert group.world._step()
            held = [stream for stream in own if group.world.head(stream).startswith("backward")]
            group.world.hold(*held)
        group.world.run_until_stuck()
        history = group.world.history
        begin = max(history.index((stream, "backward")) for stream in first)
        assert {(pull_stream(group, rank), "copy") for rank in range(2)} <= set(history[begin:])
        group.world.hold()
        group.world.run()
        check(collect(), inputs, mask)


def test_sums_travel_while_a_single_backward_call_still_computes() -> None:
    """It says when its received rows are done, and they are fetched while it goes on with the own ones."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2) as group:
        for seed in (1, 2):  # the word has been set before, in the second one
            inputs = inputs_of(mask, seed)
            collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("one", "one"))
            own = [rank.stream for rank in group.ranks]
            held: list[int] = []
            while len(held) < 2:
                assert group.world._step()
                held = [stream for stream in own if group.world.head(stream) == "backward"]
                group.world.hold(*held)
            begin = len(group.world.history)
            group.world.run_until_stuck()
            assert [group.world.head(pull_stream(group, rank)) for rank in range(2)] == ["", ""]
            assert {(pull_stream(group, rank), "copy") for rank in range(2)} & set(group.world.history[begin:])
            group.world.hold()
            group.world.run()
            check(collect(), inputs, mask)


@pytest.mark.parametrize(("max_dim", "begins"), [(128, True), (4, False)])
def test_a_single_backward_call_begins_while_keys_are_on_their_way(
    max_dim: int, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all peers have them ready, where the kernel can wait for rows itself."""
    monkeypatch.setattr(device_execute, "MAX_WAITING_DIM", max_dim)
    mask, plan = both_ways(num_stages=1)
    with group_of(2, forward_mode="rows") as group:
        for seed in (1, 2):  # the words have been set before, in the second one
            inputs = inputs_of(mask, seed)
            collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("one", "one"))
            world, first = group.world, len(group.world.history)
            own, pulls = group.ranks[0].stream, [pull_stream(group, rank) for rank in range(2)]
            while (own, "forward") not in world.history[first:]:
                assert world._step()
            while world.head(pulls[0]) != "copy":
                assert world._step()
            world.hold(pulls[0])
            world.run_until_stuck()
            ran = [what for stream, what in world.history[first:] if stream == own]
            assert ("backward begins" in ran) == begins and "backward" not in ran
            world.hold()
            world.run()
            check(collect(), inputs, mask)


def test_sums_of_a_peer_come_before_the_own_ones_are_written() -> None:
    """A rank whose received rows are done late fetches what others have for it all the same."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2) as group:
        for seed in (1, 2):
            inputs = inputs_of(mask, seed)
            collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("one", "one"))
            world, late = group.world, group.ranks[0].stream
            while world.head(late) != "backward, rows it tells of":
                assert world._step()
            world.hold(late)
            world.run_until_stuck()
            assert world.history.count((group.ranks[1].stream, "backward")) == seed
            # Rows for the forward, rows for the backward, sums.
            assert world.history.count((pull_stream(group, 0), "copy")) == 3 * seed
            world.hold()
            world.run()
            check(collect(), inputs, mask)


def seen_by(ranges: dict[int, tuple[int, int]]) -> tuple[ColumnMask, CpPlan]:
    """Of four ranks on two nodes: which ranks [begin, end) see a rank's keys; where nothing is said, it alone."""
    bounds = np.empty((1, 1, 4 * ROWS, 2), np.int32)
    for rank in range(4):
        begin, end = ranges.get(rank, (rank, rank + 1))
        bounds[:, :, rank * ROWS : (rank + 1) * ROWS] = end * ROWS, begin * ROWS
    mask = ColumnMask.from_bounds(bounds, is_causal=False, s_q=4 * ROWS)
    return mask, build_plan(
        mask, 4, topology=Topology.uniform(4, 2), strategy=ONE_WAY, options=PlanOptions(num_stages=1)
    )


def test_sums_to_pass_on_are_made_before_the_next_ones_come() -> None:
    """A rank of the second node adds its neighbour's sums for rank 0 to its own, late. The neighbour's next sums, of the
    next backward, go to the same memory, and a single call fetches what peers have as soon as they have it."""
    mask, plan = seen_by({0: (0, 4)})
    works = [DeviceWork.of(plan, plan.rank_plan(rank, mask), bwd_style="one") for rank in range(4)]
    relay = next(rank for rank in (2, 3) if any(batch.sums for batch in works[rank].reduce))
    next_mask, next_plan = seen_by({2: (2, 4), 3: (2, 4)})
    cases = [(mask, plan, inputs_of(mask, 0)), (next_mask, next_plan, inputs_of(next_mask, 1))]
    with group_of(4) as group:

        def enqueue() -> list[Callable[[], Results]]:
            return [
                group.step(its_plan, one, inputs, SCALE, bwd_styles=("one",) * 4) for one, its_plan, inputs in cases
            ]

        enqueue()  # buffers have their size then
        group.world.run()
        collects = enqueue()
        side = group.ranks[relay].attention._side
        assert side is not None
        begin = len(group.world.history)
        while not (group.world.head(side) == "sum_rows" and len(group.world.history) > begin):
            assert group.world._step()
        group.world.hold(side)
        group.world.run_until_stuck()
        group.world.hold()
        group.world.run()
        for collect, (one, _, inputs) in zip(collects, cases, strict=True):
            check(collect(), inputs, one)


@pytest.mark.parametrize("mode", ["rows", "whole"])
@pytest.mark.parametrize(("what", "number"), [("pack", 1), ("backward", 0), ("wait_word", None), ("sum_rows", 0)])
def test_an_error_in_a_backward_ends_it_on_all_ranks(
    what: str, number: int | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever rank 0 stops enqueueing: before its rows are ready, before its kernel, between kernel and the wait for its
    word, at its last sums. Once it has told the others, every stream runs to its end."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2, forward_mode=mode) as group:
        group.step(plan, mask, inputs_of(mask, 0), SCALE, bwd_styles=("one", "one"))
        group.world.run()
        device, side = group.ranks[0].device, group.ranks[0].attention._side
        original, calls = getattr(device, what), [0]

        def failing(*arguments: object) -> None:
            calls[0] += 1
            if (arguments[0] == side) if number is None else (calls[0] == number + 1):
                raise RuntimeError("out of luck")
            original(*arguments)

        monkeypatch.setattr(device, what, failing)
        with pytest.raises(RuntimeError, match="out of luck"):
            group.step(plan, mask, inputs_of(mask, 1), SCALE, bwd_styles=("one", "one"))
        group.world.run_until_stuck()
        assert bool(group.world.head(group.ranks[1].stream)) == (what != "sum_rows")  # which others need not wait for
        transports = [rank.transport for rank in group.ranks if rank.transport is not None]
        transports[0].fail("out of luck")
        for transport in transports:
            with pytest.raises(TransportError, match="rank 0 of 2 stopped: out of luck"):
                transport.check()
        group.world.run()


@pytest.mark.parametrize("num_callers", [1, 2])
def test_a_kernel_starts_when_peers_come_unless_attention_is_called_on_several_streams(num_callers: int) -> None:
    """Rank 0 has come to the call and finds no room yet. Two calls at a time could wait for each other's rows."""
    mask, plan = one_way()
    with group_of(2, forward_mode="rows") as group:
        inputs = inputs_of(mask, 0)
        for _ in range(num_callers):
            group.step(plan, mask, inputs, SCALE, has_backward=False)
            group.world.run()
            if num_callers == 2:
                group.ranks[1].stream = group.ranks[1].device.stream_create()
        collect = group.step(plan, mask, inputs, SCALE, has_backward=False)
        while group.world.head(group.ranks[0].stream) != "pack":  # it has begun
            assert group.world._step()
        group.world.hold(group.ranks[0].stream)
        group.world.run_until_stuck()
        assert group.world.head(group.ranks[1].stream).split()[0] == ("forward" if num_callers == 1 else "wait")
        group.world.hold()
        group.world.run()
        assert np.array_equal(np.isnan(collect().out), np.zeros_like(collect().out, bool))


def test_a_kernel_that_holds_the_gpu_waits_for_peers_to_come_to_this_call() -> None:
    """Not to the one before, also where calls follow each other with one batch each."""
    mask, plan = one_way()
    with group_of(2, forward_mode="rows") as group:
        inputs = inputs_of(mask, 0)
        group.step(plan, mask, inputs, SCALE, has_backward=False)
        group.world.run()
        group.world.hold(group.ranks[0].stream)
        collect = group.step(plan, mask, inputs, SCALE, has_backward=False)
        group.world.run_until_stuck()
        assert group.world.head(group.ranks[1].stream).startswith("wait word")
        group.world.hold()
        group.world.run()
        check(collect(), inputs, mask, has_backward=False)


@pytest.mark.parametrize("others", ["whole", "steps"])
def test_ranks_whose_forwards_wait_in_different_ways_are_told(others: str) -> None:
    """One would wait for a word that the other one does not write, and no batch would be late."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2, forward_mode="rows") as group:
        group.ranks[1].attention._forward_mode = others
        with pytest.raises(TransportError, match="do not make the same calls"):
            for _ in range(2):
                group.step(plan, mask, inputs_of(mask, 0), SCALE, has_backward=False)
        group.world.run()


def test_a_kernel_that_holds_the_gpu_waits_for_peers_of_later_stages_to_come() -> None:
    mask = builders.causal(3 * ROWS)
    plan = build_plan(mask, 3, strategy=ONE_WAY, options=PlanOptions(num_stages=2))
    gather = DeviceWork.of(plan, plan.rank_plan(2, mask)).gather
    peers = [{piece.peer for piece in batch.recvs} for batch in gather]
    assert len(peers) == 2 and peers[1] - peers[0]
    late = (peers[1] - peers[0]).pop()
    with group_of(3, forward_mode="rows") as group:
        inputs = inputs_of(mask, 0)
        group.world.hold(group.ranks[late].stream)
        collect = group.step(plan, mask, inputs, SCALE, has_backward=False)
        group.world.run_until_stuck()
        assert group.world.head(group.ranks[2].stream).startswith("wait word")
        group.world.hold()
        group.world.run()
        check(collect(), inputs, mask, has_backward=False)


def test_a_key_buffer_is_not_filled_again_before_peers_of_earlier_stages_have_fetched_from_it() -> None:
    mask = builders.causal(3 * ROWS)
    plan = build_plan(mask, 3, strategy=ONE_WAY, options=PlanOptions(num_stages=2))
    gather = DeviceWork.of(plan, plan.rank_plan(0, mask)).gather
    early, late = ({piece.peer for piece in batch.sends} for batch in gather)
    assert early and late and not early & late
    with group_of(3, forward_mode="rows") as group:
        group.step(plan, mask, inputs_of(mask, 0), SCALE, has_backward=False)
        group.world.run()
        group.world.hold(pull_stream(group, early.pop()))
        cases = [inputs_of(mask, seed) for seed in (1, 2, 3)]
        collects = [group.step(plan, mask, inputs, SCALE, has_backward=False) for inputs in cases]
        group.world.run_until_stuck()
        done = [bool(np.isfinite(collect().lse[:, :, :ROWS]).all()) for collect in collects]
        assert done == [True, True, False]
        group.world.hold()
        group.world.run()
        for collect, inputs in zip(collects, cases, strict=True):
            check(collect(), inputs, mask, has_backward=False)


def test_a_backward_that_waits_for_rows_starts_when_peers_come() -> None:
    """It holds the GPU as a forward does."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2, forward_mode="rows") as group:
        inputs = inputs_of(mask, 0)
        for _ in range(2):  # the words have been set before, in the second one
            collect = group.step(plan, mask, inputs, SCALE, bwd_styles=("one", "one"))
            begin, late = len(group.world.history), group.ranks[1].attention._key_stream
            assert late is not None
            while group.world.head(late) != "pack begins":
                assert group.world._step()
            group.world.hold(late)
            group.world.run_until_stuck()
            ran = [what for stream, what in group.world.history[begin:] if stream == group.ranks[0].stream]
            assert "backward, first passes" in ran and "backward begins" not in ran
            group.world.hold()
            group.world.run()
            check(collect(), inputs, mask)


def test_many_stages_are_not_announced_and_a_kernel_waits_for_its_word() -> None:
    """More than a launch has words for. What the last call but one left says that all rows are in."""
    mask, plan = both_ways(chunk_rows=4, num_stages=9)
    with group_of(2, forward_mode="rows") as group:
        for seed in range(4):
            inputs = inputs_of(mask, seed)
            group.world.hold(pull_stream(group, 0))
            collect = group.step(plan, mask, inputs, SCALE, has_backward=False)
            group.world.run_until_stuck()
            assert group.world.head(group.ranks[0].stream).startswith("wait event")
            group.world.hold()
            group.world.run()
            check(collect(), inputs, mask, has_backward=False)


def test_a_kernel_is_let_go_where_its_rank_fails_before_the_own_rows_are_packed() -> None:
    """Its copies run when they are released; packing then must not take back that all rows are in."""
    mask, plan = both_ways(num_stages=1)
    with group_of(2, forward_mode="rows") as group:
        group.world.hold(*(rank.stream for rank in group.ranks))
        group.step(plan, mask, inputs_of(mask, 0), SCALE, bwd_styles=("one", "one"))
        transports = [rank.transport for rank in group.ranks if rank.transport is not None]
        transports[0].fail("out of luck")
        group.world.run_until_stuck()
        group.world.hold()
        for transport in transports:
            with pytest.raises(TransportError, match="out of luck"):
                transport.check()
        group.world.run()


def test_rows_that_a_kernel_did_not_wait_for_do_not_let_a_later_one_go() -> None:
    """Rank 1 sees none of what it receives in two calls, and ends them before it has come; then it sees all."""
    hidden, seen = builders.document([ROWS, ROWS]), builders.causal(2 * ROWS)
    plans = [
        build_plan(
            mask, 2, strategy=Strategy("unpruned", "contiguous", is_pruned=False), options=PlanOptions(num_stages=1)
        )
        for mask in (hidden, seen)
    ]
    for seed in range(4):
        with group_of(2, forward_mode="rows") as group:
            group.step(plans[1], seen, inputs_of(seen, 9), SCALE, has_backward=False)
            group.world.run()
            for rank in group.ranks:
                rank.device.needed_rows = ROWS
            for number in range(2):
                group.step(plans[0], hidden, inputs_of(hidden, number), SCALE, has_backward=False)
            for rank in group.ranks:
                rank.device.needed_rows = None
            inputs = inputs_of(seen, 10 + seed)
            collect = group.step(plans[1], seen, inputs, SCALE, has_backward=False)
            group.world.hold(pull_stream(group, 1))
            group.world.run_until_stuck()
            group.world.hold()
            group.world.run()
            check(collect(), inputs, seen, has_backward=False)
