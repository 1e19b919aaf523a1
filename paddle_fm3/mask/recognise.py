# SPDX-License-Identifier: Apache-2.0
"""Which named mask one plane is: read the parameters off the columns, rebuild with the builder, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask import builders, intervals
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.mask.encoding import causal_ends


def recognise(mask: ColumnMask) -> str:
    """Name with parameters, such as "causal document (12 documents)", of a mask with b = h_mask = 1.

    Exact: a name is given only if the rebuilt mask hides the same pairs (block_mask aside); otherwise it is
    "key eviction" (causal, one cut a column) or "custom".
    """
    if (mask.b, mask.h_mask) != (1, 1):
        raise ValueError(f"recognise: {mask!r} has more than one plane; select one")
    mask = mask.with_block_mask(None)
    if mask.s_q == 0 or mask.s_k == 0:
        return "empty"
    columns = _Columns(mask)
    if not columns.visible_end.any():
        return "nothing visible"
    for name, rebuild in _guesses(columns):
        rebuilt = rebuild()
        if rebuilt is not None and rebuilt.same_visibility(mask):
            return name
    form = _compact_form(mask)
    return "key eviction" if form == (1, True) else "custom"


class _Columns:
    """What each column shows: first and last visible row, and how many separate runs."""

    def __init__(self, mask: ColumnMask) -> None:
        self.s_q, self.s_k = mask.s_q, mask.s_k
        self.is_square = mask.s_q == mask.s_k
        begin, end = intervals.gaps(mask.hidden_intervals(), mask.s_q)
        begin, end = begin[:, 0, 0], end[:, 0, 0]  # [4, s_k]
        is_used = begin < end
        self.visible_begin = np.where(is_used, begin, mask.s_q).min(axis=0).astype(np.int64)  # [s_k]
        self.last_begin = np.where(is_used, begin, 0).max(axis=0).astype(np.int64)  # [s_k]; of the last run
        self.visible_end = np.where(is_used, end, 0).max(axis=0).astype(np.int64)  # [s_k]; 0 if nothing is visible
        # End of the run that holds the diagonal, if any.
        diagonal = np.arange(mask.s_k)
        holds = is_used & (begin <= diagonal) & (diagonal < end)
        self.diagonal_end = np.where(holds, end, 0).max(axis=0).astype(np.int64)
        self.diagonal_begin = np.where(holds, begin, 0).max(axis=0).astype(np.int64)


Guess = tuple[str, Callable[[], ColumnMask | None]]


def _guesses(columns: _Columns) -> Iterator[Guess]:
    """Simplest first; each builder is called only when the search reaches it."""
    s_q, s_k = columns.s_q, columns.s_k
    yield "full", lambda: builders.full(s_q, s_k)
    yield "causal", lambda: builders.causal(s_q, s_k)
    is_key_seen = columns.visible_end > 0
    yield "key padding", lambda: builders.key_padding(is_key_seen[None], s_q=s_q)
    if not columns.is_square:
        yield "causal with key padding", lambda: _padded_causal(is_key_seen, s_q)
        return
    s = s_q
    yield "causal with key padding", lambda: _padded_causal(is_key_seen, s_q)
    window = int(columns.visible_end[0])
    yield f"sliding window ({window})", lambda: builders.sliding_window(s, window) if window else None
    lengths = _walk_documents(columns.diagonal_end)
    label = f"{len(lengths)} documents"
    yield f"causal document ({label})", lambda: builders.causal_document(lengths)
    yield f"document ({label})", lambda: builders.document(lengths)
    first_prefix = int((columns.visible_begin == 0).sum())
    yield f"prefix-LM causal (prefix {first_prefix})", lambda: builders.prefix_lm_causal(s, first_prefix)
    yield (
        f"prefix-LM document ({label})",
        lambda: builders.prefix_lm_document(lengths, _prefixes(columns, lengths)),
    )
    blocks = _blockwise_documents(lengths, int(columns.last_begin[0]))
    yield f"causal blockwise ({len(blocks)} documents)", lambda: builders.causal_blockwise(blocks)
    groups = _groups(columns)
    yield (
        f"share question ({len(groups)} groups)",
        lambda: builders.share_question(groups) if groups else None,
    )
    window_or_document = _window_and_documents(columns)
    if window_or_document is not None:
        window_lengths, cut = window_or_document
        name = f"causal document with window {cut} ({len(window_lengths)} documents)"
        yield name, lambda: builders.causal_document_sliding_window(window_lengths, cut)
    parameters = _global_window(columns)
    if parameters is not None:
        num_global, left, right = parameters
        name = f"global + sliding window ({num_global} global, {left} left, {right} right)"
        yield name, lambda: builders.global_sliding_window(s, num_global, left, right)
    dropped = _dropped_ranges(columns)
    yield (
        f"QK-sparse ({len(dropped)} ranges dropped)",
        lambda: builders.qk_sparse(s, dropped) if dropped else None,
    )


def _padded_causal(is_key_seen: NDArray[np.bool_], s_q: int) -> ColumnMask | None:
    """Causal with keys hidden; keys that the causal rule alone hides from every row are no padding."""
    is_valid = is_key_seen | (causal_ends(s_q, len(is_key_seen)) >= s_q)
    return None if is_valid.all() else builders.key_padding(is_valid[None], s_q=s_q, is_causal=True)


def _walk_documents(end: NDArray[np.int64]) -> list[int]:
    """Lengths of the documents if column k's document ends at end[k]; a nonsensical end closes at once."""
    lengths, begin = [], 0
    while begin < len(end):
        stop = max(int(end[begin]), begin + 1)
        lengths.append(min(stop, len(end)) - begin)
        begin = stop
    return lengths


