# SPDX-License-Identifier: Apache-2.0
"""Small cases that break kernels: odd sizes, degenerate bounds, hidden rows and columns, every mask form.

`HOSTILE_CASES` is the list every kernel's tests run; `hostile_case(name)` picks one. The bounds of the `kind_` cases
come from the builders; all others are raw integers, out of range ones included, that no builder would write.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.testing.cases import AttentionCase, RawMask

Int32Array = NDArray[np.int32]

# (is_causal, n) of every form.
FORMS = {"c1": (True, 1), "c2": (True, 2), "nc2": (False, 2), "nc4": (False, 4)}


def _case(
    name: str,
    mask: Callable[[], RawMask],
    *,
    b: int = 1,
    s_q: int,
    s_k: int | None = None,
    heads: tuple[int, int] = (1, 1),
    d: int | tuple[int, int] = 16,
    softmax_scale: float | None = None,
) -> AttentionCase:
    d_qk, d_v = (d, d) if isinstance(d, int) else d
    s_k = s_q if s_k is None else s_k
    return AttentionCase(name, b, s_q, s_k, *heads, d_qk, d_v, build_mask=mask, softmax_scale=softmax_scale)


def _no_indices(causal: bool) -> Callable[[], RawMask]:
    return lambda: RawMask(None, causal)


def _columns(form: str, *bounds: object, b: int = 1, h_mask: int = 1, s_k: int) -> Callable[[], RawMask]:
    """Each bound is a number or an array [s_k] (or [b, h_mask, s_k])."""
    causal, n = FORMS[form]
    if len(bounds) != n:
        raise ValueError(f"form {form} has {n} bounds, got {len(bounds)}")

    def build() -> RawMask:
        stacked = [np.broadcast_to(np.asarray(bound, np.int32), (b, h_mask, s_k)) for bound in bounds]
        return RawMask(np.ascontiguousarray(np.stack(stacked, axis=-1)), causal)

    return build


def _random(
    form: str, *, b: int, h_mask: int, s_q: int, s_k: int, has_block_mask: bool = False, name: str
) -> Callable[[], RawMask]:
    """Bounds anywhere in [-5, s_q + 5]: empty, inverted, overlapping and out of range ones among them."""
    causal, n = FORMS[form]

    def build() -> RawMask:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        bounds = rng.integers(-5, s_q + 6, (b, h_mask, s_k, n)).astype(np.int32)
        if not has_block_mask:
            return RawMask(bounds, causal)
        tiles = rng.integers(0, 2, (b, h_mask, -(-s_q // 128), -(-s_k // 128))).astype(np.int32)
        return RawMask(bounds, causal, tiles)

    return build


def _random_case(
    form: str,
    *,
    b: int = 1,
    h_mask: int = 1,
    s_q: int,
    s_k: int,
    heads: tuple[int, int],
    d: int | tuple[int, int] = 16,
    has_block_mask: bool = False,
) -> AttentionCase:
    block = "_block_mask" if has_block_mask else ""
    name = f"random_{form}_{s_q}x{s_k}_h{heads[0]}_{heads[1]}_hm{h_mask}_d{d}{block}".replace(" ", "")
    mask = _random(form, b=b, h_mask=h_mask, s_q=s_q, s_k=s_k, has_block_mask=has_block_mask, name=name)
    return _case(name, mask, b=b, s_q=s_q, s_k=s_k, heads=heads, d=d)


def _union_covered(s: int) -> Callable[[], RawMask]:
    """Rows [32, 160) hidden in every column, in each by both intervals together."""
    column = np.arange(s)
    is_even = column % 2 == 0
    return _columns(
        "nc4",
        np.where(is_even, 32, 96), np.where(is_even, 100, 170),
        np.where(is_even, 90, 10), np.where(is_even, 160, 97),
        s_k=s,
    )  # fmt: skip


def _documents(lengths: list[int], form: str) -> Callable[[], RawMask]:
    end = np.repeat(np.cumsum(lengths), lengths)
    begin = end - np.repeat(lengths, lengths)
    bounds = {"c1": (end,), "nc2": (end, begin)}[form]
    return _columns(form, *bounds, s_k=int(sum(lengths)))


def _block_mask_on_full(s_q: int, s_k: int, keep: Callable[[int, int], bool]) -> Callable[[], RawMask]:
    def build() -> RawMask:
        tiles = np.array([[keep(q, k) for k in range(-(-s_k // 128))] for q in range(-(-s_q // 128))], np.int32)
        bounds = np.broadcast_to(np.array([s_q, 0], np.int32), (1, 1, s_k, 2))
        return RawMask(np.ascontiguousarray(bounds), False, tiles[None, None])

    return build


def _kind_case(kind: str, mask: ColumnMask, *, heads: tuple[int, int], d: int) -> AttentionCase:
    """A named mask of ordinary use at a size that is no multiple of a tile."""
    bounds, causal = mask.to_bounds()
    return _case(f"kind_{kind}", lambda: RawMask(bounds, causal), b=mask.b, s_q=mask.s_q, heads=heads, d=d)


def _kind_cases() -> list[AttentionCase]:
    documents = [[70, 131, 50, 82], [3, 199, 1, 130]]  # 333 tokens each
    kinds = {
        "share_question": builders.share_question([[[40, 60, 33], [50, 70, 80]], [[133, 100, 100]]]),
        "global_window": builders.global_sliding_window(333, 9, 40, 25, b=2),
        "causal_blockwise": builders.causal_blockwise(documents),
        "prefix_document": builders.prefix_lm_document(documents, [[20, 131, 0, 5], [3, 64, 0, 129]]),
        "random_eviction": builders.random_eviction(333, seed=0, first_row=150, b=2, h_mask=4),
        "causal_document_window": builders.causal_document_sliding_window(documents, 48),
        "bucketed": builders.bucketed(np.sort(np.arange(666).reshape(2, 1, 333) * 7 % 5),
                                      np.sort(np.arange(666).reshape(2, 1, 333) * 3 % 5)),
    }  # fmt: skip
    return [
        _kind_case(kind, mask, heads=(4, 2), d=64 if kind_idx % 2 else 128)
        for kind_idx, (kind, mask) in enumerate(kinds.items())
    ]


def _all_cases() -> list[AttentionCase]:
    ramp = np.arange(200)
    island = 150 + 150 * (ramp % 7)
    later = np.arange(500) >= 330
    cases = [
        # sizes: one, below, at and just above a tile; s_q != s_k both ways; several d, d_v != d_qk, odd d
        _case("single", _no_indices(False), s_q=1, d=8),
        _case("single_causal", _no_indices(True), s_q=1, d=1),
        _case("full_odd", _no_indices(False), b=2, s_q=67, s_k=131, heads=(2, 2), d=(40, 24)),
        _case("causal_tile_plus_one", _no_indices(True), s_q=129, heads=(2, 1), d=64),
        _case("causal_two_tiles", _no_indices(True), s_q=256, d=32),
        _case("causal_more_keys", _no_indices(True), s_q=70, s_k=203, heads=(3, 1), d=(13, 7)),
        _case("causal_fewer_keys_hidden_rows", _no_indices(True), s_q=203, s_k=70, heads=(2, 2), d=(24, 40)),
        _case("decode_row", _no_indices(True), s_q=1, s_k=300, heads=(4, 2), d=80),
        _case("one_key", _no_indices(False), s_q=150, s_k=1, heads=(2, 1), d=16),
        _case("large_head", _no_indices(True), s_q=65, s_k=65, d=256),
        _case("head_192_128", _no_indices(True), s_q=64, s_k=96, heads=(2, 1), d=(192, 128)),
        _case("scale", _no_indices(False), s_q=40, s_k=50, d=16, softmax_scale=0.7),
        _case("scale_negative", _no_indices(True), s_q=40, s_k=50, d=16, softmax_scale=-0.3),
        _case("scale_zero", _no_indices(True), s_q=33, d=16, softmax_scale=0.0),
        # nothing to do
        _case("no_rows", _no_indices(True), s_q=0, s_k=5),
        _case("no_keys", _no_indices(False), s_q=5, s_k=0),
        _case("no_batch", _no_indices(True), b=0, s_q=4, s_k=4),
        _case("no_keys_with_indices", _columns("nc2", 3, 0, s_k=0), s_q=5, s_k=0),
        # degenerate bounds
        _case("bounds_empty", _columns("nc4", 50, 50, 7, 7, s_k=90), s_q=90),
        _case("bounds_inverted", _columns("nc4", 60, 20, 80, 3, s_k=90), s_q=90),
        _case("bounds_out_of_range", _columns("nc4", -70, 5, 85, 2**31 - 1, s_k=90), s_q=90),
        _case("bounds_int_min_max", _columns("nc2", 2**31 - 1, -(2**31), s_k=90), s_q=90),
        _case("eviction_past_end", _columns("c1", 91, s_k=90), s_q=90),
        _case("everything_hidden_c1", _columns("c1", 0, s_k=90), s_q=90, heads=(2, 1)),
        _case("everything_hidden_nc2", _columns("nc2", 0, 0, s_k=90), s_q=140, s_k=90),
        _case("everything_hidden_by_two", _columns("nc4", 0, 60, 60, 140, s_k=90), s_q=140, s_k=90),
        # hidden rows and columns
        _case("rows_hidden_middle", _columns("nc4", 40, 90, 0, 0, s_k=150), s_q=150, heads=(2, 2)),
        _case("rows_hidden_first_tile", _columns("nc2", 300, 130, s_k=300), s_q=300),
        _case("columns_hidden", _columns("nc2", np.where(ramp % 3 == 1, 0, 200), 0, s_k=200), s_q=200),
        _case("columns_hidden_tile", _columns("c1", np.where(ramp < 128, 0, 200), s_k=200), s_q=200),
        _case("right_padded_keys", _columns("nc2", np.where(ramp < 77, 200, 0), 0, s_k=200), s_q=200),
        _case("left_padded_keys_causal", _columns("c1", np.where(ramp < 77, 0, 200), s_k=200), s_q=200),
        # structured
        _case("documents_of_one", _documents([1] * 40, "nc2"), s_q=40),
        _case("documents_mixed_causal", _documents([1, 127, 1, 130, 2], "c1"), s_q=261, heads=(2, 1)),
        _case("documents_mixed", _documents([130, 1, 1, 126, 3], "nc2"), s_q=261, heads=(2, 1)),
        # a key tile of the Hopper backward ends at the border
        _case("documents_short_tile", _documents([150, 256], "nc2"), s_q=406, heads=(2, 1)),
        _case("window_one", _columns("c1", ramp + 1, s_k=200), s_q=200),
        _case("window_wide", _columns("c1", ramp + 70, s_k=200), s_q=200, d=64),
        _case("global_window", _columns("nc4", np.where(ramp < 5, 200, np.maximum(ramp + 31, 5)), 200, 5,
                                        np.where(ramp < 5, 0, ramp - 20), s_k=200), s_q=200),
        _case("dropped_keys", _columns("c2", np.where((ramp >= 60) & (ramp < 90), ramp, 0),
                                       np.where((ramp >= 60) & (ramp < 90), 90, 0), s_k=200), s_q=200),
        _case("prefix_lm", _columns("nc2", 200, np.where(ramp < 90, 0, ramp), s_k=200), s_q=200),
        _case("union_covered_tiles", _union_covered(256), s_q=256, d=32),
        _case("zigzag_bounds", _columns("nc2", 130 - 10 * (ramp % 2), 3 + 37 * (ramp % 2), s_k=200), s_q=200),
        # eight runs a key tile: summaries keep four, so wholly hidden (clear) tiles come as PARTIAL
        _case("many_hidden_runs", _columns("nc2", island + 10, island, s_k=200), s_q=1210, s_k=200),
        _case("many_clear_runs", _columns("nc4", island, island + 10, 0, 0, s_k=200), s_q=1210, s_k=200),
        # warps of one group differ in the step in which their rows first see a key
        _case("rows_split_by_keys", _columns("nc2", np.where(later, 128, 40), np.where(later, 40, 0), s_k=500),
              s_q=128, s_k=500, heads=(2, 1)),
        # block_mask
        _case("block_mask_diagonal", _block_mask_on_full(300, 400, lambda q, k: q == k),
              s_q=300, s_k=400, d=128),
        _case("block_mask_hides_rows", _block_mask_on_full(300, 260, lambda q, k: q != 1),
              s_q=300, s_k=260, d=64),
        _case("block_mask_all", _block_mask_on_full(130, 130, lambda q, k: False), s_q=130, d=64),
    ]  # fmt: skip
    sizes = {"c1": (150, 150), "c2": (83, 210), "nc2": (210, 83), "nc4": (257, 129)}
    for form, (s_q, s_k) in sizes.items():
        cases.append(_random_case(form, b=2, s_q=s_q, s_k=s_k, heads=(2, 2), d=32))
        cases.append(_random_case(form, b=2, h_mask=2, s_q=s_k, s_k=s_q, heads=(4, 2), d=(16, 48)))  # h_mask = h_kv
        cases.append(_random_case(form, h_mask=6, s_q=s_q, s_k=s_q, heads=(6, 2)))  # h_mask = h_q
        cases.append(
            _random_case(form, h_mask=2, s_q=s_q + 128, s_k=s_k + 128, heads=(4, 2), d=128, has_block_mask=True)
        )
    return cases + _kind_cases()


HOSTILE_CASES: list[AttentionCase] = _all_cases()


def hostile_case(name: str) -> AttentionCase:
    """The case called `name`, or KeyError with the legal names."""
    for case in HOSTILE_CASES:
        if case.name == name:
            return case
    raise KeyError(f"hostile_case: no case {name!r}; legal: {', '.join(case.name for case in HOSTILE_CASES)}")
