# SPDX-License-Identifier: Apache-2.0
"""What a mask is, in words and numbers: `print(explain(mask))`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_fm3.mask import intervals
from paddle_fm3.mask.column_mask import ColumnMask, check_is_mask
from paddle_fm3.mask.recognise import recognise
from paddle_fm3.schedule import TileClass, build_schedule, visible_pairs_per_row


@dataclass(frozen=True)
class MaskReport:
    """Facts about a mask, over all its batch entries and mask heads.

    Attributes:
        kinds: which family each (batch entry, mask head) looks like -> how many do.
        density_exact: visible pairs / all pairs.
        density_block: pairs in not fully hidden 128 x 128 tiles / all pairs.
        num_skip_tiles, num_partial_tiles, num_full_tiles: 128 x 128 tiles by class.
        num_hidden_rows, num_hidden_columns: rows that see nothing, keys nothing sees (without block_mask).
        num_bounds, causal: the most compact input form (1, 2 or 4), or None if no form carries the mask.
        picture: text picture of the first batch entry and mask head.
    """

    b: int
    h_mask: int
    s_q: int
    s_k: int
    has_block_mask: bool
    kinds: dict[str, int]
    density_exact: float
    density_block: float
    num_skip_tiles: int
    num_partial_tiles: int
    num_full_tiles: int
    num_hidden_rows: int
    num_hidden_columns: int
    num_bounds: int | None
    causal: bool | None
    picture: str

    @property
    def kind(self) -> str:
        """The one kind, or "mixed"."""
        return next(iter(self.kinds)) if len(self.kinds) == 1 else "mixed"

    def __str__(self) -> str:
        total = max(1, self.num_skip_tiles + self.num_partial_tiles + self.num_full_tiles)
        kinds = ", ".join(
            kind if count == self.b * self.h_mask else f"{kind} x{count}" for kind, count in self.kinds.items()
        )
        form = f"n={self.num_bounds}, causal={self.causal}" if self.num_bounds else "none carries it (ColumnMask only)"
        rows = [
            ("kind", kinds + (" with block_mask" if self.has_block_mask else "")),
            ("size", f"b={self.b} h_mask={self.h_mask} s_q={self.s_q} s_k={self.s_k}"),
            ("density", f"{self.density_exact:.4f} exact, {self.density_block:.4f} in 128 x 128 tiles"),
            (
                "tiles",
                f"{self.num_skip_tiles} skipped ({self.num_skip_tiles / total:.1%}), "
                f"{self.num_partial_tiles} partial, {self.num_full_tiles} full",
            ),
            (
                "hidden",
                f"{self.num_hidden_rows} rows see nothing, {self.num_hidden_columns} keys are never seen",
            ),
            ("input form", form),
        ]
        lines = [f"{name:>10}: {text}" for name, text in rows]
        return "\n".join([*lines, self.picture])


def explain(mask: ColumnMask, *, picture_rows: int = 24, picture_columns: int = 48) -> MaskReport:
    """Recognises the mask, counts its tiles, draws it. O(s) time and memory without a block_mask.

    Raises:
        TypeError: `mask` is no ColumnMask.
    """
    check_is_mask("explain", mask)
    schedule = build_schedule(mask)
    counts = {tile_class: int(count.sum()) for tile_class, count in schedule.counts().items()}
    kinds: dict[str, int] = {}
    kind_of: dict[str, str] = {}  # content of a plane -> its kind: batches often repeat one mask
    for b_idx, h_mask_idx in np.ndindex(mask.b, mask.h_mask):
        plane = mask.select(b=slice(b_idx, b_idx + 1), h_mask=slice(h_mask_idx, h_mask_idx + 1))
        content = plane.content_hash()
        if content not in kind_of:
            kind_of[content] = recognise(plane)
        kinds[kind_of[content]] = kinds.get(kind_of[content], 0) + 1
    try:
        bounds, causal = mask.to_bounds()
        num_bounds: int | None = bounds.shape[3]
    except ValueError:
        num_bounds = causal = None
    num_hidden_rows, num_hidden_columns = _count_hidden(mask)
    return MaskReport(
        b=mask.b,
        h_mask=mask.h_mask,
        s_q=mask.s_q,
        s_k=mask.s_k,
        has_block_mask=mask.block_mask is not None,
        kinds=kinds,
        density_exact=schedule.density,
        density_block=schedule.density_block,
        num_skip_tiles=counts[TileClass.SKIP],
        num_partial_tiles=counts[TileClass.PARTIAL],
        num_full_tiles=counts[TileClass.FULL],
        num_hidden_rows=num_hidden_rows,
        num_hidden_columns=num_hidden_columns,
        num_bounds=num_bounds,
        causal=causal,
        picture=text_picture(mask, rows=picture_rows, columns=picture_columns),
    )


def text_picture(mask: ColumnMask, *, rows: int = 24, columns: int = 48, b_idx: int = 0, h_mask_idx: int = 0) -> str:
    """One plane drawn as text: ``#`` all visible, ``+`` some, ``.`` none; rows are queries, columns keys."""
    if not (mask.b and mask.h_mask and mask.s_q and mask.s_k):
        return "(empty)"
    block_q, block_k = -(-mask.s_q // rows), -(-mask.s_k // columns)
    plane = mask.select(b=slice(b_idx, b_idx + 1), h_mask=slice(h_mask_idx, h_mask_idx + 1))
    classes = build_schedule(plane, block_q, block_k).tile_classes()
    lines = ["".join(".+#"[tile_class] for tile_class in row) for row in classes]
    return "\n".join([*lines, f"# all visible  + some  . none; one character is {block_q} rows x {block_k} keys"])


def _count_hidden(mask: ColumnMask) -> tuple[int, int]:
    unblocked = mask.with_block_mask(None)
    hidden_rows = int((visible_pairs_per_row(unblocked) == 0).sum())
    visible = intervals.gaps(unblocked.hidden_intervals(), mask.s_q)
    hidden_columns = int(intervals.is_empty(visible).all(axis=0).sum())
    return hidden_rows, hidden_columns
