# SPDX-License-Identifier: Apache-2.0
"""What callers of the Hopper kernels rely on, both directions together: CUDA graphs, prepared schedules, hidden
values that are not finite, tensors beyond 2^31 elements, the same answers as the CPU kernels, a training step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_support import (  # noqa: E402
    assert_same_bits,
    check_backward,
    check_forward,
    is_served,
    make_inputs,
    needs_sm90,
    values,
    wide_case,
)

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing import native_call  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, RawMask, benchmark_case, resized  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90  # noqa: E402
from paddle_fm3.testing.gpu_call_bwd import (  # noqa: E402
    BackwardInputs,
    Sm90Backward,
    reference_backward,
    reference_forward,
)
from paddle_fm3.testing.gpu_reference import reference_head, relative_error  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES  # noqa: E402

pytestmark = needs_sm90


@pytest.fixture(scope="module")
def sm90() -> Sm90:
    return Sm90(_native.sm90_library())


@pytest.fixture(scope="module")
def backend() -> Sm90Backward:
    return Sm90Backward(_native.sm90_library())


@pytest.mark.parametrize("is_prepared", [False, True], ids=["bare_bounds", "schedules_rebuilt_in_the_graph"])
def test_graph_replays_with_changed_bounds(sm90: Sm90, backend: Sm90Backward, is_prepared: bool) -> None:
    """A captured step must follow what the bounds tensor holds at replay, whoever scans it. The backward then has 64, 65, 69
    and 64 key tiles an entry."""
    case = resized(benchmark_case("8k_causal_document"), b=4, h_q=2, h_kv=2)
    inputs, mask = make_inputs(case, torch.bfloat16, has_dlse=False)
    grads = backend.empty_gradients(inputs)
    schedule = sm90.build_schedule(mask) if is_prepared else None
    lists = None if schedule is None else backend.build_schedule(mask)
    forward = sm90.forward_params(inputs.q, inputs.k, inputs.v, mask, inputs.out, inputs.lse, schedule=schedule)
    backward = backend.params(inputs, mask, grads, is_deterministic=True, lists=lists)
    workspaces = [sm90.prepare(forward), backend.prepare(backward)]

    def step() -> None:
        if schedule is not None and lists is not None:
            sm90.fill_schedule(mask, schedule)
            backend.fill_schedule(lists)
        sm90.run(forward)
        backend.run(backward)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for document in (8192, 2900, 700, 1):
        column = torch.arange(8192, device="cuda", dtype=torch.int32)
        mask.bounds.copy_(((column // document + 1) * document).clamp(max=8192)[None, None, :, None])
        for x in (*workspaces, inputs.out, inputs.lse, *values(grads)):
            x.view(torch.uint8).fill_(0x5A)
        graph.replay()
        replayed = [x.clone() for x in (inputs.out, inputs.lse, *values(grads))]
        out, lse = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
        again = backend.backward(replace(inputs, out=out, lse=lse), mask, is_deterministic=True)
        assert_same_bits(f"documents of {document}", tuple(replayed), (out, lse, *values(again)))


@pytest.mark.parametrize("kind", ["causal", "documents", "global_window", "eviction"])
def test_a_prepared_schedule_changes_no_bit(sm90: Sm90, kind: str) -> None:
    """Of the forward; the backward's are in test_sm90_bwd_lists.py."""
    inputs, mask = make_inputs(wide_case(kind), torch.bfloat16)
    own, given = (
        sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=x) for x in (None, sm90.build_schedule(mask))
    )
    assert_same_bits(kind, own, given)


# Keys hidden from every row: alone inside tiles that rows do see, and so many together that whole tiles are never read.
HIDDEN_KEYS = {"inside_tiles": [3, 130, 131, 299, 480], "whole_tiles": list(range(192, 832))}
SPOILT_KEYS = HIDDEN_KEYS | {
    "whole_tiles": list(range(448, 576))
}  # no visible key shares a tile of up to 256 with these


