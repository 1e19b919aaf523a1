# SPDX-License-Identifier: Apache-2.0
"""Named masks: every encoding known for FlashMask, each a function that returns a ColumnMask.

`documents` arguments take the token counts of the documents packed into a sequence, either of one sequence
(``[3, 5]``) or of a batch of equally long ones (``[[3, 5], [8]]``). Unless noted, s_q = s_k = s.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paddle_fm3.mask.column_mask import ColumnMask, Int32Array, holds_integers

Documents = Sequence[int] | Sequence[Sequence[int]]


def full(s_q: int, s_k: int | None = None, *, b: int = 1) -> ColumnMask:
    """Every row sees every key."""
    return _filled("full", s_q, s_q if s_k is None else s_k, b, is_causal=False)


def causal(s_q: int, s_k: int | None = None, *, b: int = 1) -> ColumnMask:
    """Row q sees key k iff k <= q + (s_k - s_q)."""
    return _filled("causal", s_q, s_q if s_k is None else s_k, b, is_causal=True)


def sliding_window(s: int, window: int, *, b: int = 1) -> ColumnMask:
    """Causal; row q sees the `window` keys (q - window, q], itself included."""
    _check_whole("sliding_window", s=s, window=window)
    _check(window >= 1, "sliding_window", f"window={window} must be >= 1")
    return _lower(np.broadcast_to(_arange(s) + window, (b, s)), s)


def from_window_size(
    window_size: int | tuple[int, int], *, s_q: int, s_k: int | None = None, is_causal: bool, b: int = 1
) -> ColumnMask:
    """`window_size` with the meaning of ``flashmask_attention``.

    An integer w is (w, w). Causal: row q sees keys [q - left, q] (left + 1 keys). Not causal: keys
    [q - left, q + right]. Where s_k != s_q the window is shifted by s_k - s_q, as the causal rule is. (Paddle
    takes s_q = s_k for granted.)
    """
    left, right = window_size if isinstance(window_size, tuple | list) else (window_size, window_size)
    _check_whole("from_window_size", left=left, right=right)
    _check(left >= 0 and right >= 0, "from_window_size", f"window_size={window_size} must not be negative")
    s_k = s_q if s_k is None else s_k
    column = np.broadcast_to(_arange(s_k) - (s_k - s_q), (b, 1, s_k))  # the row on the key's diagonal
    lt_begin = _rows(column + left + 1, s_q)
    if is_causal:
        return ColumnMask.from_bounds(lt_begin[..., None], is_causal=True, s_q=s_q)
    ut_end = _rows(column - right, s_q)
    return ColumnMask.from_bounds(np.stack([lt_begin, ut_end], -1), is_causal=False, s_q=s_q)


def causal_document(documents: Documents, *, s: int | None = None) -> ColumnMask:
    """Causal inside each document; rows past the last document (if `s` is longer) join it."""
    _, end = _document_bounds("causal_document", documents, s, joins_tail=True)
    return _lower(end, end.shape[1])


def document(documents: Documents, *, s: int | None = None) -> ColumnMask:
    """Both directions inside each document; rows past the last one (if `s` is longer) see one another only.

    The upper bound is the document's own begin. (The generator in FlashMask's public tests adds the next
    document's length instead, which hides the diagonal of uneven documents.)
    """
    begin, end = _document_bounds("document", documents, s, joins_tail=False)
    return _outer(end, begin, end.shape[1])


def share_question(groups: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]) -> ColumnMask:
    """Causal; each group is one question and several answers that do not see one another.

    Args:
        groups: lengths ``[question, answer, answer, ...]`` of each group packed into a sequence, or a batch
            of such lists.
    """
    must = f"groups {groups!r} must hold a list [question, answer, ...] for each group"
    _check(_is_list(groups) and all(_is_list(part) for part in groups), "share_question", must)
    is_batch = len(groups) > 0 and len(groups[0]) > 0 and _is_list(groups[0][0])
    batch: Any = groups if is_batch else [groups]
    rows = []
    for sample in batch:
        ends: list[Int32Array] = []
        begin = 0
        for group in sample:
            _check(_is_list(group), "share_question", f"{must}; group {group!r} is no list")
            sizes = _lengths("share_question", "group", group)
            _check(len(sizes) > 0, "share_question", f"group {sizes.tolist()} needs lengths >= 0")
            part_ends = begin + np.cumsum(sizes)  # [1 + answers]
            part_ends[0] = begin = int(part_ends[-1])  # the question stays visible to the end of its group
            ends.append(np.repeat(part_ends, sizes))
        rows.append(np.concatenate(ends or [np.empty(0, np.int64)]))
    end = _stacked("share_question", rows)
    return _lower(end, end.shape[1])


def global_sliding_window(s: int, num_global: int, left: int, right: int, *, b: int = 1) -> ColumnMask:
    """Row q sees key k iff k < num_global, or q < num_global, or -right <= q - k <= left."""
    _check_whole("global_sliding_window", s=s, num_global=num_global, left=left, right=right)
    _check(
        min(num_global, left, right) >= 0,
        "global_sliding_window",
        f"{num_global=}, {left=}, {right=} must be >= 0",
    )
    column = _arange(s)
    is_global = column < num_global
    bounds = [
        np.where(is_global, s, column + left + 1),
        np.full(s, s),
        np.full(s, num_global),
        np.where(is_global, 0, column - right),
    ]
    return _both([np.broadcast_to(bound, (b, s)) for bound in bounds], s)


def causal_blockwise(documents: Documents) -> ColumnMask:
    """Causal inside each document; the last one sees every earlier token (demonstrations, then a query)."""
    begin, end = _document_bounds("causal_blockwise", documents, None, joins_tail=False)
    s = end.shape[1]
    last_begin = begin[:, -1:]  # [b, 1]
    is_last = begin == last_begin
    lt_begin, lt_end = np.where(is_last, s, end), np.where(is_last, s, last_begin)
    return _from([lt_begin, lt_end], s, is_causal=True)


def prefix_lm_document(documents: Documents, prefixes: Documents) -> ColumnMask:
    """Inside each document: causal, except that its first `prefix` keys are visible to the whole document."""
    begin, end = _document_bounds("prefix_lm_document", documents, None, joins_tail=False)
    ut_end = np.empty(begin.shape, np.int64)
    _check_lists("prefix_lm_document", "prefixes", prefixes)
    samples, num_prefixes = _batched(documents), len(_batched(prefixes))
    _check(
        len(samples) == num_prefixes,
        "prefix_lm_document",
        f"prefixes have b={num_prefixes}, documents b={len(samples)}; give both one list a sample",
    )
    for b_idx, (lengths, prefix) in enumerate(zip(samples, _batched(prefixes), strict=True)):
        prefix = _lengths("prefix_lm_document", "prefixes", prefix).tolist()
        _check(
            len(lengths) == len(prefix) and all(0 <= p <= n for p, n in zip(prefix, lengths, strict=False)),
            "prefix_lm_document",
            f"prefixes {prefix} of sample {b_idx} must be one a document, each within {list(lengths)}",
        )
        column = _arange(begin.shape[1])
        is_prefix = column - begin[b_idx] < np.repeat(np.asarray(prefix, np.int64), lengths)
        ut_end[b_idx] = np.where(is_prefix, begin[b_idx], column)
    return _outer(end, ut_end, end.shape[1])


def prefix_lm_causal(s: int, prefix: int, *, b: int = 1) -> ColumnMask:
    """Causal, except that the first `prefix` keys are visible to every row."""
    _check_whole("prefix_lm_causal", s=s, prefix=prefix)
    _check(prefix >= 0, "prefix_lm_causal", f"prefix={prefix} must not be negative")
    column = _arange(s)
    ut_end = np.broadcast_to(np.where(column < prefix, 0, column), (b, s))
    return _outer(np.full((b, s), s), ut_end, s)


def qk_sparse(s: int, dropped: Sequence[tuple[int, int]], *, b: int = 1) -> ColumnMask:
    """Causal; a key of a dropped range (begin, end) is hidden from every row before `end`, not after."""
    _check_whole("qk_sparse", s=s)
    lt_begin = np.zeros(s, np.int64)
    lt_end = np.zeros(s, np.int64)
    for begin, end in dropped:
        _check(0 <= begin <= end <= s, "qk_sparse", f"dropped range {(begin, end)} must lie in [0, {s}]")
        lt_begin[begin:end] = np.arange(begin, end)
        lt_end[begin:end] = np.maximum(lt_end[begin:end], end)
    return _from([np.broadcast_to(bound, (b, s)) for bound in (lt_begin, lt_end)], s, is_causal=True)


def eviction(evict_row: ArrayLike) -> ColumnMask:
    """Causal; key k is hidden from row ``evict_row[b, h_mask, k]`` on (a KV cache that drops keys)."""
    evict_row = _array("eviction", "evict_row", evict_row)
    _check(evict_row.ndim == 3, "eviction", f"evict_row.shape is {evict_row.shape}; expected [b, h_mask, s]")
    is_integral = np.issubdtype(evict_row.dtype, np.integer)
    _check(is_integral, "eviction", f"evict_row.dtype is {evict_row.dtype}; expected integers")
    return _lower(evict_row, evict_row.shape[2])


def random_eviction(s: int, *, seed: int, first_row: int = 0, b: int = 1, h_mask: int = 1) -> ColumnMask:
    """`eviction` with rows uniform in ``[max(k + 1, first_row), s]``: every row still sees itself."""
    _check_whole("random_eviction", s=s, first_row=first_row)
    low = np.maximum(_arange(s) + 1, first_row)
    return eviction(np.random.default_rng(seed).integers(low, s + 1, (b, h_mask, s)))


def causal_document_sliding_window(documents: Documents, window: int) -> ColumnMask:
    """Causal inside each document, and row q sees at most the `window` keys (q - window, q]."""
    _check_whole("causal_document_sliding_window", window=window)
    _check(window >= 1, "causal_document_sliding_window", f"window={window} must be >= 1")
    _, end = _document_bounds("causal_document_sliding_window", documents, None, joins_tail=True)
    return _lower(np.minimum(end, _arange(end.shape[1]) + window), end.shape[1])


def bucketed(
    q_bucket: ArrayLike,
    k_bucket: ArrayLike,
    *,
    q_position: ArrayLike | None = None,
    k_position: ArrayLike | None = None,
) -> ColumnMask:
    """Hash-sparse attention: queries and keys sorted by bucket see one another inside a bucket only.

    Args:
        q_bucket, k_bucket: bucket of each row ``[b, h_mask, s_q]`` and key ``[b, h_mask, s_k]``, ascending.
        q_position, k_position: their positions before sorting, ascending inside a bucket; if given, row q
            sees key k only if ``k_position <= q_position`` as well.
    """
    q_bucket, k_bucket = (_integers("bucketed", n, x) for n, x in (("q_bucket", q_bucket), ("k_bucket", k_bucket)))
    _check(
        q_bucket.ndim == k_bucket.ndim == 3 and q_bucket.shape[:2] == k_bucket.shape[:2],
        "bucketed",
        f"q_bucket {q_bucket.shape}, k_bucket {k_bucket.shape} must be [b, h_mask, s], b and h_mask equal",
    )
    _check(
        (q_position is None) == (k_position is None),
        "bucketed",
        "give both q_position and k_position, or neither",
    )
    q_key, k_key = q_bucket, k_bucket
    if q_position is not None:
        # One number that ascends with (bucket, position).
        q_position = _integers("bucketed", "q_position", q_position)
        k_position = _integers("bucketed", "k_position", k_position)
        span = 1 + max(q_position.max(initial=0), k_position.max(initial=0))
        q_key, k_key = q_bucket * span + q_position, k_bucket * span + k_position
    for name, key in (("q", q_key), ("k", k_key)):
        _check(
            bool((np.diff(key) >= 0).all()),
            "bucketed",
            f"{name}_bucket (and {name}_position inside it) must ascend",
        )
    lt_begin = _searchsorted(q_bucket, k_bucket, "right")
    ut_end = _searchsorted(q_key, k_key, "left")
    bounds = np.stack([lt_begin, ut_end], -1).astype(np.int32)
    return ColumnMask.from_bounds(bounds, is_causal=False, s_q=q_bucket.shape[2])


def key_padding(is_key_valid: ArrayLike, *, s_q: int | None = None, is_causal: bool = False) -> ColumnMask:
    """Keys marked False in ``is_key_valid [b, s_k]`` are hidden from every row; no row is hidden."""
    is_key_valid = _array("key_padding", "is_key_valid", is_key_valid).astype(bool)
    _check(
        is_key_valid.ndim == 2,
        "key_padding",
        f"is_key_valid.shape is {is_key_valid.shape}; expected [b, s_k]",
    )
    s_q = is_key_valid.shape[1] if s_q is None else s_q
    lt_begin = np.where(is_key_valid, s_q, 0)
    bounds = [lt_begin] if is_causal else [lt_begin, np.zeros_like(lt_begin)]
    return _from(bounds, s_q, is_causal=is_causal)


def block_sparse(mask: ColumnMask, keep_tile: Callable[[int, int], bool] | ArrayLike) -> ColumnMask:
    """`mask` without the 128 x 128 tiles that `keep_tile` drops.

    `keep_tile` is a 0/1 table ``[b, h_mask, q_tiles, k_tiles]`` or a predicate ``(q_tile_idx, k_tile_idx)``.
    """
    if not callable(keep_tile):
        return mask.with_block_mask(keep_tile)
    num_q_tiles, num_k_tiles = -(-mask.s_q // 128), -(-mask.s_k // 128)
    table = np.array([[bool(keep_tile(q, k)) for k in range(num_k_tiles)] for q in range(num_q_tiles)], np.int32)
    shape = (mask.b, mask.h_mask, num_q_tiles, num_k_tiles)
    return mask.with_block_mask(np.broadcast_to(table.reshape(num_q_tiles, num_k_tiles), shape))


# --- parts ---------------------------------------------------------------------------------------


def _check(is_fine: bool, builder: str, message: str) -> None:
    if not is_fine:
        raise ValueError(f"{builder}: {message}")


def _check_whole(builder: str, **sizes: Any) -> None:
    """Each an integer: numpy would take 2.5 for a window, and keep 2 of it; and none below 0 where it is a length."""
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            raise ValueError(f"{builder}: {name}={size!r} must be an integer") from None
        _check(name not in ("s", "s_q", "s_k", "b") or size >= 0, builder, f"{name}={size} must be >= 0")


def _array(builder: str, name: str, values: ArrayLike | None) -> NDArray[Any]:
    """As an array; of lists that are unequally long numpy would speak in its own words, without a name."""
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{builder}: {name}={values!r} is no array; its lists must be equally long") from None


def _integers(builder: str, name: str, values: ArrayLike | None) -> NDArray[np.int64]:
    """An array of integers; floats are refused, of which numpy would keep the whole parts."""
    array = _array(builder, name, values)
    _check(holds_integers(array), builder, f"{name}.dtype is {array.dtype}; expected integers")
    return array.astype(np.int64)


def _arange(s: int) -> NDArray[np.int64]:
    return np.arange(s, dtype=np.int64)


def _rows(values: NDArray[Any], s_q: int) -> Int32Array:
    """Clipped to [0, s_q], where int32 is safe."""
    return np.clip(values, 0, s_q).astype(np.int32)


def _from(bounds: Sequence[NDArray[Any]], s_q: int, *, is_causal: bool) -> ColumnMask:
    """ColumnMask from bounds of shape [b, s_k] or [b, h_mask, s_k]."""
    stacked = _rows(np.stack(bounds, axis=-1), s_q)  # [b, (h_mask,) s_k, n]
    stacked = stacked[:, None] if stacked.ndim == 3 else stacked
    return ColumnMask.from_bounds(stacked, is_causal=is_causal, s_q=s_q)


def _lower(lt_begin: NDArray[Any], s_q: int) -> ColumnMask:
    return _from([lt_begin], s_q, is_causal=True)


def _outer(lt_begin: NDArray[Any], ut_end: NDArray[Any], s_q: int) -> ColumnMask:
    return _from([lt_begin, ut_end], s_q, is_causal=False)


def _both(bounds: Sequence[NDArray[Any]], s_q: int) -> ColumnMask:
    return _from(bounds, s_q, is_causal=False)


def _filled(builder: str, s_q: int, s_k: int, b: int, *, is_causal: bool) -> ColumnMask:
    _check_whole(builder, s_q=s_q, s_k=s_k, b=b)
    empty, zeros = np.full((b, 1, s_k), s_q, np.int32), np.zeros((b, 1, s_k), np.int32)
    return ColumnMask(empty, empty, zeros, zeros, s_q=s_q, is_causal=is_causal)


def _is_list(values: Any) -> bool:
    """A list, tuple, array or tensor. A string, a dict and a set have a length too, but hold no counts in order."""
    if hasattr(values, "ndim"):
        return bool(np.ndim(values) > 0)
    return hasattr(values, "__getitem__") and not isinstance(values, str | bytes | dict)


def _check_lists(builder: str, name: str, documents: Any) -> None:
    """One list of token counts, or a list of such lists; nothing between."""
    if not _is_list(documents):
        raise ValueError(f"{builder}: {name}={documents!r} must be a list of token counts")
    if not hasattr(documents, "ndim") and len({_is_list(part) for part in documents}) > 1:
        raise ValueError(
            f"{builder}: {name}={documents!r} mixes token counts and lists; expected one list of counts or one a sample"
        )


def _batched(documents: Documents) -> Sequence[Sequence[int]]:
    if len(documents) and _is_list(documents[0]):
        return documents  # type: ignore[return-value]
    return [documents]  # type: ignore[list-item]


def _lengths(builder: str, what: str, lengths: Any) -> NDArray[np.int64]:
    """A list, array or tensor of token counts; floats are refused, since a mask of their whole parts is another one."""
    try:
        sizes = np.asarray(lengths)
    except ValueError:  # numpy's own words name no argument
        raise ValueError(f"{builder}: {what} {lengths!r} must be integers, one a document, not lists") from None
    _check(
        sizes.ndim == 1 and holds_integers(sizes), builder, f"{what} {sizes.tolist()} must be integers, one a document"
    )
    _check(bool((sizes >= 0).all()), builder, f"{what} {sizes.tolist()} must be >= 0")
    return sizes.astype(np.int64)


def _stacked(builder: str, rows: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    sizes = {len(row) for row in rows}
    _check(
        len(sizes) == 1,
        builder,
        f"samples of a batch must be equally long, got {[len(row) for row in rows]} tokens",
    )
    return np.stack(rows)


def _document_bounds(
    builder: str, documents: Documents, s: int | None, *, joins_tail: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Begin and end of the document of each column, ``[b, s]`` each."""
    begins, ends = [], []
    _check_lists(builder, "documents", documents)
    if s is not None:
        _check_whole(builder, s=s)
    for lengths in _batched(documents):
        sizes = _lengths(builder, "document lengths", lengths)
        tail = 0 if s is None else s - int(sizes.sum())
        _check(tail >= 0, builder, f"document lengths sum to {int(sizes.sum())}, more than s={s}")
        if tail and (not joins_tail or not len(sizes)):
            sizes = np.append(sizes, tail)
        elif tail:
            sizes = np.append(sizes[:-1], sizes[-1] + tail)
        end = np.cumsum(sizes)
        begins.append(np.repeat(end - sizes, sizes))
        ends.append(np.repeat(end, sizes))
    return _stacked(builder, begins), _stacked(builder, ends)


def _searchsorted(rows: NDArray[np.int64], values: NDArray[np.int64], side: str) -> NDArray[np.int64]:
    """np.searchsorted along the last axis of [b, h_mask, s]."""
    found = np.empty(values.shape, np.int64)
    for plane in np.ndindex(values.shape[:2]):
        found[plane] = np.searchsorted(rows[plane], values[plane], side)  # type: ignore[call-overload]
    return found
