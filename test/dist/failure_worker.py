# SPDX-License-Identifier: Apache-2.0
"""One rank of test_cp_failures.py.

Usage: failure_worker.py disagree|killed|stalled OUTPUT_DIR
Rank 1 is the one that goes wrong. Every rank writes what it met to OUTPUT_DIR/rank<R>.txt at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.comm import CommError

TIMEOUT_S = 10.0
S = 24


def call(group: Any, rows: int, **changes: Any) -> Any:
    options: dict[str, Any] = {"heads": 2, "d": 8, "dtype": "float32", "causal": True, "bound": S, "whole": True}
    options.update(changes)
    q = paddle.ones([1, rows, options["heads"], options["d"]], options["dtype"])
    q.stop_gradient = options.get("stop_gradient", False)
    if options.get("flat"):
        q = q.flatten()
    if options.get("no_tensor"):
        q = None
    columns = S if options["whole"] else rows
    bounds = paddle.full([1, 1, columns, 1], options["bound"], "int32")
    if options.get("bound_dtype"):
        bounds = bounds.astype(options["bound_dtype"])
    return flashmask_cp_attention(
        q, q, q, bounds, causal=options["causal"], group=group, timeout_s=TIMEOUT_S,
        strategy=options.get("strategy", "dual_chunk"), softmax_scale=options.get("softmax_scale"),
        reduce_dtype=options.get("reduce_dtype", "float32"),
    )  # fmt: skip


# name -> what rank 1 does differently
DISAGREEMENTS: dict[str, dict[str, Any]] = {
    "heads": {"heads": 4},
    "head_dim": {"d": 16},
    "dtype": {"dtype": "bfloat16"},
    "mask content": {"bound": S // 2},
    "strategy": {"strategy": "contiguous"},
    "gradients": {"stop_gradient": True},
    "no tensor": {"no_tensor": True},
    "scale": {"softmax_scale": "x"},
    "reduce_dtype": {"reduce_dtype": "fp32"},
    "long name": {"strategy": "語" * 1000},
    "own error": {"flat": True},
    "bounds dtype": {"bound_dtype": "int64"},
    "rows": {"extra_rows": 1},
    "columns": {"whole": False},
}


def other_prepared_mask(group: Any, rows: int) -> None:
    """Every rank has both masks prepared; then rank 1 comes with the other one."""
    q = paddle.ones([1, rows, 2, 8])
    masks = [paddle.full([1, 1, S, 1], end, "int32") for end in (S, S // 2)]
    for bounds in (*masks, masks[group.rank == 1]):
        flashmask_cp_attention(q, q, q, bounds, causal=True, group=group, timeout_s=TIMEOUT_S)


def main() -> None:
    mode, output_dir = sys.argv[1], Path(sys.argv[2])
    groups.enable_gloo_subgroups()
    dist.init_parallel_env()
    group = dist.new_group(list(range(dist.get_world_size())))
    report = (output_dir / f"rank{group.rank}.txt").open("w")

    def tell(text: str) -> None:
        report.write(text.replace("\n", " ") + "\n")
        report.flush()

    rows = S // group.nranks
    call(group, rows)
    if mode == "disagree":
        for name, changes in DISAGREEMENTS.items():
            mine = dict(changes) if group.rank == 1 else {}
            tell(f"{name}: {met(lambda m=mine: call(group, rows + m.pop('extra_rows', 0), **m))}")
        tell(f"prepared masks: {met(lambda: other_prepared_mask(group, rows))}")
        call(group, rows)  # the group still works after a refused call
        tell("done")
        return
    if group.rank == 1:
        if mode == "killed":
            os._exit(9)
        time.sleep(600)
    began = time.monotonic()
    error = met(lambda: call(group, rows))
    tell(f"{time.monotonic() - began:.1f} s: {error}")
    tell(f"again: {met(lambda: call(group, rows))}")
    sys.exit(3)


def met(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, CommError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


main()
