# SPDX-License-Identifier: Apache-2.0
"""The named cases: densities of the published masks, sizes, and that every field reaches the call."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paddle_fm3 import mask as masks
from paddle_fm3.testing import cases
from paddle_fm3.testing.cases import (
    HOSTILE_CASES,
    AttentionCase,
    benchmark_case,
    hostile_case,
    make_inputs,
    resized,
)
from paddle_fm3.testing.reference import visible_plane

# kind -> (exact, in 128 x 128 tiles) at 8K, 32K, 128K, as measured with an independent program.
PUBLISHED = {
    "share_question": [(0.0811, 0.1065), (0.0293, 0.0368), (0.0286, 0.0303)],
    "global_window": [(0.1249, 0.1646), (0.1220, 0.1321), (0.1213, 0.1238)],
    "causal_blockwise": [(0.2865, 0.3108), (0.0950, 0.1011), (0.1263, 0.1280)],
    "prefix_document": [(0.1205, 0.1411), (0.0456, 0.0518), (0.0442, 0.0456)],
    "prefix_causal": [(0.6250, 0.6289), (0.6250, 0.6260), (0.6250, 0.6252)],
    "qk_sparse": [(0.4844, 0.4902), (0.4844, 0.4858), (0.4844, 0.4847)],
    "random_eviction": [(0.3124, 0.5078), (0.3122, 0.5008), (0.3124, 0.4980)],
}
# kind -> pairs in visited tiles / visible pairs at 8K, 32K, 128K.
PUBLISHED_RATIO = {
    "causal": (1.016, 1.004, 1.001),
    "window": (1.250, 1.063, 1.016),
    "causal_document": (1.177, 1.131, 1.032),
    "document": (1.108, 1.087, 1.021),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_densities_are_the_published_ones(kind):
    for length, (exact, block) in zip(cases.LENGTHS, PUBLISHED[kind], strict=True):
        case = benchmark_case(f"{length}_{kind}")
        # Four published digits; the eviction rows are drawn at random, so only their statistics agree.
        tolerance = 3e-4 if kind == "random_eviction" else 0.6e-4
        assert case.density_exact == pytest.approx(exact, abs=tolerance), length
        assert case.density_block == pytest.approx(block, abs=tolerance), length


@pytest.mark.parametrize("kind", PUBLISHED_RATIO)
def test_block_counting_ratios_are_the_published_ones(kind):
    for length, ratio in zip(cases.LENGTHS, PUBLISHED_RATIO[kind], strict=True):
        case = benchmark_case(f"{length}_{kind}")
        assert case.num_block_pairs / case.num_visible_pairs == pytest.approx(ratio, abs=0.6e-3)


@pytest.mark.parametrize("kind", cases.ANCHOR_KINDS)
def test_pairs_have_closed_forms(kind):
    for length, s in cases.LENGTHS.items():
        case = benchmark_case(f"{length}_{kind}")
        documents, _ = cases.paper_documents(length)
        w = s // 16
        one = {
            "full": s * s,
            "causal": s * (s + 1) // 2,
            "window": w * (w + 1) // 2 + (s - w) * w,
            "causal_document": sum(n * (n + 1) // 2 for n in documents),
            "document": sum(n * n for n in documents),
        }[kind]
        assert case.num_visible_pairs == one * case.b * 32
        assert case.flops("fwd") == 4 * 128 * case.num_visible_pairs
        assert case.flops("bwd") * 2 == 5 * case.flops("fwd")
        assert case.flops("total") == case.flops("fwd") + case.flops("bwd")
        assert case.flops("fwd", is_block=True) == 512 * case.num_block_pairs


def test_sizes_and_variants():
    assert benchmark_case("8k_full").shape == dict(b=16, s_q=8192, s_k=8192, h_q=32, h_kv=32, d_qk=128, d_v=128)
    assert benchmark_case("32k_causal").b == 4 and benchmark_case("128k_causal").b == 1
    assert benchmark_case("8k_causal_document_gqa4").h_kv == 4
    assert benchmark_case("8k_causal_document_d64").shape["d_v"] == 64
    assert benchmark_case("8k_causal_d256").d_qk == 256
    assert len(cases.benchmark_names()) == 36 and len(set(cases.benchmark_names("gqa4"))) == 36
    for name in cases.benchmark_names() + cases.benchmark_names("d64"):
        assert benchmark_case(name).name == name
    bounds = benchmark_case("8k_document").build_mask().startend_row_indices
    assert bounds.shape == (16, 1, 8192, 2) and bounds.dtype == np.int32 and bounds.flags.c_contiguous


def test_block_mask_counts_scale_with_heads():
    case = hostile_case("random_nc2_338x211_h4_2_hm2_d128_block_mask")
    table = case.column_mask().dense()
    assert case.num_visible_pairs == table.sum() * 2  # two query heads a mask head


@pytest.mark.parametrize("name", ["9k_full", "8k_fulll", "8k_", "8k_full_gqa5", "full"])
def test_unknown_names_are_refused(name):
    with pytest.raises(KeyError, match="no case"):
        benchmark_case(name)


def test_unknown_requests_are_refused():
    with pytest.raises(KeyError, match="no case"):
        hostile_case("nothing")
    with pytest.raises(KeyError, match="kind"):
        cases.paper_mask("8k", "nothing")
    with pytest.raises(ValueError, match="phase"):
        hostile_case("single").flops("both")
    with pytest.raises(ValueError, match="change the mask"):
        resized(benchmark_case("8k_full"), s_q=4)


def test_resized_keeps_the_mask():
    case = resized(benchmark_case("8k_causal_document"), b=2, h_q=4, h_kv=2, d_qk=64, d_v=32)
    assert case.shape == dict(b=2, s_q=8192, s_k=8192, h_q=4, h_kv=2, d_qk=64, d_v=32)
    assert case.build_mask().startend_row_indices.shape == (2, 1, 8192, 1)
    assert case.num_visible_pairs * 16 * 32 == benchmark_case("8k_causal_document").num_visible_pairs * 8


def test_counts_belong_to_the_mask_not_to_the_name():
    case = hostile_case("causal_two_tiles")
    assert case.num_visible_pairs == 256 * 257 // 2
    changed = dataclasses.replace(case, build_mask=lambda: cases.RawMask(None, False))
    assert changed != case and changed.num_visible_pairs == 256 * 256


def test_every_field_of_a_case_is_consumed():
    """Changing any field changes the inputs, the call's arguments, or the label under which results stand."""
    base = AttentionCase("base", 2, 6, 6, 4, 2, 8, 8, hostile_case("single").build_mask, softmax_scale=0.5)
    changes = dict(name="other", b=1, s_q=5, s_k=5, h_q=2, h_kv=1, d_qk=4, d_v=4, softmax_scale=1.0,
                   build_mask=hostile_case("single_causal").build_mask)  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(AttentionCase)}

    def footprint(case: AttentionCase) -> list:
        inputs = make_inputs(case)
        arrays = [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]
        return [array.shape for array in arrays] + [float(arrays[0].ravel()[0])] + sorted(case.call_arguments().items())

    for name, value in changes.items():
        changed = dataclasses.replace(base, **{name: value})
        assert footprint(changed) != footprint(base), name


