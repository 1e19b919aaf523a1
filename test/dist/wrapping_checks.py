# SPDX-License-Identifier: Apache-2.0
"""What trainers put around context-parallel attention changes no bit of it: recompute of both kinds, and to_static."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from cp_cases import CpCase
from paddle.distributed.fleet.utils import recompute
from rank_inputs import RankInputs

from paddle_fm3.distributed import groups
from paddle_fm3.distributed.attention import flashmask_cp_attention, make_partition

CASE = CpCase("wrapped", "causal_documents", 150, b=2, h_q=4, h_kv=2, d_qk=32, d_v=32, seed=22)
WAYS = [("fm3", True), ("fm3", False), ("dual_chunk", True), ("dual_chunk", False)]  # strategy, keep_gathered


def check_wrapped(group: object | None) -> None:
    for strategy, keep_gathered in WAYS:
        bounds = paddle.to_tensor(CASE.bounds())
        partition = make_partition(strategy, CASE.s, groups.group_size(group), bounds, causal=CASE.causal, b=CASE.b)
        inputs = RankInputs.of(CASE, partition.rows_of(groups.group_rank(group)), group)

        attend = _attention(bounds, inputs.call | {"strategy": strategy, "keep_gathered": keep_gathered})
        wanted = _gradients(attend, inputs)
        for name, wrapped in {
            "recompute": lambda *x, attend=attend: recompute(attend, *x),
            "recompute, not reentrant": lambda *x, attend=attend: recompute(attend, *x, use_reentrant=False),
            "to_static": paddle.jit.to_static(attend, full_graph=False),
        }.items():
            for at, (x, y) in enumerate(zip(_gradients(wrapped, inputs), wanted, strict=True)):
                np.testing.assert_array_equal(x, y, err_msg=f"{strategy}, {keep_gathered}, {name}, result {at}")
        if group is not None:
            with pytest.raises(RuntimeError, match="which a static graph cannot hold"):
                paddle.jit.to_static(attend, full_graph=True)(inputs.q, inputs.k, inputs.v)


def _attention(bounds: paddle.Tensor, options: dict[str, Any]) -> Callable[..., Any]:
    def attend(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> Any:
        return flashmask_cp_attention(q, k, v, bounds, **options)

    return attend


def _gradients(attend: Callable[..., Any], inputs: RankInputs) -> list[np.ndarray]:
    given = [x.detach() for x in (inputs.q, inputs.k, inputs.v)]
    for x in given:
        x.stop_gradient = False
    out, lse = attend(*(x * 1.0 for x in given))
    paddle.autograd.backward([out, lse], [inputs.dout, inputs.dlse])
    return [x.numpy() for x in (out, lse, *(x.grad for x in given))]
