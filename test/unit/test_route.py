# SPDX-License-Identifier: Apache-2.0
"""Needs against dense tables; transfers checked row by row for random masks, partitions and topologies."""

from __future__ import annotations

import numpy as np
import pytest
from plan_support import dense_visible, random_mask, random_partition, random_topology

from paddle_fm3.distributed import route
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planner import PlanOptions, build_plan
from paddle_fm3.distributed.simulate import simulate
from paddle_fm3.distributed.strategy import STRATEGIES, Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.workload import scan_mask
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask


def needed_rows(mask: ColumnMask, partition: Partition, rank: int) -> np.ndarray:
    return np.nonzero(dense_visible(mask)[:, :, partition.rows_of(rank)].any(axis=(0, 1, 2)))[0]


def plan_for(mask: ColumnMask, partition: Partition, topology: Topology, needs: route.RankNeeds, **options) -> CpPlan:
    """A plan with a given partition: build_plan would choose its own."""
    routed = route.route_needs(needs, partition, topology, is_overlapped=True, **options)
    num_chunks = partition.num_chunks
    return CpPlan(
        partition, topology, Strategy("test"), routed.num_stages, routed.range_begins, routed.key_ranges,
        routed.stage_rows, routed.gather, routed.reduce,
        np.zeros((num_chunks, 2), np.int64), np.zeros(num_chunks, np.int64), 0.0,
    )  # fmt: skip


def counting_backend():
    """Each rank adds 1 to dk of every key row that it computes with: dk counts ranks."""

    def forward(q, k, v, mask, scale):
        assert not np.isnan(k).any() and not np.isnan(v).any(), "computes with rows that have not arrived"
        return np.zeros((*q.shape[:3], v.shape[3]), q.dtype), np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)

    def backward(q, k, v, mask, out, lse, dout, dlse, scale):
        return np.zeros_like(q), np.ones_like(k), np.ones_like(v)

    return forward, backward


def execute(plan: CpPlan, mask: ColumnMask):
    x = np.zeros((1, mask.s_q, 1, 8), np.float32)
    return simulate(plan, mask, x, x, x, x, backend=counting_backend())


def test_needs_match_dense() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        s = int(rng.integers(1, 500))
        num_ranks = int(rng.integers(1, 6))
        mask = random_mask(rng, s, b=1 + int(rng.random() < 0.3), h_mask=1 + int(rng.random() < 0.3))
        partition = random_partition(rng, s, num_ranks)
        scan = scan_mask(mask, np.asarray(partition.chunk_begins_global, np.int32))
        needs = route.needs_of_mask(scan, partition, coalesce_rows=1)
        for rank in range(num_ranks):
            assert np.array_equal(needs.rows_of(rank), needed_rows(mask, partition, rank)), (mask, partition, rank)
        cuts = np.union1d(partition.chunk_begins_global, rng.integers(0, s + 1, 5)).astype(np.int32)
        finer = route.needs_of_mask(scan_mask(mask, cuts), partition, coalesce_rows=1)
        assert all(np.array_equal(finer.rows_of(rank), needs.rows_of(rank)) for rank in range(num_ranks))
        wide = route.needs_of_mask(scan, partition, coalesce_rows=20)
        for rank in range(num_ranks):
            exact, got = needs.rows_of(rank), wide.rows_of(rank)
            assert np.isin(exact, got).all()
            holes = np.split(np.setdiff1d(got, exact), np.nonzero(np.diff(np.setdiff1d(got, exact)) > 1)[0] + 1)
            assert all(len(hole) < 20 for hole in holes)


