# SPDX-License-Identifier: Apache-2.0
"""Argument checks of flashmask_attention. A size unknown while a graph is built (-1) passes; the op checks
the values again when it runs (ops/binding/arguments.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, BOUND_FORMS

if TYPE_CHECKING:
    from paddle import Tensor

    from paddle_fm3.mask import ColumnMask

DTYPES = ("float32", "bfloat16", "float16")

_WHO = "flashmask_attention"


def check_options(dropout: float, training: bool, fixed_seed_offset, return_seed_offset: bool) -> None:
    if dropout and training:
        raise ValueError(
            f"{_WHO}: dropout={dropout} while training is not supported; pass dropout=0.0 and drop "
            "elsewhere (paddle.nn.functional.dropout on the output, say)"
        )
    if fixed_seed_offset is not None or return_seed_offset:
        raise ValueError(
            f"{_WHO}: fixed_seed_offset and return_seed_offset belong to dropout, which is not supported; "
            "leave them at None and False"
        )


def check_flags(**flags: object) -> None:
    """Only True and False: anything else would count as True, "no" included."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{_WHO}: {name}={value!r} is a {type(value).__name__}; expected True or False")


def check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor, axes in (
        ("query", query, "[b, s_q, h_q, d_qk]"),
        ("key", key, "[b, s_k, h_kv, d_qk]"),
        ("value", value, "[b, s_k, h_kv, d_v]"),
    ):
        _check_is_tensor(name, tensor)
        if len(tensor.shape) != 4:
            raise ValueError(f"{_WHO}: {name}.shape is {list(tensor.shape)}; expected {axes}")
    if _differ(query.shape[0], key.shape[0]) or _differ(query.shape[0], value.shape[0]):
        sizes = [query.shape[0], key.shape[0], value.shape[0]]
        raise ValueError(f"{_WHO}: query, key, value have b={sizes}; the batch sizes must be equal")
    if _differ(key.shape[3], query.shape[3]):
        raise ValueError(f"{_WHO}: key.shape is {list(key.shape)}; its last axis must be query's d_qk={query.shape[3]}")
    if _differ(value.shape[1], key.shape[1]) or _differ(value.shape[2], key.shape[2]):
        raise ValueError(
            f"{_WHO}: value.shape is {list(value.shape)}; expected [b, s_k, h_kv, d_v] with "
            f"s_k={key.shape[1]} and h_kv={key.shape[2]} as in key"
        )
    h_q, h_kv = query.shape[2], key.shape[2]
    if h_kv == 0 or (h_q >= 0 and h_kv >= 0 and h_q % h_kv != 0):
        raise ValueError(f"{_WHO}: key.shape is {list(key.shape)}; h_kv={h_kv} must divide h_q={h_q}")


def check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtypes = [_dtype_name(tensor) for tensor in (query, key, value)]
    if len(set(dtypes)) != 1:
        raise TypeError(f"{_WHO}: query, key, value have dtypes {dtypes}; they must be the same")
    if dtypes[0] not in DTYPES:
        raise TypeError(f"{_WHO}: query.dtype is {dtypes[0]}; expected one of {list(DTYPES)}")


def check_indices(indices: Tensor, query: Tensor, key: Tensor, causal: bool) -> None:
    name = "startend_row_indices"
    _check_mask_tensor(name, indices, "[b, h_mask, s_k, n]", query, key)
    shape = list(indices.shape)
    if _differ(shape[2], key.shape[1]):
        raise ValueError(f"{_WHO}: {name}.shape is {shape}; its third axis must be s_k={key.shape[1]}")
    if (bool(causal), shape[3]) not in BOUND_FORMS:
        legal = "; ".join(f"causal={c}, n={n} is {text}" for (c, n), text in BOUND_FORMS.items())
        raise ValueError(
            f"{_WHO}: {name}.shape is {shape}, n={shape[3]} bounds with causal={bool(causal)}; legal: {legal}"
        )


