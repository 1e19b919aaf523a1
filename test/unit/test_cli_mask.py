# SPDX-License-Identifier: Apache-2.0
"""`python -m paddle_fm3 mask`: every source of a mask, its report, its refusals; and the progress line."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from paddle_fm3 import mask as masks
from paddle_fm3.__main__ import main
from paddle_fm3.commands import _inputs
from paddle_fm3.commands._progress import Progress


def report(capsys, *argv: str, status: int = 0) -> dict:
    assert main(["mask", *argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def assert_is(shown: dict, mask: masks.ColumnMask) -> None:
    """The report is about this mask: same content, and a density counted from the dense table."""
    assert shown["content_hash"] == mask.content_hash()
    assert shown["density_exact"] == pytest.approx(float(mask.dense().mean()), abs=1e-12)


def test_documents_typed(capsys):
    assert_is(report(capsys, "--documents", "100, 56 44"), masks.causal_document([100, 56, 44]))
    assert_is(
        report(capsys, "--documents", "100,56", "--kind", "document", "--s", "200"), masks.document([100, 56, 44])
    )


def test_prefixes_from_a_file(capsys, tmp_path):
    path = tmp_path / "prefixes.json"
    path.write_text("[[[30, 70], [16, 40]], [[8, 82]]]")
    shown = report(capsys, "--file", str(path), "--kind", "prefix_lm_document", "--s", "160")
    assert_is(shown, masks.prefix_lm_document([[100, 56, 4], [90, 70]], [[30, 16, 4], [8, 70]]))
    assert main(["mask", "--documents", "100,56", "--kind", "prefix_lm_document"]) == 2
    assert "takes [prefix, rest] for each document" in capsys.readouterr().err


def test_block_density_counts_whole_tiles(capsys):
    shown = report(capsys, "--documents", "300,84")
    visible = masks.causal_document([300, 84]).dense()[0, 0]
    tiles = visible.reshape(3, 128, 3, 128).any(axis=(1, 3))
    assert shown["density_block"] == pytest.approx(tiles.mean())
    assert shown["num_skip_tiles"] == int((~tiles).sum())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lengths.txt", "# two packed sequences\n100, 60\n\n90 30 20   # the second is padded\n"),
        ("lengths.json", "[[100, 60], [90, 30, 20]]"),
        ("lengths.npy", [[100, 60, 0], [90, 30, 20]]),
    ],
)
def test_lengths_from_a_file(capsys, tmp_path, name, content):
    path = tmp_path / name
    if name.endswith(".npy"):
        np.save(path, np.array(content))
    else:
        path.write_text(content)
    assert_is(report(capsys, "--file", str(path)), masks.causal_document([[100, 60], [90, 30, 20, 20]]))


def test_shared_questions_from_a_file(capsys, tmp_path):
    path = tmp_path / "groups.json"
    path.write_text("[[[30, 20, 10], [40, 28]]]")
    shown = report(capsys, "--file", str(path), "--kind", "share_question")
    assert_is(shown, masks.share_question([[30, 20, 10], [40, 28]]))


def test_patterns_take_json_parameters(capsys):
    shown = report(capsys, "--pattern", "qk_sparse", "--set", "s=256", "--set", "dropped=[[32, 96]]")
    assert_is(shown, masks.qk_sparse(256, [(32, 96)]))
    assert shown["kind"] == "QK-sparse (1 ranges dropped)"


def test_a_benchmark_case_by_name(capsys):
    shown = report(capsys, "--case", "8k_causal_document_gqa4")
    assert shown["kind"] == "causal document (5 documents)"
    assert shown["density_exact"] == pytest.approx(0.11346, abs=1e-4)


def test_every_listed_pattern_is_a_builder():
    assert all(getattr(masks, name) is builder for name, builder in _inputs.PATTERNS.items())


def test_a_dense_table_is_represented_or_refused_with_the_column(capsys, tmp_path):
    visible = np.tril(np.ones((64, 64), bool))
    path = tmp_path / "visible.npy"
    np.save(path, visible)
    assert report(capsys, "--dense", str(path))["num_bounds"] == 1
    visible[[30, 40, 50], 7] = False  # column 7: the causal rule and three more holes
    np.save(path, visible)
    shown = report(capsys, "--dense", str(path), status=1)
    assert shown["is_representable"] is False
    assert "column (b, h_mask, k) = (0, 0, 7)" in shown["reason"]
    assert "[30, 31), [40, 41), [50, 51)" in shown["reason"]


def test_bounds_as_a_model_gets_them(capsys, tmp_path):
    mask = masks.causal_document([[100, 60], [50, 110]])
    path = tmp_path / "bounds.npy"
    np.save(path, mask.to_bounds()[0])
    assert_is(report(capsys, "--bounds", str(path), "--causal"), mask)
    assert main(["mask", "--bounds", str(path)]) == 2  # one bound is no form without the causal rule
    assert "n=1 bounds with causal=False" in capsys.readouterr().err
    np.save(path, mask.to_bounds()[0][:, 0])
    assert main(["mask", "--bounds", str(path), "--causal"]) == 2
    assert "expected [b, h_mask, s_k, n]" in capsys.readouterr().err


def test_text_report_has_the_picture_and_the_png_is_written(capsys, tmp_path):
    png = tmp_path / "pictures" / "mask.png"
    assert main(["mask", "--documents", "512,512", "--rows", "4", "--columns", "4", "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "\n+...\n#+..\n..+.\n..#+\n" in shown  # 256 x 256 a character; the two documents do not see one another
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give one of --documents"),
        (["--documents", "3", "--case", "8k_full"], "came: --documents, --case"),
        (["--documents", "3,x"], "no list of token counts"),
        (["--documents", "3,-1"], "no list of positive token counts"),
        (["--documents", "300", "--s", "200"], "holds 300 tokens; --s 200 is too short"),
        (["--documents", "300", "--set", "s=3"], "--set belongs to --pattern"),
        (["--case", "8k_full", "--kind", "document"], "--kind belongs to --documents and --file"),
        (["--case", "9k_full"], "no case '9k_full'"),
        (["--pattern", "sliding"], "--pattern 'sliding' is unknown; known: full"),
        (
            ["--pattern", "sliding_window", "--set", "s=8"],
            "missing a required argument: 'window'; parameters: s, window",
        ),
        (["--pattern", "sliding_window", "--set", "s=eight"], "expected KEY=VALUE with a JSON value"),
        (["--pattern", "sliding_window", "--set", "s=8", "--set", "window=0"], "window=0 must be >= 1"),
        (["--documents", "300", "--causal"], "--causal belongs to --bounds"),
        (["--file", "nowhere.txt"], "no file nowhere.txt"),
        (["--dense", "nowhere.npy"], "no file nowhere.npy"),
        (["--documents", "3", "--rows", "0"], "--rows 0 must be >= 1"),
        (["--documents", "3", "--columns", "-1"], "--columns -1 must be >= 1"),
        (["--documents", "3", "--png", "mask.txt"], "--png mask.txt must end in .png"),
        (["--documents", "3", "--png", "/dev/null/mask.png"], "--png: [Errno"),
        (["--documents", "9999999999,4"], "a sequence of 10000000003 tokens is longer than 2147483392"),
        (["--pattern", "sliding_window", "--set", "s=1e3", "--set", "window=2"], "s=1000.0 must be an integer"),
        (["--pattern", "qk_sparse", "--set", "s=8", "--set", "dropped=[3]"], "--pattern qk_sparse with {'s': 8"),
    ],
)
def test_a_wrong_argument_is_explained(capsys, argv, message):
    assert main(["mask", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize("content", ["[]", "{}", "[[1, 0]]", '["a"]'])
def test_a_file_without_lengths_is_explained(capsys, tmp_path, content):
    path = tmp_path / "lengths.json"
    path.write_text(content)
    assert main(["mask", "--file", str(path)]) == 2
    assert "lengths.json" in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    command = [sys.executable, "-m", "paddle_fm3", "mask", "--documents", "64,64"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "causal document (2 documents)" in shown.stdout


# --- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quick_work_shows_no_progress(stream):
    with Progress("plans", 3, stream, clock=lambda: 0.0) as progress:
        for _ in range(3):
            progress.step("x")
    assert stream.getvalue() == ""


def test_slow_work_shows_a_line_every_two_seconds_in_a_log():
    seconds = iter(range(100))
    stream = io.StringIO()
    with Progress("plans", 6, stream, clock=lambda: next(seconds)) as progress:
        for name in "abcdef":
            progress.step(name)
    lines = stream.getvalue().splitlines()
    assert [line.split()[-1] for line in lines] == ["b", "d", "f", "done"]
    assert lines[-1].startswith("plans [########################] 6/6")


def test_a_terminal_gets_one_redrawn_line():
    seconds = iter(range(0, 1000, 10))
    stream = Terminal()
    with pytest.raises(RuntimeError), Progress("plans", 2, stream, clock=lambda: next(seconds)) as progress:
        progress.step("a")
        raise RuntimeError
    assert stream.getvalue().count("\r") == 1 and stream.getvalue().endswith("\n")
    assert "done" not in stream.getvalue()
