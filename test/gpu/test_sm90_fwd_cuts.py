# SPDX-License-Identifier: Apache-2.0
"""The Hopper forward where query tiles begin at documents (test/unit/test_sm90_fwd_cuts.py: where they do): short tiles
lie beside rows of the next tile, which they must leave alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_support import (  # noqa: E402
    DTYPES,
    HEADS,
    assert_same_bits,
    check_forward,
    documents_case,
    make_inputs,
    needs_sm90,
)

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3._device_api import LocalFirst  # noqa: E402
from paddle_fm3.distributed.device import Sm90Device  # noqa: E402
from paddle_fm3.testing.cases import RawMask  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, visible_rows  # noqa: E402

pytestmark = needs_sm90
KINDS = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])


@pytest.fixture(scope="module")
def sm90() -> Sm90:
    return Sm90(_native.sm90_library())


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dims", "heads"), [*((dims, (2, 2)) for dims in HEADS), *((dims, (8, 2)) for dims in ("64", "128", "192v128"))],
    ids=str,
)  # fmt: skip
def test_outputs_beside_short_tiles(sm90: Sm90, dims: str, heads: tuple[int, int], dtype: str, is_causal: bool) -> None:
    """Entries differ in how many tiles they have; two query heads of a group are two CTAs that share claims."""
    case = documents_case(is_causal, heads, HEADS[dims])
    inputs, mask = make_inputs(case, DTYPES[dtype])
    schedule = sm90.build_schedule(mask)
    got = sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule)
    check_forward(case.name, inputs, mask, got)
    for repeat in range(20):
        again = sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule if repeat % 2 else None)
        assert_same_bits(case.name, got, again)


@KINDS
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
def test_heads_with_masks_of_their_own(sm90: Sm90, heads: tuple[int, int], is_causal: bool) -> None:
    """Heads side by side whose lists have more tiles and fewer."""
    case = documents_case(is_causal, heads, (128, 128))
    bounds = case.build_mask().startend_row_indices
    assert bounds is not None
    raw = RawMask(np.concatenate([bounds[idx : idx + 6] for idx in range(heads[0])], axis=1), is_causal)
    own = replace(case, b=6, build_mask=lambda: raw)
    inputs, mask = make_inputs(own, torch.bfloat16)
    check_forward(case.name, inputs, mask, sm90.forward(inputs.q, inputs.k, inputs.v, mask))


@KINDS
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
def test_a_spoilt_value_reaches_the_rows_that_see_it_and_no_other(
    sm90: Sm90, heads: tuple[int, int], is_causal: bool
) -> None:
    """Rows to be computed again belong to tiles that may begin at any row."""
    case = documents_case(is_causal, heads, (128, 128))
    inputs, mask = make_inputs(case, torch.bfloat16)
    clean, _ = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
    spoilt = {
        5: float("nan"),
        330: float("inf"),
        2160: float("-inf"),
        2510: float("nan"),
        4000: float("inf"),
        4999: float("nan"),
    }
    for k_idx, value in spoilt.items():
        inputs.v[:, k_idx, :, k_idx % 128] = value
    out, _ = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
    for b_idx in range(3):
        shown = visible_rows(mask, b_idx, 0, 0, case.s_q)
        for h_idx in range(heads[0]):
            is_spoilt = torch.zeros(case.s_q, 128, dtype=torch.bool, device="cuda")
            for k_idx, value in spoilt.items():
                is_spoilt[:, k_idx % 128] |= shown[:, k_idx]
                column = out[b_idx, :, h_idx, k_idx % 128]
                assert value != value or (column[shown[:, k_idx]] == value).all()
            assert torch.equal(~out[b_idx, :, h_idx].isfinite(), is_spoilt)
            before = clean[b_idx, :, h_idx]
            kept = out[b_idx, :, h_idx][~is_spoilt].float() - before[~is_spoilt].float()
            assert kept.norm() <= 5e-3 * before.float().norm()


@KINDS
@pytest.mark.parametrize(
    ("dims", "heads"), [("64", (2, 2)), ("128", (2, 2)), ("128", (4, 1)), ("256", (2, 2))], ids=str
)
def test_what_rows_behind_a_short_tile_see_reaches_no_other(
    sm90: Sm90, dims: str, heads: tuple[int, int], is_causal: bool
) -> None:
    """They see keys of their step that nobody else does, and may be NaN themselves."""
    plain = documents_case(is_causal, heads, HEADS[dims])
    bounds = plain.build_mask().startend_row_indices
    assert bounds is not None
    bounds[:, :, 11::97] = 0 if is_causal else 5000  # these keys nobody sees
    case = replace(plain, build_mask=lambda: RawMask(bounds, is_causal))
    inputs, mask = make_inputs(case, torch.bfloat16)
    schedule = sm90.build_schedule(mask)
    assert schedule[:64].view(torch.int32)[12] > 0, "no tile begins at a document"
    clean, clean_lse = sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule)
    check_forward(case.name, inputs, mask, (clean, clean_lse))
    spoilt_rows = torch.arange(5000, device="cuda") % 7 == 3
    for first, value in enumerate((float("nan"), float("inf"), float("-inf"), 3e38)):
        inputs.k[:, 11 + 97 * first :: 4 * 97] = value
    for has_spoilt_rows in (False, True):
        if has_spoilt_rows:
            inputs.q[:, spoilt_rows] = float("nan")
        kept = ~spoilt_rows if has_spoilt_rows else torch.ones_like(spoilt_rows)
        out, lse = sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule)
        assert bool(out[:, kept].isfinite().all()), has_spoilt_rows
        difference = (out[:, kept].float() - clean[:, kept].float()).norm()
        assert difference <= 5e-3 * clean[:, kept].float().norm(), has_spoilt_rows
        assert torch.allclose(lse[..., kept], clean_lse[..., kept], rtol=0, atol=1e-3), has_spoilt_rows


@KINDS
def test_local_tiles_come_first_and_nothing_else_changes(sm90: Sm90, is_causal: bool) -> None:
    """Where lists have entries without a tile, too."""
    case = documents_case(is_causal, (4, 2), (128, 128))
    inputs, mask = make_inputs(case, torch.bfloat16)
    plain = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
    for k_end in (0, 1000, 2300, 5000):
        schedule, first = sm90.build_schedule(mask), LocalFirst(1, 1 << 30)
        first.k_ends[0] = k_end
        stream = torch.cuda.current_stream().cuda_stream
        Sm90Device(sm90.library)._call("order_local_first", mask.view, schedule.data_ptr(), first, stream)
        assert_same_bits(case.name, plain, sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule))


def test_outputs_are_those_of_the_grid(sm90: Sm90) -> None:
    """One sequence of 16K in pairs of tiles and single ones: a block_mask keeps the mask on the grid."""
    lengths = [2150, 1850, 3000, 680, 740, 3150, 4814]
    ends = torch.tensor(np.repeat(np.cumsum(lengths), lengths).astype(np.int32), device="cuda")
    begins = torch.tensor(np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32), device="cuda")
    tiles = torch.ones((1, 1, 128, 128), dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn((1, 16_384, 4, 128), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for columns in ([ends], [ends, begins]):
        bounds = torch.stack(columns, -1)[None, None].contiguous()
        mask = GpuMask(bounds, None, len(columns) == 1, 1, 1, 16_384, 16_384)
        out, lse = sm90.forward(q, k, v, mask)
        wanted, wanted_lse = sm90.forward(q, k, v, replace(mask, block_mask=tiles))
        assert not torch.equal(out, wanted)
        assert (out.float() - wanted.float()).norm() <= 3e-3 * wanted.float().norm()
        assert torch.allclose(lse, wanted_lse, rtol=0, atol=1e-3)
