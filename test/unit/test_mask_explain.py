# SPDX-License-Identifier: Apache-2.0
"""explain() recognises every builder, counts right, and draws; the pictures are written."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_fm3 import mask as masks
from paddle_fm3 import viz
from paddle_fm3.explain import explain, text_picture
from paddle_fm3.mask import ColumnMask
from paddle_fm3.mask.recognise import recognise
from paddle_fm3.schedule import TileClass, build_schedule

NAMED = {
    "full": masks.full(9, 4),
    "causal": masks.causal(9, 4),
    "nothing visible": ColumnMask.from_bounds(np.zeros((1, 1, 5, 2), np.int32), is_causal=False, s_q=5),
    "empty": masks.full(0, 3),
    "key padding": masks.key_padding([[1, 1, 0, 1]]),
    "causal with key padding": masks.key_padding([[1, 1, 0, 1]], is_causal=True),
    "sliding window (3)": masks.sliding_window(30, 3),
    "causal document (3 documents)": masks.causal_document([7, 1, 22]),
    "document (3 documents)": masks.document([7, 1, 22]),
    "causal document with window 4 (2 documents)": masks.causal_document_sliding_window([10, 20], 4),
    "share question (2 groups)": masks.share_question([[3, 4, 5], [2, 6, 6, 1]]),
    "global + sliding window (2 global, 5 left, 3 right)": masks.global_sliding_window(40, 2, 5, 3),
    "causal blockwise (3 documents)": masks.causal_blockwise([7, 8, 15]),
    "prefix-LM document (2 documents)": masks.prefix_lm_document([10, 20], [3, 5]),
    "prefix-LM causal (prefix 6)": masks.prefix_lm_causal(20, 6),
    "QK-sparse (2 ranges dropped)": masks.qk_sparse(40, [(5, 9), (20, 28)]),
    "key eviction": masks.random_eviction(40, seed=0),
    "custom": masks.from_predicate(lambda b, h, q, k: (q - 2 * k) % 40 < 9, 20),
}


@pytest.mark.parametrize("name", NAMED)
def test_builders_are_recognised(name):
    assert recognise(NAMED[name]) == name
    assert recognise(NAMED[name].to_noncausal()) == name  # by meaning, not by storage


@pytest.mark.parametrize("seed", range(30))
def test_random_masks_are_recognised_without_error(seed):
    """Whatever the bounds; a name other than the catch-alls means that the builder rebuilt the mask."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        (is_causal, n), s_q, s_k = (
            list(masks.BOUND_FORMS)[rng.integers(4)],
            *(int(x) for x in rng.integers(0, 9, 2)),
        )
        bounds = rng.integers(-1, s_q + 2, (1, 1, s_k, n)).astype(np.int32)
        assert recognise(ColumnMask.from_bounds(bounds, is_causal=is_causal, s_q=s_q))
    with pytest.raises(ValueError, match="more than one plane"):
        recognise(masks.full(4, b=2))


def test_numbers_match_brute_force():
    mask = masks.prefix_lm_document([100, 300, 200], [20, 150, 1])
    report, table = explain(mask), mask.dense()
    assert report.density_exact == table.mean()
    tiles = [table[0, 0, q : q + 128, k : k + 128] for q in range(0, 600, 128) for k in range(0, 600, 128)]
    counts = [
        sum(not t.any() for t in tiles),
        sum(bool(t.any() and not t.all()) for t in tiles),
        sum(bool(t.all()) for t in tiles),
    ]
    assert [report.num_skip_tiles, report.num_partial_tiles, report.num_full_tiles] == counts
    assert report.density_block == sum(t.size for t in tiles if t.any()) / table.size
    assert (report.num_bounds, report.causal) == (2, False)
    assert report.num_hidden_rows == report.num_hidden_columns == 0


def test_hidden_rows_and_columns_are_counted():
    report = explain(masks.causal(10, 6))
    assert (report.num_hidden_rows, report.num_hidden_columns) == (4, 0)
    report = explain(masks.key_padding([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]))
    assert (report.num_hidden_rows, report.num_hidden_columns) == (5, 7)


