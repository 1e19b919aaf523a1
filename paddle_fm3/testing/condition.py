# SPDX-License-Identifier: Apache-2.0
"""How strongly one fp32 rounding inside a fused kernel shows in its outputs: the yardstick's floor for float32.

A naive fp32 evaluation subtracts sum(p * dp) from dp with errors that cancel, and normalises p by the very sum
it used. A fused kernel has only what the forward pass stored: out and lse, each rounded once. In a row with few
visible keys the naive error is then zero by luck, while no kernel of this form can have less than one rounding
of |lse|, |dp| and |dout . out|. `rounding_floor` is that rounding, to first order, from the formula's own terms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.testing.cases import AttentionCase, AttentionInputs
from paddle_fm3.testing.reference import AttentionResult, visible_plane

UNIT_ROUNDOFF = 2.0**-24


def rounding_floor(case: AttentionCase, inputs: AttentionInputs, exact: AttentionResult) -> dict[str, float]:
    """Error of each output that one fp32 rounding of each stored or intermediate value may cause, at most.

    ``exact`` is the float64 oracle's result for the same case and inputs, gradients included.
    """
    with np.errstate(all="ignore"):
        return _rounding_floor(case, inputs, exact)


def _rounding_floor(case: AttentionCase, inputs: AttentionInputs, exact: AttentionResult) -> dict[str, float]:
    arguments = case.call_arguments()
    bounds, block_mask = arguments["startend_row_indices"], arguments["block_mask"]
    scale = abs(case.d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale)
    sign = 1.0 if case.softmax_scale is None else np.sign(case.softmax_scale)
    q, k, v, dout = (np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    sums = {name: np.zeros(x.shape) for name, x in (("out", dout), ("dq", q), ("dk", k), ("dv", v))}
    for b_idx in range(case.b):
        for h_idx in range(case.h_q):
            h_kv_idx = h_idx // (case.h_q // case.h_kv)
            plane = {
                name: None if table is None else table[b_idx, h_idx // (case.h_q // table.shape[1])]
                for name, table in (("bounds", bounds), ("block_mask", block_mask))
            }
            visible = visible_plane(plane["bounds"], bool(arguments["causal"]), case.s_q, case.s_k, plane["block_mask"])
            at_q, at_k = (b_idx, slice(None), h_idx), (b_idx, slice(None), h_kv_idx)
            magnitude = np.abs(q[at_q]) @ np.abs(k[at_k]).T * scale  # [s_q, s_k] |q| . |k|
            lse = exact.lse[b_idx, h_idx]  # [s_q]
            lse = np.where(np.isfinite(lse), lse, 0.0)
            score = np.where(visible, q[at_q] @ k[at_k].T * scale * sign, -np.inf)
            p = np.exp(score - lse[:, None])
            p_error = p * (1 + np.abs(lse)[:, None] + magnitude)  # error of p, in roundings
            dp = np.abs(dout[at_q]) @ np.abs(v[at_k]).T  # [s_q, s_k] |dout| . |v|
            delta = np.abs(dout[at_q] * exact.out[at_q]).sum(axis=1) + np.abs(inputs.dlse[b_idx, h_idx])
            ds_error = p * (dp + delta[:, None]) * scale
            ds_error += (
                p_error * np.abs(dout[at_q] @ v[at_k].T - (dout[at_q] * exact.out[at_q]).sum(1)[:, None]) * scale
            )
            sums["out"][at_q] = p_error @ np.abs(v[at_k])
            sums["dq"][at_q] = ds_error @ np.abs(k[at_k])
            sums["dk"][at_k] += ds_error.T @ np.abs(q[at_q])
            sums["dv"][at_k] += p_error.T @ np.abs(dout[at_q])
    floor = {name: UNIT_ROUNDOFF * _largest(total) for name, total in sums.items()}
    finite_lse = exact.lse[np.isfinite(exact.lse)]
    floor["lse"] = UNIT_ROUNDOFF * (1 + _largest(finite_lse))
    return floor


def _largest(values: NDArray[np.float64]) -> float:
    return float(np.abs(values).max(initial=0.0))
