# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Hopper kernels share: inputs of a case on the device, and comparison with fp64.

Tolerance per output: at most twice the error that rounding P, dS and the result to the input dtype causes in an
otherwise exact computation, in the Frobenius norm and, with one spacing of the dtype more, at the worst element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from paddle_fm3 import _native
from paddle_fm3.testing.cases import AttentionCase, RawMask
from paddle_fm3.testing.compare import output_rounding
from paddle_fm3.testing.gpu_call import GpuMask, Sm90
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Gradients, reference_backward, reference_forward

needs_sm90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so"),
]
_NUMPY_DTYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = {"64": (64, 64), "80": (80, 80), "96": (96, 96), "128": (128, 128), "192": (192, 192), "256": (256, 256),
         "192v128": (192, 128)}  # fmt: skip


def is_served(case: AttentionCase) -> bool:
    return case.d_qk % 8 == 0 and case.d_v % 8 == 0


def with_heads(case: AttentionCase, heads: tuple[int, int]) -> AttentionCase:
    return replace(case, name=f"{case.name}_d{heads[0]}_{heads[1]}", d_qk=heads[0], d_v=heads[1])


def make_inputs(
    case: AttentionCase, dtype: torch.dtype, *, has_dlse: bool = True, seed: int = 0
) -> tuple[BackwardInputs, GpuMask]:
    """Standard normal inputs, with out and lse of the fp64 reference rounded as a kernel stores them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q = normal(case.b, case.s_q, case.h_q, case.d_qk)
    k = normal(case.b, case.s_k, case.h_kv, case.d_qk)
    v = normal(case.b, case.s_k, case.h_kv, case.d_v)
    mask = GpuMask.of(case)
    out, lse = reference_forward(q, k, v, mask, softmax_scale=case.softmax_scale)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda") if has_dlse else None
    return BackwardInputs(q, k, v, out, lse, normal(*out.shape), dlse), mask


def check_forward(
    name: str,
    inputs: BackwardInputs,
    mask: GpuMask,
    got: tuple[torch.Tensor, torch.Tensor],
    softmax_scale: float | None = None,
) -> None:
    """Compares (out, lse) with fp64."""
    args, options = (inputs.q, inputs.k, inputs.v, mask), {"softmax_scale": softmax_scale, "out_dtype": torch.float64}
    out, lse = reference_forward(*args, **options)
    low, _ = reference_forward(*args, **options, round_like=inputs.q.dtype)
    _compare(name, "out", got[0], out, low)
    is_hidden = lse.isinf()
    assert torch.equal(got[1].isinf() & (got[1] < 0), is_hidden), (
        f"{name}: lse is not -inf exactly where no key is seen"
    )
    difference = (got[1] - lse).masked_fill(is_hidden, 0).abs()
    limit = 2e-4 + 2e-5 * lse.masked_fill(is_hidden, 0).abs()
    assert bool((difference <= limit).all()), f"{name}: lse off by {float(difference.max()):.2e}"


def check_backward(
    name: str, inputs: BackwardInputs, mask: GpuMask, *got: Gradients, softmax_scale: float | None = None
) -> None:
    """Compares gradients, those of several runs if given, with fp64."""
    exact = reference_backward(inputs, mask, softmax_scale=softmax_scale)
    low = reference_backward(inputs, mask, softmax_scale=softmax_scale, round_like=inputs.q.dtype)
    for run_idx, grads in enumerate(got):
        for (output, x), (_, wanted), (_, wanted_low) in zip(grads.items(), exact.items(), low.items(), strict=True):
            _compare(f"{name}, run {run_idx}", output, x, wanted, wanted_low)


def _compare(name: str, output: str, x: torch.Tensor, exact: torch.Tensor, low: torch.Tensor) -> None:
    assert bool(x.isfinite().all()), f"{name}: {output} has non-finite elements: {int((~x.isfinite()).sum())}"
    if exact.numel() == 0:
        return
    output_dtype = x.dtype
    x, low = x.double(), low.to(x.dtype).double()
    error, error_low = (x - exact).norm(), (low - exact).norm()
    worst, worst_low = (x - exact).abs().max(), (low - exact).abs().max()
    limit = 2 * worst_low + output_rounding(exact.abs().max().cpu().numpy(), _NUMPY_DTYPES[output_dtype]) + 1e-6
    if error <= 2 * error_low + 1e-4 * exact.norm() + 1e-6 and worst <= limit:
        return
    where = np.unravel_index(int((x - exact).abs().argmax()), x.shape)
    norm = float(exact.norm().clamp_min(1e-30))
    raise AssertionError(
        f"{name}: {output} relative error {float(error) / norm:.2e} (rounding alone {float(error_low) / norm:.2e}); "
        f"worst at [b, s, h, d]={[int(i) for i in where]}: {float(x[where]):.5f}, wanted {float(exact[where]):.5f}"
    )


def bits(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Byte views, for comparisons that NaN cannot escape."""
    return (x.contiguous().view(torch.uint8) for x in tensors)


