# SPDX-License-Identifier: Apache-2.0
"""`python -m paddle_fm3 doctor`: sound here, and it notices what it is there to notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_fm3 import flashmask_attention
from paddle_fm3.__main__ import main
from paddle_fm3.commands import _doctor_checks as checks
from paddle_fm3.commands import doctor
from paddle_fm3.integration.paddlenlp import config_schema
from paddle_fm3.testing import cases

ROOT = Path(__file__).resolve().parents[2]


def test_this_installation_is_sound(capsys):
    assert main(["doctor", "--seconds", "0.5", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_sound"]
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["fm3_op"]["verdict"] == "ok"
    done, total = re.match(
        r"(\d+) of (\d+) hostile cases agree", by_name["operator on cpu, float32"]["detail"]
    ).groups()
    assert 0 < int(done) <= int(total) == len(cases.HOSTILE_CASES)


def test_text_report_ends_with_the_verdict(capsys):
    assert main(["doctor", "--seconds", "0", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "sound" and any(line.startswith("ok   Paddle ") for line in lines)


@pytest.mark.parametrize(
    ("spoil", "output"),
    [
        (lambda q, k, v, out, lse: (out * 1.0001, lse), "out"),
        (lambda q, k, v, out, lse: (out, lse + 1e-4), "lse"),
        (lambda q, k, v, out, lse: (out + 1e-4 * q.sum() - 1e-4 * q.sum().detach(), lse), "dq"),
        (lambda q, k, v, out, lse: (out, lse + 1e-4 * v.sum() - 1e-4 * v.sum().detach()), "dv"),
    ],
)
def test_a_wrong_output_or_gradient_is_found(spoil, output):
    def wrong(q, k, v, *args, **options):
        return spoil(q, k, v, *flashmask_attention(q, k, v, *args, **options))

    chosen = [cases.hostile_case("documents_mixed_causal")]
    assert checks.operator_check(chosen, "float32", "cpu", 10, flashmask_attention).verdict == "ok"
    check = checks.operator_check(chosen, "float32", "cpu", 10, wrong)
    assert check.verdict == "fail"
    assert f"case documents_mixed_causal: {output}: error" in check.detail


def test_time_limit_stops_the_self_check_after_a_case():
    check = checks.operator_check(cases.HOSTILE_CASES[:5], "float32", "cpu", 0.0, flashmask_attention)
    assert check.verdict == "ok" and check.detail.startswith("1 of 5 hostile cases")


def test_missing_libraries_fail_and_say_how_to_build(tmp_path):
    code = "from paddle_fm3.commands._doctor_checks import library_checks as f; [print(c.verdict, c.name, c.detail) for c in f()]"
    environment = {**os.environ, "FM3_LIB_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    for name in ("fm3_cpu", "fm3_op", "planner"):
        assert re.search(rf"^fail {name} .*{re.escape(str(tmp_path))}", shown.stdout, re.M), shown.stdout
    assert "make build" in shown.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "0"], "--ranks 0 must be >= 1"),
        (["--cp", "3"], "--cp 3 is for several ranks; start them by --ranks N or a launcher"),
        (["--config", "nothing"], "--config nothing is for several ranks"),
    ],
)
def test_what_would_not_be_checked_is_refused(capsys, argv, message):
    assert main(["doctor", "--seconds", "0", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_a_device_that_this_paddle_lacks_is_a_failed_check(monkeypatch, capsys):
    def refuse(device):
        raise ValueError(f"The device should not be {device!r}, since\nPaddlePaddle is not compiled with CUDA")

    monkeypatch.setattr("paddle.device.set_device", refuse)
    assert main(["doctor", "--seconds", "0", "--device", "gpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL operator on gpu ") and "not compiled with CUDA" in line for line in lines)
    assert lines[-1] == "FAILED: operator on gpu"


def test_one_failure_makes_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(checks, "library_checks", lambda: [checks.Check("fm3_op", "fail", "gone")])
    assert main(["doctor", "--seconds", "0", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL fm3_op ") for line in lines) and lines[-1] == "FAILED: fm3_op"


def test_pins_are_those_of_the_requirements():
    text = (ROOT / "requirements.txt").read_text() + (ROOT / "requirements-paddlenlp.txt").read_text()
    for distributions, version, _ in checks.PINS.values():
        assert re.search(rf"^{distributions[0]}=={re.escape(version)}$", text, re.M), distributions


def test_another_version_is_a_note_and_an_absent_package_is_not_sound(monkeypatch):
    monkeypatch.setattr(checks, "_installed", lambda name: {"paddlepaddle-gpu": "3.4.0"}.get(name))
    verdicts = {check.name: (check.verdict, check.detail) for check in checks.version_checks()}
    assert verdicts["Paddle"] == ("note", "3.4.0 (tested: 3.3.1)")
    assert verdicts["PaddleNLP"] == ("note", "not installed (tested: 3.0.0b4)")
    assert verdicts["NumPy"][0] == "fail"


def test_the_script_for_launchers_exists(capsys):
    assert main(["doctor", "--script"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


SMALL_LAYOUTS = {
    "hybrid": {"sharding_parallel_degree": 2, "expert_parallel_degree": 4},
    "expert": {"sharding_parallel_degree": 4, "expert_parallel_degree": 2, "moe_sharding_degree": 2},
}


@pytest.mark.dist
@pytest.mark.parametrize("topology", SMALL_LAYOUTS)
def test_ranks_of_the_118b_layout_check_collectives_and_attention_together(capsys, tmp_path, topology):
    """The shipped 118B config at 4 ranks, in both topologies: fleet builds its groups, attention runs in them."""
    content = json.loads((config_schema.CONFIG_DIR / "moe_118b_a14b_128k_cp16.json").read_text())
    content["layout"].update(topology=topology, num_gpus=4, context_parallel_degree=2, **SMALL_LAYOUTS[topology])
    path = tmp_path / "small.json"
    path.write_text(json.dumps(content))
    assert main(["doctor", "--ranks", "4", "--seconds", "0", "--device", "cpu", "--config", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    details = {check["name"]: check["detail"] for check in report["checks"]}
    assert "4 ranks on 1 host, gloo; context-parallel groups [0, 1] [2, 3]; a group spans 1 host" in details["layout"]
    assert "right over 2 ranks" in details["collectives"]
    assert "dual_chunk and fm3: forward and backward agree with the oracle" in details["attention over ranks"]
    assert details["other ranks"] == "4 ranks agree"


def test_ranks_that_never_end_are_stopped():
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); time.sleep(60)"
    begin_s = time.monotonic()
    status, output = doctor._run_bounded([sys.executable, "-c", code], dict(os.environ), 2.0)
    assert status == 1 and output.startswith("up") and "no end within 2 s; the ranks were stopped" in output
    assert time.monotonic() - begin_s < 20  # the grandchild held the pipe: it is gone too


def test_a_layout_for_other_ranks_is_refused(monkeypatch):
    from paddle_fm3.commands import _doctor_group

    monkeypatch.setattr(_doctor_group.dist, "get_world_size", lambda: 8)
    with pytest.raises(ValueError, match="config moe_118b_a14b_128k_cp16 is for 128 GPUs; 8 ranks were started"):
        _doctor_group._hybrid_configs(None, "moe_118b_a14b_128k_cp16")
    with pytest.raises(ValueError, match="--cp 3 must divide the 8 ranks"):
        _doctor_group._hybrid_configs(3, None)
    assert _doctor_group._hybrid_configs(4, None)["dp_degree"] == 2
    assert _doctor_group._hybrid_configs(None, None)["sep_degree"] == 8
