# SPDX-License-Identifier: Apache-2.0
"""Gradients where tiles begin at documents (test/unit/test_sm90_bwd_cuts.py: where they do): short tiles lie beside keys and
rows of the next tile, whose gradients they must leave alone."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bwd_lists_support import BLOCK_Q, build  # noqa: E402
from gpu_support import (  # noqa: E402
    HEADS,
    assert_same_bits,
    check_backward,
    documents_case,
    make_inputs,
    needs_sm90,
    values,
)
from schedule_support import mask_of  # noqa: E402

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90  # noqa: E402
from paddle_fm3.testing.gpu_call_bwd import BackwardInputs, Gradients, Sm90Backward  # noqa: E402

pytestmark = needs_sm90


@pytest.fixture(scope="module")
def backend() -> Sm90Backward:
    return Sm90Backward(_native.sm90_library())


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("dims", "heads"), [*((dims, (2, 2)) for dims in HEADS), *((dims, (8, 2)) for dims in ("64", "128", "192v128"))],
    ids=str,
)  # fmt: skip
def test_gradients_beside_short_tiles(
    host: ctypes.CDLL, backend: Sm90Backward, dims: str, heads: tuple[int, int], is_causal: bool
) -> None:
    case = documents_case(is_causal, heads, HEADS[dims])
    lists = build(host, mask_of(case), 128)
    sizes = [np.diff(begins)[: tiles - 1] for begins, tiles in zip(lists.k_begins, lists.num_tiles, strict=True)]
    assert min(size.min() for size in sizes) < 128
    rows = [np.diff(rows[: tiles - 1])[:, 0] for rows, tiles in zip(lists.q_rows, lists.num_q_tiles, strict=True)]
    visits = [visits[: len(size), 0][size < BLOCK_Q] for visits, size in zip(lists.visits, rows, strict=True)]
    assert max(number.max(initial=0) for number in visits) > 1
    assert not is_causal or min(number.min(initial=9) for number in visits) == 1  # never in the ring
    num_tiles = lists.num_tiles if is_causal else lists.num_q_tiles
    assert len(set(num_tiles.tolist())) > 1  # entries with empty tiles
    inputs, mask = make_inputs(case, torch.bfloat16)
    schedule = backend.build_schedule(mask)
    fixed = backend.backward(inputs, mask, is_deterministic=True, lists=schedule)
    check_backward(case.name, inputs, mask, backend.backward(inputs, mask), fixed)
    for _ in range(10):
        again = backend.backward(inputs, mask, is_deterministic=True, lists=schedule)
        assert_same_bits(case.name, values(fixed), values(again))


@pytest.mark.parametrize("dims", list(HEADS))
def test_hidden_keys_beside_a_short_tile_may_hold_anything(host: ctypes.CDLL, backend: Sm90Backward, dims: str) -> None:
    """What follows a short tile's last key is loaded with it: here keys that no row sees, NaN and infinities."""
    case = documents_case(False, (2, 2), HEADS[dims])
    raw = case.build_mask()
    assert raw.startend_row_indices is not None
    raw.startend_row_indices[0, :, 331:351] = 0  # a tile of 128 keys ends before key 321
    blind = replace(case, build_mask=lambda: raw)
    assert {256, 321} <= set(build(host, mask_of(blind), 128).k_begins[0].tolist())
    inputs, mask = make_inputs(blind, torch.bfloat16)
    clean = values(backend.backward(inputs, mask, is_deterministic=True))
    inputs.k[0, 331:351] = float("nan")
    inputs.v[0, 331:351] = float("inf")
    assert_same_bits(case.name, clean, values(backend.backward(inputs, mask, is_deterministic=True)))


