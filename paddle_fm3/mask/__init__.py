# SPDX-License-Identifier: Apache-2.0
"""What may be attended: ColumnMask, its builders, converters, algebra and explanation. NumPy only."""

from paddle_fm3.mask.builders import (
    block_sparse,
    bucketed,
    causal,
    causal_blockwise,
    causal_document,
    causal_document_sliding_window,
    document,
    eviction,
    from_window_size,
    full,
    global_sliding_window,
    key_padding,
    prefix_lm_causal,
    prefix_lm_document,
    qk_sparse,
    random_eviction,
    share_question,
    sliding_window,
)
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, BOUND_FORMS, ColumnMask

__all__ = [
    "BLOCK_MASK_TILE",
    "BOUND_FORMS",
    "ColumnMask",
    "block_sparse",
    "bucketed",
    "causal",
    "causal_blockwise",
    "causal_document",
    "causal_document_sliding_window",
    "document",
    "eviction",
    "from_window_size",
    "full",
    "global_sliding_window",
    "key_padding",
    "prefix_lm_causal",
    "prefix_lm_document",
    "qk_sparse",
    "random_eviction",
    "share_question",
    "sliding_window",
]
