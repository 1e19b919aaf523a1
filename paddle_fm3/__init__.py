# SPDX-License-Identifier: Apache-2.0
"""Fast, exact attention for PaddlePaddle under structured masks stored as intervals a key column.

Names are loaded when first used: importing this package prints nothing, sets nothing and does not import
Paddle, so that masks, schedules and plans work on a machine without it.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

# public name -> (module, attribute); None: the module itself
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "flashmask_attention": ("paddle_fm3.attention", "flashmask_attention"),
    "enable": ("paddle_fm3.patch", "enable"),
    "disable": ("paddle_fm3.patch", "disable"),
    "enabled": ("paddle_fm3.patch", "enabled"),
    "is_enabled": ("paddle_fm3.patch", "is_enabled"),
    "load_op": ("paddle_fm3._native", "load_op"),
    "ColumnMask": ("paddle_fm3.mask", "ColumnMask"),
    "mask": ("paddle_fm3.mask", None),
    "schedule": ("paddle_fm3.schedule", None),
    "distributed": ("paddle_fm3.distributed", None),
    "testing": ("paddle_fm3.testing", None),
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'paddle_fm3' has no attribute {name!r}")
    module_name, attribute = _EXPORTS[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
