# SPDX-License-Identifier: Apache-2.0
"""Every strategy by name on every kind of mask, against the one-device operator. Runs inside plan_worker.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from cp_cases import MASKS, CpCase
from numpy.typing import NDArray
from rank_inputs import RankInputs

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import make_partition
from paddle_fm3.distributed.partition import LAYOUTS, contiguous_partition
from paddle_fm3.distributed.planned import plan_attention, transport_bytes
from paddle_fm3.distributed.shard import rank_order, shard_rows, token_order
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.topology import Topology

LENGTHS = {name: 75 for name in MASKS} | {"causal_documents": 128}  # 75: uneven for 2, 4 and 8 ranks
SEQUENCE_AXIS = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
TOLERANCE = 2e-5  # fp32 results of magnitude 1 to 10; a wrong mask bit or a lost share costs 1e-2 or more


def grid_cases() -> list[CpCase]:
    return [CpCase(name, name, LENGTHS[name], h_q=4, h_kv=2, seed=31 + at) for at, name in enumerate(MASKS)]


def on_one_device(case: CpCase) -> dict[str, NDArray[np.float32]]:
    """out, lse, dq, dk, dv of the whole sequence."""
    whole = RankInputs.of(case, np.arange(case.s), None)
    out, lse = flashmask_attention(
        whole.q, whole.k, whole.v, whole.bounds, causal=case.causal, return_softmax_lse=True
    )  # fmt: skip
    return whole.backward(out, lse)


def largest_error(results: dict[str, Any], expected: dict[str, Any], rows: NDArray[np.int64]) -> float:
    """Over out, lse and gradients; infinite if -inf is not where it should be."""
    worst = 0.0
    for name, axis in SEQUENCE_AXIS.items():
        wanted = np.take(expected[name], rows, axis)
        if not np.array_equal(np.isfinite(wanted), np.isfinite(results[name])):
            return float("inf")
        finite = np.isfinite(wanted)
        worst = max([worst, *np.abs(wanted - results[name])[finite].ravel()])
    return float(worst)


def grid(group: Any, topology: Topology) -> dict[str, float]:
    """'strategy, mask' -> largest error of this rank."""
    errors = {}
    for case in grid_cases():
        expected = on_one_device(case)
        for strategy in (*STRATEGIES, *LAYOUTS):
            settings = {} if strategy in LAYOUTS else {"topology": topology}
            partition = make_partition(
                strategy, case.s, group.nranks, case.bounds(), causal=case.causal, **settings
            )  # fmt: skip
            rows = partition.rows_of(group.rank)
            inputs = RankInputs.of(case, rows, group)
            results = inputs.backward(*inputs.attend(strategy=strategy, **settings))
            errors[f"{strategy}, {case.name}"] = largest_error(results, expected, rows)
    return errors


def check_names(group: Any | None) -> None:
    """A strategy by name is its plan; another cut or another mask's plan is refused with the values."""
    num_ranks, rank = groups.group_size(group), groups.group_rank(group)
    case = CpCase("names", "causal_documents", 128, seed=40)
    bounds = paddle.to_tensor(case.bounds())
    plan = plan_attention(bounds, causal=True, num_ranks=num_ranks)
    assert make_partition("fm3", case.s, num_ranks, bounds, causal=True) == plan.partition
    results = []
    for how in ({"strategy": "fm3"}, {"plan": plan}, {"strategy": STRATEGIES["fm3"], "partition": plan.partition}):
        inputs = RankInputs.of(case, plan.partition.rows_of(rank), group)
        results.append(inputs.backward(*inputs.attend(**how)))
    for name in results[0]:
        for again in results[1:]:
            np.testing.assert_array_equal(again[name], results[0][name], err_msg=name)
    with pytest.raises(ValueError, match="strategy='fm3' cuts by the work of the mask: pass startend_row_indices"):
        make_partition("fm3", case.s, num_ranks)
    with pytest.raises(ValueError, match="strategy='zigzag' is unknown; known: dual_chunk, contiguous, fm3, "):
        make_partition("zigzag", case.s, num_ranks)
    hidden = paddle.to_tensor(np.random.default_rng(7).standard_normal((2, case.s, 3)).astype("float32"))
    ordered = rank_order(hidden, plan.partition)
    begins = np.cumsum([0, *(plan.partition.num_rows(r) for r in range(num_ranks))])
    own = ordered.numpy()[:, begins[rank] : begins[rank + 1]]
    np.testing.assert_array_equal(own, shard_rows(hidden, plan.partition, rank).numpy())
    np.testing.assert_array_equal(token_order(ordered, plan.partition).numpy(), hidden.numpy())

    other = plan_attention(paddle.full([1, 1, case.s, 1], case.s, "int32"), causal=True, num_ranks=num_ranks)
    rows = other.partition.rows_of(rank)
    with pytest.raises(ValueError, match=f"made for the mask with digest {other.mask_digest}.*{plan.mask_digest}"):
        RankInputs.of(case, rows, group).attend(plan=other)
    if group is None:
        for written in ("q", "out"):  # what backward reads must be as forward left it
            inputs = RankInputs.of(case, rows, None)
            inputs.q = inputs.q * 1.0
            out, _ = inputs.attend(plan=plan)
            with paddle.no_grad():
                (inputs.q if written == "q" else out).add_(paddle.ones([1]))
            with pytest.raises(OSError, match=f"{written} was written to in place between forward and backward"):
                out.sum().backward()
        return
    short = contiguous_partition(case.s, num_ranks + 1)
    with pytest.raises(ValueError, match=f"the partition cuts s={case.s} for {num_ranks + 1} ranks"):
        RankInputs.of(case, plan.partition.rows_of(rank), group).attend(strategy="fm3", partition=short)
    own_columns = CpCase("names", "causal_documents", 128, frame="own", seed=40)
    wanted = r"strategy=.fm3. plans from the whole mask: pass all s=128 on every rank \(local rows by rank are \["
    with pytest.raises(ValueError, match=wanted):
        RankInputs.of(own_columns, plan.partition.rows_of(rank), group).attend(strategy="fm3")


def check_gathered_again(group: Any) -> None:
    """keep_gathered=False with a plan: the same bits; the rows of the gather travel once more, in backward."""
    case = CpCase("kept", "causal_documents", 128, h_q=4, h_kv=2, seed=41)
    for strategy in ("fm3", "ring", "contiguous_allgather"):
        partition = make_partition(strategy, case.s, group.nranks, case.bounds(), causal=True)
        results, moved = [], []
        for keep_gathered in (True, False):
            inputs = RankInputs.of(case, partition.rows_of(group.rank), group)
            before = np.array(transport_bytes(group))
            out, lse = inputs.attend(strategy=strategy, keep_gathered=keep_gathered)
            between = np.array(transport_bytes(group))
            results.append(inputs.backward(out, lse))
            moved.append((between - before, np.array(transport_bytes(group)) - between))
        for name in results[0]:
            np.testing.assert_array_equal(results[1][name], results[0][name], err_msg=f"{strategy} {name}")
        (gathered, reduced), (gathered_too, both) = moved
        np.testing.assert_array_equal(gathered, gathered_too)
        np.testing.assert_array_equal(both, gathered + reduced)
