# SPDX-License-Identifier: Apache-2.0
"""Checks a timed attention call on sampled rows and keys in float64: a number without a check is no result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.testing.cases import AttentionCase, AttentionInputs
from paddle_fm3.testing.reference import visible_plane

# Largest error allowed, relative to the largest exact value of that output: several times what a correct
# kernel shows, and far below what one wrong tile, scale or mask bound does.
TOLERANCE = {"float32": 5e-5, "bfloat16": 3e-2, "float16": 5e-3}
NUM_SAMPLES = 48


@dataclass(frozen=True, eq=False)
class Outputs:
    """What one implementation produced; None for what it did not compute."""

    out: NDArray  # [b, s_q, h_q, d_v]
    lse: NDArray | None = None  # [b, h_q, s_q]
    dq: NDArray | None = None
    dk: NDArray | None = None
    dv: NDArray | None = None


def relative_errors(
    case: AttentionCase, inputs: AttentionInputs, outputs: Outputs, *, seed: int = 0
) -> dict[str, float]:
    """Largest |error| / largest |exact value| of each output over sampled rows and keys of the first head.

    The gradient of lse is taken to be zero, as the benchmarks call without it.
    """
    rng = np.random.default_rng(seed)
    raw = case.build_mask()
    bounds = None if raw.startend_row_indices is None else raw.startend_row_indices[0, 0]
    block_mask = None if raw.block_mask is None else raw.block_mask[0, 0]
    visible = visible_plane(bounds, raw.causal, case.s_q, case.s_k, block_mask)  # [s_q, s_k]
    scale = case.d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale
    q, k, v, dout = (np.asarray(x[0, :, 0], np.float64) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))

    def probabilities(rows: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
        """(p [rows, s_k], lse [rows]) of the given rows."""
        score = np.where(visible[rows], q[rows] @ k.T * scale, -np.inf)
        row_max = np.maximum(score.max(axis=1, keepdims=True), -1e300)
        p = np.exp(score - row_max)
        row_sum = p.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            return p / np.maximum(row_sum, 1e-300), (row_max + np.log(row_sum))[:, 0]

    rows = np.sort(rng.choice(case.s_q, min(NUM_SAMPLES, case.s_q), replace=False))
    p, lse = probabilities(rows)
    exact = {"out": (outputs.out[0, rows, 0], p @ v)}
    if outputs.lse is not None:
        is_finite = np.isfinite(lse)
        if not (np.isfinite(outputs.lse[0, 0, rows]) == is_finite).all():
            return {"lse": float("inf")}
        exact["lse"] = (outputs.lse[0, 0, rows][is_finite], lse[is_finite])
    if outputs.dq is not None:
        dp = dout[rows] @ v.T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) * scale
        exact["dq"] = (outputs.dq[0, rows, 0], ds @ k)
    errors = {name: _relative(*pair) for name, pair in exact.items()}
    if outputs.dk is not None and outputs.dv is not None and case.h_q == case.h_kv:
        keys = np.sort(rng.choice(case.s_k, min(NUM_SAMPLES, case.s_k), replace=False))
        dk, dv = np.zeros((len(keys), case.d_qk)), np.zeros((len(keys), case.d_v))
        for begin in range(0, case.s_q, 1024):  # a bounded table at a time
            rows = np.arange(begin, min(begin + 1024, case.s_q))
            p, _ = probabilities(rows)
            delta = (dout[rows] * (p @ v)).sum(axis=1, keepdims=True)
            ds = p[:, keys] * (dout[rows] @ v[keys].T - delta) * scale
            dk += ds.T @ q[rows]
            dv += p[:, keys].T @ dout[rows]
        errors["dk"] = _relative(outputs.dk[0, keys, 0], dk)
        errors["dv"] = _relative(outputs.dv[0, keys, 0], dv)
    return errors


def passes(errors: dict[str, float], dtype: str) -> bool:
    """Whether every error is within TOLERANCE; NaN is not."""
    return all(error <= TOLERANCE[dtype] for error in errors.values())


def _relative(actual: NDArray, exact: NDArray) -> float:
    largest = np.abs(exact).max(initial=0.0)
    return float(np.abs(actual.astype(np.float64) - exact).max(initial=0.0) / max(largest, 1e-30))
