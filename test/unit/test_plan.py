# SPDX-License-Identifier: Apache-2.0
"""CpPlan as a value: equality, hash, bytes, JSON, errors; the cache; the timing model; imports."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from paddle_fm3.distributed.cache import PlanCache
from paddle_fm3.distributed.cost import CostModel, Link
from paddle_fm3.distributed.partition import contiguous_partition
from paddle_fm3.distributed.plan import CpPlan, mask_digest
from paddle_fm3.distributed.planner import PlanOptions, build_plan, default_chunk_rows
from paddle_fm3.distributed.strategy import STRATEGIES, Strategy
from paddle_fm3.distributed.timing import simulate_time
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask import builders

DOCUMENTS = [700, 300, 1500, 1596]
TOPOLOGY = Topology.uniform(8, 4)


def plan(**changes) -> CpPlan:
    return build_plan(builders.document(DOCUMENTS), 8, **({"topology": TOPOLOGY} | changes))


def test_equal_inputs_give_equal_plans() -> None:
    assert plan() == plan() and hash(plan()) == hash(plan())
    others = [
        plan(strategy="ring"),
        plan(topology=Topology.uniform(8, 2)),
        plan(options=PlanOptions(num_stages=7)),
        build_plan(builders.document(DOCUMENTS[::-1]), 8, topology=TOPOLOGY),
    ]
    assert len({p.plan_hash for p in [plan(), *others]}) == 5


def test_every_field_enters_the_hash() -> None:
    base = plan()
    for name in ("gather", "reduce", "key_ranges", "stage_rows", "chunk_tiles", "chunk_weights"):
        array = getattr(base, name).copy()
        array.flat[-1] += 1
        assert replace(base, **{name: array}) != base, name
    for name, value in (("lower_bound", 1.0), ("speeds", (1.0,) * 8), ("strategy", Strategy("other"))):
        assert replace(base, **{name: value}) != base, name


def test_same_plan_in_another_process() -> None:
    program = (
        "from paddle_fm3.distributed.planner import build_plan; from paddle_fm3.distributed.topology import Topology;"
        "from paddle_fm3.mask import builders; import sys;"
        f"print(build_plan(builders.document({DOCUMENTS}), 8, topology=Topology.uniform(8, 4)).plan_hash);"
        "sys.exit('paddle' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, f"planning imports paddle\n{result.stderr}"
    assert result.stdout.strip() == plan().plan_hash


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_bytes_and_json_round_trip(strategy: str) -> None:
    before = plan(strategy=strategy, options=PlanOptions(speeds=(1.0,) * 7 + (0.5,)))
    for after in (CpPlan.from_bytes(before.to_bytes()), CpPlan.from_json(before.to_json())):
        assert after == before and after.partition == before.partition and after.strategy == before.strategy
        assert after.speeds == before.speeds and np.array_equal(after.gather, before.gather)


def test_damage_is_noticed() -> None:
    data = bytearray(plan().to_bytes())
    for at, message in (
        (0, "starts with"),
        (len(data) - 5, "damaged or changed"),
        (len(data) // 2, "damaged or changed"),
    ):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(ValueError, match=message):
            CpPlan.from_bytes(bytes(changed))
    with pytest.raises(ValueError, match="damaged"):
        CpPlan.from_bytes(bytes(data[:-8]))
    text = json.loads(plan().to_json())
    text["arrays"]["gather"][0][5] += 1
    with pytest.raises(ValueError, match="damaged or changed"):
        CpPlan.from_json(json.dumps(text))


def test_no_bytes_do_anything_but_raise_value_error() -> None:
    data, text = plan().to_bytes(), json.loads(plan().to_json())
    rng = np.random.default_rng(0)
    head_end = 16 + int.from_bytes(data[8:16], "little")
    for _ in range(300):
        hostile = bytearray(data)
        for at in rng.integers(8, head_end if rng.integers(2) else len(data), 3):
            hostile[at] = rng.integers(256)
        if hostile != data:
            with pytest.raises(ValueError, match="no plan, or damaged"):
                CpPlan.from_bytes(bytes(hostile[: len(data) if rng.integers(2) else rng.integers(8, len(data))]))
    wrong = (None, -1, 10**30, "x", [], {}, [[1]], "[" * 10_000)
    for changes in ({field: value} for field in text for value in wrong if value != text[field]):
        with pytest.raises(ValueError, match="no plan, or damaged"):
            CpPlan.from_json(json.dumps(text | changes))
    for other in ("", "null", "[]", "[" * 100_000):
        with pytest.raises(ValueError, match="no plan, or damaged"):
            CpPlan.from_json(other)


def test_frozen_and_printable() -> None:
    with pytest.raises(FrozenInstanceError):
        plan().num_stages = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan().gather[0, 0] = 3
    assert "ranks=8" in repr(plan()) and plan().plan_hash[:8] in repr(plan())


def test_rank_plans_cover_the_plan() -> None:
    mask = builders.document(DOCUMENTS)
    base = plan()
    ranks = [base.rank_plan(rank, mask) for rank in range(8)]
    assert sum(len(r.gather_sends) for r in ranks) == sum(len(r.gather_recvs) for r in ranks) == len(base.gather)
    assert sum(len(r.reduce_sends) for r in ranks) == sum(len(r.reduce_recvs) for r in ranks) == len(base.reduce)
    rows = np.concatenate([r.key_rows_global()[: r.num_q_rows] for r in ranks])
    assert np.array_equal(np.sort(rows), np.arange(sum(DOCUMENTS)))
    for r in ranks:
        assert sum(step.k_end - step.k_begin for step in r.fwd_steps) == r.num_k_rows
        assert sum(step.k_end - step.k_begin for step in r.bwd_steps) == r.num_k_rows
        assert r.mask.s_k == r.num_k_rows and r.mask.s_q == r.num_q_rows
    with pytest.raises(ValueError, match=r"rank=8 is not in \[0, 8\)"):
        base.rank_plan(8, mask)


def test_speeds_shift_work() -> None:
    slow = plan(options=PlanOptions(chunk_rows=64, speeds=(1.0,) * 7 + (0.25,), capacities=(10,) * 8))
    weights = np.bincount(slow.partition.chunk_ranks, slow.chunk_weights, minlength=8)
    assert weights[7] < 0.5 * weights[:7].mean() and slow.gap < 0.05


def test_default_chunks() -> None:
    assert default_chunk_rows(131072, 16) == 2048 and default_chunk_rows(1 << 20, 4) == 2048
    assert default_chunk_rows(32768, 32) == 256 and default_chunk_rows(10, 4) >= 1
    for s, num_ranks in ((1, 4), (7, 3), (130, 8)):
        assert build_plan(builders.causal(s), num_ranks).partition.s == s


def test_errors() -> None:
    mask = builders.causal(100)
    for arguments, message in (
        ({"strategy": "nothing"}, "strategy 'nothing' is unknown; known: fm3"),
        ({"topology": Topology((0,))}, "topology has 1 ranks; num_ranks=2"),
        ({"options": PlanOptions(speeds=(1.0,))}, "speeds has 1 entries"),
        ({"options": PlanOptions(num_stages=0)}, "num_stages=0 must be >= 1"),
        ({"options": PlanOptions(chunk_rows=30), "strategy": "paper"}, None),
    ):
        if message is not None:
            with pytest.raises(ValueError, match=message):
                build_plan(mask, 2, **arguments)
    with pytest.raises(ValueError, match="s_q=100, s_k=90"):
        build_plan(builders.full(100, 90), 2)
    with pytest.raises(ValueError, match="layout='zigzag' is none of"):
        Strategy("x", layout="zigzag")
    with pytest.raises(ValueError, match="h_kv=3 must divide h_q=8"):
        CostModel(h_q=8, h_kv=3)
    with pytest.raises(ValueError, match=r"gather is int32\[1, 7\]"):
        replace(plan(), gather=np.zeros((1, 7), np.int32))


def test_cost_model_from_measured_rates() -> None:
    line = {"bench": "attention", "impl": "fm3", "dtype": "bfloat16", "refcheck": "pass", "date": "2026-01-01"}
    records = [
        line | {"case": "32k_full", "s_q": 32768, "phase": "fwd", "tflops_block": 600.0},
        line | {"case": "8k_full", "s_q": 8192, "phase": "fwd", "tflops_block": 900.0},
        line | {"case": "32k_full", "s_q": 32768, "phase": "bwd", "tflops_block": 400.0},
        line | {"case": "32k_full", "s_q": 32768, "phase": "bwd", "tflops_block": 450.0, "date": "2026-01-02"},
        line
        | {"case": "32k_full", "s_q": 32768, "phase": "bwd", "tflops_block": 999.0, "refcheck": "fail", "date": "2027"},
        line | {"case": "32k_window", "s_q": 32768, "phase": "fwd", "tflops_block": 1.0},
    ]
    cost = CostModel.from_records(records, h_q=32, h_kv=4)
    assert (cost.fwd_tflops, cost.bwd_tflops, cost.h_q) == (600.0, 450.0, 32)
    with pytest.raises(ValueError, match="no fm3 bfloat16 line of a \\*_full case for bwd"):
        CostModel.from_records(records[:2])


# --- cache ---------------------------------------------------------------------------------------


def test_cache_is_by_content() -> None:
    cache = PlanCache(max_plans=2)
    first = cache.get(builders.document(DOCUMENTS), 8, topology=TOPOLOGY)
    assert cache.get(builders.document(DOCUMENTS), 8, topology=TOPOLOGY) is first
    assert (cache.num_hits, cache.num_misses) == (1, 1)
    assert cache.get(builders.document(DOCUMENTS), 8, topology=TOPOLOGY, strategy="ring") is not first
    cache.get(builders.causal(4096), 8, topology=TOPOLOGY)
    assert len(cache) == 2  # the oldest went
    assert cache.get(builders.document(DOCUMENTS), 8, topology=TOPOLOGY) is not first


def test_mask_digests_differ_in_every_part() -> None:
    base = builders.document(DOCUMENTS)
    keys = {
        mask_digest(base),
        mask_digest(builders.causal_document(DOCUMENTS)),
        mask_digest(builders.document(DOCUMENTS[::-1])),
    }
    for name in ("lt_begin", "lt_end", "ut_begin", "ut_end"):
        changed = getattr(base, name).copy()
        changed[0, 0, 77] -= 1 if changed[0, 0, 77] else -1
        keys.add(mask_digest(replace(base, **{name: changed})))
    keys.add(mask_digest(replace(base, is_causal=True)))
    keys.add(mask_digest(replace(base, block_mask=np.ones((1, 1, 32, 32), np.int32))))
    assert len(keys) == 9
    assert mask_digest(base) == mask_digest(builders.document(DOCUMENTS))


def test_plan_is_bound_to_its_mask() -> None:
    mask = builders.document(DOCUMENTS)
    base = plan()
    assert base.mask_digest == mask_digest(mask)
    base.check_mask(mask_digest(mask))
    changed = mask.lt_end.copy()
    changed[0, 0, 5] -= 1  # one pair less is hidden
    other_digest = mask_digest(replace(mask, lt_end=changed))
    other = replace(base, mask_digest=other_digest)
    assert other != base and other.plan_hash != base.plan_hash  # though every transfer is the same
    with pytest.raises(ValueError, match=f"hash {base.plan_hash[:8]}.*digest {base.mask_digest}.*{other.mask_digest}"):
        base.check_mask(other.mask_digest)
    for again in (CpPlan.from_bytes(base.to_bytes()), CpPlan.from_json(base.to_json())):
        assert again.mask_digest == base.mask_digest
    replace(base, mask_digest="").check_mask(other_digest)  # a plan bound to no mask serves any


def test_cache_keeps_plans_of_a_given_partition_apart() -> None:
    cache, mask = PlanCache(), builders.document(DOCUMENTS)
    free = cache.get(mask, 8, topology=TOPOLOGY)
    given = contiguous_partition(mask.s_q, 8)
    assert free.partition != given
    assert cache.get(mask, 8, topology=TOPOLOGY, partition=given).partition == given
    assert cache.get(mask, 8, topology=TOPOLOGY) is free


def test_prefetch_and_failures() -> None:
    cache = PlanCache()
    future = cache.prefetch(builders.document(DOCUMENTS), 8, topology=TOPOLOGY)
    assert cache.get(builders.document(DOCUMENTS), 8, topology=TOPOLOGY) is future.result() == plan()
    for _ in range(2):  # a failure is raised each time and not kept
        with pytest.raises(ValueError, match="needs s_q = s_k"):
            cache.get(builders.full(10, 9), 2)
    assert len(cache) == 1


# --- timing --------------------------------------------------------------------------------------


def test_timeline_by_hand() -> None:
    """Two ranks on two nodes, full mask, no overlap: latency + rows, then compute; then gradients back."""
    cost = CostModel(h_q=1, h_kv=1, fwd_tflops=1.0, bwd_tflops=1.0, step_overhead_us=3.0, slow=Link(1.0, 10.0))
    mask = builders.full(512)
    base = build_plan(mask, 2, topology=Topology((0, 1)), strategy="contiguous_allgather", cost=cost)
    timeline = simulate_time(base, mask, cost)
    transfer_us = 256 * 512 / 1e3 + 10.0  # rows x (K and V of 128 bf16) at 1 GB/s
    fwd_us = 8 * 4 * 128**3 / 1e6 + 3.0
    assert timeline.fwd.us == pytest.approx(transfer_us + fwd_us)
    assert timeline.bwd.us == pytest.approx(2 * transfer_us + 2.5 * (fwd_us - 3.0) + 3.0)
    kept = simulate_time(base, mask, cost, keeps_gathered=True, reduce_row_factor=2.0)
    assert kept.bwd.us == pytest.approx(2 * (transfer_us - 10) + 10 + 2.5 * (fwd_us - 3.0) + 3.0)


def test_overlap_hides_transfers_and_balance_helps() -> None:
    mask = builders.document([20000, 3000, 30000, 1000, 9000, 2536])
    us = {
        name: simulate_time(build_plan(mask, 8, topology=TOPOLOGY, strategy=name), mask).total_us
        for name in ("fm3", "fm3_no_overlap", "fm3_no_balance", "dual_chunk_allgather", "ring")
    }
    assert us["fm3"] < min(us["fm3_no_overlap"], us["fm3_no_balance"], us["ring"]) < us["dual_chunk_allgather"]


def test_trace_and_json() -> None:
    mask = builders.document(DOCUMENTS)
    timeline = simulate_time(plan(), mask, with_messages=True)
    events = json.loads(timeline.to_chrome_trace())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(8))
    received = [e for e in events if e["tid"] == "receive" and e["ts"] < timeline.fwd.us]
    assert sum(e["args"]["rows"] for e in received) == plan().gather[:, 5].sum()
    # A message of a step's stage has ended before the step begins.
    begin = timeline.fwd.step_begin_us
    for stage, _, _, dst, _, _, end_us in timeline.fwd.gather:
        if timeline.fwd.step_end_us[dst, stage] > begin[dst, stage]:
            assert end_us <= begin[dst, stage]
    assert len(json.loads(timeline.to_json())["ranks"]) == 8


def test_what_is_no_mask_is_named() -> None:
    with pytest.raises(TypeError, match="build_plan: mask is a ndarray; expected a ColumnMask .*from_bounds"):
        build_plan(np.zeros((1, 1, 8, 1), np.int32), 2)  # type: ignore[arg-type]