@pytest.mark.parametrize("dims", list(HEADS))
def test_hidden_rows_in_a_short_row_tile_may_hold_anything(host: ctypes.CDLL, backend: Sm90Backward, dims: str) -> None:
    """The last rows of a document, that no key shows: NaN and infinities."""
    case = documents_case(False, (2, 2), HEADS[dims])
    raw = case.build_mask()
    assert raw.startend_row_indices is not None
    raw.startend_row_indices[1, :, :2801, 0] = 2790
    blind = replace(case, build_mask=lambda: raw)
    assert [2752, 2801] in build(host, mask_of(blind), 128).q_rows[1].tolist()
    inputs, mask = make_inputs(blind, torch.bfloat16)
    clean = backend.backward(inputs, mask, is_deterministic=True)
    check_backward(case.name, inputs, mask, clean)
    inputs.q[1, 2790:2801] = float("nan")
    inputs.dout[1, 2790:2801] = float("inf")
    assert_same_bits(case.name, values(clean), values(backend.backward(inputs, mask, is_deterministic=True)))


def one_sequence(
    backend: Sm90Backward, kind: str, heads: tuple[int, int], d: int
) -> tuple[BackwardInputs, GpuMask, GpuMask]:
    """16K tokens, and their mask twice: with key tiles that begin at documents, and on the grid for a block_mask's sake."""
    lengths = [2150, 1850, 3000, 680, 740, 3150, 4814]
    ends = torch.tensor(np.repeat(np.cumsum(lengths), lengths).astype(np.int32), device="cuda")
    begins = torch.tensor(np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32), device="cuda")
    columns = {"causal": [], "causal documents": [ends], "documents": [ends, begins]}[kind]
    bounds = torch.stack(columns, -1)[None, None].contiguous() if columns else None
    mask = GpuMask(bounds, None, kind != "documents", 1, 1, 16_384, 16_384)
    tiles = torch.ones((1, 1, 128, 128), dtype=torch.int32, device="cuda")
    q, k, v, dout = (
        torch.randn((1, 16_384, h, d), device="cuda", dtype=torch.bfloat16)
        for h in (heads[0], heads[1], heads[1], heads[0])
    )
    out, lse = Sm90(backend.library).forward(q, k, v, mask)
    return BackwardInputs(q, k, v, out, lse, dout), mask, replace(mask, block_mask=tiles)


def assert_close(name: str, found: Gradients, wanted: Gradients) -> None:
    for (output, x), (_, y) in zip(found.items(), wanted.items(), strict=True):
        error = float((x.float() - y.float()).norm() / y.float().norm())
        assert error <= 1e-3, f"{name}: {output} differs by {error:.1e}"


@pytest.mark.parametrize("kind", ["causal documents", "documents"])
@pytest.mark.parametrize("d", [64, 128])
def test_parts_of_a_group_are_those_of_the_grid(backend: Sm90Backward, d: int, kind: str) -> None:
    """One key head, whose group is cut into parts: a short tile's gradients are sums over these."""
    inputs, mask, on_grid = one_sequence(backend, kind, (8, 1), d)
    assert backend.build_schedule(mask).memory.numel() != backend.build_schedule(on_grid).memory.numel()
    wanted = backend.backward(inputs, on_grid)
    for is_deterministic in (False, True):
        assert_close(kind, backend.backward(inputs, mask, is_deterministic=is_deterministic), wanted)


@pytest.mark.parametrize("d", [64, 128])
def test_a_kept_workspace_serves_masks_with_more_tiles(backend: Sm90Backward, d: int) -> None:
    """Its sums stay zeros (BwdParams::zero_sums), whatever the room that a mask's key tiles take."""
    workspace = None
    for kind in ("causal", "causal documents", "causal", "documents", "causal documents"):
        inputs, mask, on_grid = one_sequence(backend, kind, (8, 1), d)
        for given in (mask, on_grid):
            lists, grads = backend.build_schedule(given), backend.empty_gradients(inputs)
            params = backend.params(inputs, given, grads, lists=lists)
            if workspace is None:
                workspace = backend.prepare(params)
                workspace.fill_(0xA5)
                params.zero_sums = 1
            else:
                params.workspace, params.workspace_bytes = workspace.data_ptr(), workspace.numel()
                params.zero_sums = 2
            backend.run(params)
            assert_close(kind, grads, backend.backward(inputs, on_grid))
