# SPDX-License-Identifier: Apache-2.0
"""What differs between the Paddle releases that are served (3.3, and 2.6 for what it has), all of it.

The package is written for Paddle 3; each name here is that of Paddle 3, or does its work under Paddle 2. Paddle 2.6 has
no static graph of our kind (SOT markers, PIR), so its stand-ins for those do nothing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

IS_PADDLE_2 = int(paddle.version.major) < 3

if IS_PADDLE_2:
    run_custom_op = paddle.base.core.eager._run_custom_op

    def unified(function: Any) -> Any:
        return function

    force_dynamic = eager = unified

    def break_graph() -> None:
        """Paddle 2.6 traces nothing that would have to be broken."""

    def amp_dtype() -> str | None:
        """The dtype that AMP computes in, or None outside it."""
        tracer = paddle.base.framework._dygraph_tracer()
        is_on = tracer is not None and tracer._amp_level != paddle.base.core.AmpLevel.O0
        return tracer._amp_dtype if is_on else None

    def amp_black_list() -> set[str]:
        return set(paddle.base.framework._dygraph_tracer()._get_amp_op_list()[1])

    @contextmanager
    def grouped_p2p(process_group: Any) -> Iterator[None]:
        """Sends and receives of an NCCL process group made inside are one NCCL group."""
        nccl = paddle.base.core.ProcessGroupNCCL
        nccl.group_start()
        try:
            yield
        finally:
            nccl.group_end()

    def zeros_like(x: paddle.Tensor) -> paddle.Tensor:
        """NOTE: made on the host; on a GPU that Paddle 2.6 has no kernels for its own would leave what was there."""
        carrier = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
        zeros = np.zeros(x.shape, carrier[str(x.dtype).removeprefix("paddle.")])
        return paddle.to_tensor(zeros, place=x.place)

else:
    from paddle import _C_ops
    from paddle.jit.marker import force_dynamic, unified
    from paddle.jit.sot import psdb
    from paddle.jit.sot.utils import no_eval_frame

    def eager(function: Any) -> Any:
        """Decorates a function that SOT leaves alone, with all that it calls."""
        return force_dynamic(no_eval_frame(function))

    def run_custom_op(*arguments: Any) -> Any:
        return _C_ops._run_custom_op(*arguments)

    def break_graph() -> None:
        """Ends the graph that SOT is building here."""
        psdb.fallback(recursive=True)

    def amp_dtype() -> str | None:
        """The dtype that AMP computes in, or None outside it."""
        return paddle.get_autocast_dtype() if paddle.is_autocast_enabled() else None

    def amp_black_list() -> set[str]:
        in_pir = paddle.framework.in_pir_mode()
        source = paddle.base.core if in_pir else paddle.base.framework._dygraph_tracer()
        return set(source._get_amp_op_list()[1])

    def zeros_like(x: paddle.Tensor) -> paddle.Tensor:
        return paddle.zeros_like(x)

    @contextmanager
    def grouped_p2p(process_group: Any) -> Iterator[None]:
        """Sends and receives of an NCCL process group made inside are one NCCL group."""
        process_group._start_coalescing()
        try:
            yield
        finally:
            process_group._end_coalescing()


_running = threading.local()


def backward_once(layer: Any) -> Any:
    """Decorates a PyLayer: a second `.backward()` through one of its calls raises an error. By itself Paddle ends the
    process: the first one takes the call's context away, with retain_graph=True as well. `paddle.grad` does not.
    """
    forward, apply = layer.forward, layer.apply

    @functools.wraps(forward)
    def noted_forward(ctx: Any, *arguments: Any) -> Any:
        results = forward(ctx, *arguments)
        _running.ctx = weakref.ref(ctx)
        return results

    def guarded_apply(*arguments: Any) -> Any:
        results = apply(*arguments)
        ctx = _running.ctx

        def check(grad: paddle.Tensor) -> None:
            if ctx() is None:
                raise RuntimeError(
                    f"{layer.__module__}: a second backward() through one call; Paddle keeps nothing of a PyLayer for "
                    "it, nor does retain_graph=True change that: add the losses up and call backward() once, or use "
                    "paddle.grad(..., retain_graph=True), which may be called again"
                )

        for x in results if isinstance(results, tuple) else (results,):
            if not x.stop_gradient:
                x.register_hook(check)  # runs before the layer's own backward
        return results

    layer.forward, layer.apply = staticmethod(noted_forward), staticmethod(guarded_apply)
    return layer


def new_stream(*, is_urgent: bool) -> Any:
    """A CUDA stream of the current device; its `cuda_stream` is the cudaStream_t."""
    return paddle.base.core.CUDAStream(None, 1 if is_urgent else 2)


def current_stream() -> int:
    """cudaStream_t that Paddle enqueues on, of the current device."""
    return int(paddle.base.core._get_current_stream(-1).cuda_stream)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Paddle enqueues on the stream inside."""
    previous = paddle.base.core._set_current_stream(stream)
    try:
        yield
    finally:
        paddle.base.core._set_current_stream(previous)


__all__ = [
    "IS_PADDLE_2",
    "amp_black_list",
    "amp_dtype",
    "backward_once",
    "break_graph",
    "current_stream",
    "eager",
    "force_dynamic",
    "grouped_p2p",
    "new_stream",
    "on_stream",
    "run_custom_op",
    "unified",
    "zeros_like",
]
