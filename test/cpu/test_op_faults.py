# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults: the hostile cases and the comparison must catch every one of them.

Each fault is a way the op has been, or could be, wrong. It is made from the real op by changing what goes
in or comes out; a fault that no case notices makes this file red.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import op_support
import pytest
from op_support import Result

from paddle_fm3.testing.cases import HOSTILE_CASES, AttentionCase, AttentionInputs, RawMask

Fault = Callable[[AttentionCase, AttentionInputs], Result]


def _with_mask(change: Callable[[RawMask, AttentionCase], RawMask]) -> Fault:
    def run(case: AttentionCase, inputs: AttentionInputs) -> Result:
        changed = dataclasses.replace(case, build_mask=lambda: change(case.build_mask(), case))
        return op_support.run_op(changed, inputs)

    return run


def _bounds_changed(change: Callable[[np.ndarray, AttentionCase], np.ndarray]) -> Fault:
    def change_mask(mask: RawMask, case: AttentionCase) -> RawMask:
        if mask.startend_row_indices is None:
            return mask
        bounds = change(mask.startend_row_indices.astype(np.int64), case)
        return dataclasses.replace(mask, startend_row_indices=bounds.clip(-(2**31), 2**31 - 1).astype(np.int32))

    return _with_mask(change_mask)


def _shift_bound(bound_idx: int, step: int) -> Fault:
    def shift(bounds: np.ndarray, _) -> np.ndarray:
        if bound_idx < bounds.shape[-1]:
            bounds[..., bound_idx] += step
        return bounds

    return _bounds_changed(shift)


def _drop_last_key_tile(case: AttentionCase, inputs: AttentionInputs) -> Result:
    """The ragged tail of the keys is never visited."""
    kept = case.s_k // 128 * 128 if case.s_k > 128 else case.s_k

    def cut(bounds: np.ndarray, _) -> np.ndarray:
        bounds[:, :, kept:] = np.array([0, 2**30, 0, 0] if bounds.shape[-1] == 4 else [0, 2**30][: bounds.shape[-1]])
        return bounds

    return _bounds_changed(cut)(case, inputs)


def _outputs_changed(change: Callable[[Result, AttentionCase], Result]) -> Fault:
    return lambda case, inputs: change(op_support.run_op(case, inputs), case)


def _top_left_causal(mask: RawMask, case: AttentionCase) -> RawMask:
    if not mask.causal or mask.startend_row_indices is not None:
        return mask
    column = np.arange(case.s_k)
    bounds = np.stack([np.full(case.s_k, case.s_q), np.minimum(column, case.s_q)], -1).astype(np.int32)
    return RawMask(np.broadcast_to(bounds, (case.b, 1, case.s_k, 2)).copy(), False)


def _lse_in_base_2(result: Result, _) -> Result:
    return dataclasses.replace(result, lse=result.lse / np.float32(np.log(2)))


def _nan_in_hidden_rows(result: Result, _) -> Result:
    hidden = np.isneginf(result.lse).transpose(0, 2, 1)[..., None]  # [b, s_q, h_q, 1]
    return dataclasses.replace(result, out=np.where(hidden, np.nan, result.out).astype(result.out.dtype))


def _without_dlse(case: AttentionCase, inputs: AttentionInputs) -> Result:
    return op_support.run_op(case, dataclasses.replace(inputs, dlse=np.zeros_like(inputs.dlse)))


def _swapped_kv_heads(case: AttentionCase, inputs: AttentionInputs) -> Result:
    """Query head h reads K/V head h % h_kv."""
    if case.h_kv in (1, case.h_q):
        return op_support.run_op(case, inputs)
    order = np.argsort(np.arange(case.h_q) % case.h_kv, kind="stable")
    result = op_support.run_op(case, dataclasses.replace(inputs, q=inputs.q[:, :, order].copy()))
    back = np.argsort(order)
    return dataclasses.replace(result, out=result.out[:, :, back], lse=result.lse[:, back])


def _last_head_of_group_only(result: Result, case: AttentionCase) -> Result:
    return dataclasses.replace(result, dk=result.dk / max(1, case.h_q // max(case.h_kv, 1)))


def _scale_of_d_v(case: AttentionCase, inputs: AttentionInputs) -> Result:
    scale = case.d_v**-0.5 if case.softmax_scale is None else case.softmax_scale
    return op_support.run_op(dataclasses.replace(case, softmax_scale=scale), inputs)


FAULTS: dict[str, Fault] = {
    **{f"bound {idx} {step:+}": _shift_bound(idx, step) for idx in range(4) for step in (1, -1)},
    "last key tile dropped": _drop_last_key_tile,
    "causal aligned top left": _with_mask(_top_left_causal),
    "causal rule ignored": _with_mask(
        lambda mask, _: dataclasses.replace(mask, causal=False) if mask.startend_row_indices is None else mask
    ),
    "block mask ignored": _with_mask(lambda mask, _: dataclasses.replace(mask, block_mask=None)),
    "block mask transposed": _with_mask(
        lambda mask, case: mask
        if mask.block_mask is None or mask.block_mask.shape[2] != mask.block_mask.shape[3]
        else dataclasses.replace(mask, block_mask=mask.block_mask.swapaxes(2, 3).copy())
    ),
    "mask head 0 for every head": _bounds_changed(
        lambda bounds, _: np.broadcast_to(bounds[:, :1], bounds.shape).copy()
    ),
    "batch entry 0 for every entry": _bounds_changed(
        lambda bounds, _: np.broadcast_to(bounds[:1], bounds.shape).copy()
    ),
    "bounds not clipped at 0": _bounds_changed(lambda bounds, _: np.where(bounds < 0, 1, bounds)),
    "lse in base 2": _outputs_changed(_lse_in_base_2),
    "NaN in hidden rows": _outputs_changed(_nan_in_hidden_rows),
    "dlse ignored": _without_dlse,
    "K/V head by remainder": _swapped_kv_heads,
    "dk not summed over the group": _outputs_changed(_last_head_of_group_only),
    "scale from d_v": _scale_of_d_v,
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    caught = []
    for case in HOSTILE_CASES:
        try:
            op_support.check_against_oracle(case, "float32", run=FAULTS[name])
        except AssertionError as error:
            caught.append(case.name)
            assert "case AttentionCase" in str(error)
            if len(caught) == 2:
                break
    assert caught, f"no hostile case notices the fault: {name}"
