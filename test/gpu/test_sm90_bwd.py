# SPDX-License-Identifier: Apache-2.0
"""The Hopper backward against the textbook formulas in fp64, on hostile cases and on ones that reach every path.

Tolerance per output: at most twice the error that rounding P, dS and the result to the input dtype causes in
an otherwise exact computation, in the Frobenius norm and at the worst element.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, RawMask, hostile_case  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90Error  # noqa: E402
from paddle_fm3.testing.gpu_call_bwd import (  # noqa: E402
    BackwardInputs,
    Gradients,
    Sm90Backward,
    reference_backward,
    reference_forward,
)
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def backend() -> Sm90Backward:
    return Sm90Backward(_native.sm90_library())


def make_inputs(case: AttentionCase, dtype: torch.dtype, *, has_dlse: bool = True, seed: int = 0) -> BackwardInputs:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q = normal(case.b, case.s_q, case.h_q, case.d_qk)
    k = normal(case.b, case.s_k, case.h_kv, case.d_qk)
    v = normal(case.b, case.s_k, case.h_kv, case.d_v)
    out, lse = reference_forward(q, k, v, GpuMask.of(case), softmax_scale=case.softmax_scale)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda") if has_dlse else None
    return BackwardInputs(q, k, v, out, lse, normal(*out.shape), dlse)


def check(name: str, inputs: BackwardInputs, mask: GpuMask, got: Gradients, softmax_scale: float | None = None) -> None:
    exact = reference_backward(inputs, mask, softmax_scale=softmax_scale)
    low = reference_backward(inputs, mask, softmax_scale=softmax_scale, round_like=inputs.q.dtype)
    for (output, x), (_, ref), (_, ref_low) in zip(got.items(), exact.items(), low.items(), strict=True):
        assert bool(x.isfinite().all()), f"{name}: {output} has non-finite elements: {int((~x.isfinite()).sum())}"
        x, ref_low = x.double(), ref_low.to(x.dtype).double()
        if ref.numel() == 0:
            continue
        error, error_low = (x - ref).norm(), (ref_low - ref).norm()
        worst, worst_low = (x - ref).abs().max(), (ref_low - ref).abs().max()
        limit = 2 * worst_low + 2e-4 * ref.abs().max() + 1e-6
        where = np.unravel_index(int((x - ref).abs().argmax()), x.shape)
        assert error <= 2 * error_low + 1e-4 * ref.norm() + 1e-6 and worst <= limit, (
            f"{name}: {output} relative error {float(error / ref.norm().clamp_min(1e-30)):.2e} (rounding alone "
            f"{float(error_low / ref.norm().clamp_min(1e-30)):.2e}); worst at [b, s, h, d]={[int(i) for i in where]}: "
            f"{float(x[where]):.5f}, wanted {float(ref[where]):.5f}"
        )


def is_served(case: AttentionCase) -> bool:
    return case.d_qk % 8 == 0 and case.d_v % 8 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
def test_hostile(backend: Sm90Backward, case: AttentionCase, dtype: str, is_deterministic: bool) -> None:
    mask = GpuMask.of(case)
    inputs = make_inputs(case, DTYPES[dtype])
    if not is_served(case):
        with pytest.raises(Sm90Error, match="multiples of 8"):
            backend.backward(inputs, mask, softmax_scale=case.softmax_scale)
        return
    got = backend.backward(inputs, mask, softmax_scale=case.softmax_scale, is_deterministic=is_deterministic)
    check(case.name, inputs, mask, got, case.softmax_scale)


def wide_case(kind: str, *, s: int = 1000, b: int = 2, heads: tuple[int, int] = (4, 2), d: int = 128) -> AttentionCase:
    """Cases with several key tiles a row tile, so that sums go through the ring and heads reuse its slots."""
    column = np.arange(s)

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
        rng = np.random.default_rng(0)
        return RawMask(stacked(rng.integers(column + 1, s + 1)), True)

    def stacked(*bounds: np.ndarray) -> np.ndarray:
        one = np.stack([np.asarray(bound, np.int32) for bound in bounds], -1)[None, None]
        return np.ascontiguousarray(np.broadcast_to(one, (b, *one.shape[1:])))

    return AttentionCase(f"wide_{kind}_s{s}_d{d}", b, s, s, *heads, d, d, build_mask=build)


KINDS = ("full", "causal", "window", "documents", "global_window", "eviction")


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("d", [64, 80, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_wide(backend: Sm90Backward, kind: str, d: int, heads: tuple[int, int]) -> None:
    case = wide_case(kind, heads=heads, d=d)
    inputs = make_inputs(case, torch.bfloat16)
    check(case.name, inputs, GpuMask.of(case), backend.backward(inputs, GpuMask.of(case)))


@pytest.mark.parametrize("d", [(192, 128), (192, 192), (160, 128), (256, 256), (136, 200)])
@pytest.mark.parametrize("kind", ["causal", "documents", "global_window"])
def test_wide_heads(backend: Sm90Backward, kind: str, d: tuple[int, int]) -> None:
    case = replace(wide_case(kind, s=700), d_qk=d[0], d_v=d[1])
    inputs = make_inputs(case, torch.bfloat16)
    for is_deterministic in (False, True):
        got = backend.backward(inputs, GpuMask.of(case), is_deterministic=is_deterministic)
        check(f"{case.name} {d}", inputs, GpuMask.of(case), got)


def test_ring_is_reused(backend: Sm90Backward) -> None:
    """More heads than the ring holds: each slot serves several heads in turn."""
    case = wide_case("causal", s=2048, b=4, heads=(32, 32))
    inputs = make_inputs(case, torch.bfloat16, has_dlse=False)
    check(case.name, inputs, GpuMask.of(case), backend.backward(inputs, GpuMask.of(case)))


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_repeats_bitwise(backend: Sm90Backward, kind: str, d: int) -> None:
    case = wide_case(kind, s=3000, b=2, heads=(8, 4), d=d)
    inputs = make_inputs(case, torch.bfloat16)
    mask = GpuMask.of(case)
    first = backend.backward(inputs, mask, is_deterministic=True)
    check(case.name, inputs, mask, first)
    for _ in range(5):
        again = backend.backward(inputs, mask, is_deterministic=True)
        for (name, x), (_, y) in zip(first.items(), again.items(), strict=True):
            assert torch.equal(x.view(torch.int16), y.view(torch.int16)), f"{kind}: {name} differs between runs"


def test_strided(backend: Sm90Backward) -> None:
    """q, k, v, dout and the gradients as slices of wider tensors, in [b, h, s, d] memory order."""
    case = wide_case("window", s=500, heads=(4, 2))
    plain = make_inputs(case, torch.bfloat16)
    mask = GpuMask.of(case)

    def strided(x: torch.Tensor) -> torch.Tensor:
        b, s, h, d = x.shape
        wide = torch.full((b, h, s + 3, d + 24), float("nan"), dtype=x.dtype, device=x.device)
        view = wide[:, :, 1 : s + 1, 8 : d + 8].transpose(1, 2)
        view.copy_(x)
        return view

    inputs = replace(plain, **{name: strided(getattr(plain, name)) for name in ("q", "k", "v", "out", "dout")})
    grads = Gradients(*(strided(x) for x in (plain.q, plain.k, plain.v)))
    got = backend.backward(inputs, mask, grads=grads)
    check("strided", plain, mask, got)
    for name, x in got.items():
        edge = x._base if x._base is not None else x
        assert bool(edge[:, :, 0].isnan().all() and edge[..., :8].isnan().all()), f"{name}: written outside its view"


def test_refuses_what_it_does_not_serve(backend: Sm90Backward) -> None:
    case = hostile_case("single")
    inputs = make_inputs(case, torch.bfloat16)
    inputs = replace(inputs, q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
    with pytest.raises(Sm90Error, match="float32"):
        backend.backward(inputs, GpuMask.of(case))
