# SPDX-License-Identifier: Apache-2.0
"""The checks of `doctor` that need all ranks: groups, collectives by value, link speed, split attention."""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_fm3.commands._doctor_checks import Check
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention, make_partition
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.mask import builders
from paddle_fm3.testing.compare import assert_close_to_oracle
from paddle_fm3.testing.reference import attention, low_precision_attention

TIMEOUT_S = 25.0
LINK_BYTES = 4 << 20
LINK_REPEATS = 5


def group_checks(cp: int | None, config: str | None, own: list[Check]) -> tuple[int, list[Check]]:
    """This process's global rank, and checks made together; rank 0's hold what other ranks found.

    Args:
        cp: context-parallel degree; None: the config's, else every rank.
        config: name or path of a config whose layout the groups follow.
        own: what this rank found by itself; failures are passed to rank 0.
    """
    try:
        hybrid_configs = _hybrid_configs(cp, config)
    except (ValueError, FileNotFoundError) as error:  # alike on every rank: none waits for another
        return int(dist.get_rank()), [Check("layout", "fail", str(error))]
    groups.enable_gloo_subgroups()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = hybrid_configs
    fleet.init(is_collective=True, strategy=strategy)
    rank = int(dist.get_rank())
    everyone = Communicator(dist.new_group(list(range(dist.get_world_size()))), TIMEOUT_S)
    group = groups.resolve_group()

    found = [_layout_check(everyone, group)]
    if group is not None:
        communicator = Communicator(group, TIMEOUT_S)
        found.append(_guarded("collectives", lambda: _collectives(communicator)))
        found.append(_guarded("links", lambda: _link_speed(communicator)))
        found.append(_guarded("attention over ranks", lambda: _split_attention(group)))
    failed = [f"{check.name}: {check.detail}"[:300] for check in own + found if check.verdict == "fail"]
    reports = everyone.exchange({"failed": failed[:4]}, "doctor's verdicts")
    bad = [f"rank {r}: {text}" for r, report in enumerate(reports) for text in report["failed"] if r != rank]
    found.append(Check("other ranks", "fail" if bad else "ok", "; ".join(bad) or f"{len(reports)} ranks agree"))
    return rank, found


def _hybrid_configs(cp: int | None, config: str | None) -> dict[str, Any]:
    world = int(dist.get_world_size())
    if config is not None:
        from paddle_fm3.integration.paddlenlp.config_schema import load_scenario

        layout = load_scenario(config).layout
        if layout.num_gpus != world:
            raise ValueError(f"config {config} is for {layout.num_gpus} GPUs; {world} ranks were started")
        return layout.fleet_hybrid_configs()
    cp = world if cp is None else cp
    if cp < 1 or world % cp:
        raise ValueError(f"--cp {cp} must divide the {world} ranks")
    order = ["dp", "pp", "sharding", "sep", "mp"]
    return {
        "dp_degree": world // cp,
        "sep_degree": cp,
        "mp_degree": 1,
        "pp_degree": 1,
        "sharding_degree": 1,
        "order": order,
    }


def _layout_check(everyone: Communicator, group: Any) -> Check:
    """Who sits where, and which ranks share a sequence."""
    members = [everyone.rank] if group is None else list(group.ranks)
    records = everyone.exchange({"host": socket.gethostname(), "members": members}, "layout")
    hosts = sorted({record["host"] for record in records})
    cp_groups = sorted({tuple(record["members"]) for record in records})
    for rank, record in enumerate(records):
        if rank not in record["members"] or records[record["members"][0]]["members"] != record["members"]:
            return Check(
                "layout", "fail", f"rank {rank} says its group is {record['members']}; the others' lists differ"
            )
    spans = max(len({records[member]["host"] for member in members}) for members in cp_groups)
    shown = " ".join(str(list(members)) for members in cp_groups[:4]) + (" ..." if len(cp_groups) > 4 else "")
    backend = "gloo" if everyone.is_gloo else "nccl"
    detail = f"{len(records)} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}, {backend}"
    detail += f"; context-parallel groups {shown}"
    return Check("layout", "ok", f"{detail}; a group spans {spans} host{'s' if spans > 1 else ''}")


def _guarded(name: str, run: Any) -> Check:
    """A check that fails with its error's text. Every rank runs it, so none waits for one that gave up early
    longer than the communicator's limit."""
    try:
        return Check(name, "ok", run())
    except Exception as error:
        return Check(name, "fail", " ".join(str(error).split())[:300])


