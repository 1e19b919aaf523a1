# SPDX-License-Identifier: Apache-2.0
"""enable() / disable(): routes paddle.nn.functional.flashmask_attention to this package.

The function is replaced wherever Paddle, PaddleNLP or PaddleFormers hold it, found by identity among the
modules loaded so far, so that code which imported it by name is served too.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_PACKAGES = ("paddle", "paddlenlp", "paddleformers")

_lock = threading.RLock()
_depth = 0
_replaced: list[tuple[dict[str, Any], str, Callable]] = []  # namespace, name, the original function


def enable() -> None:
    """Routes every ``flashmask_attention`` of Paddle here until the matching :func:`disable`.

    Calls nest: the original comes back with the last ``disable()``. Modules that import the function by
    name later get this one, because ``paddle.nn.functional`` already holds it.

    Raises:
        NativeLibraryError: the compiled op is missing; nothing is replaced then.
        RuntimeError: this Paddle (2.6, say) has no such function.
    """
    global _depth
    from paddle_fm3 import _native
    from paddle_fm3.attention import flashmask_attention

    with _lock:
        if _depth == 0:
            _native.load_op()
            original = _paddle_function()
            for namespace, name in list(_places_of(original)):
                namespace[name] = flashmask_attention
                _replaced.append((namespace, name, original))
        _depth += 1


def disable() -> None:
    """Undoes one :func:`enable`; the last one restores Paddle's own function at every place.

    A place that somebody else has replaced meanwhile is left alone, with a warning.

    Raises:
        RuntimeError: nothing is enabled.
    """
    global _depth
    from paddle_fm3.attention import flashmask_attention

    with _lock:
        if _depth == 0:
            raise RuntimeError("paddle_fm3.disable(): not enabled; each disable() undoes one enable()")
        _depth -= 1
        if _depth:
            return
        original = _replaced[0][2]
        for namespace, name, _ in _replaced:
            if namespace.get(name) is flashmask_attention:
                namespace[name] = original
            else:
                warnings.warn(
                    f"paddle_fm3.disable(): {namespace.get('__name__')}.{name} was replaced by "
                    "somebody else after enable(); left as it is",
                    stacklevel=2,
                )
        # Modules loaded while enabled took this package's function by name.
        for namespace, name in list(_places_of(flashmask_attention)):
            namespace[name] = original
        _replaced.clear()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """``with paddle_fm3.enabled(): ...``: enable() inside, the former state after."""
    enable()
    try:
        yield
    finally:
        disable()


def is_enabled() -> bool:
    return _depth > 0


def _paddle_function() -> Callable:
    import paddle
    import paddle.nn.functional as functional

    if not hasattr(functional, "flashmask_attention"):
        raise RuntimeError(
            f"paddle_fm3.enable(): Paddle {paddle.version.full_version} has no nn.functional.flashmask_attention to "
            "route here (Paddle 3 has); call paddle_fm3.flashmask_attention"
        )
    return functional.flashmask_attention


def _places_of(function: Callable) -> Iterator[tuple[dict[str, Any], str]]:
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] not in _PACKAGES:
            continue
        namespace = getattr(module, "__dict__", {})
        for name, value in list(namespace.items()):
            if value is function:
                yield namespace, name
