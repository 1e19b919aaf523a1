# SPDX-License-Identifier: Apache-2.0
"""Pictures: masks and their tiles, loss curves, per-rank load. matplotlib (Agg) is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.schedule import TileClass, build_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Hidden, partly visible, visible; readable in grey and for colour-blind readers.
CLASS_COLOURS = {TileClass.SKIP: "#f2f2f2", TileClass.PARTIAL: "#7fb2d9", TileClass.FULL: "#1f4e79"}
CLASS_LABELS = {TileClass.SKIP: "skipped", TileClass.PARTIAL: "partial", TileClass.FULL: "full"}
_MAX_PIXELS = 512
_BAR_COLOUR = "#1f4e79"
_MARK_COLOUR = "#b4542b"


def new_figure(num_panels: int, *, panel_inches: tuple[float, float] = (5.0, 4.2)) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side that needs no display; save it with `save`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panel_inches[0] * num_panels, panel_inches[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, num_panels, squeeze=False)[0]
    return figure, list(axes)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the PNG (making its folder) and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def save_mask(mask: ColumnMask, path: str | Path, *, title: str = "", b_idx: int = 0, h_mask_idx: int = 0) -> Path:
    """PNG of one plane: what is visible, and the classes of its 128 x 128 tiles."""
    figure, (left, right) = new_figure(2)
    draw_mask(left, mask, b_idx=b_idx, h_mask_idx=h_mask_idx, title=title or "visible pairs")
    draw_tiles(right, mask, b_idx=b_idx, h_mask_idx=h_mask_idx)
    return save(figure, path)


def draw_mask(
    axes: Axes, mask: ColumnMask, *, b_idx: int = 0, h_mask_idx: int = 0, title: str = "visible pairs"
) -> None:
    """The mask at up to 512 x 512 pixels: dark, mid or pale as all, some or none of its pairs are visible."""
    block_q, block_k = (max(1, -(-size // _MAX_PIXELS)) for size in (mask.s_q, mask.s_k))
    _draw_classes(axes, mask, block_q, block_k, b_idx, h_mask_idx, title)


def draw_tiles(
    axes: Axes,
    mask: ColumnMask,
    *,
    block: int = 128,
    b_idx: int = 0,
    h_mask_idx: int = 0,
    title: str | None = None,
) -> None:
    """The class of every ``block`` x ``block`` tile, with the share of each in the legend."""
    classes = _draw_classes(axes, mask, block, block, b_idx, h_mask_idx, title or f"{block} x {block} tiles")
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=CLASS_COLOURS[c],
            edgecolor="grey",
            label=f"{CLASS_LABELS[c]} {np.mean(classes == c):.1%}",
        )
        for c in TileClass
        if classes.size
    ]
    if handles:
        axes.legend(handles=handles, loc="upper right", fontsize=8)


def draw_loss(axes: Axes, losses: Mapping[str, Sequence[float]] | Sequence[float], *, title: str = "loss") -> None:
    """Loss a step; several named curves if a mapping is given."""
    named = losses if isinstance(losses, Mapping) else {"": losses}
    for name, values in named.items():
        axes.plot(np.arange(1, len(values) + 1), values, label=name or None, linewidth=1.4)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    if any(named):
        axes.legend(fontsize=8)


def draw_rank_load(
    axes: Axes, load: Sequence[float], *, unit: str = "visible tiles", title: str = "load by rank"
) -> None:
    """One bar a rank, the mean as a line, and how far the heaviest rank is above it."""
    values = np.asarray(load, np.float64)
    axes.bar(np.arange(len(values)), values, color=_BAR_COLOUR)
    mean = float(values.mean()) if len(values) else 0.0
    imbalance = float(values.max()) / mean - 1 if mean > 0 else 0.0
    axes.axhline(mean, color=_MARK_COLOUR, linestyle="--", linewidth=1)
    axes.set(xlabel="rank", ylabel=unit, title=f"{title}\nheaviest {imbalance:+.1%} against the mean")
    if len(values) <= 32:
        axes.set_xticks(np.arange(len(values)))


def _draw_classes(
    axes: Axes, mask: ColumnMask, block_q: int, block_k: int, b_idx: int, h_mask_idx: int, title: str
) -> NDArray[np.int8]:
    from matplotlib.colors import BoundaryNorm, ListedColormap

    plane = mask.select(b=slice(b_idx, b_idx + 1), h_mask=slice(h_mask_idx, h_mask_idx + 1))
    classes = build_schedule(plane, block_q, block_k).tile_classes()
    colours = ListedColormap([CLASS_COLOURS[tile_class] for tile_class in TileClass])
    if classes.size:
        extent = (0, classes.shape[1] * block_k, classes.shape[0] * block_q, 0)
        norm = BoundaryNorm([-0.5, 0.5, 1.5, 2.5], colours.N)
        axes.imshow(classes, cmap=colours, norm=norm, extent=extent, interpolation="nearest", aspect="auto")
        axes.set(xlim=(0, mask.s_k), ylim=(mask.s_q, 0))
    axes.set(xlabel="key", ylabel="query row", title=title)
    return classes
