# SPDX-License-Identifier: Apache-2.0
"""Packs documents into fixed-length sequences with the mask that their layers need. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.integration.paddlenlp.masks import ColumnBounds, LayerMasks
from paddle_fm3.mask.column_mask import holds_integers

IGNORED_LABEL = -100
INDICES = "attn_mask_startend_row_indices"


def pack_documents(documents: Iterable[Sequence[Any]], max_length: int) -> list[list[Sequence[Any]]]:
    """Groups documents into packs of at most max_length tokens, first fit in the order given.

    Args:
        documents: token ids of each document, at least one token each; or, for shared questions, groups of a
            question's and its answers' token ids.
        max_length: tokens a pack holds.

    Returns:
        Packs in the order in which they were opened. Every document is in exactly one.

    Raises:
        ValueError: an empty document, or one longer than max_length; cutting it is the caller's decision.
    """
    packs: list[list[Sequence[Any]]] = []
    room: list[int] = []
    first_open = 0  # packs before it are full
    for document_idx, document in enumerate(documents):
        length = len(document)
        if length and isinstance(document[0], Sequence | np.ndarray):
            length = sum(map(len, document))
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

    Each feature is a pack; which keys it has depends on the kind of mask:

        causal_document      {"documents": [token ids, ...]}, or a record of PaddleNLP's ZeroPadding datasets
                             (input_ids, labels, attn_mask_startend_row_indices and optionally position_ids)
        prefix_lm_document   {"documents": [...], "prefixes": [tokens of each document's prefix, ...]}
        share_question       {"groups": [[question, answer, answer, ...], ...]}, or such a record
        causal_blockwise     {"documents": [...]}; the last one sees the others
        document             {"documents": [...], "labels": [...]}: a token that sees its successor cannot be asked
                             to predict it, so the labels are yours

    ``labels`` (ids of each document, or of each question and answer in turn) may be given with the others as well.

    Returned, [b, max_length] except for the last:
        input_ids int64; position_ids int64, restarting at each document, and at each answer where its question
        ended; labels int64: the next token *of the same document*, or -100 at a document's last token, inside a
        prefix, and in a question (so an answer's first token is not asked for; PaddleNLP's preference data repeats
        the question's last token at the head of each answer for that); attn_mask_startend_row_indices int32, see
        `masks.py` for its forms.

    A padded position is a document of its own of length one: nothing sees it and its label is -100. It sees itself
    only (with causal_blockwise also what is visible to the last document), so no row is fully hidden, which
    upstream's zero padding makes of every padded row.

    Args:
        max_length: length of every sequence.
        pad_token_id: token of padded positions.
        masks: kind of mask, and which layers see a window only.
    """

    def __init__(self, max_length: int, pad_token_id: int = 0, masks: LayerMasks | None = None) -> None:
        if max_length < 1:
            raise ValueError(f"PackedCollator: max_length={max_length} must be >= 1")
        self.max_length = max_length
        self.pad_token_id = pad_token_id
        self.masks = LayerMasks() if masks is None else masks

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        if not len(features):
            raise ValueError("PackedCollator: no features; expected at least one a batch")
        rows = [self._row(feature) for feature in features]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, feature: dict[str, Any]) -> dict[str, NDArray[Any]]:
        s, kind = self.max_length, self.masks.kind
        entry = "groups" if kind == "share_question" else "documents"
        is_pack = entry in feature
        record = _record_of_pack(feature, kind, entry, s) if is_pack else _checked_record(feature, kind, entry)
        length = len(record["input_ids"])
        if length > s:
            raise ValueError(f"PackedCollator: a pack has {length} tokens; at most max_length={s} fit")
        padding = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL, "position_ids": 0}
        row = {
            name: np.concatenate([record[name], np.full(s - length, value)]).astype(np.int64)
            for name, value in padding.items()
        }
        k_idx = np.arange(s)
        ends = {"lt_end": np.full(length, s), "ut_end": k_idx[:length], **record}  # the causal rule unless it says else
        bounds = ColumnBounds(
            np.concatenate([ends["lt_begin"], k_idx[length:] + 1]),
            np.concatenate([ends["lt_end"], np.full(s - length, s)]),
            np.concatenate([ends["ut_end"], k_idx[length:]]),
        )
        return {**row, INDICES: self.masks.encode(bounds)}


