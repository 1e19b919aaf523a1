# SPDX-License-Identifier: Apache-2.0
"""LayerMasks: which mask a model's layers apply to packed documents, and how a batch carries it. NumPy only.

A batch entry ``attn_mask_startend_row_indices`` says its own meaning by its shape:

    [b, s], [b, h_mask, s]        one bound, causal: rows [bound, s) hidden (PaddleNLP's own form)
    [b, h_mask, s, n]             n = 1 or 2: causal; n = 4: not causal (paddle.nn.functional.flashmask_attention)
    [b, num_masks, h_mask, s, n]  several such masks; each layer picks one
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("causal_document", "document", "prefix_lm_document", "share_question", "causal_blockwise")
VARIANTS = ("full", "window")
_NUM_BOUNDS = {"causal_blockwise": 2, "document": 4, "prefix_lm_document": 4}  # of the others: 1
_WINDOW_KINDS = ("causal_document", "document")
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class ColumnBounds:
    """Rows hidden from each key of a packed sequence: [lt_begin, lt_end) and [0, ut_end). int64 ``[s]`` each."""

    lt_begin: Int64Array
    lt_end: Int64Array
    ut_end: Int64Array


@dataclass(frozen=True)
class LayerMasks:
    """The masks of a model's layers.

    Attributes:
        kind: what a document means, see `KINDS`:
            causal_document: a token sees itself and earlier tokens of its document;
            document: a token sees its whole document;
            prefix_lm_document: causal, and a document's prefix is seen by all of it;
            share_question: answers see their question and themselves, causally;
            causal_blockwise: as causal_document, but the last document sees all earlier tokens.
        window: tokens that a "window" layer sees at most on either side, itself included; 0 where there is none.
        layers: "full" or "window" for layer 0, 1, ..., repeated over the model's layers. Empty: all "window" if
            there is a window, else all "full".

    Raises:
        ValueError: an unknown kind or word, a window that no layer uses or that is missing, or one for a kind that
            two hidden intervals a key cannot narrow.
    """

    kind: str = "causal_document"
    window: int = 0
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"LayerMasks: kind={self.kind!r} is unknown; known: {', '.join(KINDS)}")
        if self.window < 0:
            raise ValueError(f"LayerMasks: window={self.window} must be >= 0 (0: no window)")
        if not self.layers:
            object.__setattr__(self, "layers", ("window" if self.window else "full",))
        unknown = [word for word in self.layers if word not in VARIANTS]
        if unknown:
            raise ValueError(f"LayerMasks: layers has {unknown}; expected {' or '.join(VARIANTS)} for each layer")
        if ("window" in self.layers) != (self.window > 0):
            raise ValueError(
                f"LayerMasks: window={self.window} with layers={','.join(self.layers)}; a window > 0 belongs to "
                "layers that use it"
            )
        if self.window and self.kind not in _WINDOW_KINDS:
            raise ValueError(
                f"LayerMasks: a window with kind={self.kind!r}: only {' and '.join(_WINDOW_KINDS)} stay within two "
                "hidden intervals a key"
            )

    @classmethod
    def from_flags(cls, kind: str, window: int, layers: str) -> LayerMasks:
        """From the flags' values; `layers` is a comma-separated list such as "window,window,full"."""
        return cls(kind, window, tuple(word.strip() for word in layers.split(",") if word.strip()))

    @property
    def variants(self) -> tuple[str, ...]:
        """The distinct masks, in the order in which a batch holds them."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def num_masks(self) -> int:
        return len(self.variants)

    @property
    def num_bounds(self) -> int:
        """n, the last axis of ``attn_mask_startend_row_indices``."""
        return _NUM_BOUNDS.get(self.kind, 1)

    def mask_idx(self, layer_idx: int) -> int:
        """Which of the batch's masks a layer uses."""
        return self.variants.index(self.layers[layer_idx % len(self.layers)])

    def shares(self) -> tuple[int, ...]:
        """How many layers use each mask, relative to the others, in lowest terms."""
        counts = Counter(self.layers)
        divisor = math.gcd(*counts.values())
        return tuple(counts[variant] // divisor for variant in self.variants)

    def encode(self, full: ColumnBounds) -> NDArray[np.int32]:
        """One sequence's masks: int32 ``[s]`` (one mask of one bound), ``[1, s, n]`` or ``[num_masks, 1, s, n]``.

        Args:
            full: the mask of "full" layers.
        """
        encoded = np.stack([self._form(self._narrowed(full, variant)) for variant in self.variants])
        if self.num_masks > 1:
            return encoded[:, None]  # [num_masks, h_mask, s, n]
        return encoded[0, :, 0] if self.num_bounds == 1 else encoded

    def _narrowed(self, full: ColumnBounds, variant: str) -> ColumnBounds:
        if variant == "full":
            return full
        k_idx = np.arange(len(full.lt_begin))
        return ColumnBounds(
            np.minimum(full.lt_begin, k_idx + self.window),
            full.lt_end,
            np.maximum(full.ut_end, k_idx - self.window + 1),
        )

    def _form(self, mask: ColumnBounds) -> NDArray[np.int32]:
        """``[s, n]``. What the causal rule hides is left to it where the form has it."""
        bounds = [mask.lt_begin, mask.lt_end, np.zeros_like(mask.ut_end), mask.ut_end][: self.num_bounds]
        return np.stack(bounds, axis=-1).astype(np.int32)


def masks_of_batch(indices: Any) -> tuple[list[Any], bool]:
    """A batch's ``attn_mask_startend_row_indices`` -> ([num_masks] of ``[b, h_mask, s, n]``, causal).

    Args:
        indices: array or tensor in one of the forms at the top of this file.

    Raises:
        ValueError: another number of axes.
    """
    shape = list(indices.shape)
    if not 2 <= len(shape) <= 5:
        raise ValueError(
            f"paddle_fm3: attn_mask_startend_row_indices.shape is {shape}; expected [b, s], [b, h_mask, s], "
            "[b, h_mask, s, n] or [b, num_masks, h_mask, s, n]"
        )
    if len(shape) < 4:
        return [indices.reshape([shape[0], shape[1] if len(shape) == 3 else 1, shape[-1], 1])], True
    masks = [indices] if len(shape) == 4 else [indices[:, mask_idx] for mask_idx in range(shape[1])]
    # A decoder's one or two bounds come with the causal rule; four bounds say everything themselves.
    return masks, shape[-1] != 4
