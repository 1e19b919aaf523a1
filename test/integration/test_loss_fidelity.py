# SPDX-License-Identifier: Apache-2.0
"""tools/loss_fidelity.py: a few steps of dense and context-parallel training for real, and what it must not let pass."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import loss_fidelity  # noqa: E402

from paddle_fm3.testing import bench  # noqa: E402


@pytest.mark.dist
@pytest.mark.slow
def test_a_short_run_on_one_rank_and_four(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "4", "--seq-length", "256", "--hidden-size", "64", "--arms", "fm3_cp4"]
    files = ["--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "out.jsonl")]
    assert loss_fidelity.main([*options, *files]) == 0, capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(one["arm"], one["seed"]) for one in lines] == [(a, s) for s in (0, 1) for a in ("dense", "fm3_cp4")]
    for one in lines:
        assert one["refcheck"] == "pass" and one["bench"] == "training"
        assert len(one["losses"]) == one["steps"] == 4
        assert one["losses"][-1] < one["losses"][0]
    assert lines[0]["noise_between_seeds"] > 1e-4  # the seeds do differ
    assert (tmp_path / "runs" / "fidelity.png").stat().st_size > 10_000

    capsys.readouterr()
    assert loss_fidelity.main([*options, *files, "--keep"]) == 0
    assert capsys.readouterr().out.count("(kept)") == 4


def metrics(
    *, shift: float = 0.0, attention_s: float = 0.0, batch: str = "b", fall: float = 0.01
) -> list[dict[str, Any]]:
    return [
        {
            "loss": 5.0 - fall * step + (shift if step > loss_fidelity.EARLY_STEPS else 0.0),
            "gradient_norm": 1.0,
            "tokens_per_s": 1.0,
            "step_s": 1.0,
            "attention_s": attention_s,
            "batch": f"{batch}{step}",
        }
        for step in range(100)
    ]


def refcheck(ours: list[dict[str, Any]], noise: float = 0.1) -> str:
    options = argparse.Namespace(layers=1, hidden_size=64, experts=2, seq_length=128)
    identity = bench.RunIdentity("run", "commit", "date", "device")
    runs = {("dense", 0): metrics(), ("fm3_cp1", 0): ours}
    return loss_fidelity.record_of(identity, options, runs, "fm3_cp1", 0, noise)["refcheck"]


def test_what_passes_and_what_does_not() -> None:
    assert refcheck(metrics(attention_s=0.1)) == "pass"
    assert refcheck(metrics(attention_s=0.1, shift=0.09)) == "pass"
    assert refcheck(metrics(attention_s=0.1, shift=0.11)) == "fail"  # ends beyond the noise
    assert refcheck(metrics(attention_s=0.1, shift=-0.11)) == "fail"
    assert refcheck(metrics(attention_s=0.0)) == "fail"  # attention of this package never ran
    assert refcheck(metrics(attention_s=0.1, batch="c")) == "fail"
    assert refcheck(metrics(attention_s=0.1, fall=float("nan"))) == "fail"
    early = metrics(attention_s=0.1)
    early[3]["loss"] *= 1 + 2e-4
    assert refcheck(early) == "fail"


def test_a_dense_arm_that_did_not_learn_fails() -> None:
    flat = metrics(fall=0.0)
    assert not loss_fidelity.is_comparable("dense", flat, flat)
    assert loss_fidelity.is_comparable("dense", metrics(), metrics())
    assert not loss_fidelity.is_comparable("dense", metrics(attention_s=0.1), metrics())  # not PaddleNLP's attention


@pytest.mark.parametrize(
    "options, words",
    [(["--steps", "1"], "--steps must be at least 2"), (["--seeds", "3", "3"], "two seeds different")],
)
def test_bad_options_are_named(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loss_fidelity.main(options)
    assert words in capsys.readouterr().err
