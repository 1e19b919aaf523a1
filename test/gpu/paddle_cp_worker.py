# SPDX-License-Identifier: Apache-2.0
"""One GPU rank of test_paddle_cp_gpu.py: planned context parallelism through Paddle, each rank against the oracle.

Usage: paddle_cp_worker.py MODE [TRANSPORTS]
    MODE check    every strategy and mask kind, bytes against the plan, repeats, a long sequence against one GPU, the
                  timeline of a step
         speed    milliseconds of a forward and backward for each of TRANSPORTS (nccl,ipc)
         killed   the last rank ends in the middle of a step
         killed_new_mask   likewise, while the others wait to compare masks
         stalled  the last rank stops taking part
         refilled  the mask is written to in a way that Paddle does not count
Inputs are made on the host, as test_paddle_op_gpu.py says why.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
import paddle.distributed as dist
from plan_cases import CASES, PlanCase

from paddle_fm3 import _native, _paddle, env, flashmask_attention
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.device import Sm90Device
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.planned import plan_attention, transport_bytes
from paddle_fm3.distributed.strategy import STRATEGIES
from paddle_fm3.distributed.trace import TRACKS, Trace, hidden_us, now_us
from paddle_fm3.testing import reference
from paddle_fm3.testing.compare import assert_close_to_oracle

NUMPY_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SEQUENCE_AXIS = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
TIMEOUT_S = 10.0


def gpu_case(case: PlanCase) -> PlanCase:
    """The CPU suite's case in 16 bits and with head dims that the GPU serves."""
    call = case.call
    dtype = call.dtype if call.dtype in NUMPY_DTYPES else "bfloat16"
    return replace(case, call=replace(call, dtype=dtype, d_qk=64, d_v=64 if call.d_v == call.d_qk else 32))


def to_tensor(array: np.ndarray, *, needs_grad: bool = False) -> paddle.Tensor:
    array = np.ascontiguousarray(array)
    plain = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    return paddle.to_tensor(plain, place=paddle.CUDAPlace(current_device()), stop_gradient=not needs_grad)


def to_array(tensor: paddle.Tensor) -> np.ndarray:
    array = tensor.detach().cpu().numpy()
    return array.view(ml_dtypes.bfloat16) if tensor.dtype == paddle.bfloat16 else array


def current_device() -> int:
    return int(paddle.get_device().rpartition(":")[2])


def poison() -> None:
    paddle.device.cuda.empty_cache()
    garbage = to_tensor(np.full(32 << 20, 0xFF, np.uint8))
    del garbage


def expected_bytes(plan: CpPlan, call: object, rank: int) -> np.ndarray:
    """[2, num_ranks] that a forward and a backward send and receive: K/V twice, dK/dV once; a message that passes on
    received sums carries float32 (or the input's dtype, if the sums are to travel in that)."""
    per_row = call.b * call.h_kv * (call.d_qk + call.d_v)
    moved = np.zeros((2, plan.num_ranks), np.int64)
    for table, times in (("gather", 2), ("reduce", 1)):
        transfers = list(plan.transfers(table))
        for transfer in transfers:
            is_sum = table == "reduce" and any(
                earlier.dst_rank == transfer.src_rank
                and (earlier.stage, earlier.hop) < (transfer.stage, transfer.hop)
                and earlier.dst_row < transfer.src_row + transfer.num_rows
                and transfer.src_row < earlier.dst_row + earlier.num_rows
                for earlier in transfers
            )
            num_bytes = transfer.num_rows * per_row * (4 if is_sum and call.reduce_dtype == "float32" else 2) * times
            if transfer.src_rank == rank:
                moved[0, transfer.dst_rank] += num_bytes
            if transfer.dst_rank == rank:
                moved[1, transfer.src_rank] += num_bytes
    return moved


def moved_bytes(group: object) -> np.ndarray:
    """[2, num_ranks] sent and received so far."""
    return np.array(transport_bytes(group))


