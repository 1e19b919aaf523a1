# SPDX-License-Identifier: Apache-2.0
"""The Hopper forward against the fp64 oracle on hostile cases, and against fp32 at benchmark sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing import reference  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, benchmark_case, make_inputs, resized  # noqa: E402
from paddle_fm3.testing.compare import assert_close_to_oracle  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, Sm90Error, reference_rows  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES, hostile_case  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so"),
]
DTYPES = {"bf16": (torch.bfloat16, ml_dtypes.bfloat16), "fp16": (torch.float16, np.float16)}
HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


@pytest.fixture(scope="module")
def sm90() -> Sm90:
    return Sm90(_native.sm90_library())


def to_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).cuda().to(dtype)


def check_against_oracle(sm90: Sm90, case: AttentionCase, dtype: str) -> None:
    torch_dtype, numpy_dtype = DTYPES[dtype]
    inputs = make_inputs(case, numpy_dtype)
    q, k, v = (to_torch(x, torch_dtype) for x in (inputs.q, inputs.k, inputs.v))
    out, lse = sm90.forward(q, k, v, GpuMask.of(case), softmax_scale=case.softmax_scale)
    arguments = case.call_arguments()
    oracle = reference.attention(inputs.q, inputs.k, inputs.v, **arguments)
    low = reference.low_precision_attention(numpy_dtype, inputs.q, inputs.k, inputs.v, **arguments)
    actual = out.float().cpu().numpy().astype(numpy_dtype)
    assert_close_to_oracle(actual, oracle.out, low.out, "out", case)
    assert_close_to_oracle(lse.cpu().numpy(), oracle.lse, low.lse, "lse", case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile(sm90: Sm90, case: AttentionCase, dtype: str) -> None:
    if case.d_qk % 8 == 0 and case.d_v % 8 == 0:
        check_against_oracle(sm90, case, dtype)
    else:
        with pytest.raises(Sm90Error, match="multiples of 8"):
            check_against_oracle(sm90, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"d{heads[0]}_{heads[1]}")
@pytest.mark.parametrize("name", ["documents_mixed", "global_window", "random_nc4_385x257_h4_2_hm2_d128_block_mask"])
def test_every_head_dim(sm90: Sm90, name: str, heads: tuple[int, int], dtype: str) -> None:
    case = hostile_case(name)
    check_against_oracle(sm90, replace(case, name=f"{name}_d{heads}", d_qk=heads[0], d_v=heads[1]), dtype)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", ["jump", "ramp"])
def test_scores_far_above_the_first_ones(sm90: Sm90, shape: str) -> None:
    """Rows whose scores outgrow what the kernel first refers to take the way of computing them again."""
    s = 2048
    growth = torch.where(torch.arange(s) >= s // 2, 40.0, 1.0) if shape == "jump" else torch.linspace(0.1, 60, s)
    q, v = (normal(1, s, 2, 128).bfloat16() for _ in range(2))
    k = (normal(1, s, 2, 128) * growth.cuda()[None, :, None, None]).bfloat16()
    mask = GpuMask(None, None, False, 1, 1, s, s)
    out, lse = sm90.forward(q, k, v, mask)
    for h_idx in range(2):
        wanted, wanted_lse = reference_rows(q, k, v, mask, 0, h_idx, 0, s)
        assert (out[0, :, h_idx].float() - wanted).norm() <= 4e-3 * wanted.norm()
        assert (lse[0, h_idx] - wanted_lse).abs().max() <= 1e-2


def test_nan_in_a_visible_key_reaches_every_row_that_sees_it(sm90: Sm90) -> None:
    s = 512
    q, k, v = (normal(1, s, 1, 128).bfloat16() for _ in range(3))
    k[0, 300] = float("nan")
    mask = GpuMask(None, None, True, 1, 1, s, s)
    out, lse = sm90.forward(q, k, v, mask)
    assert torch.isnan(out[0, 300:]).all() and torch.isnan(lse[0, 0, 300:]).all()
    assert not torch.isnan(out[0, :300]).any() and not torch.isnan(lse[0, 0, :300]).any()


def test_prepared_schedule_and_strided_inputs_change_nothing(sm90: Sm90) -> None:
    case = resized(benchmark_case("8k_causal_document"), b=1, h_q=2, h_kv=2)
    packed = normal(1, 8192, 3, 2, 128).bfloat16()  # q, k, v side by side
    mask = GpuMask.of(case)
    q, k, v = (packed[:, :, idx] for idx in range(3))
    plain = sm90.forward(*(x.contiguous() for x in (q, k, v)), mask)
    strided = sm90.forward(q, k, v, mask, schedule=sm90.build_schedule(mask))
    assert torch.equal(plain[0], strided[0]) and torch.equal(plain[1], strided[1])


def test_a_thousand_runs_are_equal(sm90: Sm90) -> None:
    case = resized(benchmark_case("8k_document"), b=1, h_q=4, h_kv=4)
    q, k, v = (normal(1, 8192, 4, 128).bfloat16() for _ in range(3))
    mask = GpuMask.of(case)
    schedule = sm90.build_schedule(mask)
    first = sm90.forward(q, k, v, mask)
    for repeat in range(1000):
        again = sm90.forward(q, k, v, mask, schedule=schedule if repeat % 2 else None)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]), f"repeat {repeat} differs"


@pytest.mark.parametrize("name", ["8k_full", "8k_window", "8k_document", "32k_causal_document", "8k_global_window",
                                  "8k_random_eviction", "8k_causal_gqa4", "8k_causal_d64", "8k_document_d256"])  # fmt: skip
def test_benchmark_sizes(sm90: Sm90, name: str) -> None:
    case = benchmark_case(name)
    q = torch.randn(case.b, case.s_q, case.h_q, case.d_qk, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(case.b, case.s_k, case.h_kv, d, device="cuda", dtype=torch.bfloat16)
            for d in (case.d_qk, case.d_v))  # fmt: skip
    mask = GpuMask.of(case)
    out, lse = sm90.forward(q, k, v, mask)
    assert not torch.isnan(out).any() and not torch.isnan(lse).any()
    for b_idx, h_idx in ((0, 0), (case.b - 1, case.h_q - 1)):
        for q_begin in (0, case.s_q // 3, case.s_q - 256):
            wanted, wanted_lse = reference_rows(q, k, v, mask, b_idx, h_idx, q_begin, q_begin + 256)
            error = out[b_idx, q_begin : q_begin + 256, h_idx].float() - wanted
            assert error.norm() <= 4e-3 * wanted.norm()
            assert torch.allclose(lse[b_idx, h_idx, q_begin : q_begin + 256], wanted_lse, rtol=0, atol=2e-3)


def test_graph_capture(sm90: Sm90) -> None:
    case = resized(benchmark_case("8k_causal_document"), b=1, h_q=2, h_kv=2)
    q, k, v = (normal(1, 8192, 2, 128).bfloat16() for _ in range(3))
    mask = GpuMask.of(case)
    wanted = sm90.forward(q, k, v, mask)
    out, lse = torch.zeros_like(wanted[0]), torch.zeros_like(wanted[1])
    params = sm90.forward_params(q, k, v, mask, out, lse)
    workspace = sm90.prepare(params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sm90.run(params)
    for _ in range(2):
        workspace.fill_(0x5A)
        graph.replay()
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
        out.zero_()