def _blockwise_documents(lengths: list[int], last_begin: int) -> list[int]:
    """The document before the last one runs into it when walked; cut there."""
    ends = sorted({*np.cumsum(lengths).tolist(), last_begin} - {0})
    return np.diff(ends, prepend=0).tolist()


def _prefixes(columns: _Columns, lengths: list[int]) -> list[int]:
    begins = np.cumsum([0, *lengths])[:-1]
    return [
        max(1, int((columns.visible_begin[begin : begin + size] == begin).sum()))
        for begin, size in zip(begins.tolist(), lengths, strict=True)
    ]


def _groups(columns: _Columns) -> list[list[int]]:
    """[question, answers...] of each group, read from where columns end; [] if that makes no sense."""
    end = columns.visible_end
    groups: list[list[int]] = []
    begin = 0
    while begin < len(end):
        group_end = int(end[begin])
        if group_end <= begin:
            return []
        edges = [begin, *(np.flatnonzero(np.diff(end[begin:group_end])) + begin + 1).tolist(), group_end]
        groups.append(np.diff(edges).tolist())
        begin = group_end
    return groups


def _window_and_documents(columns: _Columns) -> tuple[list[int], int] | None:
    """(document lengths, window) of a windowed document mask: its documents show as shared ends."""
    span = columns.visible_end - np.arange(columns.s_k)
    window = int(span.max())
    if window < 1:
        return None
    is_cut_by_document = span < window
    ends = np.unique(np.append(columns.visible_end[is_cut_by_document], columns.s_q))
    return np.diff(ends, prepend=0).tolist(), window


def _global_window(columns: _Columns) -> tuple[int, int, int] | None:
    """(num_global, left, right) from a column far enough from both ends, or None."""
    sees_all = (columns.visible_begin == 0) & (columns.visible_end == columns.s_q)
    num_global = int(sees_all.argmin()) if not sees_all.all() else 0
    span_after = columns.diagonal_end - 1 - np.arange(columns.s_k)
    span_before = np.arange(columns.s_k) - columns.diagonal_begin
    inner = slice(num_global, columns.s_k)
    if num_global >= columns.s_k:
        return None
    is_before_end = columns.diagonal_end[inner] < columns.s_q
    left = int(span_after[inner][is_before_end].max(initial=0))
    # A run that begins at row 0 has merged with the global rows.
    is_after_begin = columns.diagonal_begin[inner] > 0
    right = int(span_before[inner][is_after_begin].max(initial=0))
    return num_global, left, right


def _dropped_ranges(columns: _Columns) -> list[tuple[int, int]]:
    """Key ranges whose columns become visible late, as (begin, row where they do)."""
    is_late = columns.visible_begin > np.arange(columns.s_k)
    begins = np.where(is_late, columns.visible_begin, -1)
    changes = np.flatnonzero(np.diff(begins, prepend=-1))
    return [(int(column), int(begins[column])) for column in changes if begins[column] >= 0]


def _compact_form(mask: ColumnMask) -> tuple[int, bool] | None:
    try:
        bounds, is_causal = mask.to_bounds()
    except ValueError:
        return None
    return bounds.shape[3], is_causal
