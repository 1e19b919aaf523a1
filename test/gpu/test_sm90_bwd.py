# SPDX-License-Identifier: Apache-2.0
"""The Hopper backward against the textbook formulas in fp64, on hostile cases and on ones that reach every path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_support import (  # noqa: E402
    DTYPES,
    HEADS,
    KINDS,
    assert_same_bits,
    check_backward,
    is_served,
    make_inputs,
    needs_sm90,
    strided,
    values,
    wide_case,
    with_heads,
)

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, RawMask  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, Sm90Error  # noqa: E402
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Gradients, Sm90Backward, reference_forward  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES, hostile_case  # noqa: E402

pytestmark = needs_sm90


@pytest.fixture(scope="module")
def backend() -> Sm90Backward:
    return Sm90Backward(_native.sm90_library())


def run_and_check(
    backend: Sm90Backward, case: AttentionCase, dtype: torch.dtype, *, has_deterministic: bool = True
) -> None:
    """Run 0 is the free mode, run 1 the deterministic one."""
    inputs, mask = make_inputs(case, dtype)
    got = [
        backend.backward(inputs, mask, softmax_scale=case.softmax_scale, is_deterministic=is_deterministic)
        for is_deterministic in ((False, True) if has_deterministic else (False,))
    ]
    check_backward(case.name, inputs, mask, *got, softmax_scale=case.softmax_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile(backend: Sm90Backward, case: AttentionCase, dtype: str) -> None:
    if is_served(case):
        run_and_check(backend, case, DTYPES[dtype])
        return
    with pytest.raises(Sm90Error, match="multiples of 8"):
        run_and_check(backend, case, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile_at_every_head_dim(backend: Sm90Backward, case: AttentionCase, heads: str, dtype: str) -> None:
    run_and_check(backend, with_heads(case, HEADS[heads]), DTYPES[dtype])


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("d", [64, 80, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_wide(backend: Sm90Backward, kind: str, d: int, heads: tuple[int, int]) -> None:
    run_and_check(backend, wide_case(kind, heads=heads, d=d), torch.bfloat16, has_deterministic=False)


@pytest.mark.parametrize("d", [(192, 128), (192, 192), (160, 128), (256, 256), (136, 200)], ids=str)
@pytest.mark.parametrize("kind", ["causal", "documents", "global_window"])
def test_wide_heads(backend: Sm90Backward, kind: str, d: tuple[int, int]) -> None:
    run_and_check(backend, wide_case(kind, s=700, d=d), torch.bfloat16)


def test_ring_is_reused(backend: Sm90Backward) -> None:
    """More heads than the ring's 161 slots: some serve several heads in turn."""
    run_and_check(backend, wide_case("causal", s=2048, b=6, heads=(32, 32)), torch.bfloat16, has_deterministic=False)


