# SPDX-License-Identifier: Apache-2.0
"""Packs documents into fixed-length sequences with a document mask. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100


def pack_documents(documents: Iterable[Sequence[int]], max_length: int) -> list[list[Sequence[int]]]:
    """Groups documents into packs of at most max_length tokens, first fit in the order given.

    Args:
        documents: token ids of each document, at least one token each.
        max_length: tokens a pack holds.

    Returns:
        Packs in the order in which they were opened. Every document is in exactly one.

    Raises:
        ValueError: an empty document, or one longer than max_length; cutting it is the caller's decision.
    """
    packs: list[list[Sequence[int]]] = []
    room: list[int] = []
    first_open = 0  # packs before it are full
    for document_idx, document in enumerate(documents):
        length = len(document)
        if not 0 < length <= max_length:
            raise ValueError(
                f"pack_documents: document {document_idx} has {length} tokens; expected 1 to max_length={max_length}"
            )
        while first_open < len(room) and room[first_open] == 0:
            first_open += 1
        pack_idx = next((i for i in range(first_open, len(room)) if room[i] >= length), len(room))
        if pack_idx == len(room):
            packs.append([])
            room.append(max_length)
        packs[pack_idx].append(document)
        room[pack_idx] -= length
    return packs


class PackedCollator:
    """Batch of packs -> model inputs for PaddleNLP's causal language models under `--use_flashmask3`.

    Each feature is a pack: ``{"documents": [token ids, ...]}``, or a record of PaddleNLP's ZeroPadding datasets
    (``input_ids``, ``labels``, ``attn_mask_startend_row_indices`` and optionally ``position_ids``).

    Returned, all [b, max_length]:
        input_ids int64; labels int64, the next token *of the same document* or -100; position_ids int64, restarting
        at each document; attn_mask_startend_row_indices int32, for each key column the end of its document.

    A padded position is a document of its own of length one: it sees itself, nothing sees it, its label is -100. So
    no row is fully hidden, which upstream's zero padding makes of every padded row.

    Args:
        max_length: length of every sequence.
        pad_token_id: token of padded positions.
    """

    def __init__(self, max_length: int, pad_token_id: int = 0) -> None:
        if max_length < 1:
            raise ValueError(f"PackedCollator: max_length={max_length} must be >= 1")
        self.max_length = max_length
        self.pad_token_id = pad_token_id

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        rows = [self._row(feature) for feature in features]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, feature: dict[str, Any]) -> dict[str, NDArray[Any]]:
        record = _record_of_documents(feature["documents"]) if "documents" in feature else _checked_record(feature)
        length = len(record["input_ids"])
        if length > self.max_length:
            raise ValueError(f"PackedCollator: a pack has {length} tokens; at most max_length={self.max_length} fit")
        missing = self.max_length - length
        padding = {
            "input_ids": np.full(missing, self.pad_token_id),
            "labels": np.full(missing, IGNORED_LABEL),
            "position_ids": np.zeros(missing),
            "attn_mask_startend_row_indices": np.arange(length, self.max_length) + 1,
        }
        return {
            name: np.concatenate([record[name], padding[name]]).astype(
                np.int32 if name == "attn_mask_startend_row_indices" else np.int64
            )
            for name in padding
        }


def _record_of_documents(documents: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int64]]:
    lengths = np.array([len(document) for document in documents], np.int64)
    ends = np.cumsum(lengths)
    tokens = np.concatenate([np.asarray(document, np.int64) for document in documents])
    labels = np.append(tokens[1:], IGNORED_LABEL)
    labels[ends - 1] = IGNORED_LABEL  # the last token of a document does not predict the next one's first
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": np.concatenate([np.arange(length) for length in lengths]),
        "attn_mask_startend_row_indices": np.repeat(ends, lengths),
    }


def _checked_record(feature: dict[str, Any]) -> dict[str, NDArray[np.int64]]:
    names = ("input_ids", "labels", "attn_mask_startend_row_indices")
    missing = [name for name in names if name not in feature]
    if missing:
        raise ValueError(f"PackedCollator: a feature has {sorted(feature)}; missing {missing} (or give 'documents')")
    record = {name: np.asarray(feature[name], np.int64) for name in names}
    bounds = record["attn_mask_startend_row_indices"]
    if "position_ids" in feature:
        record["position_ids"] = np.asarray(feature["position_ids"], np.int64)
    else:
        # A document begins where the bound changes.
        begins = np.flatnonzero(np.append(True, bounds[1:] != bounds[:-1]))
        record["position_ids"] = np.arange(len(bounds)) - np.repeat(begins, np.diff(np.append(begins, len(bounds))))
    lengths = {name: len(values) for name, values in record.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"PackedCollator: a feature's entries differ in length: {lengths}")
    return record
