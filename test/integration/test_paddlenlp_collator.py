# SPDX-License-Identifier: Apache-2.0
"""Packing: every document once, labels inside their document, positions restart, padding hides nothing fully."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_fm3.integration.paddlenlp.collator import PackedCollator, pack_documents
from paddle_fm3.testing.reference import visible_plane


def test_packs_hold_every_document_once() -> None:
    rng = np.random.default_rng(0)
    documents = [[document_idx] * int(rng.integers(1, 30)) for document_idx in range(200)]
    packs = pack_documents(documents, 32)
    assert sorted(document[0] for pack in packs for document in pack) == list(range(200))
    assert all(sum(map(len, pack)) <= 32 for pack in packs)
    fill = np.mean([sum(map(len, pack)) for pack in packs]) / 32
    assert fill > 0.85
    with pytest.raises(ValueError, match="document 1 has 33 tokens; expected 1 to max_length=32"):
        pack_documents([[1], [2] * 33], 32)
    with pytest.raises(ValueError, match="document 0 has 0 tokens"):
        pack_documents([[]], 32)


def test_collated_batch() -> None:
    batch = PackedCollator(9, pad_token_id=7)([{"documents": [[1, 2, 3], [4], [5, 6]]}, {"documents": [[8] * 9]}])
    assert batch["input_ids"].tolist()[0] == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    assert batch["labels"].tolist()[0] == [2, 3, -100, -100, 6, -100, -100, -100, -100]
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 0, 0, 1, 0, 0, 0]
    assert batch["attn_mask_startend_row_indices"].tolist()[0] == [3, 3, 3, 4, 6, 6, 7, 8, 9]
    assert batch["attn_mask_startend_row_indices"].tolist()[1] == [9] * 9
    assert batch["attn_mask_startend_row_indices"].dtype == np.int32
    visible = visible_plane(batch["attn_mask_startend_row_indices"][0][:, None], True, 9, 9)
    document = np.array([0, 0, 0, 1, 2, 2, 3, 4, 5])
    np.testing.assert_array_equal(visible, np.tril(document[:, None] == document[None, :]))


def test_zero_padding_records_are_taken() -> None:
    zero_padding = pytest.importorskip("paddlenlp.datasets.zero_padding_dataset").ZeroPadding
    documents = [[1, 2, 3], [4, 5]]
    records = [
        {"input_ids": d, "labels": d[1:] + [-100], "attn_mask_startend_row_indices": [len(d)] * len(d)}
        for d in documents
    ]
    record = zero_padding._pad_batch_records(records)
    ours = PackedCollator(8)([{"documents": documents}])
    theirs = PackedCollator(8)([record])
    for name, expected in ours.items():
        np.testing.assert_array_equal(theirs[name], expected, err_msg=name)


def test_bad_features_are_named() -> None:
    collator = PackedCollator(4)
    with pytest.raises(ValueError, match=r"missing \['labels', 'attn_mask_startend_row_indices'\]"):
        collator([{"input_ids": [1]}])
    with pytest.raises(ValueError, match="a pack has 5 tokens; at most max_length=4 fit"):
        collator([{"documents": [[1, 2, 3], [4, 5]]}])
    with pytest.raises(ValueError, match="differ in length"):
        collator([{"input_ids": [1, 2], "labels": [1], "attn_mask_startend_row_indices": [2, 2]}])
