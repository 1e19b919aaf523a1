# SPDX-License-Identifier: Apache-2.0
"""Seconds that attention takes in forward and backward of a training step, communication included."""

from __future__ import annotations

import time
from typing import Any

import paddle
from paddle.autograd import PyLayer
from paddlenlp.transformers.llama import fusion_ops


class AttentionTimer:
    """Wraps PaddleNLP's attention funnel between two markers.

    In backward the gradient passes the outer marker first and the inner one last, so the time between the two is
    the backward of everything in the funnel.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._backward_began = 0.0

    def install(self) -> None:
        """Puts the timer around whatever funnel is in place now."""
        funnel = fusion_ops.fusion_flash_attention

        def timed(query: paddle.Tensor, config: Any, key: paddle.Tensor, value: paddle.Tensor, *args: Any, **kw: Any):  # noqa: ANN202
            began = time.perf_counter()
            query, key, value = _Inner.apply(query, key, value, self)
            out = _Outer.apply(funnel(query, config, key, value, *args, **kw), self)
            self._seconds += time.perf_counter() - began
            return out

        fusion_ops.fusion_flash_attention = timed

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _Inner(PyLayer):
    @staticmethod
    def forward(ctx: Any, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor, timer: AttentionTimer) -> Any:
        ctx.timer = timer
        return query.clone(), key.clone(), value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: paddle.Tensor) -> Any:
        ctx.timer._seconds += time.perf_counter() - ctx.timer._backward_began
        return grads


class _Outer(PyLayer):
    @staticmethod
    def forward(ctx: Any, out: paddle.Tensor, timer: AttentionTimer) -> paddle.Tensor:
        ctx.timer = timer
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        ctx.timer._backward_began = time.perf_counter()
        return grad
