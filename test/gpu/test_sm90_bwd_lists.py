# SPDX-License-Identifier: Apache-2.0
"""The backward's prepared schedule on a GPU: the same lists as on the host, where test/unit/test_sm90_bwd_lists.py and
test_sm90_bwd_steps.py look at them, and the same gradients, bit for bit, as of calls that make their own."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bwd_lists_support import BLOCK_KS, build, take_apart  # noqa: E402
from gpu_support import (  # noqa: E402
    DTYPES,
    HEADS,
    KINDS,
    assert_same_bits,
    check_backward,
    is_served,
    make_inputs,
    needs_sm90,
    values,
    wide_case,
)
from schedule_support import mask_of  # noqa: E402

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, RawMask, benchmark_case, benchmark_names, resized  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, Sm90Error  # noqa: E402
from paddle_fm3.testing.gpu_call_bwd import Sm90Backward  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES  # noqa: E402

pytestmark = needs_sm90
CASES = [case for case in HOSTILE_CASES if case.s_q > 0 and case.s_k > 0 and case.b > 0]


@pytest.fixture(scope="module")
def backend() -> Sm90Backward:
    return Sm90Backward(_native.sm90_library())


def short_documents(least: int, most: int) -> AttentionCase:
    """128K tokens in more documents than are looked at (cuts.h), three long ones among the first."""

    def build_mask() -> RawMask:
        lengths = np.random.default_rng(most).integers(least, most + 1, 131_072)
        lengths[[0, 50, 200]] = 901
        ends = np.cumsum(lengths)
        ends = np.minimum(ends[: np.searchsorted(ends, 131_072) + 1], 131_072)
        return RawMask(np.repeat(ends, np.diff(ends, prepend=0)).astype(np.int32)[None, None, :, None], True)

    return AttentionCase(f"documents_of_{least}_to_{most}", 1, 131_072, 131_072, 1, 1, 128, 128, build_mask=build_mask)


@pytest.mark.parametrize(
    "case",
    [
        *CASES, *(benchmark_case(f"32k_{kind}") for kind in ("causal_document", "random_eviction")),
        short_documents(1, 1), short_documents(20, 100),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_device_and_host_make_the_same_lists(host: ctypes.CDLL, backend: Sm90Backward, case: AttentionCase) -> None:
    mask, gpu_mask = mask_of(case), GpuMask.of(case)
    made = backend.build_schedule(gpu_mask)
    assert made.memory.numel() == host.lists_bytes(ctypes.byref(mask.view))
    made.memory.fill_(0xA5)  # nothing may rely on what it holds
    backend.fill_schedule(made)
    found = made.memory.cpu().numpy()
    for block_k in BLOCK_KS:
        on_host, on_device = (astuple(x) for x in (build(host, mask, block_k), take_apart(host, mask, found, block_k)))
        for one, other in zip(on_host, on_device, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if is_served(case)], ids=lambda case: case.name)
def test_hostile(backend: Sm90Backward, case: AttentionCase, dtype: str) -> None:
    inputs, mask = make_inputs(case, DTYPES[dtype])
    lists, scale = backend.build_schedule(mask), case.softmax_scale
    given = backend.backward(inputs, mask, softmax_scale=scale, is_deterministic=True, lists=lists)
    own = backend.backward(inputs, mask, softmax_scale=scale, is_deterministic=True)
    assert_same_bits(case.name, values(own), values(given))
    free = backend.backward(inputs, mask, softmax_scale=scale, lists=lists)
    check_backward(case.name, inputs, mask, free, given, softmax_scale=scale)


@pytest.mark.parametrize("kind", KINDS)
def test_one_schedule_serves_every_head_dim_group_and_mode(backend: Sm90Backward, kind: str) -> None:
    schedule = None
    for name, dims in HEADS.items():
        for heads in ((4, 2), (8, 1), (3, 3)):
            case = wide_case(kind, d=dims, heads=heads)
            inputs, mask = make_inputs(case, torch.bfloat16)
            if schedule is None:
                kept, schedule = mask, backend.build_schedule(mask)
            given = backend.backward(inputs, kept, is_deterministic=True, lists=schedule)
            own = backend.backward(inputs, mask, is_deterministic=True)
            assert_same_bits(f"{case.name} {name} {heads}", values(own), values(given))
            if heads == (8, 1):
                check_backward(case.name, inputs, mask, backend.backward(inputs, kept, lists=schedule))


@pytest.mark.parametrize("d", [(128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("name", benchmark_names())
def test_benchmark_masks(backend: Sm90Backward, name: str, d: tuple[int, int]) -> None:
    case = resized(benchmark_case(name), b=1, h_q=2, h_kv=1, d_qk=d[0], d_v=d[1])
    q, k, v, dout = (
        torch.randn((1, s, h, x), device="cuda", dtype=torch.bfloat16)
        for s, h, x in ((case.s_q, 2, d[0]), (case.s_k, 1, d[0]), (case.s_k, 1, d[1]), (case.s_q, 2, d[1]))
    )
    mask = GpuMask.of(case)
    out, lse = Sm90(backend.library).forward(q, k, v, mask)
    inputs = replace(make_inputs(wide_case("full", s=1), torch.bfloat16)[0], q=q, k=k, v=v, out=out, lse=lse,
                     dout=dout, dlse=None)  # fmt: skip
    own = values(backend.backward(inputs, mask, is_deterministic=True))
    given = backend.backward(inputs, mask, is_deterministic=True, lists=backend.build_schedule(mask))
    assert_same_bits(name, own, values(given))


def test_a_schedule_is_of_the_mask_as_it_was(backend: Sm90Backward) -> None:
    """Refilling the bounds changes nothing until the schedule is made again: the gradients are those of one mask."""
    inputs, mask = make_inputs(wide_case("documents"), torch.bfloat16)
    lists = backend.build_schedule(mask)
    before = values(backend.backward(inputs, mask, is_deterministic=True, lists=lists))
    assert mask.bounds is not None
    mask.bounds[..., 0] = mask.bounds[..., 0].clamp(max=500)
    mask.bounds[..., 1] = 0
    stale = values(backend.backward(inputs, mask, is_deterministic=True, lists=lists))
    assert_same_bits("stale", before, stale)
    backend.fill_schedule(lists)
    again = values(backend.backward(inputs, mask, is_deterministic=True, lists=lists))
    assert_same_bits("made again", values(backend.backward(inputs, mask, is_deterministic=True)), again)
    assert not torch.equal(before[1], again[1])


def test_a_schedule_of_another_mask_is_refused(backend: Sm90Backward) -> None:
    inputs, mask = make_inputs(wide_case("documents"), torch.bfloat16)
    _, other = make_inputs(wide_case("documents", s=999), torch.bfloat16)
    twin = replace(mask, bounds=None if mask.bounds is None else mask.bounds.clone())
    for made_for in (other, twin):
        with pytest.raises(Sm90Error, match="was made for a mask with b=2, h_mask=1, s_q=.*; the call's has b=2"):
            backend.backward(inputs, mask, lists=backend.build_schedule(made_for))


def test_graph_of_a_prepared_backward(backend: Sm90Backward) -> None:
    """Captured with lists prepared before, replayed many times, on other values."""
    case = resized(benchmark_case("8k_causal_document"), b=1, h_q=4, h_kv=2)
    inputs, mask = make_inputs(case, torch.bfloat16, has_dlse=False)
    lists, grads = backend.build_schedule(mask), backend.empty_gradients(inputs)
    params = backend.params(inputs, mask, grads, is_deterministic=True, lists=lists)
    workspace = backend.prepare(params)
    backend.run(params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(params)
    for _ in range(3):
        inputs.dout.normal_()
        for x in (workspace, *values(grads)):
            x.view(torch.uint8).fill_(0x5A)
        graph.replay()
        replayed = tuple(x.clone() for x in values(grads))
        assert_same_bits("replay", replayed, values(backend.backward(inputs, mask, is_deterministic=True)))
