# SPDX-License-Identifier: Apache-2.0
"""What differs between the Paddle releases that are served (3.3, and 2.6 for what it has), all of it.

The package is written for Paddle 3; each name here is that of Paddle 3, or does its work under Paddle 2. Paddle 2.6 has
no static graph of our kind (SOT markers, PIR), so its stand-ins for those do nothing.
"""

from __future__ import annotations

from typing import Any

import paddle

IS_PADDLE_2 = int(paddle.version.major) < 3

if IS_PADDLE_2:
    run_custom_op = paddle.base.core.eager._run_custom_op

    def unified(function: Any) -> Any:
        return function

    force_dynamic = unified

    def break_graph() -> None:
        """Paddle 2.6 traces nothing that would have to be broken."""

    def amp_dtype() -> str | None:
        """The dtype that AMP computes in, or None outside it."""
        tracer = paddle.base.framework._dygraph_tracer()
        is_on = tracer is not None and tracer._amp_level != paddle.base.core.AmpLevel.O0
        return tracer._amp_dtype if is_on else None

    def amp_black_list() -> set[str]:
        return set(paddle.base.framework._dygraph_tracer()._get_amp_op_list()[1])

else:
    from paddle import _C_ops
    from paddle.jit.marker import force_dynamic, unified
    from paddle.jit.sot import psdb

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


__all__ = [
    "IS_PADDLE_2",
    "amp_black_list",
    "amp_dtype",
    "break_graph",
    "force_dynamic",
    "run_custom_op",
    "unified",
]