@pytest.mark.parametrize("d", [64, 128, (192, 128), 256], ids=str)
@pytest.mark.parametrize("heads", [(16, 2), (12, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_group(backend: Sm90Backward, kind: str, heads: tuple[int, int], d: int | tuple[int, int]) -> None:
    """Few key tiles and many query heads each: up to d = 128, and at 192/128, the plan cuts the groups, and fp32 sums of dK
    and dV meet in memory (test_choices of test/unit/test_sm90_bwd_plan.py has such sizes). Repeats are bitwise equal
    there, too."""
    case = wide_case(kind, s=1500, b=3, heads=heads, d=d)
    inputs, mask = make_inputs(case, torch.bfloat16)
    free = backend.backward(inputs, mask)
    first = backend.backward(inputs, mask, is_deterministic=True)
    check_backward(case.name, inputs, mask, free, first)
    for _ in range(3):
        again = backend.backward(inputs, mask, is_deterministic=True)
        assert_same_bits(case.name, values(first), values(again))


@pytest.mark.parametrize("shift", [0, 17])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_every_number_of_steps(backend: Sm90Backward, d: int, heads: tuple[int, int], shift: int) -> None:
    """Key tile n is visited by n row tiles a head, the second half of them apart from the first: d = 64 takes two steps at a
    time. With a shift no step is whole at the ends."""
    num_steps = np.arange(14).repeat(128)
    first_end = num_steps // 2 * 64 + shift * (num_steps > 1)
    second_begin = first_end + 64 * (1 + num_steps % 3)
    second_end = second_begin + (num_steps - num_steps // 2) * 64
    bounds = np.stack([first_end, second_begin, second_end, np.full(14 * 128, 1088)], -1).astype(np.int32)
    case = AttentionCase(
        f"steps_d{d}", 1, 1088, 14 * 128, *heads, d, d, build_mask=lambda: RawMask(bounds[None, None], False)
    )
    run_and_check(backend, case, torch.bfloat16)


@pytest.mark.parametrize("d", [64, 128, (192, 128), 256], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (16, 2)], ids=str)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_kept_workspace_s_sums_are_not_cleared_again(
    backend: Sm90Backward, is_deterministic: bool, heads: tuple[int, int], d: int | tuple[int, int]
) -> None:
    """One workspace for calls under several masks, a window (whose parts come in turns) among them."""
    workspace = None
    for kind in ("causal", "window", "documents", "window", "full", "causal"):
        case = wide_case(kind, s=1500, b=2, heads=heads, d=d)
        inputs, mask = make_inputs(case, torch.bfloat16)
        lists, grads = backend.build_schedule(mask), backend.empty_gradients(inputs)
        params = backend.params(inputs, mask, grads, is_deterministic=is_deterministic, lists=lists)
        if workspace is None:
            workspace = backend.prepare(params)
            workspace.fill_(0xA5)
            params.zero_sums = 1
        else:
            params.workspace, params.workspace_bytes, params.zero_sums = workspace.data_ptr(), workspace.numel(), 2
        backend.run(params)
        check_backward(case.name, inputs, mask, grads)


def test_rooms_of_parts_are_reused(backend: Sm90Backward) -> None:
    """Twelve key heads in parts, rooms for eight."""
    run_and_check(backend, wide_case("causal", s=8192, b=3, heads=(32, 4)), torch.bfloat16)


@pytest.mark.parametrize("d", [64, 128, (192, 128), 192, 256], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_repeats_bitwise(backend: Sm90Backward, kind: str, d: int | tuple[int, int]) -> None:
    case = wide_case(kind, s=3000, b=2, heads=(8, 4), d=d)
    inputs, mask = make_inputs(case, torch.bfloat16)
    first = backend.backward(inputs, mask, is_deterministic=True)
    check_backward(case.name, inputs, mask, first)
    for _ in range(5):
        again = backend.backward(inputs, mask, is_deterministic=True)
        assert_same_bits(case.name, values(first), values(again))


def test_deterministic_groups_that_walk_down(backend: Sm90Backward) -> None:
    """Enough key heads in groups that key tiles are added in ascending order (test_a_fixed_order_walks_down_only_by_key
    of test/unit/test_sm90_bwd_plan.py has these sizes)."""
    inputs, mask = make_inputs(wide_case("causal", s=2048, b=8, heads=(16, 8), d=64), torch.bfloat16)
    first = backend.backward(inputs, mask, is_deterministic=True)
    check_backward("walks down", inputs, mask, first)
    for _ in range(20):
        assert_same_bits("walks down", values(first), values(backend.backward(inputs, mask, is_deterministic=True)))


@pytest.mark.parametrize(("kind", "s", "heads"), [("causal", 32768, (32, 4)), ("full", 8192, (8, 8))], ids=str)
def test_a_swap_of_two_addends_would_show(backend: Sm90Backward, kind: str, s: int, heads: tuple[int, int]) -> None:
    """All keys are one, so dQ is what rounding leaves of sums that cancel: a row tile whose parts are added in another
    order differs nearly everywhere, where rounding to bf16 would hide it. At 32K the sums do not fit into L2."""
    b, d = 1, 128
    case = wide_case(kind, s=s, b=b, heads=heads, d=d)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn((b, s, h, d), generator=generator, device="cuda", dtype=torch.bfloat16)
        for h in (heads[0], heads[1], heads[1], heads[0])
    )
    k.copy_(k[:, :1].expand_as(k).clone())
    mask = GpuMask.of(case)
    out, lse = Sm90(backend.library).forward(q, k, v, mask)
    inputs = BackwardInputs(q, k, v, out, lse, dout)
    first = values(backend.backward(inputs, mask, is_deterministic=True))
    for _ in range(8):
        assert_same_bits(case.name, first, values(backend.backward(inputs, mask, is_deterministic=True)))


def test_a_thousand_deterministic_runs_are_equal(backend: Sm90Backward) -> None:
    inputs, mask = make_inputs(wide_case("documents", s=2000, b=1, heads=(8, 4)), torch.bfloat16)
    lists = backend.build_schedule(mask)
    first = values(backend.backward(inputs, mask, is_deterministic=True))
    for repeat in range(1000):
        again = backend.backward(inputs, mask, is_deterministic=True, lists=lists if repeat % 2 else None)
        assert all(torch.equal(x, y) for x, y in zip(first, values(again), strict=True)), f"repeat {repeat} differs"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128, (192, 128), 256], ids=str)
@pytest.mark.parametrize("scale", [-0.1, 1.0, 1e-4, 1e-30, -1e-37, 0.0])
def test_scales(backend: Sm90Backward, scale: float, d: int | tuple[int, int], dtype: str) -> None:
    """Up to d = 128, and at 192/128, lse is divided by the scale (test/unit/test_sm90_bwd_rows.py)."""
    run_and_check(backend, replace(wide_case("window", s=700, d=d), softmax_scale=scale), DTYPES[dtype])


@pytest.mark.parametrize("kind", ["full", "documents", "causal"])
@pytest.mark.parametrize("d", [64, 128, (192, 128)], ids=str)
def test_rows_whose_lse_are_far_apart(backend: Sm90Backward, d: int | tuple[int, int], kind: str) -> None:
    """A row tile that takes the lse of another one shows in every element. Each CTA has one or two key tiles here: at
    its start all stages are free, and the loader is as far ahead as it can be."""
    case = wide_case(kind, s=2048, b=1, heads=(8, 8), d=d)
    inputs, mask = make_inputs(case, torch.bfloat16)
    size = torch.tensor([1, 8, 0.125], device="cuda").repeat_interleave(64).repeat(11)[:2048]
    q = inputs.q * size[:, None, None].to(torch.bfloat16)
    out, lse = reference_forward(q, inputs.k, inputs.v, mask)
    inputs = replace(inputs, q=q, out=out, lse=lse)
    check_backward(case.name, inputs, mask, *(backend.backward(inputs, mask) for _ in range(10)))


@pytest.mark.parametrize("d", [64, 128, (192, 128)], ids=str)
def test_what_nan_in_lse_and_dlse_reaches(backend: Sm90Backward, d: int | tuple[int, int]) -> None:
    """Its row, and the keys that the row sees; from delta nothing gets into dV."""
    case = wide_case("causal", s=512, b=1, heads=(2, 2), d=d)
    inputs, mask = make_inputs(case, torch.bfloat16)
    lse, dlse = inputs.lse.clone(), torch.zeros_like(inputs.lse)
    lse[0, 0, 200] = float("nan")
    dlse[0, 1, 300] = float("nan")
    got = backend.backward(replace(inputs, lse=lse, dlse=dlse), mask)
    for head, row in ((0, 200), (1, 300)):
        is_row = torch.arange(512, device="cuda") == row
        assert torch.equal(got.dq[0, :, head].isnan().all(1), is_row)
        assert torch.equal(got.dq[0, :, head].isnan().any(1), is_row)
        assert bool(got.dk[0, : row + 1, head].isnan().all())
        assert bool(got.dv[0, : row + 1, head].isnan().all()) is (head == 0)
    assert not got.dv[0, :, 1].isnan().any() and not got.dv[0, 201:, 0].isnan().any()


def test_strided(backend: Sm90Backward) -> None:
    """q, k, v, dout and the gradients as slices of wider tensors, in [b, h, s, d] memory order."""
    plain, mask = make_inputs(wide_case("window", s=500, heads=(4, 2)), torch.bfloat16)
    inputs = replace(plain, **{name: strided(getattr(plain, name)) for name in ("q", "k", "v", "out", "dout")})
    grads = Gradients(*(strided(x) for x in (plain.q, plain.k, plain.v)))
    got = backend.backward(inputs, mask, grads=grads)
    check_backward("strided", plain, mask, got)
    for name, x in got.items():
        edge = x._base if x._base is not None else x
        assert bool(edge[:, :, 0].isnan().all() and edge[..., :8].isnan().all()), f"{name}: written outside its view"


def test_refuses_what_it_does_not_serve(backend: Sm90Backward) -> None:
    inputs, mask = make_inputs(hostile_case("single"), torch.bfloat16)
    inputs = replace(inputs, q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
    with pytest.raises(Sm90Error, match="float32"):
        backend.backward(inputs, mask)