def _record_of_pack(feature: dict[str, Any], kind: str, entry: str, s: int) -> dict[str, NDArray[np.int64]]:
    """Tokens, labels, positions and the bounds that differ from the causal rule, all [tokens]."""
    pack = feature[entry]
    parts = [part for group in pack for part in group] if entry == "groups" else pack
    if not len(parts):
        raise ValueError(f"PackedCollator: a pack's {entry} are empty; expected at least one")
    ids = [_integers(part, f"part {part_idx} of {entry!r}") for part_idx, part in enumerate(parts)]
    lengths = np.array([len(part) for part in ids], np.int64)  # [parts]
    tokens = np.concatenate(ids)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    labels = np.append(tokens[1:], IGNORED_LABEL)
    labels[ends - 1] = IGNORED_LABEL  # the last token of a document does not predict the next one's first
    positions = np.arange(len(tokens)) - np.repeat(begins, lengths)
    record = {"input_ids": tokens, "labels": labels, "position_ids": positions, "lt_begin": np.repeat(ends, lengths)}
    if entry == "groups":
        sizes = [len(group) for group in pack]
        question = np.cumsum(sizes) - sizes  # [groups]: index of each group's question among the parts
        last = np.cumsum(sizes) - 1
        is_question = np.isin(np.arange(len(parts)), question)
        seen_until = np.where(is_question, np.repeat(ends[last], sizes), ends)  # a question: to the end of its group
        shift = np.where(is_question, 0, np.repeat(lengths[question], sizes))
        record["lt_begin"] = np.repeat(seen_until, lengths)
        record["position_ids"] = positions + np.repeat(shift, lengths)
        labels[np.repeat(is_question, lengths)] = IGNORED_LABEL
    elif kind == "document":
        record["ut_end"] = np.repeat(begins, lengths)
    elif kind == "prefix_lm_document":
        prefix = np.repeat(_prefixes(feature, lengths), lengths)
        is_prefix = positions < prefix
        record["ut_end"] = np.where(is_prefix, np.repeat(begins, lengths), np.arange(len(tokens)))
        labels[positions < prefix - 1] = IGNORED_LABEL  # the next token is visible there
    elif kind == "causal_blockwise":
        # Earlier documents are hidden from one another's rows, not from the last one's: [end, begin of the last).
        is_last = np.arange(len(tokens)) >= begins[-1]
        record["lt_end"] = np.where(is_last, s, begins[-1])
    if "labels" in feature:
        record["labels"] = np.concatenate([_integers(part, "a part of 'labels'") for part in feature["labels"]])
        if [len(part) for part in feature["labels"]] != lengths.tolist():
            raise ValueError(
                f"PackedCollator: labels have {[len(part) for part in feature['labels']]} ids; the {entry} have "
                f"{lengths.tolist()} tokens"
            )
    elif kind == "document":
        raise ValueError(
            "PackedCollator: kind='document' needs 'labels' for each document: every token sees its successor, so "
            "predicting the next token would teach nothing"
        )
    return record


def _integers(values: Any, what: str) -> NDArray[np.int64]:
    """int64 [n]. Floats are refused, of which a conversion would train on other tokens in silence."""
    array = np.asarray(values)
    if array.ndim != 1 or not holds_integers(array):
        raise ValueError(f"PackedCollator: {what} is {array.dtype} {list(array.shape)}; expected integers [tokens]")
    return array.astype(np.int64)


def _prefixes(feature: dict[str, Any], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    prefixes = _integers(feature.get("prefixes", ()), "'prefixes'")
    if prefixes.shape != lengths.shape or (prefixes < 0).any() or (prefixes > lengths).any():
        raise ValueError(
            f"PackedCollator: kind='prefix_lm_document' needs 'prefixes', one a document and within its "
            f"{lengths.tolist()} tokens; got {prefixes.tolist()}"
        )
    return prefixes


def _checked_record(feature: dict[str, Any], kind: str, entry: str) -> dict[str, NDArray[np.int64]]:
    names = ("input_ids", "labels", INDICES)
    missing = [name for name in names if name not in feature]
    if missing:
        raise ValueError(f"PackedCollator: a feature has {sorted(feature)}; missing {missing} (or give {entry!r})")
    if kind not in ("causal_document", "share_question"):
        raise ValueError(f"PackedCollator: kind={kind!r} needs {entry!r}; a record of one bound a key cannot say it")
    record = {name: _integers(feature[name], repr(name)) for name in names}
    bounds = record.pop(INDICES)
    if "position_ids" in feature:
        record["position_ids"] = _integers(feature["position_ids"], "'position_ids'")
    elif kind == "share_question":
        raise ValueError("PackedCollator: kind='share_question' needs position_ids in a record: bounds do not say them")
    else:
        # A document begins where the bound changes.
        begins = np.flatnonzero(np.append(True, bounds[1:] != bounds[:-1]))
        record["position_ids"] = np.arange(len(bounds)) - np.repeat(begins, np.diff(np.append(begins, len(bounds))))
    record["lt_begin"] = bounds
    lengths = {name: len(values) for name, values in record.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"PackedCollator: a feature's entries differ in length: {lengths}")
    return record
