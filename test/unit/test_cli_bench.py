# SPDX-License-Identifier: Apache-2.0
"""`python -m paddle_fm3 bench`: hands the request on, shows the records, and fails when a check failed.

The measuring itself is tested with tools/bench_attention.py.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from paddle_fm3.__main__ import main
from paddle_fm3.commands import _bench_run, bench

RECORD = {"case": "8k_window", "impl": "fm3", "phase": "fwd", "ms_median": 1.5, "refcheck": "pass"}


def fake_measurement(monkeypatch, records, status=0):
    lines = [json.dumps({"columns": ["case", "impl", "ms_median", "refcheck"]}), *map(json.dumps, records)]
    code = f"print({chr(10).join(lines)!r}); raise SystemExit({status})"
    monkeypatch.setattr(bench, "measuring_command", lambda wanted: [sys.executable, "-c", code])


def test_records_become_a_table_or_json(monkeypatch, capsys):
    fake_measurement(monkeypatch, [RECORD, {**RECORD, "impl": "torch_sdpa"}])
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["case", "impl", "ms_median", "refcheck"]
    assert lines[3].split() == ["8k_window", "torch_sdpa", "1.5", "pass"]
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == RECORD


@pytest.mark.parametrize(("records", "status"), [([{**RECORD, "refcheck": "fail"}], 0), ([], 0), ([RECORD], 3)])
def test_a_failed_check_no_record_and_a_crash_are_failures(monkeypatch, records, status):
    fake_measurement(monkeypatch, records, status)
    assert main(["bench", "--json"]) == (status or 1)


def test_every_option_reaches_the_device(monkeypatch, capsys):
    seen = {}

    def run(kind, options):
        seen.update(kind=kind, options=options)
        print("chatter")
        yield RECORD

    device = SimpleNamespace(CASES=("a", "b"), IMPLS=("fm3", "flex"), COLUMNS={"memory": ["case"]}, run=run)
    argv = [
        "bench",
        "--memory",
        "--case",
        "a",
        "--impl",
        "flex",
        "--dtype",
        "float16",
        "--repeats",
        "7",
        "--threads",
        "1",
    ]
    wanted = {}
    monkeypatch.setattr(bench, "measuring_command", lambda w: wanted.update(w) or [sys.executable, "-c", ""])
    main(argv)
    capsys.readouterr()
    monkeypatch.setattr(_bench_run.importlib, "import_module", lambda name: device)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # undone afterwards: main moves it
    assert _bench_run.main(wanted) == 0
    assert seen["kind"] == "memory"
    options = seen["options"]
    assert (options.cases, options.impls, options.dtypes) == (("a",), ("flex",), ("float16",))
    assert (options.repeats, options.threads) == (7, 1)
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == [{"columns": ["case"]}, RECORD]
    assert "chatter" in captured.err


@pytest.mark.parametrize(("flag", "known"), [("--case", "8k_window"), ("--impl", "fm3")])
def test_an_unknown_name_lists_the_known_ones(capfd, flag, known):
    assert main(["bench", flag, "nonsense"]) == 2
    assert known in capfd.readouterr().err


def test_thread_counts_reach_every_library():
    environment = _bench_run.prepared_environment(3)
    assert {environment[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "FLAGS_paddle_num_threads")} == {
        "3"
    }
