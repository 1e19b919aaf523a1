# SPDX-License-Identifier: Apache-2.0
"""Shared by test_c_abi_*.py: runs one case through the C ABI and compares all five outputs with the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paddle_fm3._native import cpu_library
from paddle_fm3.testing import native_call, reference
from paddle_fm3.testing.cases import AttentionCase, AttentionInputs, make_inputs
from paddle_fm3.testing.compare import assert_close_to_oracle
from paddle_fm3.testing.condition import rounding_floor
from paddle_fm3.testing.native_call import NativeMask

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def simd_targets() -> list[str]:
    """Targets this machine can run, best first."""
    library = cpu_library()
    served = [name for name in ("avx512", "avx2", "baseline") if library.fm3_cpu_set_simd_target(name.encode()) == 0]
    library.fm3_cpu_set_simd_target(b"")
    return served


@contextlib.contextmanager
def backend(*, target: str = "", num_threads: int = 2) -> Iterator[None]:
    """Runs the body on one SIMD target and thread count, then goes back to the defaults."""
    library = cpu_library()
    native_call.check(library.fm3_cpu_set_simd_target(target.encode()))
    library.fm3_cpu_set_num_threads(num_threads)
    try:
        yield
    finally:
        library.fm3_cpu_set_simd_target(b"")
        library.fm3_cpu_set_num_threads(0)


def native_mask(case: AttentionCase) -> NativeMask:
    raw = case.build_mask()
    if raw.startend_row_indices is None:
        return NativeMask.without_bounds(raw.causal, case.b, case.s_q, case.s_k)
    return NativeMask.from_bounds(raw.startend_row_indices, raw.causal, case.s_q, raw.block_mask)


def run(case: AttentionCase, inputs: AttentionInputs, *, has_dlse: bool = True) -> dict[str, NDArray]:
    """out, lse, dq, dk, dv of the C ABI."""
    mask = native_mask(case)
    scale = case.d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    dlse = inputs.dlse if has_dlse else None
    out, lse = native_call.forward(q, k, v, mask, scale)
    grads = native_call.backward(q, k, v, mask, out, lse, dout, dlse, softmax_scale=scale)
    return dict(zip(OUTPUTS, (out, lse, *grads), strict=True))


@lru_cache(maxsize=256)
def expected(case: AttentionCase, dtype: str) -> tuple[AttentionInputs, dict[str, NDArray], dict[str, NDArray]]:
    """Inputs, fp64 oracle and naive low-precision result of one case."""
    inputs = make_inputs(case, DTYPES[dtype])
    return inputs, *oracles(case, inputs, dtype)


def oracles(case: AttentionCase, inputs: AttentionInputs, dtype: str) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    """fp64 oracle and the yardstick: the naive result, for float32 at least one rounding away from the oracle."""
    arguments = {**case.call_arguments(), "dout": inputs.dout, "dlse": inputs.dlse}
    exact = reference.attention(inputs.q, inputs.k, inputs.v, **arguments)
    naive = reference.low_precision_attention(DTYPES[dtype], inputs.q, inputs.k, inputs.v, **arguments)
    exact_by_name, naive_by_name = ({name: getattr(x, name) for name in OUTPUTS} for x in (exact, naive))
    if dtype == "float32":
        for name, floor in rounding_floor(case, inputs, exact).items():
            with np.errstate(invalid="ignore"):  # inf - inf
                error = np.abs(naive_by_name[name] - exact_by_name[name])
            if error[np.isfinite(error)].max(initial=0.0) < floor:
                naive_by_name[name] = exact_by_name[name] + floor
    return exact_by_name, naive_by_name


def assert_matches_oracle(
    actual: dict[str, NDArray], exact: dict[str, NDArray], naive: dict[str, NDArray], label: object
) -> None:
    for name in OUTPUTS:
        assert_close_to_oracle(actual[name], exact[name], naive[name], name, label)


def assert_same_bits(left: dict[str, NDArray], right: dict[str, NDArray], label: object) -> None:
    for name, array in left.items():
        other = right[name]
        assert array.dtype == other.dtype and array.shape == other.shape
        differs = array.view(np.uint8) != other.view(np.uint8)
        assert not differs.any(), f"{name}: {int(differs.sum())} bytes differ; {label}"
