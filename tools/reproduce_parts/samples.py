# SPDX-License-Identifier: Apache-2.0
"""Packed sequences like the paper's, which did not publish all of its own: seeded, and stated in each result."""

from __future__ import annotations

import numpy as np

from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.schedule import build_schedule

MASKS = ("causal_document", "document", "prefix_document")
# Documents a sequence, least and most, by length. Published for 256K only; the others are this project's choice.
NUM_DOCUMENTS = {32768: (6, 10), 65536: (8, 12), 131072: (10, 16), 262144: (14, 20)}


def random_documents(s: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """(lengths, prefixes): a uniform number of documents, lengths as uniform numbers fall, prefixes uniform."""
    least, most = NUM_DOCUMENTS[s]
    share = rng.random(int(rng.integers(least, most + 1))) + 1e-3
    edges = np.unique(np.concatenate([[0], np.round(np.cumsum(share) / share.sum() * s).astype(int)]))
    lengths = np.diff(edges).tolist()
    return lengths, [int(rng.integers(1, max(2, length))) for length in lengths]


def sample_mask(kind: str, s: int, seed: int) -> ColumnMask:
    lengths, prefixes = random_documents(s, np.random.default_rng([seed, s]))
    if kind == "causal_document":
        return builders.causal_document(lengths)
    return builders.document(lengths) if kind == "document" else builders.prefix_lm_document(lengths, prefixes)


def mask_of_sparsity(kind: str, s: int, sparsity: float, seed: int) -> ColumnMask:
    """A document mask whose share of skipped 128 x 128 tiles is `sparsity` to within 0.5 points.

    One long document among about ten short ones; its share is found by bisection. The order is random.

    Raises:
        ValueError: no such mask (a causal mask skips half at least).
    """
    rng = np.random.default_rng([seed, round(sparsity * 100)])
    rest = rng.random(10) + 0.1
    place = int(rng.integers(0, len(rest) + 1))

    def build(long_share: float) -> ColumnMask:
        share = np.insert(rest / rest.sum() * (1 - long_share), place, long_share)
        edges = np.unique(np.concatenate([[0], np.round(np.cumsum(share) * s).astype(int)]))
        lengths = np.diff(edges).tolist()
        return builders.causal_document(lengths) if kind == "causal_document" else builders.document(lengths)

    low, high = 0.02, 0.999
    for _ in range(24):
        middle = (low + high) / 2
        if 1 - build_schedule(build(middle)).density_block > sparsity:
            low = middle
        else:
            high = middle
    mask = build((low + high) / 2)
    found = 1 - build_schedule(mask).density_block
    if abs(found - sparsity) > 0.005:
        raise ValueError(f"mask_of_sparsity: no {kind} mask of {s} tokens at sparsity {sparsity}; nearest {found:.4f}")
    return mask