def values(grads: Gradients) -> tuple[torch.Tensor, ...]:
    return tuple(x for _, x in grads.items())


def assert_same_bits(name: str, first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> None:
    for idx, (x, y) in enumerate(zip(bits(*first), bits(*second), strict=True)):
        assert torch.equal(x, y), f"{name}: output {idx} differs in {int((x != y).sum())} bytes"


def strided(x: torch.Tensor) -> torch.Tensor:
    """A copy of [b, s, h, d] inside a wider NaN tensor of [b, h, s, d] memory order; rows start at 16 bytes."""
    b, s, h, d = x.shape
    wide = torch.full((b, h, s + 3, d + 24), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[:, :, 1 : s + 1, 8 : d + 8].transpose(1, 2)
    view.copy_(x)
    return view


def wide_case(
    kind: str, *, s: int = 1000, b: int = 2, heads: tuple[int, int] = (4, 2), d: int | tuple[int, int] = 128
) -> AttentionCase:
    """Cases with several key tiles a row tile, so that every path of a kernel's pipeline is taken."""
    column = np.arange(s)
    d_qk, d_v = (d, d) if isinstance(d, int) else d

    def build() -> RawMask:
        if kind == "full":
            return RawMask(None, False)
        if kind == "causal":
            return RawMask(None, True)
        if kind == "window":
            return RawMask(stacked(np.minimum(column + 300, s)), True)
        if kind == "documents":
            end = np.minimum((column // 333 + 1) * 333, s)
            return RawMask(stacked(end, column // 333 * 333), False)
        if kind == "global_window":
            return RawMask(
                stacked(np.where(column < 16, s, np.minimum(column + 100, s)), np.full(s, s), np.full(s, 16),
                        np.where(column < 16, 0, column - 100)), False)  # fmt: skip
        if kind == "eviction":
            return RawMask(stacked(np.random.default_rng(0).integers(column + 1, s + 1)), True)
        raise KeyError(f"wide_case: no kind {kind!r}")

    def stacked(*bounds: np.ndarray) -> np.ndarray:
        one = np.stack([np.asarray(bound, np.int32) for bound in bounds], -1)[None, None]
        return np.ascontiguousarray(np.broadcast_to(one, (b, *one.shape[1:])))

    return AttentionCase(f"wide_{kind}_s{s}_d{d_qk}_{d_v}", b, s, s, *heads, d_qk, d_v, build_mask=build)


# Of each batch entry: the Hopper backward's key tiles begin at any key (bidirectional) or at row tiles (causal), and
# entries differ in how many there are.
_LENGTHS = {
    True: ([2214, 1850, 936], [5000], [100, 3050, 1850]),
    False: ([321, 321, 700, 1158, 2500], [2801, 2199], [1089, 1984, 1927]),
}


def documents_case(is_causal: bool, heads: tuple[int, int], dims: tuple[int, int]) -> AttentionCase:
    """Twelve entries of 5000 tokens, three forms in turn, in documents at which key tiles begin (cuts.h: of fewer pairs they
    do not)."""
    name = f"{'causal' if is_causal else 'bidirectional'}_documents_{heads[0]}_{heads[1]}"
    return lengths_case(name, [*_LENGTHS[is_causal]] * 4, is_causal, heads, dims)


def lengths_case(
    name: str, entries: list[list[int]], is_causal: bool, heads: tuple[int, int], dims: tuple[int, int]
) -> AttentionCase:
    """Of each batch entry the lengths of its documents."""

    def build_mask() -> RawMask:
        bounds = []
        for lengths in entries:
            ends = np.repeat(np.cumsum(lengths), lengths)
            begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
            bounds.append(np.stack([ends] if is_causal else [ends, begins], -1))
        return RawMask(np.stack(bounds)[:, None].astype(np.int32), is_causal)

    s = sum(entries[0])
    return AttentionCase(name, len(entries), s, s, *heads, *dims, build_mask)


def forward_of_ready_keys(
    sm90: Sm90, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: GpuMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call that may wait for keys, all of which are there."""
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), device=q.device)
    schedule = sm90.build_schedule(mask)
    params = sm90.forward_params(q, k, v, mask, out, lse, schedule=schedule)
    words = torch.zeros(64, dtype=torch.int32, device="cuda")  # [0] ready rows, [32] status
    words[0] = mask.s_k
    params.ready_rows, params.ready_status = words.data_ptr(), words.data_ptr() + 128
    params.ready_timeout_us = 2_000_000
    workspace = sm90.prepare(params)
    sm90.run(params)
    torch.cuda.synchronize()
    assert int(words[32]) == 0 and workspace.is_cuda
    return out, lse


KINDS = ("full", "causal", "window", "documents", "global_window", "eviction")