def test_needs_with_a_block_mask() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        s = 128 * int(rng.integers(1, 7))
        base = random_mask(rng, s)
        block_mask = rng.integers(0, 2, (1, 1, s // 128, s // 128)).astype(np.int32)
        bounds = (base.lt_begin, base.lt_end, base.ut_begin, base.ut_end)
        mask = ColumnMask(*bounds, s_q=s, is_causal=base.is_causal, block_mask=block_mask)
        partition = Partition(tuple(range(0, s + 1, 128)), tuple(rng.integers(0, 3, s // 128).tolist()), 3)
        scan = scan_mask(mask, np.asarray(partition.chunk_begins_global, np.int32))
        needs = route.needs_of_mask(scan, partition, coalesce_rows=1)
        for rank in range(3):
            tiles = np.unique(needed_rows(mask, partition, rank) // 128)
            assert np.array_equal(needs.rows_of(rank), (tiles[:, None] * 128 + np.arange(128)).ravel())


@pytest.mark.parametrize("is_hierarchical", [True, False])
def test_every_row_arrives_once_and_gradients_count_each_rank_once(is_hierarchical: bool) -> None:
    rng = np.random.default_rng(2 + is_hierarchical)
    for _ in range(150):
        s = int(rng.integers(1, 400))
        num_ranks = int(rng.integers(1, 9))
        mask, partition = random_mask(rng, s), random_partition(rng, s, num_ranks)
        topology = random_topology(rng, num_ranks)
        scan = scan_mask(mask, np.asarray(partition.chunk_begins_global, np.int32))
        needs = route.needs_of_mask(scan, partition, coalesce_rows=int(rng.integers(1, 30)))
        num_stages = int(rng.integers(1, 5))
        plan = plan_for(mask, partition, topology, needs, is_hierarchical=is_hierarchical, num_stages=num_stages)
        result = execute(plan, mask)  # PlanError if a row is missing, early, twice or misplaced

        holders = np.zeros(s)
        for rank in range(num_ranks):
            own = partition.rows_of(rank)
            foreign = np.setdiff1d(needs.rows_of(rank), own)
            # Memory bounded by need: own rows and needed foreign rows, no other, not even to relay.
            held = plan.rank_plan(rank, mask).key_rows_global()
            assert np.array_equal(np.sort(held), np.sort(np.concatenate([own, foreign])))
            if len(own):
                holders[held] += 1
        assert np.array_equal(result.dk[0, :, 0, 0], holders)

        nodes = topology.as_array()
        crossings = [
            (row, nodes[t.dst_rank])
            for t in plan.transfers()
            if nodes[t.src_rank] != nodes[t.dst_rank]
            for row in range(t.k_begin_global, t.k_begin_global + t.num_rows)
        ]
        if is_hierarchical:
            assert len(crossings) == len(set(crossings)), "a row crosses to a node twice"
        assert len(crossings) == plan.slow_rows
        assert len(set(crossings)) <= (topology.num_nodes - 1) * s


def test_long_ranges_are_fetched_in_pieces_by_different_members() -> None:
    mask = builders.full(4096)
    partition = Partition((0, 1000, 2048, 3072, 4096), (0, 1, 2, 3), 4)
    topology = Topology((0, 0, 1, 1))
    needs = route.needs_of_all(partition)
    plan = plan_for(mask, partition, topology, needs, is_hierarchical=True, num_stages=3, piece_rows=200)
    assert (execute(plan, mask).dk == 4).all()
    received = np.zeros(4, int)
    for transfer in plan.transfers():
        if (transfer.src_rank < 2) != (transfer.dst_rank < 2):
            received[transfer.dst_rank] += transfer.num_rows
    assert received.sum() == 4096 and np.abs(received - 1024).max() <= 256


def test_slow_rows_are_shared_among_the_members_of_a_node() -> None:
    mask = builders.full(8192)
    plan = build_plan(mask, 8, topology=Topology.uniform(8, 4), options=PlanOptions(num_stages=2))
    nodes = plan.topology.as_array()
    slow = plan.gather[nodes[plan.gather[:, 2]] != nodes[plan.gather[:, 3]]]
    received = np.bincount(slow[:, 3], slow[:, 5], minlength=8)
    assert received.tolist() == [1024.0] * 8


def test_reduce_is_the_gather_backwards() -> None:
    mask = builders.document([500, 300, 1248])
    plan = build_plan(mask, 6, topology=Topology.uniform(6, 3), options=PlanOptions(num_stages=3))
    edges = {
        (t.src_rank, t.dst_rank, row)
        for t in plan.transfers()
        for row in range(t.k_begin_global, t.k_begin_global + t.num_rows)
    }
    back = {
        (t.dst_rank, t.src_rank, row)
        for t in plan.transfers("reduce")
        for row in range(t.k_begin_global, t.k_begin_global + t.num_rows)
    }
    assert edges == back and edges


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_slow_rows_never_exceed_the_allgather(strategy: str) -> None:
    """For strategies that route hierarchically. Documents at 16 ranks on 2 nodes."""
    rng = np.random.default_rng(6)
    for _ in range(3):
        mask = builders.document(rng.multinomial(16384, rng.dirichlet(np.ones(15))).tolist())
        plan = build_plan(mask, 16, topology=Topology.uniform(16), strategy=strategy)
        base = build_plan(mask, 16, topology=Topology.uniform(16), strategy="contiguous_allgather")
        assert base.slow_rows == 16384
        if plan.strategy.is_hierarchical:
            assert plan.slow_rows <= base.slow_rows
        else:
            assert plan.slow_rows != base.slow_rows


def test_ring_moves_every_row_past_every_rank() -> None:
    mask = builders.causal(1000)
    plan = build_plan(mask, 5, topology=Topology.uniform(5, 2), strategy="ring")
    assert plan.num_stages == 4 and plan.gather[:, 5].sum() == 4 * 1000
    assert ((plan.gather[:, 3] - plan.gather[:, 2]) % 5 == 1).all()
    assert np.array_equal(execute(plan, mask).dk[0, :, 0, 0], np.full(1000, 5.0))


def test_more_stages_when_transfers_are_slow() -> None:
    mask = builders.document([8192] * 2)
    topology = Topology.uniform(8, 8)
    plan = build_plan(mask, 8, topology=topology)
    assert plan.num_stages in route.STAGE_CHOICES
    tiny = build_plan(builders.document([64] * 64), 8, topology=topology)
    assert tiny.num_stages <= plan.num_stages


def test_errors() -> None:
    partition = Partition((0, 10), (0,), 1)
    needs = route.needs_of_all(partition)
    with pytest.raises(ValueError, match="num_stages=0"):
        route.route_needs(needs, partition, Topology((0,)), is_hierarchical=True, is_overlapped=True, num_stages=0)
    with pytest.raises(ValueError, match="coalesce_rows=0"):
        scan = scan_mask(builders.full(10), np.array([0, 10], np.int32))
        route.needs_of_mask(scan, partition, coalesce_rows=0)
    with pytest.raises(ValueError, match="made for other chunks"):
        route.needs_of_mask(scan, Partition((0, 5, 10), (0, 0), 1))
    with pytest.raises(ValueError, match="needs of 1 ranks, a topology of 2"):
        route.route_needs(needs, partition, Topology((0, 0)), is_hierarchical=True, is_overlapped=True, num_stages=1)
    with pytest.raises(ValueError, match="every node index"):
        Topology((0, 2))
