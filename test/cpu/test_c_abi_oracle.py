# SPDX-License-Identifier: Apache-2.0
"""Every hostile case, dtype and SIMD target of the CPU kernels against the fp64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
from c_abi_support import assert_matches_oracle, backend, expected, native_mask, run, simd_targets
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fm3._native import cpu_library
from paddle_fm3.testing import native_call
from paddle_fm3.testing.cases import HOSTILE_CASES, AttentionCase, RawMask

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile_cases(case, dtype):
    inputs, exact, naive = expected(case, dtype)
    for target in simd_targets():
        with backend(target=target):
            actual = run(case, inputs)
        assert_matches_oracle(actual, exact, naive, (target, dtype, case))


def test_best_target_is_used_by_default():
    assert cpu_library().fm3_cpu_simd_target().decode() == simd_targets()[0]


@pytest.mark.parametrize("name", ["one_key", "window_one", "documents_of_one"])
def test_rows_with_one_visible_key_have_exact_zero_gradient(name):
    """Softmax over one key does not depend on its score: dq and dk are 0, not rounding errors."""
    case = next(case for case in HOSTILE_CASES if case.name == name)
    inputs, exact, _ = expected(case, "float32")
    for target in simd_targets():
        with backend(target=target):
            actual = run(case, inputs, has_dlse=False)
        assert not actual["dq"].any() and not actual["dk"].any(), target
        np.testing.assert_array_equal(actual["out"], exact["out"].astype(np.float32))


def test_missing_dlse_means_zero():
    case = next(case for case in HOSTILE_CASES if case.name == "documents_mixed")
    inputs, _, _ = expected(case, "float32")
    without = run(case, inputs, has_dlse=False)
    zero = type(inputs)(inputs.q, inputs.k, inputs.v, inputs.dout, np.zeros_like(inputs.dlse))
    with_zero = run(case, zero)
    for name, array in without.items():
        np.testing.assert_array_equal(array, with_zero[name], err_msg=name)
    assert not np.array_equal(without["dq"], run(case, inputs)["dq"]), "dlse has no effect"


def _tie_bounds(draw, s_q: int, s_k: int, n: int) -> np.ndarray:
    """Bounds in runs of equal columns, so that tiles of every class occur; values beyond both ends too."""
    run_length = draw(st.sampled_from([1, 7, 64, 128, 200]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    step = draw(st.sampled_from([1, 32, 128]))
    bounds = rng.integers(-1, s_q // step + 2, (-(-s_k // run_length), n)) * step
    return np.repeat(bounds, run_length, axis=0)[:s_k].astype(np.int32)


@st.composite
def random_cases(draw) -> AttentionCase:
    s_q, s_k = draw(st.integers(1, 330)), draw(st.integers(1, 330))
    h_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    h_q = h_kv * group
    h_mask = draw(st.sampled_from(sorted({1, h_kv, h_q})))
    causal, n = draw(st.sampled_from(FORMS))
    bounds = np.stack([_tie_bounds(draw, s_q, s_k, n) for _ in range(h_mask)])[None]  # [1, h_mask, s_k, n]
    block_mask = None
    if draw(st.booleans()):
        bits = draw(st.integers(0, 2**32 - 1))
        shape = (1, h_mask, -(-s_q // 128), -(-s_k // 128))
        block_mask = np.random.default_rng(bits).integers(0, 2, shape).astype(np.int32)
    d_qk, d_v = draw(st.sampled_from([(8, 8), (5, 33), (64, 64), (80, 48), (17, 1)]))
    raw = RawMask(bounds, causal, block_mask)
    return AttentionCase("random", 1, s_q, s_k, h_q, h_kv, d_qk, d_v, build_mask=lambda: raw)


@settings(max_examples=120, deadline=None)
@given(case=random_cases(), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_random_masks(case, dtype):
    inputs, exact, naive = expected.__wrapped__(case, dtype)
    assert_matches_oracle(run(case, inputs), exact, naive, (dtype, case, case.build_mask()))


@pytest.mark.parametrize("target", ["avx512", "avx2", "baseline"])
def test_rounding_of_outputs_is_to_nearest_even(target):
    """One visible key gives out = v exactly; two with equal scores give the mean, rounded once."""
    if target not in simd_targets():
        pytest.skip(f"this processor lacks {target}")
    rng = np.random.default_rng(0)
    for dtype in (np.dtype(np.float16), np.dtype("bfloat16")):
        bits = np.arange(2**16, dtype=np.uint16)
        v = bits.view(dtype)
        v = v[np.isfinite(v.astype(np.float32))][:63232].reshape(1, 1, 247, 256)  # every head holds 256 of the values
        q = np.zeros((1, 1, 247, 1), dtype)
        mask = native_call.NativeMask.without_bounds(False, 1, 1, 1)
        with backend(target=target):
            out, _ = native_call.forward(q, q, v, mask)
        np.testing.assert_array_equal(out.astype(np.float32), v.astype(np.float32))

        pairs = rng.permutation(v.reshape(-1))[: 2 * 31232].reshape(1, 2, 122, 256)
        k = np.zeros((1, 2, 122, 1), dtype)
        mask = native_call.NativeMask.without_bounds(False, 1, 1, 2)
        with backend(target=target):
            out, _ = native_call.forward(k[:, :1], k, pairs, mask)
        mean = pairs.astype(np.float64).mean(axis=1, keepdims=True)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(
                out.astype(np.float64), mean.astype(np.float32).astype(dtype).astype(np.float64)
            )


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_probabilities_are_accurate_for_any_spread_of_scores(spread):
    """out of a row = softmax of chosen scores: the error of exp is a few fp32 roundings, relative to the sum."""
    rng = np.random.default_rng(1)
    s_k = 4096
    scores = (-spread * rng.random(s_k)).astype(np.float32)
    scores[17] = 0.0
    q = np.ones((1, 1, 1, 1), np.float32)
    k = scores.reshape(1, s_k, 1, 1)
    v = np.ones((1, s_k, 1, 1), np.float32)
    for target in simd_targets():
        with backend(target=target):
            _, lse = native_call.forward(q, k, v, native_call.NativeMask.without_bounds(False, 1, 1, s_k), 1.0)
            exact = np.log(np.exp(scores.astype(np.float64)).sum())
            assert abs(lse[0, 0, 0] - exact) < 4e-7 * (1 + abs(exact)), (target, lse[0, 0, 0], exact)


def test_native_mask_reaches_the_call():
    """A fault that ignored the bounds must show: the mask of this case hides most pairs."""
    case = next(case for case in HOSTILE_CASES if case.name == "documents_mixed")
    inputs, exact, _ = expected(case, "float32")
    mask = native_mask(case)
    unmasked = native_call.NativeMask.without_bounds(False, case.b, case.s_q, case.s_k)
    out, _ = native_call.forward(inputs.q, inputs.k, inputs.v, unmasked)
    assert np.abs(out - exact["out"]).max() > 0.1
    out, _ = native_call.forward(inputs.q, inputs.k, inputs.v, mask)
    assert np.abs(out - exact["out"]).max() < 1e-5
