#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/gallery.md and its pictures: every kind of mask, the line that makes it, and what it costs.

tools/make_gallery.py             writes into docs/
tools/make_gallery.py --out DIR   elsewhere
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paddle_fm3 import mask as masks  # noqa: E402
from paddle_fm3 import viz  # noqa: E402
from paddle_fm3.mask.column_mask import ColumnMask  # noqa: E402
from paddle_fm3.schedule import build_schedule  # noqa: E402

PIXELS = 240


@dataclass(frozen=True)
class Entry:
    """`code` is one expression over the names of paddle_fm3.mask."""

    slug: str
    title: str
    use: str
    code: str


ENTRIES = (
    Entry("causal", "Causal", "Language modelling of one document.", "causal(2048)"),
    Entry("full", "Full", "Encoders, diffusion.", "full(2048)"),
    Entry(
        "causal_document",
        "Causal document",
        "Pretraining and SFT on packed documents.",
        "causal_document([700, 300, 48, 1000])",
    ),
    Entry("document", "Document", "Packed documents, read in both directions.", "document([700, 300, 48, 1000])"),
    Entry(
        "sliding_window", "Sliding window", "Local layers: a row sees its last 256 keys.", "sliding_window(2048, 256)"
    ),
    Entry(
        "causal_document_sliding_window",
        "Causal document with a window",
        "Local layers over packed documents.",
        "causal_document_sliding_window([700, 300, 48, 1000], 256)",
    ),
    Entry(
        "share_question",
        "Shared question",
        "DPO, reward models, group sampling: several answers to one question, which is computed once.",
        "share_question([[400, 300, 324], [300, 200, 200, 324]])",
    ),
    Entry(
        "prefix_lm_document",
        "Prefix-LM document",
        "Packed samples whose prompt is read in both directions.",
        "prefix_lm_document([700, 300, 48, 1000], [200, 100, 16, 400])",
    ),
    Entry("prefix_lm_causal", "Prefix-LM", "One sample with a bidirectional prompt.", "prefix_lm_causal(2048, 700)"),
    Entry(
        "causal_blockwise",
        "Causal blockwise",
        "In-context learning: demonstrations apart from one another, and a query that sees them all.",
        "causal_blockwise([500, 500, 500, 548])",
    ),
    Entry(
        "global_sliding_window",
        "Global tokens and a window",
        "Long-document encoders: a few tokens see and are seen by all.",
        "global_sliding_window(2048, 96, 256, 256)",
    ),
    Entry(
        "qk_sparse",
        "QK-sparse",
        "Key ranges dropped until they end.",
        "qk_sparse(2048, [(512, 768), (1024, 1280)])",
    ),
    Entry(
        "random_eviction",
        "Key eviction",
        "A cache that drops keys: each key disappears at a row of its own.",
        "random_eviction(2048, seed=0, first_row=1024)",
    ),
    Entry(
        "key_padding",
        "Key padding",
        "Batches of sequences padded to one length.",
        "from_padding([1300], 2048)",
    ),
    Entry(
        "intersection",
        "Masks from masks",
        "Visible where both are: the same document, and a causal window.",
        "intersect(document([700, 300, 1048]), sliding_window(2048, 400))",
    ),
    Entry(
        "block_sparse",
        "Block-sparse",
        "Any of these, with chosen 128 x 128 tiles taken out.",
        "block_sparse(causal(2048), lambda q_tile, k_tile: k_tile == 0 or q_tile - k_tile < 4)",
    ),
)


def build(entry: Entry) -> ColumnMask:
    return eval(entry.code, {name: getattr(masks, name) for name in masks.__all__})  # noqa: S307 - our own text


def write_picture(mask: ColumnMask, path: Path) -> None:
    figure, (axes,) = viz.new_figure(1, panel_inches=(PIXELS / 80, PIXELS / 80))
    viz.draw_mask(axes, mask, title="")
    axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def form_of(mask: ColumnMask) -> str:
    bounds, is_causal = mask.to_bounds()
    form = f"{bounds.shape[3]} bound{'s' if bounds.shape[3] > 1 else ''} a key{', causal' if is_causal else ''}"
    return form + (" and a block mask" if mask.block_mask is not None else "")


def render() -> str:
    parts = [
        "# Mask gallery\n",
        "Rows are queries, from top to bottom; columns are keys. Dark is visible, mid blue partly visible in this "
        "picture's resolution, pale hidden.",
        "*Density* is the share of pairs that are visible; *visited* the share of pairs in 128 x 128 tiles that a "
        "kernel "
        "must compute. Every line below is executed by the tests; `tools/make_gallery.py` writes this page.\n",
        "```python\nfrom paddle_fm3.mask import *\n```\n",
    ]
    for entry in ENTRIES:
        mask = build(entry)
        schedule = build_schedule(mask)
        parts += [
            f"## {entry.title}\n",
            f"![{entry.title}](gallery/{entry.slug}.png)\n",
            entry.use + "\n",
            f"```python\nmask = {entry.code}\n```\n",
            f"Density {schedule.density:.3f}, visited {schedule.density_block:.3f}; {form_of(mask)}.\n",
        ]
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of gallery.md and gallery/")
    out = parser.parse_args(argv).out
    for entry in ENTRIES:
        write_picture(build(entry), out / "gallery" / f"{entry.slug}.png")
    (out / "gallery.md").write_text(render(), encoding="utf-8")
    print(f"{len(ENTRIES)} masks in {out / 'gallery.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