def test_report_reads_well():
    text = str(explain(masks.causal_document([[300, 212], [512, 0]])))
    for part in ("causal document (2 documents) x1, causal x1", "b=2 h_mask=1 s_q=512 s_k=512",
                 "n=1, causal=True", "skipped", "partial", "full", "exact", "rows see nothing",
                 "# all visible"):  # fmt: skip
        assert part in text, text
    assert explain(masks.causal_document([[300, 212], [512, 0]])).kind == "mixed"
    blocked = explain(masks.full(130).with_block_mask(np.ones((1, 1, 2, 2))))
    assert blocked.kind == "full" and "full with block_mask" in str(blocked)
    three = ColumnMask(*(np.full((1, 1, 10), x, np.int32) for x in (5, 6, 8, 9)), s_q=10, is_causal=True)
    assert explain(three).num_bounds is None and "none carries it" in str(explain(three))
    assert "(empty)" in str(explain(masks.full(0, 4)))


def test_text_picture_is_exact():
    picture = text_picture(masks.causal(6), rows=6, columns=6).splitlines()[:-1]
    assert picture == ["#.....", "##....", "###...", "####..", "#####.", "######"]
    picture = text_picture(masks.document([2, 4]), rows=3, columns=2).splitlines()
    assert picture == ["+.", "+#", "+#", "# all visible  + some  . none; one character is 2 rows x 3 keys"]
    second = masks.causal_document([[6], [3, 3]])
    assert text_picture(second, rows=2, columns=2, b_idx=1).splitlines()[:2] == ["+.", ".+"]


def read_png_pixels(path) -> np.ndarray:
    import matplotlib.image

    return (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)


def has_colour(pixels: np.ndarray, colour: str) -> bool:
    """More than the stray pixels of smoothed text."""
    return (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).mean() > 0.005


def test_mask_picture(tmp_path):
    path = viz.save_mask(masks.causal(700), tmp_path / "new" / "mask.png")
    pixels = read_png_pixels(path)
    for tile_class in TileClass:
        assert has_colour(pixels, viz.CLASS_COLOURS[tile_class])
    only_full = read_png_pixels(viz.save_mask(masks.full(300), tmp_path / "full.png", title="all"))
    assert has_colour(only_full, viz.CLASS_COLOURS[TileClass.FULL])
    assert not has_colour(only_full[:, : only_full.shape[1] // 2], viz.CLASS_COLOURS[TileClass.SKIP])
    viz.save_mask(masks.full(0, 4), tmp_path / "empty.png")


def test_drawn_values_are_the_given_ones(tmp_path):
    figure, (left, middle, right) = viz.new_figure(3)
    viz.draw_loss(left, {"one rank": [3.0, 2.0], "two ranks": [3.0, 2.1]})
    viz.draw_loss(middle, [5.0, 4.0, 3.0])
    viz.draw_rank_load(right, [1.0, 3.0])
    assert [line.get_ydata().tolist() for line in left.lines] == [[3.0, 2.0], [3.0, 2.1]]
    assert left.lines[0].get_xdata().tolist() == [1, 2] and left.get_legend() is not None
    assert middle.lines[0].get_ydata().tolist() == [5.0, 4.0, 3.0] and middle.get_legend() is None
    assert [bar.get_height() for bar in right.patches] == [1.0, 3.0]
    assert "heaviest +50.0% against the mean" in right.get_title()
    assert viz.save(figure, tmp_path / "all.png").stat().st_size > 1000
    viz.draw_rank_load(viz.new_figure(1)[1][0], [])


def test_tile_picture_shows_the_schedule():
    figure, (axes,) = viz.new_figure(1)
    mask = masks.causal_document([[600], [300, 300]])
    viz.draw_tiles(axes, mask, block=64, b_idx=1)
    shown = axes.images[0].get_array()
    np.testing.assert_array_equal(shown, build_schedule(mask, 64, 64).tile_classes(b_idx=1))
    assert (shown != build_schedule(mask, 64, 64).tile_classes(b_idx=0)).any()
    assert figure.axes == [axes]


def test_what_is_no_mask_is_named():
    with pytest.raises(TypeError, match="explain: mask is a ndarray; expected a ColumnMask .*from_bounds"):
        explain(np.zeros((1, 1, 8, 1), np.int32))
