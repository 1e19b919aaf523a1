# SPDX-License-Identifier: Apache-2.0
"""Named attention cases: the paper's benchmark masks and a list of small hostile ones, with seeded inputs.

`benchmark_case("8k_causal_document")` is what the benchmarks measure; `HOSTILE_CASES` is what every kernel's
tests run. A case is a plain value; every field of it reaches the call (`AttentionCase.call_arguments`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.schedule import BlockSchedule, build_schedule

Int32Array = NDArray[np.int32]

LENGTHS = {"8k": 8192, "32k": 32768, "128k": 131072}
BATCH = {"8k": 16, "32k": 4, "128k": 1}  # 128K tokens in every case
ANCHOR_KINDS = ("full", "causal", "window", "causal_document", "document")
OTHER_KINDS = (
    "share_question",
    "global_window",
    "causal_blockwise",
    "prefix_document",
    "prefix_causal",
    "qk_sparse",
    "random_eviction",
)
VARIANTS = {
    "": {},
    "gqa4": {"h_kv": 4},
    "gqa8": {"h_q": 64, "h_kv": 8},
    "d64": {"d_qk": 64, "d_v": 64},
    "d256": {"d_qk": 256, "d_v": 256},
    "d192v128": {"d_qk": 192, "d_v": 128},
}
EVICTION_SEED = 0
_DOCUMENT_SAMPLE_IDX = 2  # the third sample of each length


@dataclass(frozen=True)
class RawMask:
    """The mask arguments as a caller passes them; values may be out of range on purpose."""

    startend_row_indices: Int32Array | None  # [b, h_mask, s_k, n]
    causal: bool
    block_mask: Int32Array | None = None  # [b, h_mask, ceil(s_q/128), ceil(s_k/128)]


@dataclass(frozen=True)
class AttentionCase:
    """Shapes, mask and scale of one attention call. `build_mask` makes the (maybe large) mask on demand."""

    name: str
    b: int
    s_q: int
    s_k: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    build_mask: Callable[[], RawMask] = field(repr=False)  # equal cases have the same mask, not only its name
    softmax_scale: float | None = None

    @property
    def shape(self) -> dict[str, int]:
        """The sizes under the names that results and kernels use."""
        return {name: getattr(self, name) for name in ("b", "s_q", "s_k", "h_q", "h_kv", "d_qk", "d_v")}

    def call_arguments(self) -> dict[str, object]:
        """Keyword arguments besides q, k, v of `reference.attention` and of the operator."""
        mask = self.build_mask()
        return {
            "startend_row_indices": mask.startend_row_indices,
            "causal": mask.causal,
            "block_mask": mask.block_mask,
            "softmax_scale": self.softmax_scale,
        }

    def column_mask(self) -> ColumnMask:
        """The mask as a value; b or h_mask is 1 without indices, where every batch entry is alike."""
        raw = self.build_mask()
        if raw.startend_row_indices is None:
            builder = builders.causal if raw.causal else builders.full
            return builder(self.s_q, self.s_k, b=self.b)
        return ColumnMask.from_bounds(
            raw.startend_row_indices, is_causal=raw.causal, s_q=self.s_q, block_mask=raw.block_mask
        )

    def schedule(self, block_q: int = 128, block_k: int = 128) -> BlockSchedule:
        return build_schedule(self.column_mask(), block_q, block_k)

    @property
    def num_visible_pairs(self) -> int:
        """Visible (q, k) pairs summed over batch and query heads: what `tflops_exact` counts."""
        return self._over_heads(_case_schedule(self).num_visible_pairs)

    @property
    def num_block_pairs(self) -> int:
        """Pairs in not fully hidden 128 x 128 tiles, over batch and heads: what `tflops_block` counts."""
        return self._over_heads(_case_schedule(self).num_block_pairs)

    @property
    def density_exact(self) -> float:
        return _case_schedule(self).density

    @property
    def density_block(self) -> float:
        return _case_schedule(self).density_block

    def flops(self, phase: str, *, is_block: bool = False) -> int:
        """Floating-point operations of "fwd", "bwd" or "total", by visible pairs or by visited tiles.

        Forward is two products of 2 d operations a pair (q k and p v); backward five (2.5 x when d_v = d_qk).
        """
        pairs = self.num_block_pairs if is_block else self.num_visible_pairs
        per_pair = {
            "fwd": 2 * (self.d_qk + self.d_v),
            "bwd": 2 * (3 * self.d_qk + 2 * self.d_v),  # scores again, dq, dk; dp, dv
            "total": 2 * (4 * self.d_qk + 3 * self.d_v),
        }
        if phase not in per_pair:
            raise ValueError(f"AttentionCase.flops: phase {phase!r} is none of {sorted(per_pair)}")
        return pairs * per_pair[phase]

    def _over_heads(self, per_mask_head: NDArray[np.int64]) -> int:
        return int(per_mask_head.sum()) * (self.h_q // per_mask_head.shape[1] if per_mask_head.shape[1] else 0)


@lru_cache(maxsize=8)
def _case_schedule(case: AttentionCase) -> BlockSchedule:
    return case.schedule()


# --- inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Contiguous arrays of one case; gradients of both outputs included."""

    q: ArrayLike  # [b, s_q, h_q, d_qk]
    k: ArrayLike  # [b, s_k, h_kv, d_qk]
    v: ArrayLike  # [b, s_k, h_kv, d_v]
    dout: ArrayLike  # [b, s_q, h_q, d_v]
    dlse: NDArray[np.float32]  # [b, h_q, s_q]


