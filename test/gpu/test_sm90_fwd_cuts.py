# SPDX-License-Identifier: Apache-2.0
"""The Hopper forward where query tiles begin at documents (test/unit/test_sm90_fwd_cuts.py: where they do): short tiles
lie beside rows of the next tile, which they must leave alone. And where pairs of tiles of a document are walked first, then
the tiles that are in none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_support import (  # noqa: E402
    DTYPES,
    HEADS,
    assert_same_bits,
    check_forward,
    documents_case,
    forward_of_ready_keys,
    lengths_case,
    make_inputs,
    needs_sm90,
)

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3._device_api import LocalFirst  # noqa: E402
from paddle_fm3.distributed.device import Sm90Device  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, RawMask  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90, visible_rows  # noqa: E402

pytestmark = needs_sm90
KINDS = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])


@pytest.fixture(scope="module")
def sm90() -> Sm90:
    return Sm90(_native.sm90_library())


@dataclass(frozen=True)
class Walk:
    """What a prepared schedule says of the forward's way (device_schedule.cuh's totals)."""

    pairs: tuple[int, int]  # of the list that has most of them, of the one that has fewest
    rest: tuple[int, int]
    num_cuts: int
    is_in_pairs: bool  # use_pairs, where tiles begin at documents

    @classmethod
    def of(cls, schedule: torch.Tensor) -> Walk:
        words = schedule[:64].view(torch.int32).tolist()
        tile_halves, pair_halves = schedule[:16].view(torch.int64).tolist()
        return cls((words[8], words[9]), (words[10], words[11]), words[12], 8 * pair_halves >= 3 * tile_halves)


# Of each entry the lengths of its documents; whether they are causal; pairs and rest as in Walk.
WALKS = {
    "pairs alone": ([[1024, 2560, 1536], [1280, 3840]] * 6, False, (20, 20), (0, 0)),
    "pairs and some": (
        [[321, 321, 700, 1158, 2500], [5000], [350, 384, 600, 900, 1000, 1766]] * 4, False, (20, 19), (3, 0),
    ),
    "gaps in both": (
        [[8192], [8192], [7000, 1192], [1042, 1645, 1796, 517, 1000, 1300, 892]], True, (24, 0), (68, 16),
    ),
    "one list": ([[9000, 7384]], True, (49, 49), (31, 31)),
    "few pairs": ([[2214, 1850, 936], [5000], [100, 3050, 1850]] * 4, True, (12, 3), (35, 16)),
    "no pairs": ([[1042, 1645, 1796, 517], [1408, 755, 1182, 868, 787]] * 6, True, (0, 0), (42, 41)),
}  # fmt: skip


def walk_case(sm90: Sm90, name: str, num_heads: int, dims: str) -> AttentionCase:
    """One of WALKS; that it is what its name says."""
    entries, is_causal, pairs, rest = WALKS[name]
    case = lengths_case(name, entries, is_causal, (num_heads, num_heads), HEADS[dims])
    walk = Walk.of(sm90.build_schedule(GpuMask.of(case)))
    assert (walk.pairs, walk.rest) == (pairs, rest) and walk.num_cuts > 0
    assert walk.is_in_pairs == (name not in ("few pairs", "no pairs"))
    return case


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
    assert Walk.of(schedule).num_cuts > 0, "no tile begins at a document"
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
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_local_tiles_come_first_and_nothing_else_changes(sm90: Sm90, heads: tuple[int, int], is_causal: bool) -> None:
    """Where lists have entries without a tile, too."""
    case = documents_case(is_causal, heads, (128, 128))
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


@pytest.mark.parametrize(
    ("name", "num_heads", "dims", "dtype"),
    [
        ("pairs alone", 1, "64", "fp16"), ("pairs alone", 2, "96", "bf16"), ("pairs alone", 1, "128", "bf16"),
        ("pairs and some", 2, "64", "bf16"), ("pairs and some", 1, "96", "fp16"),
        ("pairs and some", 3, "128", "bf16"), ("pairs and some", 16, "128", "fp16"),
        ("gaps in both", 1, "64", "bf16"), ("gaps in both", 2, "96", "bf16"), ("gaps in both", 5, "128", "fp16"),
        ("one list", 1, "128", "bf16"), ("one list", 4, "64", "fp16"),  # fewer pairs than teams of CTAs
        ("few pairs", 2, "128", "bf16"), ("no pairs", 2, "128", "bf16"),
    ],
)  # fmt: skip
def test_pairs_and_then_the_rest(sm90: Sm90, name: str, num_heads: int, dims: str, dtype: str) -> None:
    """Each output once, the same in every run; also if the call may have to wait for keys: then no pairs are walked."""
    case = walk_case(sm90, name, num_heads, dims)
    inputs, mask = make_inputs(case, DTYPES[dtype])
    schedule = sm90.build_schedule(mask)
    got = sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule)
    check_forward(name, inputs, mask, got)
    for repeat in range(20):
        again = sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule if repeat % 2 else None)
        assert_same_bits(name, got, again)
    check_forward(name, inputs, mask, forward_of_ready_keys(sm90, inputs.q, inputs.k, inputs.v, mask))


@pytest.mark.parametrize(("name", "dims"), [("gaps in both", "128"), ("pairs and some", "64"), ("one list", "96")])
def test_values_that_a_pair_brings_to_rows_that_do_not_see_them(sm90: Sm90, name: str, dims: str) -> None:
    """Its steps are those of both tiles. Spoilt values everywhere, each in a column of its own."""
    case = walk_case(sm90, name, 2, dims)
    inputs, mask = make_inputs(case, torch.bfloat16)
    clean, _ = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
    d, spoilt = case.d_v, range(7, case.s_k, 211)
    for idx, k_idx in enumerate(spoilt):
        inputs.v[:, k_idx, :, idx % d] = (float("nan"), float("inf"), float("-inf"))[idx % 3]
    out, _ = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
    for b_idx in range(case.b):
        shown = visible_rows(mask, b_idx, 0, 0, case.s_q)
        is_spoilt = torch.zeros(case.s_q, d, dtype=torch.bool, device="cuda")
        for idx, k_idx in enumerate(spoilt):
            is_spoilt[:, idx % d] |= shown[:, k_idx]
        assert bool(is_spoilt.any()) and not bool(is_spoilt.all())
        for h_idx in range(2):
            assert torch.equal(~out[b_idx, :, h_idx].isfinite(), is_spoilt)
            before = clean[b_idx, :, h_idx]
            kept = out[b_idx, :, h_idx][~is_spoilt].float() - before[~is_spoilt].float()
            assert kept.norm() <= 5e-3 * before.float().norm()


@pytest.mark.parametrize("back", [0, 512, 4096])
@pytest.mark.parametrize("dims", ["64", "128"])
def test_keys_that_only_a_pair_s_second_tile_sees(sm90: Sm90, dims: str, back: int) -> None:
    """What is not finite in them reaches no row of the first one. Some rows are spoilt themselves. Pairs end with their
    document, and each 256 rows before."""
    case = walk_case(sm90, "one list", 2, dims)
    inputs, mask = make_inputs(case, torch.bfloat16)
    clean, clean_lse = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
    ends = [9000 - back, case.s_k - back]
    for end in ends:
        for idx, value in enumerate((float("nan"), float("inf"), float("-inf"), 3e38)):
            inputs.k[:, end - 100 + idx] = value
    row = torch.arange(case.s_q, device="cuda")
    sees = ((row >= ends[0] - 100) & (row < 9000)) | (row >= ends[1] - 100)
    is_nan = row % 7 == 3
    for has_nan_rows in (False, True):
        if has_nan_rows:
            inputs.q[:, is_nan] = float("nan")
        kept = ~(sees | is_nan) if has_nan_rows else ~sees
        out, lse = sm90.forward(inputs.q, inputs.k, inputs.v, mask)
        assert bool(out[:, kept].isfinite().all())
        difference = (out[:, kept].float() - clean[:, kept].float()).norm()
        assert difference <= 5e-3 * clean[:, kept].float().norm()
        assert torch.allclose(lse[..., kept], clean_lse[..., kept], rtol=0, atol=1e-3)


def keys_and_rows_case(kind: str) -> AttentionCase:
    """Documents of 12,000 rows and 24,000 keys. growing: a row sees more keys than the row before."""
    rows, keys = ([3000, 9000], [7000, 17_000]) if kind == "growing" else ([3000, 4100, 4900], [5000, 9000, 10_000])
    if kind == "causal":  # with the last row and the last key in line
        rows, keys = [500, 6000, 5500], [12_500, 6000, 5500]
    end = np.repeat(np.cumsum(rows), keys)
    begin = np.repeat(np.cumsum([0, *rows[:-1]]), keys)
    if kind == "growing":
        begin = begin + np.concatenate([np.arange(k) * r // k for r, k in zip(rows, keys, strict=True)])
    columns = [end] if kind == "causal" else [end, begin]
    bounds = np.stack(columns, -1)[None, None].astype(np.int32)
    return AttentionCase(kind, 1, 12_000, 24_000, 2, 2, 128, 128, lambda: RawMask(bounds, kind == "causal"))


@pytest.mark.parametrize("kind", ["bidirectional", "growing", "causal"])
def test_fewer_rows_than_keys(sm90: Sm90, kind: str) -> None:
    case = keys_and_rows_case(kind)
    inputs, mask = make_inputs(case, torch.bfloat16)
    schedule = sm90.build_schedule(mask)
    walk = Walk.of(schedule)
    assert walk.num_cuts > 0 and walk.is_in_pairs and walk.rest[0] > 0
    got = sm90.forward(inputs.q, inputs.k, inputs.v, mask, schedule=schedule)
    check_forward(kind, inputs, mask, got)
    assert_same_bits(kind, got, sm90.forward(inputs.q, inputs.k, inputs.v, mask))
