# SPDX-License-Identifier: Apache-2.0
"""tools/demo.py: its messages for what a user gets wrong, its data, its comparison, and one whole small run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tools import demo
from tools.demo_parts import report, text

DEMO = Path(demo.__file__)


def run_demo(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(DEMO), *arguments], capture_output=True, text=True, timeout=timeout_s)


def write_folder(folder: Path) -> Path:
    """Every accepted file type, with words that repeat so that a model can learn from little."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = np.array(["attention", "mask", "tile", "key", "query", "rank", "row", "skip"])

    def document(num_words: int) -> str:
        return " ".join(rng.choice(words, num_words))

    (folder / "a.txt").write_text("\n\n".join(document(int(n)) for n in rng.integers(2, 60, 40)))
    (folder / "b.md").write_text("# Title\n\n" + document(20))
    (folder / "c.py").write_text("\n\n\n".join(f"def f{n}():\n    return {n}" for n in range(30)))
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"text": document(int(n))}) for n in rng.integers(2, 30, 30)))
    table = pyarrow.table({"id": list(range(30)), "content": [document(int(n)) for n in rng.integers(2, 30, 30)]})
    parquet.write_table(table, folder / "e.parquet")
    (folder / "ignored.bin").write_bytes(b"\xff\x00")
    return folder


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda folder: folder / "nowhere", "the data folder .*nowhere does not exist"),
        (lambda folder: folder, r"holds no \.txt, \.md, \.py, \.jsonl, \.parquet file"),
        (lambda folder: _file(folder / "x.txt", ""), "the files hold no text"),
        (lambda folder: _file(folder / "x.jsonl", '{"text": "a"}\nnot json\n'), r"x\.jsonl, line 2: not JSON"),
        (lambda folder: _file(folder / "x.parquet", "a"), r"x\.parquet is not a readable \.parquet file"),
        (lambda folder: _table(folder / "x.parquet", {"text": [1]}), "column text: holds int; text is needed"),
        (
            lambda folder: _file(folder / "x.jsonl", '{"body": "a"}\n'),
            "line 1: no text in any of the fields text, content",
        ),
    ],
)
def test_data_that_cannot_be_used_gives_one_line(make, words: str, tmp_path: Path) -> None:  # noqa: ANN001
    result = run_demo("--data", str(make(tmp_path)), "--runs", str(tmp_path / "runs"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(rf"demo: .*{words}.*\n", result.stderr), result.stderr


def _file(path: Path, content: str) -> Path:
    path.write_text(content)
    return path.parent


def _table(path: Path, columns: dict[str, list[object]]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path.parent


@pytest.mark.parametrize(
    "option, words",
    [(("--steps", "1"), "--steps must be at least 2"), (("--hidden-size", "100"), "must be a multiple of 64")],
)
def test_bad_option_is_named(option: tuple[str, str], words: str) -> None:
    result = run_demo(*option)
    assert result.returncode == 2
    assert words in result.stderr


def test_packs_are_full_and_hold_whole_documents(tmp_path: Path) -> None:
    files = text.find_files(str(write_folder(tmp_path / "data")))
    assert [path.name for path in files] == ["a.txt", "b.md", "c.py", "d.jsonl", "e.parquet"]
    tokenizer = text.load_tokenizer(None)
    options = {"s": 256, "num_sequences": 20, "max_document": 192}
    packs = text.packed_sequences(files, tokenizer, **options, seed=1)
    assert len(packs) == 20
    for pack in packs:
        assert 0.9 * 256 <= sum(map(len, pack)) <= 256
        assert all(len(document) <= 192 for document in pack)
    lengths = {len(document) for pack in packs for document in pack}
    assert len(lengths) > 10  # uneven
    whole = [d for pack in packs for d in pack if d[-1] == tokenizer.end_token_id]
    assert any(bytes(d[:-1]).decode().startswith("def f") for d in whole)
    assert packs == text.packed_sequences(files, tokenizer, **options, seed=1)
    assert packs != text.packed_sequences(files, tokenizer, **options, seed=2)


def test_text_without_blank_lines_fills_sequences_too(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("\n".join(f"line {n} of a log that has no paragraphs" for n in range(2000)))
    packs = text.packed_sequences([path], text.load_tokenizer(None), s=256, num_sequences=20, max_document=192, seed=0)
    assert len(packs) == 20 and all(0.9 * 256 <= sum(map(len, pack)) <= 256 for pack in packs)
    assert len({len(document) for pack in packs for document in pack}) > 10  # uneven


def test_tokenizer_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    fast = Tokenizer(WordLevel({"mask": 0, "tile": 1, "?": 2}, unk_token="?"))
    fast.pre_tokenizer = Whitespace()
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = text.load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("tile mask key") == [1, 0, 2]
    assert (tokenizer.vocab_size, tokenizer.end_token_id) == (4, 3)
    with pytest.raises(text.DemoError, match="does not exist"):
        text.load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(text.DemoError, match="is not a tokenizer.json"):
        text.load_tokenizer(str(tmp_path / "bad.json"))


def steps(losses: list[float], norms: list[float], batches: str = "abc") -> list[dict[str, object]]:
    return [
        {"step": i + 1, "loss": loss, "gradient_norm": norm, "batch": batches[i]}
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


@pytest.mark.parametrize(
    "losses, norms, exit_code",
    [
        ([3.0, 2.0, 1.0], [5.0, 4.0, 3.0], 0),
        ([3.0, 2.0, 1.0 + 5e-5], [5.0, 4.0, 3.0], 0),
        ([3.0, 2.001, 1.0], [5.0, 4.0, 3.0], 1),
        ([3.0, 2.0, 1.0], [5.0, 8.0, 3.0], 1),
        ([3.0, float("nan"), 1.0], [5.0, 4.0, 3.0], 1),
    ],
)
def test_comparison_fails_when_it_must(losses: list[float], norms: list[float], exit_code: int) -> None:
    single = steps([3.0, 2.0, 1.0], [5.0, 4.0, 3.0])
    assert demo.compare(steps(losses, norms), single, 2, {}) == exit_code
    with pytest.raises(RuntimeError, match="saw different batches"):
        report.largest_differences(steps([3.0, 2.0, 1.0], [5.0, 4.0, 3.0], "abd"), single)


@pytest.mark.dist
def test_whole_run(tmp_path: Path) -> None:
    """Two ranks, uneven chunks (250 tokens, 4 chunks), then one rank; files, table and JSON line."""
    data = write_folder(tmp_path / "data")
    result = run_demo(
        "--data", str(data), "--runs", str(tmp_path / "runs"), "--run", "small", "--steps", "6", "--seq-length", "250",
        "--hidden-size", "64", "--json", str(tmp_path / "results" / "training.jsonl"), timeout_s=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = tmp_path / "runs" / "small"
    for num_ranks in (1, 2):
        metrics = report.read_metrics(run_dir / f"metrics_cp{num_ranks}.jsonl")
        assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
        assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3
        assert all(0 < record["attention_s"] < record["step_s"] for record in metrics)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["is_agreed"] and 0 < summary["tiles_skipped"] < 1 and summary["documents_per_sequence"] > 2
    line = json.loads((tmp_path / "results" / "training.jsonl").read_text())
    assert (line["bench"], line["refcheck"], line["ranks"]) == ("training", "pass", 2)
    assert (run_dir / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "agrees" in result.stdout and "DIFFERS" not in result.stdout
    command = (run_dir / "command.txt").read_text()
    assert command in result.stdout
    assert f"--data {data}" in command and "--seed 0" in command


@pytest.mark.dist
def test_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    options = ["--data", str(data), "--runs", str(tmp_path / "runs"), "--run", "stopped", "--steps", "300"]
    process = subprocess.Popen(
        [sys.executable, str(DEMO), *options, "--seq-length", "256"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A suite that runs in the background of a shell has interrupts ignored, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    metrics = tmp_path / "runs" / "stopped" / "metrics_cp2.jsonl"
    deadline = time.monotonic() + 90
    while not report.read_metrics(metrics) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130, error
    assert re.fullmatch(r"\ndemo: stopped by you; what was written so far is in .*stopped\n", error), error
    assert not [command for command in _command_lines() if str(tmp_path) in command]


def _command_lines() -> list[str]:
    lines = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                lines.append(Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return lines


def test_file_endings_are_read_in_either_case(tmp_path: Path) -> None:
    (tmp_path / "NOTES.TXT").write_text("one document")
    (tmp_path / "rows.JSONL").write_text('{"text": "another"}\n')
    assert [list(text.read_documents(path)) for path in text.find_files(str(tmp_path))] == [
        ["one document"],
        ["another"],
    ]
