# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: who owns which rows, what each rank sees, who sends what; and attention that runs on it.

Names are loaded when first used, so that planning works without Paddle.
"""

from __future__ import annotations

import importlib

# public name -> module
_EXPORTS = {
    "flashmask_cp_attention": "attention",
    "make_partition": "attention",
    "plan_attention": "planned",
    "Trace": "trace",
    "CpPlan": "plan",
    "shard_rows": "shard",
    "unshard_rows": "shard",
    "rank_order": "shard",
    "token_order": "shard",
    "enable_gloo_subgroups": "groups",
    "disable_gloo_subgroups": "groups",
    "resolve_group": "groups",
    "CommError": "comm",
    "Partition": "partition",
    "contiguous_partition": "partition",
    "dual_chunk_partition": "partition",
    "localize_mask": "localize",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
