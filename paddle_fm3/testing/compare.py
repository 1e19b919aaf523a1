# SPDX-License-Identifier: Apache-2.0
"""Comparison of a kernel's output with the oracle; the tolerance comes from arithmetic, not from taste."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray


def output_rounding(oracle: NDArray[np.float64], dtype: DTypeLike) -> float:
    """Spacing of `dtype` at the largest finite |oracle| + 0.3: what storing the result may cost.

    The 0.3 keeps the allowance of nearly-zero outputs at the level of the terms that cancelled in them.
    """
    finite = np.abs(oracle[np.isfinite(oracle)])
    largest = float(finite.max(initial=0.0)) + 0.3
    mantissa_bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[np.dtype(dtype).name]
    return float(2.0 ** (np.floor(np.log2(largest)) - mantissa_bits))


def assert_close_to_oracle(
    actual: ArrayLike,
    oracle: ArrayLike,
    low_precision: ArrayLike,
    name: str,
    case: object,
    *,
    dtype: DTypeLike | None = None,
    factor: float = 2.0,
) -> float:
    """Asserts ``err(actual) <= factor * err(low_precision) + output_rounding``; errors are max |x - oracle|.

    Also asserts that NaN, +inf and -inf stand at the same places as in the oracle.

    The bound is on the largest error. In bfloat16 a single wrong pair among some fifty visible ones stays
    below it; float32 shows it a thousandfold. So test masks in float32 too, or where few keys are visible.

    Args:
        actual: the kernel's output.
        oracle: float64 from `reference.attention`, same shape.
        low_precision: the same output of `reference.low_precision_attention`.
        name: which output ("out", "lse", "dq", "dk", "dv"), for the message.
        case: anything whose repr identifies the inputs, for the message.
        dtype: the dtype whose rounding is allowed; default that of `actual`.
        factor: how many times the naive error a kernel may have.

    Returns:
        The error as a fraction of the allowance (0 when exact), for reports.

    Raises:
        AssertionError: with the worst index, both values, the bound and repr(case).
        ValueError: shapes differ, or the low-precision reference itself is unusable (it overflowed).
    """
    actual, oracle, low_precision = np.asarray(actual), np.asarray(oracle), np.asarray(low_precision)
    dtype = actual.dtype if dtype is None else np.dtype(dtype)
    if not actual.shape == oracle.shape == low_precision.shape:
        raise ValueError(
            f"{name}: shapes differ: actual {actual.shape}, oracle {oracle.shape}, "
            f"low precision {low_precision.shape}; case {case!r}"
        )
    values, expected, naive = (x.astype(np.float64) for x in (actual, oracle, low_precision))
    _assert_same_specials(values, expected, name, case)
    is_finite = np.isfinite(expected)
    if not np.isfinite(naive[is_finite]).all():
        raise ValueError(f"{name}: the low-precision reference is not finite where the oracle is; case {case!r}")
    if not is_finite.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        error = np.where(is_finite, np.abs(values - expected), 0.0)
        naive_error = float(np.where(is_finite, np.abs(naive - expected), 0.0).max())
    allowed = factor * naive_error + output_rounding(expected, dtype)
    worst = np.unravel_index(int(error.argmax()), error.shape)
    if not error[worst] <= allowed:
        raise AssertionError(
            f"{name}: error {error[worst]:.3e} at {tuple(int(i) for i in worst)} exceeds {allowed:.3e} = "
            f"{factor} x low-precision error {naive_error:.3e} + rounding of {dtype}; "
            f"got {values[worst]:.9g}, expected {expected[worst]:.9g}; "
            f"{int((error > allowed).sum())} of {error.size} values beyond; case {case!r}"
        )
    return float(error[worst] / allowed)


def _assert_same_specials(values: NDArray[np.float64], expected: NDArray[np.float64], name: str, case: object) -> None:
    for label, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differs = test(values) != test(expected)
        if differs.any():
            first = tuple(int(i) for i in np.argwhere(differs)[0])
            raise AssertionError(
                f"{name}: {label} at different places than the oracle, {differs.sum()} of {differs.size}; "
                f"first at {first}: got {values[first]!r}, expected {expected[first]!r}; case {case!r}"
            )
