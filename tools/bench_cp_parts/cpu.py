# SPDX-License-Identifier: Apache-2.0
"""The CPU half of tools/bench_cp.py: what one rank does. Rounds of one step of each implementation in turn, so that a
machine that is slower for a while is slower for all of them."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base import core

from paddle_fm3.attention import flashmask_attention
from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.partition import LAYOUTS, Partition
from paddle_fm3.distributed.planned import plan_attention, transport_bytes
from paddle_fm3.distributed.shard import shard_rows, unshard_rows
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.trace import Trace, hidden_us
from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.schedule import build_schedule
from paddle_fm3.testing.bench import TimingStats

HEADS = {"h_q": 4, "h_kv": 2, "d": 64}
TOLERANCE = 1e-4  # largest difference to the one-device op, of values around 1
REGATHER = "_regather"  # suffix: keep_gathered=False
# Without a plan Paddle's all-gather brings all keys, then one call: "collective_".
IMPLS = (
    "collective_dual_chunk",
    "collective_dual_chunk" + REGATHER,
    *STRATEGIES,
    "fm3" + REGATHER,
)
Tensors = dict[str, paddle.Tensor]  # q, k, v, dout


@dataclass
class Impl:
    """One way to run the step on this rank, and what was seen of it."""

    name: str
    how: dict[str, Any]
    partition: Partition
    local: Tensors
    times_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of this process, all its threads
    hidden: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)
    gathered_bytes: int = 0
    held_bytes: int = 0
    results: list[paddle.Tensor] = field(default_factory=list)


def work(folder: Path, s: int, repeats: int, impls: list[str]) -> None:
    groups.enable_gloo_subgroups()
    dist.init_parallel_env()
    group = dist.new_group(list(range(dist.get_world_size())))
    mask = builders.causal_document([s // 2, s // 4, s // 8, s // 16, s - s // 2 - s // 4 - s // 8 - s // 16])
    schedule = build_schedule(mask)
    density = float(schedule.num_visible_tiles.sum()) / (-(-s // 128)) ** 2
    rng = np.random.default_rng(0)
    shapes = {"q": "h_q", "k": "h_kv", "v": "h_kv", "dout": "h_q"}
    tensors = {n: paddle.to_tensor(rng.standard_normal((1, s, HEADS[h], HEADS["d"])).astype("float32"))
               for n, h in shapes.items()}  # fmt: skip
    expected = one_device(mask, tensors)
    indices, causal = mask.to_bounds()
    mask_arguments = {"startend_row_indices": paddle.to_tensor(indices), "causal": causal}
    prepared = [prepare(name, mask_arguments, tensors, group) for name in impls]
    for impl in prepared:
        step(impl, mask_arguments, group, is_measured=False)
    for _ in range(repeats):
        for impl in prepared:
            step(impl, mask_arguments, group)
    common = {"s": s, "ranks": group.nranks, **HEADS, "density_block": round(density, 4), "threads_a_rank": 1}
    records = [{"impl": impl.name, **common, **figures(impl, expected, group)} for impl in prepared]
    if group.rank == 0:
        (folder / "rank0.json").write_text(json.dumps(records))


def one_device(mask: ColumnMask, tensors: Tensors) -> list[paddle.Tensor]:
    q, k, v = leaves(tensors)
    out = flashmask_attention(q, k, v, mask)
    out.backward(tensors["dout"])
    return [out.detach(), q.grad, k.grad, v.grad]


def leaves(tensors: Tensors) -> list[paddle.Tensor]:
    q, k, v = (tensors[name].clone().detach() for name in ("q", "k", "v"))
    for x in (q, k, v):
        x.stop_gradient = False
    return [q, k, v]


def prepare(name: str, mask_arguments: dict[str, Any], tensors: Tensors, group: Any) -> Impl:
    base = name.removesuffix(REGATHER)
    how: dict[str, Any] = {"keep_gathered": base == name}
    if base in STRATEGIES:
        nodes = Topology.uniform(group.nranks, max(1, group.nranks // 2))
        how["plan"] = plan_attention(**mask_arguments, num_ranks=group.nranks, strategy=base, topology=nodes)
        partition = how["plan"].partition
    else:
        how["strategy"] = base.removeprefix("collective_")
        partition = LAYOUTS[how["strategy"]](tensors["q"].shape[1], group.nranks)
    local = {n: shard_rows(x, partition, group.rank).detach() for n, x in tensors.items()}
    return Impl(name, how, partition, local)


def step(impl: Impl, mask_arguments: dict[str, Any], group: Any, is_measured: bool = True) -> None:
    """Forward and backward. The pass that is not timed looks at memory instead."""
    q, k, v = leaves(impl.local)
    trace = Trace()
    if not is_measured:
        tracemalloc.start()  # NumPy's arrays; Paddle counts its own
    held = held_bytes()
    received = sum(transport_bytes(group)[1])
    dist.barrier(group)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    out = flashmask_cp_attention(q, k, v, group=group, trace=trace, **mask_arguments, **impl.how)
    if not is_measured:
        impl.held_bytes = held_bytes() - held
        tracemalloc.stop()
        impl.gathered_bytes = sum(transport_bytes(group)[1]) - received
    out.backward(impl.local["dout"])
    cpu_ms = (time.process_time() - cpu_begin) * 1e3
    dist.barrier(group)  # the step ends with its last rank
    if not is_measured:
        impl.results = [out.detach(), q.grad, k.grad, v.grad]
        return
    impl.times_ms.append((time.perf_counter() - begin) * 1e3)
    impl.cpu_ms.append(cpu_ms)
    moving_us, both_us = hidden_us(trace.spans)
    impl.hidden.append(both_us / moving_us if moving_us else 1.0)
    impl.wait_ms.append(sum(span.end_us - span.begin_us for span in trace.spans if span.track == "wait") / 1e3)


def held_bytes() -> int:
    gc.collect()
    return core.host_memory_stat_current_value("Allocated", 0) + tracemalloc.get_traced_memory()[0]


def figures(impl: Impl, expected: list[paddle.Tensor], group: Any) -> dict[str, Any]:
    results = [unshard_rows(x, impl.partition, group) for x in impl.results]
    error = max(float((x - y).abs().max()) for x, y in zip(results, expected, strict=True))
    fields: dict[str, Any] = {**TimingStats.from_ms(impl.times_ms).fields(), "refcheck": error < TOLERANCE}
    own = [
        float(np.median(impl.cpu_ms)),
        impl.held_bytes,
        impl.gathered_bytes,
        np.mean(impl.hidden),
        np.mean(impl.wait_ms),
    ]
    gathered: list[Any] = []
    dist.all_gather(gathered, paddle.to_tensor(np.array(own, np.float64)), group=group)
    cpu, held, moved, hidden, waited = np.array([x.numpy() for x in gathered]).T  # [ranks] each
    fields.update(max_error=float(f"{error:.2g}"), cpu_ms=round(float(cpu.sum()), 1))
    fields.update(held_mb=round(float(held.max()) / 1e6, 2))
    plan = impl.how.get("plan")
    if plan is None:
        return fields
    fields.update(hidden_pct=round(100 * float(hidden.mean()), 1), wait_ms=round(float(waited.mean()), 1))
    fields.update(mb_gathered=round(float(moved.sum()) / 1e6, 2), imbalance=round(plan.imbalance, 4))
    return {**fields, "nodes": plan.topology.num_nodes, "stages": plan.num_stages}
