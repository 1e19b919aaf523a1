# SPDX-License-Identifier: Apache-2.0
"""One rank of test_plan_failures.py: rank 1 goes wrong in several ways, each in a group of its own; death comes last.

Usage: plan_failure_worker.py OUTPUT_DIR
Every rank writes what it met to OUTPUT_DIR/rank<R>.txt at once: mode, seconds, error.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_fm3.distributed import cpu_rows, groups
from paddle_fm3.distributed.attention import flashmask_cp_attention
from paddle_fm3.distributed.comm import CommError
from paddle_fm3.distributed.partition import contiguous_partition
from paddle_fm3.distributed.planned import plan_attention
from paddle_fm3.distributed.shard import unshard_rows

TIMEOUT_S = 3.0
S = 96
MODES = (
    "other plan", "other mask", "other rows", "kernel fails", "skips backward", "other order", "late", "stalled", "killed",
)  # fmt: skip


def forward(group: Any, strategy: str = "fm3_no_pruning", bound: int = S) -> paddle.Tensor:
    bounds = np.full((1, 1, S, 1), S, np.int32)
    plan = plan_attention(bounds, causal=True, num_ranks=group.nranks, strategy=strategy)
    q = paddle.ones([1, plan.partition.num_rows(group.rank), 2, 8])
    q.stop_gradient = False
    bounds[0, 0, 0] = bound
    return flashmask_cp_attention(
        q, q, q, paddle.to_tensor(bounds), causal=True, group=group, plan=plan, timeout_s=TIMEOUT_S
    )


def act(mode: str, group: Any) -> None:
    if mode == "other rows":
        num_rows = (S // 3) + (group.rank == 1)
        unshard_rows(paddle.ones([1, num_rows]), contiguous_partition(S, 3), group, timeout_s=TIMEOUT_S)
    elif mode == "other order":
        outs = [forward(group) for _ in range(2)]
        for out in outs if group.rank != 1 else outs[::-1]:
            out.sum().backward()
    elif group.rank != 1:
        forward(group).sum().backward()
    elif mode == "other plan":
        forward(group, strategy="ring")
    elif mode == "other mask":
        forward(group, bound=50)
    elif mode == "skips backward":  # as a rank does that catches an exception of its own and goes on
        forward(group)
        forward(group)
    elif mode == "late":
        time.sleep(TIMEOUT_S + 2)
        forward(group)
    elif mode == "kernel fails":
        out = forward(group)
        kept, cpu_rows.backward = cpu_rows.backward, broken
        try:
            out.sum().backward()
        finally:
            cpu_rows.backward = kept
    else:
        out = forward(group)
        if mode == "killed":
            os._exit(9)
        time.sleep(TIMEOUT_S + 2)
        out.sum().backward()


def broken(*arguments: Any) -> Any:
    raise RuntimeError("broken kernel")


def main() -> None:
    output_dir = Path(sys.argv[1])
    groups.enable_gloo_subgroups()
    dist.init_parallel_env()
    report = (output_dir / f"rank{dist.get_rank()}.txt").open("w")
    for mode in MODES:
        group = dist.new_group(list(range(dist.get_world_size())))
        forward(group).sum().backward()
        began = time.monotonic()
        error = "no error"
        try:
            act(mode, group)
        except (ValueError, CommError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        except OSError as caught:  # what Paddle makes of an exception in a backward: its text has ours as a line
            error = next(
                line.strip() for line in str(caught).splitlines() if re.match(r" *(Comm|Runtime)Error: ", line)
            )
        report.write(f"{mode}|{time.monotonic() - began:.1f}|{error}\n")
        report.flush()
    os._exit(3)  # gloo's threads would wait for the dead rank


main()
