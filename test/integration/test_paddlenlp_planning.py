# SPDX-License-Identifier: Apache-2.0
"""Plans of a batch, the thread that makes them ahead, node maps, and the figures that are logged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from paddle_fm3.distributed.planner import build_plan
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.integration.paddlenlp.collator import INDICES, PackedCollator
from paddle_fm3.integration.paddlenlp.masks import LayerMasks, masks_of_batch
from paddle_fm3.integration.paddlenlp.planning import plan_batch
from paddle_fm3.integration.paddlenlp.prefetch import PlanAheadLoader, PlannedBatch, ReadAhead
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings, topology_of
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing.reference import visible_plane

S, NUM_RANKS = 2048, 4
ONE_NODE = Topology((0,) * NUM_RANKS)
MASKS = LayerMasks.from_flags("causal_document", 160, "window,window,full")


def indices_of(masks: LayerMasks, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    documents = [[1] * int(length) for length in (900, *rng.integers(40, 400, 3))]
    return PackedCollator(S, masks=masks)([{"documents": documents}])[INDICES]


def planes(indices: np.ndarray) -> list[np.ndarray]:
    bounds, causal = masks_of_batch(indices)
    return [visible_plane(each[0, 0], causal, S, S) for each in bounds]


def test_one_cut_for_all_masks_and_each_masks_own_rows() -> None:
    indices = indices_of(MASKS)
    batch_plan = plan_batch(indices, MASKS, NUM_RANKS, "fm3", ONE_NODE)
    window_plan, full_plan = batch_plan.plans
    assert window_plan.partition == full_plan.partition == batch_plan.partition
    owned = [batch_plan.partition.rows_of(rank) for rank in range(NUM_RANKS)]
    received = {}
    for name, plan, visible in zip(("window", "full"), batch_plan.plans, planes(indices), strict=True):
        received[name] = sum(transfer.num_rows for transfer in plan.transfers())
        for rank in range(NUM_RANKS):
            needed = set(np.flatnonzero(visible[owned[rank]].any(axis=0)).tolist())
            held = {
                row for begin, num_rows in plan.key_ranges_of(rank).tolist() for row in range(begin, begin + num_rows)
            }
            assert needed <= held, f"{name}: rank {rank} lacks rows"
    assert received["window"] < 0.7 * received["full"]


def test_the_cut_balances_the_summed_work() -> None:
    """By the tiles that a dense table shows: 2 layers in 3 have the window, so it counts twice."""
    indices = indices_of(MASKS)
    bounds, causal = masks_of_batch(indices)
    window, full = (ColumnMask.from_bounds(each, is_causal=causal, s_q=S) for each in bounds)

    def imbalance_of_both(partition) -> float:  # noqa: ANN001
        plans = [build_plan(mask, NUM_RANKS, topology=ONE_NODE, partition=partition) for mask in (window, full)]
        loads = sum(share * plan.rank_loads for share, plan in zip(MASKS.shares(), plans, strict=True))
        return float(loads.max() / loads.mean() - 1)

    batch_plan = plan_batch(indices, MASKS, NUM_RANKS, "fm3", ONE_NODE)
    assert imbalance_of_both(batch_plan.partition) == pytest.approx(batch_plan.imbalance, abs=1e-9)
    for mask in (window, full):
        alone = build_plan(mask, NUM_RANKS, topology=ONE_NODE).partition
        assert batch_plan.imbalance <= imbalance_of_both(alone) + 1e-9
    tiles = sum(
        share * plane.reshape(S // 128, 128, S // 128, 128).any(axis=(1, 3)).sum(axis=1)  # [row tiles]
        for share, plane in zip(MASKS.shares(), planes(indices), strict=True)
    )
    by_rank = [sum(tiles[row // 128] for row in batch_plan.partition.rows_of(r)[::128]) for r in range(NUM_RANKS)]
    assert max(by_rank) / np.mean(by_rank) - 1 < batch_plan.imbalance + 0.15  # full tiles cost less than partial ones


def test_another_number_of_masks_than_the_flags_name() -> None:
    with pytest.raises(ValueError, match="the batch has 1 masks; --mask_layers window,window,full names 2"):
        plan_batch(indices_of(LayerMasks()), MASKS, NUM_RANKS, "fm3", ONE_NODE)
    mask = ColumnMask.from_bounds(indices_of(LayerMasks())[:, None, :, None], is_causal=True, s_q=S)
    with pytest.raises(ValueError, match="the partition cuts s=2048 for 4 ranks; the mask has s=2048, num_ranks=2"):
        build_plan(mask, 2, partition=build_plan(mask, 4, topology=ONE_NODE).partition)


# --- the thread ----------------------------------------------------------------------------------


def planning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paddle_fm3-plan-ahead"]


def wait_for(is_so) -> None:  # noqa: ANN001
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert is_so()


@pytest.mark.parametrize("depth", [1, 3])
def test_never_more_than_depth_ahead(depth: int) -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    with ReadAhead(source(), lambda item: item * item, depth) as ahead:
        wait_for(lambda: len(taken) == depth)
        time.sleep(0.05)
        assert len(taken) == depth
        for expected in range(20):
            assert next(ahead) == expected * expected
            wait_for(lambda expected=expected: len(taken) == min(20, expected + 1 + depth))
        with pytest.raises(StopIteration):
            next(ahead)
        with pytest.raises(StopIteration):
            next(ahead)
    assert not planning_threads()
    with pytest.raises(ValueError, match="depth=0"):
        ReadAhead([], str, 0)


@pytest.mark.parametrize("where", ["source", "prepare"])
def test_an_exception_reaches_the_reader_in_its_place(where: str) -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        if where == "source":
            raise RuntimeError("the data ended early")
        yield 3

    def prepare(item: int) -> int:
        if item == 3:
            raise RuntimeError("the data ended early")
        return item

    with ReadAhead(source(), prepare, 4) as ahead:
        assert (next(ahead), next(ahead)) == (1, 2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the data ended early"):
                next(ahead)
    assert not planning_threads()


def test_leaving_in_the_middle_ends_the_thread() -> None:
    ahead = ReadAhead(iter(int, 1), lambda item: item, 2)  # endless
    assert next(ahead) == 0 and len(planning_threads()) == 1
    ahead.close()
    ahead.close()
    assert not planning_threads()


class Documents(paddle.io.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> dict:
        return {"documents": [[at] * 900, [at] * 300]}


def test_a_loader_that_plans_ahead_is_still_a_data_loader() -> None:
    sampler = paddle.io.BatchSampler(Documents(), batch_size=1)
    inner = paddle.io.DataLoader(Documents(), batch_sampler=sampler, collate_fn=PackedCollator(S, masks=MASKS))
    loader = PlanAheadLoader(inner, lambda indices: plan_batch(indices.numpy(), MASKS, NUM_RANKS, "fm3", ONE_NODE), 2)
    assert isinstance(loader, paddle.io.DataLoader) and loader.batch_sampler is sampler and len(loader) == 6
    for _ in range(2):  # epochs
        seen = []
        for batch in loader:
            assert isinstance(batch, PlannedBatch) and batch.wait_ms >= 0
            assert batch.batch_plan.plans == plan_batch(batch[INDICES].numpy(), MASKS, NUM_RANKS, "fm3", ONE_NODE).plans
            seen.append(int(batch["input_ids"][0, 0]))
        assert seen == list(range(6))
    assert not planning_threads()
    held = iter(loader)
    next(held)
    assert len(planning_threads()) == 1
    loader.close()  # the iterator is still alive, as after an exception in training
    assert not planning_threads()


# --- nodes ---------------------------------------------------------------------------------------


def test_node_maps() -> None:
    assert topology_of("", 4) == Topology((0, 0, 0, 0))
    assert topology_of("", 4, ["b", "b", "a", "b"]) == Topology((0, 0, 1, 0))
    assert topology_of("2", 5) == Topology((0, 0, 1, 1, 2))
    assert topology_of("0,1,1", 3) == Topology((0, 1, 1))
    with pytest.raises(ValueError, match=r"names the nodes of 3 ranks; the context-parallel group has 4"):
        topology_of("0,1,1", 4)
    for text in ("0", "-2", "two", "0,2", "1,1", "0;1"):
        with pytest.raises(ValueError, match="expected the number of ranks a node"):
            FlashMask3Settings(cp_nodes=text)
    with pytest.raises(ValueError, match="plans_ahead=-1 must be >= 0"):
        FlashMask3Settings(plans_ahead=-1)