def run_case(
    case: PlanCase, plan: CpPlan, group: object, bounds: paddle.Tensor | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """This rank's outputs, and the whole inputs in the case's dtype. With bounds the mask is one seen before."""
    call, rows = case.call, plan.partition.rows_of(group.rank)
    dtype = NUMPY_DTYPES[call.dtype]
    whole = {name: x if name == "dlse" else x.astype(dtype) for name, x in call.tensors().items()}
    q, k, v = (to_tensor(whole[name][:, rows], needs_grad=True) for name in "qkv")
    dout, dlse = to_tensor(whole["dout"][:, rows]), to_tensor(whole["dlse"][:, :, rows])
    block_mask = call.block_mask()
    if bounds is None and call.bounds() is not None:
        bounds = to_tensor(call.bounds())
    poison()
    out, lse = flashmask_cp_attention(
        q, k, v, bounds, causal=call.causal, group=group, plan=plan, return_softmax_lse=True, timeout_s=TIMEOUT_S,
        block_mask=None if block_mask is None else to_tensor(block_mask), reduce_dtype=call.reduce_dtype,
        deterministic=True,
    )  # fmt: skip
    paddle.autograd.backward([out, lse], [dout, dlse])
    results = {"out": out, "lse": lse}
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        results[name] = x if x.grad is None and x.size == 0 else x.grad  # Paddle 2.6: no gradient of no elements
    return {name: to_array(x) for name, x in results.items()}, whole


def check_case(case: PlanCase, group: object) -> dict[str, np.ndarray]:
    call, plan = case.call, case.plan(group.nranks)
    before = moved_bytes(group)
    actual, whole = run_case(case, plan, group)
    np.testing.assert_array_equal(moved_bytes(group) - before, expected_bytes(plan, call, group.rank), case.name)
    arguments = {
        "startend_row_indices": call.bounds(), "causal": call.causal, "block_mask": call.block_mask(),
        "dout": whole["dout"], "dlse": whole["dlse"],
    }  # fmt: skip
    exact = reference.attention(whole["q"], whole["k"], whole["v"], **arguments)
    dtype = NUMPY_DTYPES[call.dtype]
    naive = reference.low_precision_attention(dtype, whole["q"], whole["k"], whole["v"], **arguments)
    rows = plan.partition.rows_of(group.rank)
    for name, axis in SEQUENCE_AXIS.items():
        index = tuple(rows if at == axis else slice(None) for at in range(getattr(exact, name).ndim))
        # Every rank's part of dK and dV is rounded once on its way.
        assert_close_to_oracle(
            actual[name], getattr(exact, name)[index], getattr(naive, name)[index], name, (group.rank, case.name),
            factor=2.0 + group.nranks,
        )  # fmt: skip
    return actual


def check_long(group: object, strategy: str) -> None:
    """Real sizes against the one-GPU operator on the same tensors; three layers are enqueued before anything is read."""
    s, h_q, h_kv, d = 4096 * group.nranks, 8, 2, 128
    ends = np.minimum((np.arange(s) // 3000 + 1) * 3000, s).astype(np.int32)
    bounds_array = ends[None, None, :, None]  # [1, 1, s, 1]
    plan = plan_attention(bounds_array, causal=True, num_ranks=group.nranks, strategy=strategy)
    rows = plan.partition.rows_of(group.rank)
    rng = np.random.default_rng(5)
    shapes = {"q": h_q, "k": h_kv, "v": h_kv, "dout": h_q}
    whole = {n: rng.standard_normal((1, s, h, d), np.float32).astype(ml_dtypes.bfloat16) for n, h in shapes.items()}

    q, k, v = (to_tensor(whole[name], needs_grad=True) for name in "qkv")
    out = flashmask_attention(q, k, v, to_tensor(bounds_array), causal=True)
    paddle.autograd.backward([out], [to_tensor(whole["dout"])])
    wanted = [to_array(x)[:, rows].astype(np.float32) for x in (out, q.grad, k.grad, v.grad)]

    bounds = to_tensor(bounds_array)
    own = [[to_tensor(whole[name][:, rows], needs_grad=True) for name in "qkv"] for _ in range(3)]
    douts = [to_tensor(whole["dout"][:, rows]) for _ in own]
    poison()
    outs = [
        flashmask_cp_attention(*qkv, bounds, causal=True, group=group, strategy=strategy, timeout_s=TIMEOUT_S)
        for qkv in own
    ]
    for out, dout in reversed(list(zip(outs, douts, strict=True))):
        paddle.autograd.backward([out], [dout])
    for out, qkv in zip(outs, own, strict=True):
        got = [to_array(x).astype(np.float32) for x in (out, *(x.grad for x in qkv))]
        for name, x, ref in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
            error = np.linalg.norm(x - ref) / np.linalg.norm(ref)
            assert error < 6e-3, (strategy, name, error)  # two roundings to bfloat16 are 3.3e-3


def check(group: object) -> None:
    cases = [gpu_case(case) for case in CASES if case.call.frame == "whole"]
    num_failed = 0
    for case in cases:
        began = time.monotonic()
        try:
            check_case(case, group)
            print(f"ok {case.name} {time.monotonic() - began:.2f} s", flush=True)
        except AssertionError as error:  # a wrong value does not keep the others from being seen
            num_failed += 1
            print(f"WRONG {case.name}: {str(error)[:500]}", flush=True)
    first, second = (check_case(cases[0], group) for _ in range(2))
    for name in first:
        assert np.array_equal(first[name].view(np.uint8), second[name].view(np.uint8)), f"{name} differs between runs"
    for strategy in STRATEGIES:
        try:
            check_long(group, strategy)
            print(f"ok long {strategy}", flush=True)
        except AssertionError as error:
            num_failed += 1
            print(f"WRONG long {strategy}: {str(error)[:500]}", flush=True)
    check_timeline(group)
    assert not num_failed, f"{num_failed} cases are wrong"
    print(f"passed {len(cases) + len(STRATEGIES)} cases", flush=True)


def check_timeline(group: object) -> None:
    """A step's timeline: what was computed and what came from the other ranks, between the times the host saw."""
    s, h_q, h_kv, d = 8192 * group.nranks, 8, 2, 128
    bounds_array = np.full((1, 1, s, 1), s, np.int32)  # causal and nothing else: every rank needs rows of others
    plan = plan_attention(bounds_array, causal=True, num_ranks=group.nranks)
    num_rows = plan.partition.num_rows(group.rank)
    rng = np.random.default_rng(7)
    shapes = ((h_q, True), (h_kv, True), (h_kv, True), (h_q, False))
    bounds = to_tensor(bounds_array)
    for _ in range(2):  # the first one loads kernels and connects
        q, k, v, dout = (
            to_tensor(rng.standard_normal((1, num_rows, h, d), np.float32).astype(ml_dtypes.bfloat16), needs_grad=grad)
            for h, grad in shapes
        )
        paddle.device.cuda.synchronize()
        trace, begin_us = Trace(), now_us()
        out = flashmask_cp_attention(
            q, k, v, bounds, causal=True, group=group, plan=plan, timeout_s=TIMEOUT_S, trace=trace
        )
        paddle.autograd.backward([out], [dout])
        paddle.device.cuda.synchronize()
        end_us = now_us()
    spans = trace.spans
    clock_us = 100.0  # the two clocks are read at one moment, not quite the same one
    assert all(begin_us - clock_us < span.begin_us <= span.end_us < end_us + clock_us for span in spans), spans
    by_track = {track: [span for span in spans if span.track == track] for track in TRACKS}
    moving_us, hidden = hidden_us(spans)
    assert len(by_track["compute"]) >= 2 and by_track["receive"] and moving_us > 0, spans
    step_us = end_us - begin_us
    computing_us = sum(span.end_us - span.begin_us for span in by_track["compute"])
    # A GPU does 1,000 TFLOP/s at most, and other processes may have taken any part of the step's time.
    least_us = 0.9 * s * s / 2 / group.nranks * h_q * d * (4 + 10) / 1e9
    assert least_us < computing_us < step_us * 2, (least_us, computing_us, step_us)
    path = Path(f"timeline_rank{group.rank}.json")
    trace.save(path, group.rank)
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(spans)
    print(
        f"ok timeline: {len(spans)} spans in {step_us:.0f} us; computing {computing_us:.0f} us, moving {moving_us:.0f} us, "
        f"{hidden:.0f} of these hidden",
        flush=True,
    )


def refilled(group: object) -> None:
    """The call with the stale mask gives NaN on every rank; a later one is refused on every rank."""
    case = gpu_case(CASES[0])
    plan, bounds_array = case.plan(group.nranks), case.call.bounds()
    bounds = to_tensor(bounds_array)
    good, _ = run_case(case, plan, group, bounds)
    assert np.isfinite(good["out"].astype(np.float32)).all()
    count = bounds.inplace_version
    other = bounds_array.copy()
    other[0, 0, 0, 0] += 1
    bounds.set_value(other)
    assert bounds.inplace_version == count, "this Paddle counts set_value: nothing is left to guard"
    rows = plan.partition.rows_of(group.rank)
    q, k, v = (to_tensor(case.call.tensors()[name][:, rows].astype(NUMPY_DTYPES[case.call.dtype])) for name in "qkv")
    stale = flashmask_cp_attention(
        q, k, v, bounds, causal=case.call.causal, group=group, plan=plan, return_softmax_lse=True, timeout_s=TIMEOUT_S
    )
    for name, x in zip(("out", "lse"), stale, strict=True):
        assert np.isnan(to_array(x).astype(np.float32)).all(), f"{name} of a stale mask is not NaN"
    print("stale outputs are NaN", flush=True)
    dist.stream.all_reduce(to_tensor(np.zeros(1, np.float32)), group=group)  # every rank has seen its own
    paddle.device.cuda.synchronize()
    run_case(case, plan, group, bounds)
    print("second step done", flush=True)  # must not be reached


SPEED_STRATEGIES = ("fm3", "fm3_no_overlap", "dual_chunk_allgather", "ring")


def speed(group: object, transport: str) -> None:
    """Prints a line a strategy; documents of 3,000 rows, 8,192 rows a rank, 32 query and 4 key heads of 128."""
    os.environ["FM3_GPU_TRANSPORT"] = transport  # read when the group's first call connects it
    s, h_q, h_kv, d = 8192 * group.nranks, 32, 4, 128
    ends = np.minimum((np.arange(s) // 3000 + 1) * 3000, s).astype(np.int32)[None, None, :, None]  # [1, 1, s, 1]
    rng = np.random.default_rng(6)
    device = Sm90Device(_native.sm90_library())
    begin, end = device.event_create(has_time=True), device.event_create(has_time=True)
    few = rng.standard_normal((1, 1024, h_q, d), np.float32).astype(ml_dtypes.bfloat16)
    bounds = to_tensor(ends)
    for strategy in SPEED_STRATEGIES:
        plan = plan_attention(ends, causal=True, num_ranks=group.nranks, strategy=strategy)
        num_rows = plan.partition.num_rows(group.rank)
        kept = [to_tensor(np.resize(few[:, :, :heads], (1, num_rows, heads, d))) for heads in (h_q, h_kv, h_kv, h_q)]
        times = []
        for _ in range(24):
            q, k, v = (x.detach() for x in kept[:3])
            q.stop_gradient = k.stop_gradient = v.stop_gradient = False
            dist.stream.all_reduce(to_tensor(np.zeros(1, np.float32)), group=group)  # ranks start together
            device.event_record(begin, _paddle.current_stream())
            out = flashmask_cp_attention(q, k, v, bounds, causal=True, group=group, plan=plan, timeout_s=TIMEOUT_S)
            paddle.autograd.backward([out], [kept[3]])
            device.event_record(end, _paddle.current_stream())
            times.append(device.event_elapsed_ms(begin, end))
        print(
            f"speed {transport}, NCCL_MAX_CTAS={env.nccl_max_ctas()}, {strategy}: median {np.median(times[8:]):.3f} ms, "
            f"best {min(times):.3f} ms",
            flush=True,
        )


def fail_in_the_middle(group: object, mode: str) -> None:
    case = gpu_case(CASES[0])
    plan = case.plan(group.nranks)
    bounds = to_tensor(case.call.bounds())
    run_case(case, plan, group, bounds)
    print("first step done", time.time(), flush=True)
    if group.rank == group.nranks - 1:
        if mode.startswith("killed"):
            os._exit(9)
        time.sleep(120)
    results, _ = run_case(case, plan, group, None if mode == "killed_new_mask" else bounds)
    # Not reached, or what was read is plainly no result.
    is_done = all(np.isfinite(x.astype(np.float32)).all() for x in results.values())
    print("second step done" if is_done else "second step gave NaN", flush=True)


def main() -> None:
    mode = sys.argv[1]
    dist.init_parallel_env()
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks)
    if mode == "check":
        check(group)
    elif mode == "speed":
        for transport in sys.argv[2].split(","):
            speed(dist.new_group(ranks), transport)
    elif mode == "refilled":
        refilled(group)
    else:
        fail_in_the_middle(group, mode)


if __name__ == "__main__":
    main()
