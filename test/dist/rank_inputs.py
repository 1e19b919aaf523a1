# SPDX-License-Identifier: Apache-2.0
"""What one rank hands to context-parallel attention for a case, and what it gets back. Used by the workers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from cp_cases import CpCase
from numpy.typing import NDArray

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention

TIMEOUT_S = 30.0


def start() -> Any | None:
    """The group of all ranks; None for one process."""
    if dist.get_world_size() == 1:
        return None
    groups.enable_gloo_subgroups()
    dist.init_parallel_env()
    return dist.new_group(list(range(dist.get_world_size())))


def growth_bytes(step: Callable[[], Any]) -> int:
    """Memory that 100 further steps add after 20."""
    before = 0
    for number in range(120):
        if number == 20:
            gc.collect()
            before = _resident_bytes()
        step()
    gc.collect()
    return _resident_bytes() - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class RankInputs:
    """Tensors of the given rows; q, k, v want gradients. `call` holds the arguments of `flashmask_cp_attention`."""

    q: paddle.Tensor  # [b, s_local, h_q, d_qk]
    k: paddle.Tensor  # [b, s_local, h_kv, d_qk]
    v: paddle.Tensor  # [b, s_local, h_kv, d_v]
    dout: paddle.Tensor  # [b, s_local, h_q, d_v]
    dlse: paddle.Tensor  # [b, h_q, s_local]
    bounds: paddle.Tensor | None  # [b, h_mask, s or s_local, n]
    call: dict[str, Any]

    @classmethod
    def of(cls, case: CpCase, rows: NDArray[np.int64], group: Any | None) -> RankInputs:
        tensors = case.tensors()
        q, k, v, dout = (paddle.to_tensor(tensors[n][:, rows]).astype(case.dtype) for n in ("q", "k", "v", "dout"))
        for x in (q, k, v):
            x.stop_gradient = False
        bounds, block_mask = case.bounds(), case.block_mask()
        if bounds is not None:
            bounds = paddle.to_tensor(bounds[:, :, rows] if case.frame == "own" else bounds)
        call = {
            "causal": case.causal,
            "group": group,
            "return_softmax_lse": True,
            "timeout_s": TIMEOUT_S,
            "block_mask": None if block_mask is None else paddle.to_tensor(block_mask),
            "reduce_dtype": case.reduce_dtype,
            "softmax_scale": case.softmax_scale,
        }
        return cls(q, k, v, dout, paddle.to_tensor(tensors["dlse"][:, :, rows]), bounds, call)

    def attend(self, **how: Any) -> tuple[paddle.Tensor, paddle.Tensor]:
        """out and lse; `how` says by which strategy, partition or plan."""
        return flashmask_cp_attention(self.q, self.k, self.v, self.bounds, **(self.call | how))

    def backward(self, out: paddle.Tensor, lse: paddle.Tensor) -> dict[str, NDArray[np.float32]]:
        """out, lse, dq, dk, dv of this rank's rows, float32."""
        paddle.autograd.backward([out, lse], [self.dout, self.dlse])
        results = {"out": out, "lse": lse, "dq": self.q.grad, "dk": self.k.grad, "dv": self.v.grad}
        return {name: x.astype("float32").numpy() for name, x in results.items()}
