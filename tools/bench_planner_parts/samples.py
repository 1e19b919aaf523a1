# SPDX-License-Identifier: Apache-2.0
"""Masks of table 5: packed documents, lengths in proportion to uniform numbers, prefixes uniform; any length."""

from __future__ import annotations

import numpy as np
from reproduce_parts.samples import MASKS, NUM_DOCUMENTS

from paddle_fm3.mask import builders
from paddle_fm3.mask.column_mask import ColumnMask

__all__ = ["MASKS", "num_documents", "sample_mask"]
LONGEST = 262144  # the longest length whose number of documents the paper states: 14 to 20


def num_documents(s: int) -> tuple[int, int]:
    """Least and most documents in s tokens; beyond 256K in proportion: longer sequences pack more documents."""
    if s in NUM_DOCUMENTS:
        return NUM_DOCUMENTS[s]
    least, most = NUM_DOCUMENTS[LONGEST]
    return max(1, least * s // LONGEST), max(2, most * s // LONGEST)


def sample_mask(kind: str, s: int, seed: int) -> ColumnMask:
    """One of MASKS; the same for a (kind, s, seed) on any machine."""
    rng = np.random.default_rng([seed, s])
    least, most = num_documents(s)
    share = rng.random(int(rng.integers(least, most + 1))) + 1e-3
    edges = np.unique(np.concatenate([[0], np.round(np.cumsum(share) / share.sum() * s).astype(int)]))
    lengths = np.diff(edges).tolist()
    if kind == "causal_document":
        return builders.causal_document(lengths)
    if kind == "document":
        return builders.document(lengths)
    return builders.prefix_lm_document(lengths, [int(rng.integers(1, max(2, length))) for length in lengths])
