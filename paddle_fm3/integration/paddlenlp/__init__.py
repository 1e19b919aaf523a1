# SPDX-License-Identifier: Apache-2.0
"""FlashMask attention, context parallelism included, in PaddleNLP 3.0.0b4's Trainer by one flag.

    from paddle_fm3.integration.paddlenlp import FlashMask3TrainingArguments
    parser = PdArgumentParser((ModelArguments, FlashMask3TrainingArguments))   # then: --use_flashmask3 true

or by hand, before `TrainingArguments` is made: `enable()`, and `disable()` to get everything back.
Names are loaded when first used; importing this package imports neither Paddle nor PaddleNLP.
"""

from __future__ import annotations

import importlib

_EXPORTS = {
    "enable": "patch",
    "disable": "patch",
    "is_enabled": "patch",
    "FlashMask3Settings": "settings",
    "FlashMask3Arguments": "arguments",
    "FlashMask3TrainingArguments": "arguments",
    "LayerMasks": "masks",
    "number_layers": "attention",
    "PackedCollator": "collator",
    "pack_documents": "collator",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
