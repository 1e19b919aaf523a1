# SPDX-License-Identifier: Apache-2.0
"""The Hopper forward against fp64 on hostile cases, and against fp32 at benchmark sizes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_support import (  # noqa: E402
    DTYPES,
    HEADS,
    assert_same_bits,
    check_forward,
    is_served,
    make_inputs,
    needs_sm90,
    strided,
    wide_case,
    with_heads,
)

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, RawMask, benchmark_case, resized  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, Sm90Error, visible_rows  # noqa: E402
from paddle_fm3.testing.gpu_reference import reference_head, relative_error  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES, hostile_case  # noqa: E402

pytestmark = needs_sm90


@pytest.fixture(scope="module")
def sm90() -> Sm90:
    return Sm90(_native.sm90_library())


def run_and_check(sm90: Sm90, case: AttentionCase, dtype: torch.dtype) -> None:
    inputs, mask = make_inputs(case, dtype)
    got = sm90.forward(inputs.q, inputs.k, inputs.v, mask, softmax_scale=case.softmax_scale)
    check_forward(case.name, inputs, mask, got, case.softmax_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile(sm90: Sm90, case: AttentionCase, dtype: str) -> None:
    if is_served(case):
        run_and_check(sm90, case, DTYPES[dtype])
        return
    with pytest.raises(Sm90Error, match="multiples of 8"):
        run_and_check(sm90, case, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile_at_every_head_dim(sm90: Sm90, case: AttentionCase, heads: str, dtype: str) -> None:
    run_and_check(sm90, with_heads(case, HEADS[heads]), DTYPES[dtype])


@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("kind", ["causal", "documents", "global_window", "eviction"])
def test_grouped_heads(sm90: Sm90, kind: str, heads: tuple[int, int]) -> None:
    run_and_check(sm90, wide_case(kind, heads=heads), torch.bfloat16)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["jump", "ramp"])
def test_scores_far_above_the_first_ones(sm90: Sm90, shape: str, dtype: str) -> None:
    """Rows whose scores outgrow what the kernel first refers to take the way of computing them again."""
    s = 2048
    growth = torch.where(torch.arange(s) >= s // 2, 40.0, 1.0) if shape == "jump" else torch.linspace(0.1, 60, s)
    q, v = (normal(1, s, 2, 128).to(DTYPES[dtype]) for _ in range(2))
    k = (normal(1, s, 2, 128) * growth.cuda()[None, :, None, None]).to(DTYPES[dtype])
    mask = GpuMask(None, None, False, 1, 1, s, s)
    out, lse = sm90.forward(q, k, v, mask)
    for h_idx in range(2):
        wanted = reference_head(q, k, v, torch.zeros_like(out), mask, 0, h_idx)
        assert relative_error(out[0, :, h_idx], wanted.out[:, 0]) <= 4e-3
        assert (lse[0, h_idx] - wanted.lse[0]).abs().max() <= 1e-2


def test_nan_in_a_visible_key_reaches_every_row_that_sees_it(sm90: Sm90) -> None:
    s = 512
    q, k, v = (normal(1, s, 1, 128).bfloat16() for _ in range(3))
    k[0, 300] = float("nan")
    mask = GpuMask(None, None, True, 1, 1, s, s)
    out, lse = sm90.forward(q, k, v, mask)
    assert torch.isnan(out[0, 300:]).all() and torch.isnan(lse[0, 0, 300:]).all()
    assert not torch.isnan(out[0, :300]).any() and not torch.isnan(lse[0, 0, :300]).any()


@pytest.mark.parametrize("kind", ["full", "causal", "window", "causal_document", "document"])
def test_a_spoilt_value_reaches_the_rows_that_see_it_and_no_other(sm90: Sm90, kind: str) -> None:
    """Single tiles and (full) pairs; hidden pairs of partial tiles would carry 0 times the value."""
    case = resized(benchmark_case(f"8k_{kind}"), b=1, h_q=2, h_kv=1)
    q, k, v = normal(1, 8192, 2, 128).bfloat16(), normal(1, 8192, 1, 128).bfloat16(), normal(1, 8192, 1, 128).bfloat16()
    mask = GpuMask.of(case)
    spoilt = {5: float("nan"), 3000: float("inf"), 4097: float("-inf"), 8190: float("nan")}
    clean, _ = sm90.forward(q, k, v, mask)
    for k_idx, value in spoilt.items():
        v[0, k_idx, 0, k_idx % 128] = value
    out, _ = sm90.forward(q, k, v, mask)
    shown = visible_rows(mask, 0, 0, 0, 8192)  # [s_q, s_k]
    for h_idx in range(2):
        is_spoilt = torch.zeros(8192, 128, dtype=torch.bool, device="cuda")
        for k_idx, value in spoilt.items():
            column = out[0, :, h_idx, k_idx % 128]
            is_spoilt[:, k_idx % 128] |= shown[:, k_idx]
            assert value != value or (column[shown[:, k_idx]] == value).all()
        assert torch.equal(~out[0, :, h_idx].isfinite(), is_spoilt)
        kept = out[0, :, h_idx][~is_spoilt].float() - clean[0, :, h_idx][~is_spoilt].float()
        assert kept.norm() <= 5e-3 * clean[0, :, h_idx].float().norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first", range(16))
def test_items_begin_where_documents_do(sm90: Sm90, first: int, causal: bool) -> None:
    """A document behind `first` tokens. Its items reach over its end: by as much further as they begin later."""
    lengths = [x for x in (first, 300, 700 - first) if x]
    end = np.cumsum(lengths)
    bounds = np.stack([np.repeat(end, lengths), np.repeat(end - lengths, lengths)][: 1 if causal else 2], axis=-1)
    raw = RawMask(bounds[None, None].astype(np.int32), causal)
    case = AttentionCase(f"behind_{first}", 1, 1000, 1000, 2, 1, 128, 128, build_mask=lambda: raw)
    inputs, mask = make_inputs(case, torch.bfloat16)
    got = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
    check_forward(case.name, inputs, mask, got)
    spoilt = inputs.v.clone()
    spoilt[0, 320 : 320 + first] = float("nan")  # of the next document, in two items that begin at `first`
    out, _ = sm90.forward(inputs.q, inputs.k, spoilt, mask)
    unseeing, clean = out[0, : first + 300].float(), got[0][0, : first + 300].float()  # they see none of it
    assert bool(unseeing.isfinite().all()) and (unseeing - clean).norm() <= 5e-3 * clean.norm()


def test_prepared_schedule_and_strided_inputs_change_nothing(sm90: Sm90) -> None:
    case = resized(benchmark_case("8k_causal_document"), b=1, h_q=2, h_kv=2)
    packed = normal(1, 8192, 3, 2, 128).bfloat16()  # q, k, v side by side
    mask = GpuMask.of(case)
    q, k, v = (packed[:, :, idx] for idx in range(3))
    plain = sm90.forward(*(x.contiguous() for x in (q, k, v)), mask)
    assert_same_bits("side by side", plain, sm90.forward(q, k, v, mask, schedule=sm90.build_schedule(mask)))
    out = strided(torch.zeros_like(plain[0]))
    assert_same_bits("in [b, h, s, d] order", plain, sm90.forward(*(strided(x) for x in (q, k, v)), mask, out=out))


def test_a_thousand_runs_are_equal(sm90: Sm90) -> None:
    case = resized(benchmark_case("8k_document"), b=1, h_q=4, h_kv=4)
    q, k, v = (normal(1, 8192, 4, 128).bfloat16() for _ in range(3))
    mask = GpuMask.of(case)
    schedule = sm90.build_schedule(mask)
    first = sm90.forward(q, k, v, mask)
    for repeat in range(1000):
        again = sm90.forward(q, k, v, mask, schedule=schedule if repeat % 2 else None)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]), f"repeat {repeat} differs"


@pytest.mark.parametrize(
    "name",
    ["8k_full", "8k_window", "8k_document", "32k_causal_document", "8k_global_window", "8k_random_eviction",
     "8k_causal_gqa4", "8k_causal_d64", "8k_document_d256", "8k_causal_d192v128"],
)  # fmt: skip
def test_benchmark_sizes(sm90: Sm90, name: str) -> None:
    """Every row of two heads; the timed runs of tools/bench_attention.py compare themselves too."""
    case = benchmark_case(name)
    q = torch.randn(case.b, case.s_q, case.h_q, case.d_qk, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(case.b, case.s_k, case.h_kv, d, device="cuda", dtype=torch.bfloat16) for d in (case.d_qk, case.d_v)
    )
    mask, group = GpuMask.of(case), case.h_q // case.h_kv
    out, lse = sm90.forward(q, k, v, mask)
    assert not torch.isnan(out).any() and not torch.isnan(lse).any()
    for b_idx, h_kv_idx in ((0, 0), (case.b - 1, case.h_kv - 1)):
        wanted = reference_head(q, k, v, out, mask, b_idx, h_kv_idx)
        heads = slice(h_kv_idx * group, (h_kv_idx + 1) * group)
        assert relative_error(out[b_idx, :, heads], wanted.out) <= 4e-3
        assert torch.allclose(lse[b_idx, heads], wanted.lse, rtol=0, atol=2e-3)


def test_refuses_what_it_does_not_serve(sm90: Sm90) -> None:
    inputs, mask = make_inputs(hostile_case("single"), torch.bfloat16)
    with pytest.raises(Sm90Error, match="float32"):
        sm90.forward(inputs.q.float(), inputs.k.float(), inputs.v.float(), mask)
    with pytest.raises(Sm90Error, match="up to 256"):
        run_and_check(sm90, with_heads(hostile_case("single"), (264, 264)), torch.bfloat16)