def hidden_keys_inputs(
    d: tuple[int, int], where: str, tensor: str, bad: str
) -> tuple[str, BackwardInputs, BackwardInputs, GpuMask]:
    """Causal documents with hidden keys: (name, inputs, the same with `tensor` spoilt at hidden keys, mask)."""
    s = 1024
    end = np.minimum((np.arange(s) // 250 + 1) * 250, s).astype(np.int32)
    end[HIDDEN_KEYS[where]] = 0
    bounds = np.tile(end[None, None, :, None], (2, 1, 1, 1))
    case = AttentionCase(f"hidden_keys_d{d}", 2, s, s, 4, 2, *d, build_mask=lambda: RawMask(bounds, True))
    inputs, mask = make_inputs(case, torch.bfloat16)
    spoilt = replace(inputs, **{tensor: getattr(inputs, tensor).clone()})
    getattr(spoilt, tensor)[:, SPOILT_KEYS[where]] = float(bad)
    return case.name, inputs, spoilt, mask


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("where", HIDDEN_KEYS)
@pytest.mark.parametrize("d", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
class TestHiddenKeysThatAreNotFinite:
    """Padding may hold anything: a hidden pair contributes nothing, whatever its numbers."""

    def test_forward(self, sm90: Sm90, d: tuple[int, int], where: str, tensor: str, bad: str) -> None:
        name, inputs, spoilt, mask = hidden_keys_inputs(d, where, tensor, bad)
        check_forward(name, inputs, mask, sm90.forward(spoilt.q, spoilt.k, spoilt.v, mask))

    def test_backward(self, backend: Sm90Backward, d: tuple[int, int], where: str, tensor: str, bad: str) -> None:
        name, inputs, spoilt, mask = hidden_keys_inputs(d, where, tensor, bad)
        check_backward(name, inputs, mask, backend.backward(spoilt, mask))


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("s", [40, 1000])
@pytest.mark.parametrize("d", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
def test_such_keys_beside_rows_past_the_last_one(
    backend: Sm90Backward, d: tuple[int, int], s: int, tensor: str, bad: str
) -> None:
    """Every key tile's walk begins at the last row tile, which is short: there these keys are read as they are."""
    hidden = [3, s // 2, s - 6]
    end = np.full(s, s, np.int32)
    end[hidden] = 0
    bounds = np.tile(end[None, None, :, None], (2, 1, 1, 1))
    case = AttentionCase(f"short_row_tile_d{d}", 2, s, s, 4, 2, *d, build_mask=lambda: RawMask(bounds, True))
    inputs, mask = make_inputs(case, torch.bfloat16)
    spoilt = replace(inputs, **{tensor: getattr(inputs, tensor).clone()})
    getattr(spoilt, tensor)[:, hidden] = float(bad)
    fixed = backend.backward(spoilt, mask, is_deterministic=True)
    check_backward(case.name, inputs, mask, backend.backward(spoilt, mask), fixed)


def hidden_rows_inputs(tensor: str, d: tuple[int, int] = (128, 128)) -> tuple[BackwardInputs, BackwardInputs, GpuMask]:
    """Rows 130 to 169 see no key; (inputs, the same with `tensor` NaN there, mask)."""
    s, hidden = 400, slice(130, 170)
    bounds = np.broadcast_to(np.array([130, 170, 0, 0], np.int32), (1, 1, s, 4)).copy()
    case = AttentionCase("hidden_rows", 1, s, s, 2, 2, *d, build_mask=lambda: RawMask(bounds, False))
    inputs, mask = make_inputs(case, torch.bfloat16)
    spoilt = replace(inputs, **{tensor: getattr(inputs, tensor).clone()})
    getattr(spoilt, tensor)[(slice(None), slice(None), hidden) if tensor == "dlse" else (slice(None), hidden)] = float(
        "nan"
    )
    return inputs, spoilt, mask


def test_hidden_rows_with_nan_queries(sm90: Sm90) -> None:
    """A row that sees no key gives 0, even if its query is NaN."""
    inputs, spoilt, mask = hidden_rows_inputs("q")
    check_forward("hidden_rows", inputs, mask, sm90.forward(spoilt.q, spoilt.k, spoilt.v, mask))


@pytest.mark.parametrize("d", [(128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("tensor", ["q", "dout", "dlse"])
def test_hidden_rows_with_nan_gradients(backend: Sm90Backward, tensor: str, d: tuple[int, int]) -> None:
    """A row that sees no key has gradient 0 and adds nothing, even if its query or its gradient is NaN."""
    inputs, spoilt, mask = hidden_rows_inputs(tensor, d)
    check_backward("hidden_rows", inputs, mask, backend.backward(spoilt, mask))


def test_offsets_beyond_32_bits(sm90: Sm90, backend: Sm90Backward) -> None:
    """q, k, v and every output have 2.7e9 elements; the last head of the last batch entry is compared."""
    b, s, h, d, window = 5, 131072, 32, 128, 200
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free device memory")
    end = np.minimum(np.arange(s) + window, s).astype(np.int32)
    case = AttentionCase(
        "far", b, s, s, h, h, d, d, build_mask=lambda: RawMask(np.tile(end[None, None, :, None], (b, 1, 1, 1)), True)
    )
    mask = GpuMask.of(case)
    assert b * s * h * d > 2**31
    q, k, v, dout = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = sm90.forward(q, k, v, mask)
    grads = backend.backward(BackwardInputs(q, k, v, out, lse, dout), mask)
    for b_idx, h_idx in ((0, 0), (b - 1, h - 1)):
        wanted = reference_head(q, k, v, dout, mask, b_idx, h_idx)
        assert relative_error(out[b_idx, :, h_idx], wanted.out[:, 0]) <= 4e-3
        for name, x in grads.items():
            ref = getattr(wanted, name)
            assert relative_error(x[b_idx, :, h_idx], ref[:, 0] if name == "dq" else ref) <= 5e-3, name


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("kind", "heads"), [("full", 1), ("causal", 3)])
def test_rows_beyond_l2(sm90: Sm90, backend: Sm90Backward, kind: str, heads: int, is_deterministic: bool) -> None:
    """Two waves of items and the rest of a third (`comes_in_waves`); a fixed order walked down (`goes_by_key`)."""
    s = 50176
    case = wide_case(kind, s=s, b=1, heads=(heads, heads))
    mask = GpuMask.of(case)
    q, k, v, dout = (torch.randn(1, s, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = sm90.forward(q, k, v, mask)
    inputs = BackwardInputs(q, k, v, out, lse, dout)
    grads = backend.backward(inputs, mask, is_deterministic=is_deterministic)
    for h_idx in range(heads):
        wanted = reference_head(q, k, v, dout, mask, 0, h_idx)
        for name, x in grads.items():
            ref = getattr(wanted, name)
            assert relative_error(x[0, :, h_idx], ref[:, 0] if name == "dq" else ref) <= 5e-3, name
    if is_deterministic:
        again = backend.backward(inputs, mask, is_deterministic=True)
        assert_same_bits(case.name, values(grads), values(again))


SMALL = [case for case in HOSTILE_CASES if is_served(case)]


@pytest.mark.skipif(not _native.is_built("fm3_cpu"), reason="needs libfm3_cpu.so")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_same_answers_as_the_cpu_kernels(sm90: Sm90, backend: Sm90Backward, case: AttentionCase) -> None:
    """fp32 on the host, bf16 here, on the same bf16 values: they differ by what rounding costs."""
    inputs, mask = make_inputs(case, torch.bfloat16)
    raw = case.build_mask()
    if raw.startend_row_indices is None:
        host_mask = native_call.NativeMask.without_bounds(raw.causal, case.b, case.s_q, case.s_k)
    else:
        host_mask = native_call.NativeMask.from_bounds(raw.startend_row_indices, raw.causal, case.s_q, raw.block_mask)
    q, k, v, dout, dlse = (x.float().cpu().numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse))
    out, lse = native_call.forward(q, k, v, host_mask, case.softmax_scale)
    wanted = (out, *native_call.backward(q, k, v, host_mask, out, lse, dout, dlse, case.softmax_scale))
    gpu_out, gpu_lse = sm90.forward(inputs.q, inputs.k, inputs.v, mask, softmax_scale=case.softmax_scale)
    grads = backend.backward(
        replace(inputs, out=gpu_out, lse=gpu_lse), mask, softmax_scale=case.softmax_scale, is_deterministic=True
    )
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), (gpu_out, *values(grads)), wanted, strict=True):
        difference = np.abs(ours.float().cpu().numpy() - theirs).max(initial=0)
        assert difference <= 0.03 * np.abs(theirs).max(initial=0) + 1e-3, f"{case.name}: {name} differs by {difference}"
    assert np.array_equal(np.isneginf(gpu_lse.cpu().numpy()), np.isneginf(lse))


def test_descent_follows_the_exact_gradient(sm90: Sm90, backend: Sm90Backward) -> None:
    """Twenty steps of gradient descent on k and v through the kernels end where fp64's end."""
    case = wide_case("documents", s=700, b=1, heads=(4, 2))
    start, mask = make_inputs(case, torch.bfloat16, has_dlse=False)
    target = torch.randn_like(start.out, dtype=torch.float32)

    def descend(is_exact: bool) -> list[float]:
        k, v, losses = start.k.float(), start.v.float(), []
        for _ in range(20):
            held = replace(start, k=k.bfloat16(), v=v.bfloat16())
            if is_exact:
                out, lse = reference_forward(held.q, held.k, held.v, mask)
            else:
                out, lse = sm90.forward(held.q, held.k, held.v, mask)
            difference = out.float() - target
            losses.append(float(difference.square().mean()))
            held = replace(held, out=out, lse=lse, dout=(difference * 2).bfloat16())
            if is_exact:
                grads = reference_backward(held, mask)
            else:
                grads = backend.backward(held, mask)
            k, v = k - 0.05 * grads.dk.float(), v - 0.05 * grads.dv.float()
        return losses

    ours, exact = descend(False), descend(True)
    assert exact[-1] < 0.95 * exact[0]
    assert max(abs(x - y) for x, y in zip(ours, exact, strict=True)) <= 2e-3 * exact[0]