def test_inputs_are_reproducible_and_seeded():
    case = hostile_case("full_odd")
    one, same, other = make_inputs(case), make_inputs(case), make_inputs(case, seed=1)
    np.testing.assert_array_equal(one.q, same.q)
    assert (one.q != other.q).any() and (one.q.ravel()[:9] != make_inputs(hostile_case("scale")).q.ravel()[:9]).any()
    assert make_inputs(case, np.float16).q.dtype == np.float16 and one.dlse.dtype == np.float32
    shapes = [array.shape for array in (one.q, one.k, one.v, one.dout, one.dlse)]
    assert shapes == [(2, 67, 2, 40), (2, 131, 2, 40), (2, 131, 2, 24), (2, 67, 2, 24), (2, 2, 67)]


def test_hostile_cases_cover_what_they_claim():
    names = [case.name for case in HOSTILE_CASES]
    assert len(set(names)) == len(names) >= 60
    seen = set()
    for case in HOSTILE_CASES:
        raw = case.build_mask()
        h_mask = 1 if raw.startend_row_indices is None else raw.startend_row_indices.shape[1]
        assert case.h_q % case.h_kv == 0 and h_mask in (1, case.h_kv, case.h_q)
        seen |= {
            (
                "form",
                None if raw.startend_row_indices is None else raw.startend_row_indices.shape[3],
                raw.causal,
            ),
            ("order", np.sign(case.s_q - case.s_k)),
            ("gqa", case.h_q > case.h_kv > 1 if case.h_q != case.h_kv else None),
            ("h_mask", "1" if h_mask == 1 else "q" if h_mask == case.h_q > case.h_kv else "kv"),
            ("d", np.sign(case.d_qk - case.d_v)),
            ("block_mask", raw.block_mask is not None),
            ("empty", case.b * case.s_q * case.s_k == 0),
            ("scale", case.softmax_scale is None),
        }
        mask = case.column_mask()
        table = mask.dense()
        for plane in np.ndindex(mask.b, mask.h_mask):
            bounds = None if raw.startend_row_indices is None else raw.startend_row_indices[plane]
            tiles = None if raw.block_mask is None else raw.block_mask[plane]
            expected = visible_plane(bounds, raw.causal, case.s_q, case.s_k, tiles)
            np.testing.assert_array_equal(table[plane], expected, err_msg=case.name)
        if table.size:
            seen |= {
                ("hidden row", bool((~table.any(3)).any())),
                ("hidden column", bool((~table.any(2)).any())),
            }
    for form in [(None, True), (None, False), *((n, c) for c, n in masks.BOUND_FORMS)]:
        assert ("form", *form) in seen
    for wanted in [("order", -1), ("order", 0), ("order", 1), ("gqa", True), ("h_mask", "1"), ("h_mask", "q"),
                   ("h_mask", "kv"), ("d", -1), ("d", 0), ("d", 1), ("block_mask", True), ("empty", True),
                   ("scale", False), ("hidden row", True), ("hidden column", True)]:  # fmt: skip
        assert wanted in seen, wanted


def test_union_covered_case_needs_the_union():
    """The case is worth its name only if no single interval hides the tile."""
    raw = hostile_case("union_covered_tiles").build_mask()
    lts, lte, uts, ute = np.moveaxis(raw.startend_row_indices[0, 0], -1, 0)
    table = hostile_case("union_covered_tiles").column_mask().dense()[0, 0]
    assert not table[32:160].any()
    assert lts.max() > 64 or lte.min() < 128
    assert uts.max() > 64 or ute.min() < 128


@pytest.mark.parametrize("kind", ["hidden", "clear"])
def test_many_runs_cases_have_more_runs_than_fit(kind):
    case = hostile_case(f"many_{kind}_runs")
    table = case.column_mask().dense()[0, 0][:, :128]
    rows = ~table.any(axis=1) if kind == "hidden" else table.all(axis=1)
    begins = np.diff(np.concatenate([[False], rows]).astype(int)) == 1
    assert begins.sum() == 8
    runs = getattr(case.schedule(), f"{kind}_runs")[0, 0, 0]
    assert runs.tolist() == [[0, 150], [160, 300], [310, 450], [1060, 1210]]
