# SPDX-License-Identifier: Apache-2.0
"""What one rank can see wrong with its own call of `flashmask_cp_attention`, before it talks to any other.

Every check returns words instead of raising: on CPU ranks they travel to the others, so that all raise the same and
none waits for a rank that has left.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from paddle_fm3._arguments import batch_hint, heads_hint
from paddle_fm3.distributed import agreement, groups
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.distributed.partition import LAYOUTS, Partition
from paddle_fm3.distributed.plan import CpPlan
from paddle_fm3.distributed.strategy import STRATEGIES, Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.trace import Trace

DTYPES = ("float32", "bfloat16", "float16")
REDUCE_DTYPES = ("float32", "input")


def option_error(
    *,
    strategy: object,
    partition: object,
    plan: object,
    topology: object,
    trace: object,
    softmax_scale: object,
    reduce_dtype: object,
    timeout_s: object,
    **flags: object,
) -> str | None:
    """What is wrong with an argument that is no tensor; None if nothing is."""
    for name, value, kind, maker in (
        ("partition", partition, Partition, "make_partition"),
        ("plan", plan, CpPlan, "plan_attention"),
        ("topology", topology, Topology, "Topology.uniform, say,"),
        ("trace", trace, Trace, "Trace()"),
    ):
        if value is not None and not isinstance(value, kind):
            return f"{name} is {_shown(value)}; expected a {kind.__name__}, which {maker} makes, or None"
    if strategy is not None and not isinstance(strategy, Strategy) and not is_known(strategy):
        return unknown_strategy(strategy)
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            return f"{name} is {_shown(flag)}; expected True or False"
    if softmax_scale is not None and not _is_finite(softmax_scale):
        return f"softmax_scale is {_shown(softmax_scale)}; expected a finite number, or None for d_qk ** -0.5"
    if not _is_finite(timeout_s) or timeout_s <= 0:  # type: ignore[operator]
        return f"timeout_s is {_shown(timeout_s)}; expected seconds, more than 0"
    if not isinstance(reduce_dtype, str) or reduce_dtype not in REDUCE_DTYPES:
        return f"reduce_dtype is {_shown(reduce_dtype)}; expected one of {', '.join(map(repr, REDUCE_DTYPES))}"
    return None


def kind_error(q: object, k: object, v: object, bounds: object, block_mask: object) -> str | None:
    """What is given in a tensor's place and is none; None if nothing is."""
    masks = {"startend_row_indices": bounds, "block_mask": block_mask}
    given = {"q": q, "k": k, "v": v} | {name: x for name, x in masks.items() if x is not None}
    for name, x in given.items():
        if not hasattr(x, "stop_gradient"):
            hint = "; a ColumnMask gives it by paddle.to_tensor(mask.to_bounds()[0])" if hasattr(x, "to_bounds") else ""
            return f"{name} is a {type(x).__name__}; expected a paddle.Tensor{hint}"
    return None


def shape_error(q: Any, k: Any, v: Any, bounds: Any, block_mask: Any) -> str | None:
    """What is wrong with the tensors' shapes or dtypes; None if nothing is."""
    dtype = _dtype_of(q)
    if dtype not in DTYPES:
        return f"q.dtype is {dtype}; expected one of {', '.join(DTYPES)}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            return f"{name}.shape is {list(x.shape)}; expected [b, s_local, h, d]"
        if x.dtype != q.dtype:
            return f"{name}.dtype is {_dtype_of(x)}; q has {dtype}"
        if x.shape[:2] != q.shape[:2]:
            return f"{name}.shape is {list(x.shape)}; b and s_local must be those of q, {list(q.shape)}"
    if k.shape[2] != v.shape[2] or k.shape[3] != q.shape[3]:
        v_shape, q_shape = list(v.shape), list(q.shape)
        return f"k.shape is {list(k.shape)}; heads must be those of v {v_shape}, head_dim that of q {q_shape}"
    h_q, h_kv = q.shape[2], k.shape[2]
    if 0 in (q.shape[0], h_q, h_kv, q.shape[3], v.shape[3]):
        return f"q.shape is {list(q.shape)}, v.shape {list(v.shape)}; only s_local may be 0"
    if h_q % h_kv:
        return f"q has {h_q} heads, k has {h_kv}; h_kv must divide h_q"
    for name, x in (("startend_row_indices", bounds), ("block_mask", block_mask)):
        if x is None:
            continue
        if len(x.shape) != 4 or x.shape[0] != q.shape[0]:
            axes = "s, n" if name == "startend_row_indices" else "ceil(s/128), ceil(s/128)"
            hint = batch_hint(name, list(x.shape), q.shape[0]) if len(x.shape) == 4 else ""
            return f"{name}.shape is {list(x.shape)}; expected [b={q.shape[0]}, h_mask, {axes}]{hint}"
        if _dtype_of(x) != "int32":
            return f"{name}.dtype is {_dtype_of(x)}; expected int32"
        if x.shape[1] not in (1, h_kv, h_q):
            wanted = f"must be 1, h_kv={h_kv} or h_q={h_q}{heads_hint(name, list(x.shape), h_kv, h_q)}"
            return f"{name}.shape is {list(x.shape)}; h_mask={x.shape[1]} {wanted}"
    return None


def refuse(error: str, group: Any | None, timeout_s: object) -> None:
    """Raises ValueError with these words. Ranks of a gloo group, which are in the same call, raise the same."""
    if group is not None and groups.is_gloo(group):
        bounded_s = float(timeout_s) if _is_finite(timeout_s) and timeout_s > 0 else 60.0  # type: ignore[operator]
        communicator = Communicator(group, bounded_s)
        agreement.check_agreement(communicator.exchange({"error": error[:300]}, "comparison of shapes and masks"))
    raise ValueError(f"flashmask_cp_attention: {error}")


def is_known(strategy: object) -> bool:
    return isinstance(strategy, str) and strategy in (*LAYOUTS, *STRATEGIES)


def unknown_strategy(strategy: object) -> str:
    return f"strategy={_shown(strategy)} is unknown; known: {', '.join((*LAYOUTS, *STRATEGIES))}"


def _dtype_of(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


def _is_finite(x: object) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)


def _shown(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."
