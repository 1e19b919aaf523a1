# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity never pass through a hidden pair; through a visible pair they do.

The contract: a hidden (q, k) pair contributes nothing to any output, whatever stands in its q, k, v, dout,
out, lse and dlse. Probabilities are set to zero by selection, and rows that hold a NaN or an infinity are
taken out of the matrix products (0 * NaN is NaN) and added to their visible partners alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from c_abi_support import DTYPES, assert_matches_oracle, backend, oracles, run, simd_targets

from paddle_fm3.testing.cases import AttentionCase, RawMask, make_inputs

S_Q, S_K = 300, 290
POISON = [np.nan, np.inf, -np.inf]


def _case(kind: str) -> AttentionCase:
    """Masks with partial, full and skipped tiles; keys 5, 140 and rows 7, 200 are hidden from everything."""
    k = np.arange(S_K)
    bounds = np.stack([np.full(S_K, 200), np.full(S_K, 201), np.full(S_K, 7), np.full(S_K, 8)], axis=-1)
    if kind == "window":
        bounds[:, 0], bounds[:, 1] = np.clip(k - 40, 0, 200), S_Q
        bounds[k < 130, 0], bounds[k < 130, 1] = 200, 201
    bounds[[5, 140]] = [0, S_Q, 0, 0]
    raw = RawMask(bounds.astype(np.int32)[None, None], False)
    return AttentionCase(f"poison_{kind}", 1, S_Q, S_K, 2, 1, 24, 40, build_mask=lambda: raw)


def _poisoned(inputs, value: float):
    """Copies with `value` in hidden rows of q, dout, dlse and hidden keys of k, v."""
    q, k, v, dout, dlse = (np.array(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse))
    q[:, [7, 200]] = value
    dout[:, 200] = value
    dout[:, 7, :, 3] = value
    dlse[:, :, [7, 200]] = value
    k[:, 5] = value
    k[:, 140, :, 11] = value
    v[:, 140] = value
    v[:, 5, :, 0] = value
    return dataclasses.replace(inputs, q=q, k=k, v=v, dout=dout, dlse=dlse)


@pytest.mark.parametrize("value", POISON, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["rows", "window"])
def test_hidden_rows_and_keys_do_not_leak(kind, dtype, value):
    case = _case(kind)
    clean = make_inputs(case, DTYPES[dtype])
    poisoned = _poisoned(clean, value)
    exact, naive = oracles(case, clean, dtype)
    for target in simd_targets():
        with backend(target=target):
            actual = run(case, poisoned)
        assert all(np.isfinite(actual[name].astype(np.float32)).all() for name in ("out", "dq", "dk", "dv")), target
        assert_matches_oracle(actual, exact, naive, (target, dtype, value, case))


@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", POISON, ids=str)
def test_visible_poison_reaches_exactly_its_partners(operand, value):
    """A NaN that some pairs see and some do not shows in the same places as in the oracle."""
    case = _case("window")
    clean = make_inputs(case)
    tensor = np.array(getattr(clean, operand))
    position = 250 if operand in ("q", "dout") else 200
    tensor[:, position, 0, 2] = value
    poisoned = dataclasses.replace(clean, **{operand: tensor})
    exact, _ = oracles(case, poisoned, "float32")
    for target in simd_targets():
        with backend(target=target):
            actual = run(case, poisoned)
        for name, array in actual.items():
            is_finite = np.isfinite(array.astype(np.float64))
            expected = np.isfinite(exact[name])
            assert (is_finite == expected).all(), (target, name, np.argwhere(is_finite != expected)[:5])
            np.testing.assert_allclose(array[expected], exact[name][expected], rtol=2e-4, atol=2e-5)


def test_clean_inputs_are_unaffected_by_the_slow_path():
    """Bits of rows that never see the poison are those of the clean run."""
    case = _case("window")
    clean = make_inputs(case)
    v = np.array(clean.v)
    v[:, 5] = np.nan
    before, after = run(case, clean), run(case, dataclasses.replace(clean, v=v))
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_large_scores_do_not_overflow():
    """Scores of +-1e30 are finite: the largest takes all, nothing becomes NaN."""
    case = AttentionCase("large", 1, 140, 150, 1, 1, 8, 8, build_mask=lambda: RawMask(None, True), softmax_scale=1.0)
    inputs = make_inputs(case)
    k = np.array(inputs.k) * np.float32(1e30)
    actual = run(case, dataclasses.replace(inputs, k=k))
    assert np.isfinite(actual["out"]).all() and np.isfinite(actual["dv"]).all()
    assert np.abs(actual["out"]).max() <= np.abs(inputs.v).max()