def check_block_mask(block_mask: Tensor, query: Tensor, key: Tensor, indices: Tensor | None) -> None:
    name = "block_mask"
    _check_mask_tensor(name, block_mask, "[b, h_mask, ceil(s_q/128), ceil(s_k/128)]", query, key)
    shape = list(block_mask.shape)
    if indices is not None and _differ(shape[1], indices.shape[1]):
        raise ValueError(
            f"{_WHO}: {name}.shape is {shape}; its second axis must be h_mask={indices.shape[1]} as in "
            "startend_row_indices"
        )
    s_q, s_k = query.shape[1], key.shape[1]
    tiles = [-(-size // BLOCK_MASK_TILE) if size >= 0 else -1 for size in (s_q, s_k)]
    if _differ(shape[2], tiles[0]) or _differ(shape[3], tiles[1]):
        raise ValueError(
            f"{_WHO}: {name}.shape is {shape}; expected [b, h_mask, {tiles[0]}, {tiles[1]}], one entry a "
            f"{BLOCK_MASK_TILE} x {BLOCK_MASK_TILE} tile of s_q={s_q} by s_k={s_k}"
        )


def check_column_mask(mask: ColumnMask, query: Tensor, key: Tensor, causal: bool, window_size, block_mask):
    """A ColumnMask is the whole mask: nothing else may hide, and it must fit the tensors."""
    if window_size is not None or block_mask is not None:
        raise ValueError(f"{_WHO}: a ColumnMask excludes window_size and block_mask; put them into the mask")
    if causal and not mask.is_causal:
        raise ValueError(
            f"{_WHO}: causal=True with a ColumnMask of is_causal=False; the mask decides, so build it with "
            "is_causal=True or leave causal at False"
        )
    if _differ(mask.s_q, query.shape[1]) or _differ(mask.s_k, key.shape[1]) or _differ(mask.b, key.shape[0]):
        is_one = mask.b == 1 and _differ(1, key.shape[0])
        raise ValueError(
            f"{_WHO}: ColumnMask has b={mask.b}, s_q={mask.s_q}, s_k={mask.s_k}; the tensors have "
            f"b={key.shape[0]}, s_q={query.shape[1]}, s_k={key.shape[1]}"
            + (f"; one for every sample: paddle_fm3.mask.expand(mask, b={key.shape[0]})" if is_one else "")
        )
    h_kv, h_q = key.shape[2], query.shape[2]
    if min(h_kv, h_q) >= 0 and mask.h_mask not in (1, h_kv, h_q):
        h = _multiple_of(mask.h_mask, h_kv, h_q)
        hint = f"each for several heads: paddle_fm3.mask.expand(mask, h_mask={h})" if h else "1 is for every head"
        raise ValueError(f"{_WHO}: ColumnMask has h_mask={mask.h_mask}; must be 1, h_kv={h_kv} or h_q={h_q}; {hint}")


def window_sides(window_size: int | tuple[int, int], indices: Tensor | None) -> tuple[int, int]:
    """(left, right) of window_size."""
    if indices is not None:
        raise ValueError(
            f"{_WHO}: window_size and startend_row_indices exclude each other; put the window into the "
            "indices (paddle_fm3.mask builds them)"
        )
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else (window_size, window_size)
    # True is an int to Python; here it is a slip.
    are_integers = all(isinstance(side, (int, np.integer)) and not isinstance(side, bool) for side in sides)
    if len(sides) != 2 or not are_integers or min(sides) < 0:
        raise ValueError(
            f"{_WHO}: window_size={window_size!r}; expected an int >= 0 or a pair (left, right) of them; "
            "None means no window"
        )
    # A side beyond every length hides nothing; held where adding it to a row stays inside int32.
    return min(int(sides[0]), 2**30), min(int(sides[1]), 2**30)


def default_scale(query: Tensor) -> float:
    d_qk = query.shape[3]
    if d_qk < 0:
        raise ValueError(
            f"{_WHO}: query.shape is {list(query.shape)}, d_qk not known while the graph is built; pass softmax_scale, "
            "or put d_qk into the InputSpec"
        )
    return max(d_qk, 1) ** -0.5  # no features: every score is 0, whatever the factor


def _check_is_tensor(name: str, value: object) -> None:
    if value is None or isinstance(value, (np.ndarray, np.generic, int, float, str, tuple, list)):
        raise TypeError(f"{_WHO}: {name} is a {type(value).__name__}; expected a paddle.Tensor")


def _check_mask_tensor(name: str, mask: Tensor, axes: str, query: Tensor, key: Tensor) -> None:
    _check_is_tensor(name, mask)
    shape = list(mask.shape)
    if _dtype_name(mask) != "int32":
        raise TypeError(f"{_WHO}: {name}.dtype is {_dtype_name(mask)}; expected int32")
    if len(shape) != 4:
        raise ValueError(f"{_WHO}: {name}.shape is {shape}; expected {axes}")
    if _differ(shape[0], key.shape[0]):
        b = key.shape[0]
        raise ValueError(f"{_WHO}: {name}.shape is {shape}; its first axis must be b={b}{batch_hint(name, shape, b)}")
    legal = [1, key.shape[2], query.shape[2]]
    if shape[1] >= 0 and min(legal) >= 0 and shape[1] not in legal:
        raise ValueError(
            f"{_WHO}: {name}.shape is {shape}; h_mask={shape[1]} must be 1, h_kv={legal[1]} or h_q={legal[2]}"
            f"{heads_hint(name, shape, *legal[1:])}"
        )


def batch_hint(name: str, shape: list[int], b: int) -> str:
    """How a mask of one sample is given to all of them; "" if it is no such mask."""
    return f"; one for every sample: {name}.expand([{b}, -1, -1, -1])" if shape[0] == 1 else ""


def heads_hint(name: str, shape: list[int], h_kv: int, h_q: int) -> str:
    """How a mask head is given to several heads."""
    h_mask = shape[1]
    h = _multiple_of(h_mask, h_kv, h_q)
    if not h:
        return "; 1 is for every head"
    return f"; each for several heads: paddle.repeat_interleave({name}, {h // h_mask}, axis=1)"


def _multiple_of(h_mask: int, *numbers: int) -> int | None:
    return next((h for h in numbers if h_mask and h and h % h_mask == 0), None)


def _differ(size: int, wanted: int) -> bool:
    return size >= 0 and wanted >= 0 and size != wanted


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).rpartition(".")[2]