def _collectives(communicator: Communicator) -> str:
    """all_gather and reduce_scatter in the dtypes that context parallelism sends, checked by value."""
    rank, num_ranks = communicator.rank, communicator.num_ranks
    for dtype in ("float32", "bfloat16", "int32"):
        own = paddle.arange(1, 7).astype(dtype) * (rank + 1)  # [6]
        gathered = communicator.post_all_gather(own, f"doctor all_gather {dtype}").wait()
        for sender, received in enumerate(gathered):
            expected = np.arange(1, 7) * (sender + 1)
            if not np.array_equal(received.astype("float32").numpy(), expected):
                raise RuntimeError(
                    f"all_gather {dtype}: from rank {sender} came {received.tolist()}, expected {expected}"
                )
    for dtype in ("float32", "bfloat16"):
        parts = paddle.ones([num_ranks, 5]).astype(dtype) * (rank + 1)  # [num_ranks, 5]
        summed = communicator.post_reduce_scatter(parts, f"doctor reduce_scatter {dtype}").wait()
        expected_sum = num_ranks * (num_ranks + 1) / 2
        if not (summed.astype("float32").numpy() == expected_sum).all():
            raise RuntimeError(f"reduce_scatter {dtype}: came {summed.tolist()}, expected {expected_sum}")
    return f"all_gather and reduce_scatter right over {num_ranks} ranks (float32, bfloat16, int32)"


def _link_speed(communicator: Communicator) -> str:
    payload = paddle.zeros([LINK_BYTES // 4], "float32")
    times_s = []
    for _ in range(LINK_REPEATS):
        begin_s = time.perf_counter()
        communicator.post_all_gather(payload, "doctor link speed").wait()[-1].sum().item()
        times_s.append(time.perf_counter() - begin_s)
    received = LINK_BYTES * (communicator.num_ranks - 1)
    return (
        f"all_gather of {LINK_BYTES >> 20} MiB a rank: {received / np.median(times_s) / 1e9:.2f} GB/s received by each"
    )


def _split_attention(group: Any) -> str:
    """Outputs and gradients of this rank's rows against the oracle on the whole sequence, each way of moving keys."""
    num_ranks = groups.group_size(group)
    s, h_q, h_kv, d = 32 * num_ranks, 2, 1, 16
    lengths = [s // 2 - 5, 5, s - s // 2]
    mask = builders.causal_document(lengths)
    bounds, is_causal = mask.to_bounds()
    rng = np.random.default_rng(0)
    shapes = ((1, s, h_q, d), (1, s, h_kv, d), (1, s, h_kv, d), (1, s, h_q, d))
    q, k, v, dout = (rng.standard_normal(shape, np.float32) for shape in shapes)
    oracle = attention(q, k, v, bounds, causal=is_causal, dout=dout)
    naive = low_precision_attention(np.float32, q, k, v, bounds, causal=is_causal, dout=dout)

    worst = 0.0
    strategies = ("dual_chunk", "fm3") if paddle.get_device().startswith("cpu") else ("dual_chunk",)  # fm3 is not fp32
    for strategy in strategies:
        rows = make_partition(strategy, s, num_ranks, bounds, causal=is_causal).rows_of(groups.group_rank(group))
        tensors = [paddle.to_tensor(x[:, rows]) for x in (q, k, v)]
        for tensor in tensors:
            tensor.stop_gradient = False
        out = flashmask_cp_attention(
            *tensors, paddle.to_tensor(bounds), causal=is_causal, group=group, strategy=strategy, timeout_s=TIMEOUT_S
        )
        out.backward(paddle.to_tensor(dout[:, rows]))
        actual = {"out": out, "dq": tensors[0].grad, "dk": tensors[1].grad, "dv": tensors[2].grad}
        for name, value in actual.items():
            exact, low = getattr(oracle, name)[:, rows], getattr(naive, name)[:, rows]
            case = f"doctor, {strategy}, s={s}, {num_ranks} ranks"
            # dK and dV are sums over ranks: one more rounding a rank than the naive evaluation has.
            worst = max(worst, assert_close_to_oracle(value.numpy(), exact, low, name, case, factor=2.0 + num_ranks))
    what = f"{len(lengths)} documents, {s} tokens, {' and '.join(strategies)}"
    return f"{what}: forward and backward agree with the oracle ({worst:.0%} of the allowance)"