def make_inputs(case: AttentionCase, dtype: DTypeLike = np.float32, *, seed: int = 0) -> AttentionInputs:
    """Standard normal inputs rounded to ``dtype``; the same for a (case name, seed) on any machine."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])

    def normal(*shape: int) -> NDArray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    return AttentionInputs(
        q=normal(case.b, case.s_q, case.h_q, case.d_qk),
        k=normal(case.b, case.s_k, case.h_kv, case.d_qk),
        v=normal(case.b, case.s_k, case.h_kv, case.d_v),
        dout=normal(case.b, case.s_q, case.h_q, case.d_v),
        dlse=rng.standard_normal((case.b, case.h_q, case.s_q), np.float32),
    )


# --- the paper's masks ---------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _paper_samples() -> dict[str, list[list[dict[str, int]]]]:
    text = (Path(__file__).parent / "paper_documents.json").read_text(encoding="utf-8")
    return json.loads(text)["samples"]


def paper_documents(length: str, sample_idx: int = _DOCUMENT_SAMPLE_IDX) -> tuple[list[int], list[int]]:
    """(lengths, prefixes) of one published sample; ``length`` is "8k", "32k" or "128k"."""
    sample = _paper_samples()[length.upper()][sample_idx]
    return [document["length"] for document in sample], [document["prefix"] for document in sample]


def paper_mask(length: str, kind: str, sample_idx: int = _DOCUMENT_SAMPLE_IDX) -> ColumnMask:
    """One sequence of a benchmark mask (b = h_mask = 1), with ANCHORS' definitions of each kind."""
    s = LENGTHS[length]
    documents, prefixes = paper_documents(length, sample_idx)
    makers: dict[str, Callable[[], ColumnMask]] = {
        "full": lambda: builders.full(s),
        "causal": lambda: builders.causal(s),
        "window": lambda: builders.sliding_window(s, s // 16),
        "causal_document": lambda: builders.causal_document(documents),
        "document": lambda: builders.document(documents),
        "share_question": lambda: builders.share_question(
            [_question_and_two_answers(size, prefix) for size, prefix in zip(documents, prefixes, strict=True)]
        ),
        "global_window": lambda: builders.global_sliding_window(s, 16, s // 16, s // 16),
        "causal_blockwise": lambda: builders.causal_blockwise(documents),
        "prefix_document": lambda: builders.prefix_lm_document(documents, prefixes),
        "prefix_causal": lambda: builders.prefix_lm_causal(s, s // 2),
        "qk_sparse": lambda: builders.qk_sparse(s, [(s // 4, s // 4 + s // 8), (s // 2, s // 2 + s // 8)]),
        "random_eviction": lambda: builders.random_eviction(s, seed=EVICTION_SEED, first_row=s // 2),
    }
    if kind not in makers:
        raise KeyError(f"paper_mask: kind {kind!r} is none of {', '.join(makers)}")
    return makers[kind]()


def _question_and_two_answers(length: int, prefix: int) -> list[int]:
    first_answer = (length - prefix) // 2
    return [prefix, first_answer, length - prefix - first_answer]


@cache
def benchmark_case(name: str) -> AttentionCase:
    """A case by its name in `results/`: ``{8k,32k,128k}_<kind>[_gqa4|_gqa8|_d64|_d256|_d192v128]``.

    b = 16 / 4 / 1, 32 query heads, 32 key heads (4 with ``_gqa4``; 64 and 8 with ``_gqa8``), head_dim 128 (64, 256;
    d_qk 192 and d_v 128), one mask head.
    """
    length, _, rest = name.partition("_")
    kind, _, variant = rest.rpartition("_")
    if variant not in VARIANTS or not kind:
        kind, variant = rest, ""
    if length not in LENGTHS or kind not in ANCHOR_KINDS + OTHER_KINDS:
        raise KeyError(
            f"benchmark_case: no case {name!r}; legal: {', '.join(benchmark_names())}, each also with "
            f"{', '.join('_' + variant for variant in VARIANTS if variant)}"
        )
    b, s = BATCH[length], LENGTHS[length]

    def build_mask() -> RawMask:
        bounds, causal = paper_mask(length, kind).to_bounds()
        return RawMask(np.ascontiguousarray(np.broadcast_to(bounds, (b, *bounds.shape[1:]))), causal)

    sizes = {"h_q": 32, "h_kv": 32, "d_qk": 128, "d_v": 128} | VARIANTS[variant]
    return AttentionCase(name, b=b, s_q=s, s_k=s, build_mask=build_mask, **sizes)


def benchmark_names(variant: str = "", *, kinds: tuple[str, ...] = ANCHOR_KINDS + OTHER_KINDS) -> list[str]:
    """Names of every length and kind, with a variant's suffix if given."""
    suffix = f"_{variant}" if variant else ""
    return [f"{length}_{kind}{suffix}" for length in LENGTHS for kind in kinds]


def resized(case: AttentionCase, **sizes: int) -> AttentionCase:
    """The case with other heads, head dims or batch; a new batch repeats the mask of the first entry."""
    illegal = set(sizes) - {"b", "h_q", "h_kv", "d_qk", "d_v"}
    if illegal:
        raise ValueError(f"resized: {sorted(illegal)} change the mask; only b, h_q, h_kv, d_qk, d_v may")
    b = sizes.get("b", case.b)

    def build_mask() -> RawMask:
        raw = case.build_mask()
        parts = [
            None if x is None else np.ascontiguousarray(np.broadcast_to(x[:1], (b, *x.shape[1:])))
            for x in (raw.startend_row_indices, raw.block_mask)
        ]
        return RawMask(parts[0], raw.causal, parts[1])

    label = "".join(f"_{name}{size}" for name, size in sorted(sizes.items()))
    return replace(case, name=case.name + label, build_mask=build_mask if "b" in sizes else case.build_mask, **sizes)


def __getattr__(name: str) -> object:
    # Kept in a file of its own for length; imported late because it needs AttentionCase from here.
    if name in ("HOSTILE_CASES", "hostile_case"):
        from paddle_fm3.testing import hostile_cases

        return getattr(hostile_cases, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
