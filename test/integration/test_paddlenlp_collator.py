# SPDX-License-Identifier: Apache-2.0
"""Packing: every document once, labels inside their document, positions restart, padding hides nothing fully."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_fm3.integration.paddlenlp.collator import IGNORED_LABEL, INDICES, PackedCollator, pack_documents
from paddle_fm3.integration.paddlenlp.masks import KINDS, LayerMasks, masks_of_batch
from paddle_fm3.testing.reference import visible_plane

S = 24
LENGTHS = (5, 1, 7, 8)  # 21 of 24 tokens
PREFIXES = (2, 0, 7, 3)
GROUPS = ((4, 2, 3), (3, 1), (5, 3))  # question, answers


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


def feature_of(kind: str) -> dict:
    rng = np.random.default_rng(2)

    def tokens(length: int) -> list[int]:
        return rng.integers(1, 50, length).tolist()

    if kind == "share_question":
        return {"groups": [[tokens(length) for length in group] for group in GROUPS]}
    feature = {"documents": [tokens(length) for length in LENGTHS]}
    if kind == "prefix_lm_document":
        feature["prefixes"] = list(PREFIXES)
    if kind == "document":
        feature["labels"] = [[7] * length for length in LENGTHS]
    return feature


def sees(kind: str, q: int, k: int) -> bool:
    """Whether the token at q sees the one at k, by what the kind means; token by token, from the lengths alone."""
    parts = [n for group in GROUPS for n in group] if kind == "share_question" else list(LENGTHS)
    ends = np.cumsum(parts)

    def place(token: int) -> tuple[int, int]:  # part, offset; padding: a part of its own
        if token >= ends[-1]:
            return len(parts) + token - ends[-1], 0
        part = int(np.searchsorted(ends, token, side="right"))
        return part, int(token - ends[part] + parts[part])

    (q_part, q_offset), (k_part, k_offset) = place(q), place(k)
    if kind == "share_question":
        if q_part == k_part:
            return k_offset <= q_offset
        group_of = [at for at, group in enumerate(GROUPS) for _ in group]
        is_question = [at for group in GROUPS for at in range(len(group))]
        both_real = max(q_part, k_part) < len(parts)
        return both_real and group_of[q_part] == group_of[k_part] and is_question[k_part] == 0 and k_part < q_part
    if kind == "causal_blockwise":
        last = len(parts) - 1
        if q_part >= last and k_part < last:
            return True  # the last document, and padding after it
        return q_part == k_part and k_offset <= q_offset
    if q_part != k_part:
        return False
    if kind == "document":
        return True
    is_prefix = kind == "prefix_lm_document" and q_part < len(parts) and k_offset < PREFIXES[k_part]
    return is_prefix or k_offset <= q_offset


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_means_what_it_says(kind: str) -> None:
    masks = LayerMasks(kind)
    batch = PackedCollator(S, masks=masks)([feature_of(kind)])
    assert batch[INDICES].dtype == np.int32
    bounds, causal = masks_of_batch(batch[INDICES])
    assert len(bounds) == 1 and bounds[0].shape == (1, 1, S, {"causal_blockwise": 2}.get(kind, 1 if causal else 4))
    visible = visible_plane(bounds[0][0, 0], causal, S, S)
    expected = np.array([[sees(kind, q, k) for k in range(S)] for q in range(S)])
    np.testing.assert_array_equal(visible, expected)
    # What a token must predict is the next token of its document, and it may not see it.
    labels, tokens = batch["labels"][0], batch["input_ids"][0]
    asked = np.flatnonzero(labels != IGNORED_LABEL)
    assert len(asked) >= 5
    if kind != "document":
        np.testing.assert_array_equal(labels[asked], tokens[asked + 1])
        assert not visible[asked, asked + 1].any()
    assert visible.diagonal().all()


def test_windows_a_layer() -> None:
    masks = LayerMasks.from_flags("causal_document", 3, "window, window,full")
    assert (masks.num_masks, masks.shares()) == (2, (2, 1))
    assert [masks.mask_idx(layer) for layer in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    batch = PackedCollator(S, masks=masks)([feature_of("causal_document")])
    assert batch[INDICES].shape == (1, 2, 1, S, 1)
    (window, full), causal = masks_of_batch(batch[INDICES])
    document = np.array([[sees("causal_document", q, k) for k in range(S)] for q in range(S)])
    near = np.subtract.outer(np.arange(S), np.arange(S)) < 3
    np.testing.assert_array_equal(visible_plane(full[0, 0], causal, S, S), document)
    np.testing.assert_array_equal(visible_plane(window[0, 0], causal, S, S), document & near)

    both_ways = PackedCollator(S, masks=LayerMasks("document", 3))([feature_of("document")])
    (window,), causal = masks_of_batch(both_ways[INDICES])
    document = np.array([[sees("document", q, k) for k in range(S)] for q in range(S)])
    near = np.abs(np.subtract.outer(np.arange(S), np.arange(S))) < 3
    np.testing.assert_array_equal(visible_plane(window[0, 0], causal, S, S), document & near)


def test_shared_questions_restart_positions() -> None:
    batch = PackedCollator(12, masks=LayerMasks("share_question"))(
        [{"groups": [[[1, 2, 3], [4, 5], [6, 7, 8]], [[9], [3]]]}]
    )
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 0, 0]
    assert batch["labels"].tolist()[0] == [-100, -100, -100, 5, -100, 7, 8, -100, -100, -100, -100, -100]
    assert batch[INDICES].tolist()[0] == [8, 8, 8, 5, 5, 8, 8, 8, 10, 10, 11, 12]
    packs = pack_documents([[[1] * 5, [2] * 3], [[1] * 2, [2], [3]], [[1], [2]]], 10)
    assert [len(pack) for pack in packs] == [2, 1]


def test_bad_masks_and_packs_are_named() -> None:
    for arguments, words in (
        (("causal",), "kind='causal' is unknown; known: causal_document"),
        (("causal_document", -1), "window=-1 must be >= 0"),
        (("causal_document", 4, ("full",)), "window=4 with layers=full"),
        (("causal_document", 0, ("window", "full")), "window=0 with layers=window,full"),
        (("causal_document", 4, ("window", "half")), r"layers has \['half'\]; expected full or window"),
        (("share_question", 4), "a window with kind='share_question'"),
    ):
        with pytest.raises(ValueError, match=words):
            LayerMasks(*arguments)
    documents = [[1, 2, 3], [4, 5]]
    for kind, feature, words in (
        ("prefix_lm_document", {"documents": documents}, r"needs 'prefixes'.*got \[\]"),
        (
            "prefix_lm_document",
            {"documents": documents, "prefixes": [4, 0]},
            r"within its \[3, 2\] tokens; got \[4, 0\]",
        ),
        ("document", {"documents": documents}, "needs 'labels' for each document"),
        ("document", {"documents": documents, "labels": [[1, 2, 3], [4]]}, r"labels have \[3, 1\] ids"),
        ("causal_document", {"documents": []}, "documents are empty"),
        ("share_question", {"documents": documents}, "or give 'groups'"),
        ("causal_blockwise", {"input_ids": [1], "labels": [1], INDICES: [1]}, "a record of one bound"),
        ("share_question", {"input_ids": [1], "labels": [1], INDICES: [1]}, "needs position_ids"),
        # Ids that are no integers, and a list less than there must be.
        ("causal_document", {"documents": [[1, 2], [1.5, 2]]}, r"part 1 of 'documents' is float64 \[2\]; expected int"),
        ("causal_document", {"documents": ["ab"]}, r"part 0 of 'documents' is <U2 \[\]; expected integers"),
        ("causal_document", {"documents": [1, 2, 3]}, r"part 0 of 'documents' is int64 \[\]; expected integers"),
        ("share_question", {"groups": [[1, 2], [3]]}, r"part 0 of 'groups' is int64 \[\]; expected integers"),
        ("document", {"documents": [[1]], "labels": [[1.5]]}, "a part of 'labels' is float64"),
        ("prefix_lm_document", {"documents": [[1, 2]], "prefixes": [0.5]}, "'prefixes' is float64"),
        ("causal_document", {"input_ids": [1.5], "labels": [1], INDICES: [1]}, "'input_ids' is float64"),
        (
            "causal_document",
            {"input_ids": [1], "labels": [1], INDICES: [1], "position_ids": [0.5]},
            "'position_ids' is float64",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            PackedCollator(8, masks=LayerMasks(kind))([feature])
    with pytest.raises(ValueError, match=r"shape is \[4\]; expected"):
        masks_of_batch(np.zeros(4, np.int32))


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
    with pytest.raises(ValueError, match="PackedCollator: no features"):
        collator([])
    with pytest.raises(ValueError, match="a pack has 5 tokens; at most max_length=4 fit"):
        collator([{"documents": [[1, 2, 3], [4, 5]]}])
    with pytest.raises(ValueError, match="differ in length"):
        collator([{"input_ids": [1, 2], "labels": [1], "attn_mask_startend_row_indices": [2, 2]}])
