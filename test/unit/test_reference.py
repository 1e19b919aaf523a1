# SPDX-License-Identifier: Apache-2.0
"""The oracle itself: against plain loops, finite differences, hidden NaN; and what the comparison catches."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from paddle_fm3.testing.cases import HOSTILE_CASES, AttentionCase, hostile_case, make_inputs
from paddle_fm3.testing.compare import assert_close_to_oracle, output_rounding
from paddle_fm3.testing.reference import AttentionResult, attention, low_precision_attention, visible_plane

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def plain_loops(q, k, v, is_visible, scale):
    """out and lse with Python floats, one pair at a time; is_visible(b, h, q, k)."""
    b, s_q, h_q, _ = q.shape
    s_k, group = k.shape[1], h_q // k.shape[2]
    out, lse = np.zeros((b, s_q, h_q, v.shape[3])), np.full((b, h_q, s_q), -math.inf)
    for b_idx, h, row in np.ndindex(b, h_q, s_q):
        weights = {}
        for key in range(s_k):
            if is_visible(b_idx, h, row, key):
                score = sum(
                    float(x) * float(y) for x, y in zip(q[b_idx, row, h], k[b_idx, key, h // group], strict=True)
                )
                weights[key] = math.exp(scale * score)
        if weights:
            total = sum(weights.values())
            lse[b_idx, h, row] = math.log(total)
            out[b_idx, row, h] = sum(w / total * v[b_idx, key, h // group] for key, w in weights.items())
    return out, lse


@pytest.mark.parametrize(
    ("causal", "bounds", "rule"),
    [
        (False, None, lambda q, k, x: True),
        (True, None, lambda q, k, x: k <= q + 2),
        (True, [[4], [9], [2], [0], [-1], [5], [3]], lambda q, k, x: k <= q + 2 and q < x[0]),
        (True, [[1, 3], [3, 1], [0, 9], [2, 2], [4, 5], [-2, 1], [0, 0]],
         lambda q, k, x: k <= q + 2 and not x[0] <= q < x[1]),
        (False, [[3, 1], [9, 0], [0, 0], [2, 4], [5, 9], [4, -3], [1, 1]], lambda q, k, x: x[1] <= q < x[0]),
        (False,
         [[1, 2, 3, 4], [0, 9, 0, 0], [4, 1, 2, 3], [0, 2, 2, 5], [-3, 1, 4, 99], [0] * 4, [1, 4, 2, 3]],
         lambda q, k, x: not x[0] <= q < x[1] and not x[2] <= q < x[3]),
    ],
    ids=["full", "causal", "c1", "c2", "nc2", "nc4"],
)  # fmt: skip
def test_forward_matches_plain_loops(causal, bounds, rule):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, 5, 4, 3)),
        rng.standard_normal((1, 7, 2, 3)),
        rng.standard_normal((1, 7, 2, 2)),
    )
    indices = None if bounds is None else np.array(bounds, np.int32)[None, None]
    result = attention(q, k, v, indices, causal=causal)
    columns = bounds or [None] * 7
    out, lse = plain_loops(q, k, v, lambda b, h, row, key: rule(row, key, columns[key]), 3**-0.5)
    np.testing.assert_allclose(result.out, out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-12)


@pytest.mark.parametrize("h_mask", [1, 2, 4])
def test_mask_heads_are_shared_by_neighbouring_query_heads(h_mask):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 4, h, 3)) for h in (4, 2, 2))
    bounds = rng.integers(0, 5, (2, h_mask, 4, 2)).astype(np.int32)
    result = attention(q, k, v, bounds, softmax_scale=0.3)

    def is_visible(b, h, row, key):
        lts, ute = bounds[b, h // (4 // h_mask), key]
        return ute <= row < lts

    out, lse = plain_loops(q, k, v, is_visible, 0.3)
    np.testing.assert_allclose(result.out, out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-12)


def test_block_mask_hides_tiles():
    tiles = np.array([[1, 0], [0, 1]], np.int32)
    table = visible_plane(None, False, 130, 140, tiles)
    q, k = np.arange(130)[:, None], np.arange(140)[None, :]
    np.testing.assert_array_equal(table, (q < 128) == (k < 128))


def small_case(seed: int) -> tuple[dict, dict, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    form = [(True, 1), (True, 2), (False, 2), (False, 4)][seed % 4]
    s_q, s_k = int(rng.integers(2, 6)), int(rng.integers(2, 6))
    tensors = {
        "q": rng.standard_normal((1, s_q, 2, 3)),
        "k": rng.standard_normal((1, s_k, 1, 3)),
        "v": rng.standard_normal((1, s_k, 1, 2)),
    }
    bounds = rng.integers(-1, s_q + 2, (1, 2, s_k, form[1])).astype(np.int32)
    mask = dict(startend_row_indices=bounds, causal=form[0])
    return tensors, mask, rng.standard_normal((1, s_q, 2, 2)), rng.standard_normal((1, 2, s_q))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("has_dlse", [False, True])
def test_gradients_match_finite_differences(seed, has_dlse):
    tensors, mask, dout, dlse = small_case(seed)
    result = attention(**tensors, **mask, dout=dout, dlse=dlse if has_dlse else None)

    def objective(moved: dict) -> float:
        forward = attention(**moved, **mask)
        value = (forward.out * dout).sum()
        if has_dlse:
            value += (
                np.where(np.isfinite(forward.lse), forward.lse, 0)[forward.lse > -np.inf] @ dlse[forward.lse > -np.inf]
            )
        return float(value)

    step = 1e-6
    for name, gradient in (("q", result.dq), ("k", result.dk), ("v", result.dv)):
        numeric = np.empty(gradient.shape)
        for index in np.ndindex(gradient.shape):
            values = []
            for sign in (1, -1):
                moved = tensors[name].copy()
                moved[index] += sign * step
                values.append(objective(tensors | {name: moved}))
            numeric[index] = (values[0] - values[1]) / (2 * step)
        np.testing.assert_allclose(gradient, numeric, atol=2e-8, err_msg=name)


def test_hidden_rows_and_columns():
    case = hostile_case("causal_fewer_keys_hidden_rows")
    inputs = make_inputs(case)
    hidden = case.s_q - case.s_k
    dout, dlse = inputs.dout.copy(), inputs.dlse.copy()
    dout[:, :hidden], dlse[..., :hidden] = np.nan, np.inf
    result = attention(inputs.q, inputs.k, inputs.v, causal=True, dout=dout, dlse=dlse)
    assert (result.out[:, :hidden] == 0).all() and (result.lse[..., :hidden] == -np.inf).all()
    assert (result.dq[:, :hidden] == 0).all() and np.isfinite(result.lse[..., hidden:]).all()
    clean = attention(inputs.q, inputs.k, inputs.v, causal=True, dout=inputs.dout, dlse=inputs.dlse)
    np.testing.assert_array_equal(result.dk, clean.dk)
    np.testing.assert_array_equal(result.dv, clean.dv)
    case = hostile_case("columns_hidden")
    inputs = make_inputs(case)
    result = attention(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **case.call_arguments())
    assert (result.dk[:, 1::3] == 0).all() and (result.dv[:, 1::3] == 0).all() and (result.dk[:, ::3] != 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_numbers_do_not_pass_through_hidden_pairs(value):
    """Only rows that see the bad key, and keys that see the bad row, may change."""
    case = hostile_case("documents_mixed_causal")  # documents [1, 127, 1, 130, 2]
    inputs = make_inputs(case)
    arguments = case.call_arguments()
    clean = attention(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **arguments)
    k, v = inputs.k.copy(), inputs.v.copy()
    k[:, 50, 0, 3], v[:, 60, 0, 2] = value, value
    result = attention(inputs.q, k, v, dout=inputs.dout, dlse=inputs.dlse, **arguments)
    others = np.r_[0:1, 128:261]  # all documents but the second
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(result, name)[:, others], getattr(clean, name)[:, others], err_msg=name)
    np.testing.assert_array_equal(result.out[:, 1:50], clean.out[:, 1:50])  # before the bad keys
    assert np.isnan(result.out[:, 60:128]).any()
    q, dout = inputs.q.copy(), inputs.dout.copy()
    q[:, 70, 1], dout[:, 80, 0] = value, value
    result = attention(q, inputs.k, inputs.v, dout=dout, dlse=inputs.dlse, **arguments)
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(result, name)[:, others], getattr(clean, name)[:, others], err_msg=name)
    np.testing.assert_array_equal(result.dv[:, 81:128], clean.dv[:, 81:128])  # keys after the bad rows
    assert np.isnan(result.dk[:, 1:70]).any()


DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("name", DTYPES)
def test_low_precision_error_is_of_the_dtype(name):
    """Neither exact (it must round) nor wrong (a few units in the last place of the dtype)."""
    case = hostile_case("causal_two_tiles")
    inputs = make_inputs(case, DTYPES[name])
    exact, naive = (
        run(*mode, inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, causal=True)
        for run, mode in ((attention, ()), (low_precision_attention, (DTYPES[name],)))
    )
    for output in OUTPUTS:
        error = np.abs(getattr(naive, output) - getattr(exact, output)).max() / np.abs(getattr(exact, output)).max()
        assert 0.05 * EPSILON[name] < error < 20 * EPSILON[name], output
        if output != "lse":  # lse stays float32
            stored = getattr(naive, output)
            np.testing.assert_array_equal(stored.astype(DTYPES[name]).astype(np.float64), stored)


def run_all(case: AttentionCase, dtype, **changed) -> AttentionResult:
    inputs = make_inputs(case, dtype)
    arguments = case.call_arguments() | changed
    return attention(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **arguments)


@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_a_rounded_oracle_passes(case):
    """What a perfect kernel returns is accepted, in every case and dtype."""
    for dtype in DTYPES.values():
        inputs = make_inputs(case, dtype)
        exact = run_all(case, dtype)
        naive = low_precision_attention(
            dtype, inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **case.call_arguments()
        )
        for output in OUTPUTS:
            stored = np.float32 if output == "lse" else dtype
            actual = getattr(exact, output).astype(stored)
            assert_close_to_oracle(actual, getattr(exact, output), getattr(naive, output), output, case)


def faulty_window(case: AttentionCase) -> dict:
    bounds = case.call_arguments()["startend_row_indices"].copy()
    bounds[:, :, 100, 0] += 1  # one bound off by one
    return {"startend_row_indices": bounds}


def without_causal_rule(case: AttentionCase) -> dict:
    bounds = case.call_arguments()["startend_row_indices"]
    return {"causal": False, "startend_row_indices": np.concatenate([bounds, np.zeros_like(bounds)], axis=-1)}


# fault -> (case, changed arguments). With a window of 70 keys, one wrong pair is within bfloat16's own error
# (float32 shows it a thousandfold): a mask must be tested in float32 too, or where few keys are visible.
FAULTS = {
    "one_bound_off_by_one": ("window_one", faulty_window),
    "causal_rule_dropped": ("window_wide", without_causal_rule),
    "scale_off_by_five_percent": ("window_wide", lambda case: {"softmax_scale": case.d_qk**-0.5 * 1.05}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_catches_faulty_kernels(fault, dtype):
    name, changed = FAULTS[fault]
    case = hostile_case(name)
    dtype = DTYPES[dtype]
    inputs = make_inputs(case, dtype)
    exact, wrong = run_all(case, dtype), run_all(case, dtype, **changed(case))
    naive = low_precision_attention(
        dtype, inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, **case.call_arguments()
    )
    for output in OUTPUTS:
        with pytest.raises(AssertionError, match=rf"{output}: error .* exceeds .*{name}"):
            assert_close_to_oracle(
                getattr(wrong, output).astype(dtype),
                getattr(exact, output),
                getattr(naive, output),
                output,
                case,
            )


def test_the_comparison_names_the_worst_value():
    oracle = np.zeros((2, 3))
    actual = oracle.copy()
    actual[1, 2] = 0.5
    with pytest.raises(AssertionError, match=r"dq: error 5\.000e-01 at \(1, 2\) .* got 0.5, expected 0; 1 of 6"):
        assert_close_to_oracle(actual, oracle, oracle, "dq", "some case")
    assert 0 < assert_close_to_oracle(oracle + 2e-17, oracle, oracle, "dq", "") < 1
    assert assert_close_to_oracle(oracle, oracle, oracle, "dq", "") == 0


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_the_comparison_checks_non_finite_places(special):
    oracle = np.array([1.0, -np.inf, np.nan, np.inf])
    assert_close_to_oracle(oracle, oracle, np.ones(4), "lse", "")
    for index in range(4):
        wrong = oracle.copy()
        wrong[index] = special if repr(float(oracle[index])) != repr(float(special)) else 0.0
        with pytest.raises(AssertionError, match=r"lse: .* at different places than the oracle, 1 of 4; first at"):
            assert_close_to_oracle(wrong, oracle, np.ones(4), "lse", "")


def test_the_comparison_refuses_unusable_references():
    with pytest.raises(ValueError, match="shapes differ"):
        assert_close_to_oracle(np.zeros(2), np.zeros(3), np.zeros(3), "out", "")
    with pytest.raises(ValueError, match="low-precision reference is not finite"):
        assert_close_to_oracle(np.zeros(2), np.zeros(2), np.array([0, np.inf]), "out", "")
    with pytest.raises(ValueError, match="do not fit together"):
        attention(np.zeros((1, 2, 3, 4)), np.zeros((1, 2, 2, 4)), np.zeros((1, 2, 2, 4)))
    with pytest.raises(ValueError, match="no mask form"):
        visible_plane(np.zeros((3, 3), np.int32), True, 3, 3)


@pytest.mark.parametrize(
    ("largest", "dtype", "expected"),
    [
        (0.5, np.float32, 2.0**-24),
        (1.0, ml_dtypes.bfloat16, 2.0**-7),
        (3.0, np.float16, 2.0**-9),
        (0.0, np.float64, 2.0**-54),
    ],
)
def test_output_rounding_is_one_spacing(largest, dtype, expected):
    assert output_rounding(np.array([0.0, -largest, np.inf]), dtype) == expected


def test_long_sequences_fit():
    """s = 2048 with several heads stays plane by plane (a dense [h, s, s] float64 table would be 134 MB)."""
    import tracemalloc

    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2048, 4, 16))
    tracemalloc.start()
    attention(q, q, q, causal=True, dout=q)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 2048 * 2048 * 8  # about ten tables of one plane, whatever the number of heads
