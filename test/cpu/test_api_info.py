# SPDX-License-Identifier: Apache-2.0
"""python -m paddle_fm3 info: what it says is what is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_fm3 import __main__, _native, backends

ROOT = Path(__file__).parents[2]


def info(capsys, *arguments: str) -> tuple[int, dict]:
    status = __main__.main(["info", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def verdicts(report: dict) -> dict[str, dict]:
    return {verdict["backend"]: verdict for verdict in report["backends"]}


def test_cpu_call_is_served(capsys):
    status, report = info(capsys, "--dtype", "float32", "--d-qk", "72", "--d-v", "40")
    assert status == 0
    assert report["libraries"]["fm3_cpu"] and report["libraries"]["fm3_op"]
    assert report["simd_target"] == _native.cpu_library().fm3_cpu_simd_target().decode()
    assert report["simd_target"] in verdicts(report)["cpu"]["reason"]
    assert verdicts(report)["cpu"]["serves"] is True
    assert verdicts(report)["sm90"] == {
        "backend": "sm90", "serves": False, "reason": "takes gpu tensors; these are on cpu",
    }  # fmt: skip
    assert report["call"]["d_qk"] == 72 and report["call"]["dtype"] == "float32"


def test_unserved_call_fails_with_reasons(capsys, monkeypatch, tmp_path):
    status, report = info(capsys, "--dtype", "float64")
    assert status == 1
    assert verdicts(report)["cpu"]["reason"] == "dtype float64 is none of float32, bfloat16, float16"
    monkeypatch.setenv("FM3_LIB_DIR", str(tmp_path))
    _native.cpu_library.cache_clear()
    status, report = info(capsys, "--device", "gpu")
    assert status == 1 and report["simd_target"] is None
    assert "libfm3_sm90.so does not exist; configure with -DFM3_CUDA=ON" in verdicts(report)["sm90"]["reason"]
    assert report["libraries"] == {"fm3_cpu": False, "fm3_op": False, "fm3_sm90": False}
    _native.cpu_library.cache_clear()


@pytest.mark.parametrize("with_cuda", ["ON", "OFF"])
def test_a_gpu_call_needs_an_op_built_for_a_gpu_paddle(monkeypatch, with_cuda):
    class Library:
        def __getattr__(self, name):
            return lambda *_: 1024

    monkeypatch.setattr(_native, "sm90_library", lambda: Library())
    monkeypatch.setattr(_native, "is_built", lambda name: True)
    monkeypatch.setattr(_native, "build_info", lambda: {"paddle_version": "3.3.1", "paddle_with_cuda": with_cuda})
    verdict = backends.explain(backends.AttentionCall(device="gpu"))[1]
    assert verdict.serves == (with_cuda == "ON")
    assert verdict.serves or verdict.reason.startswith("libfm3_op.so was built for Paddle 3.3.1 without GPU; build it")


def test_impossible_call_is_an_error(capsys):
    assert __main__.main(["info", "--h-q", "6", "--h-kv", "4"]) == 2
    assert "h_kv=4 must divide h_q=6" in capsys.readouterr().out
    assert __main__.main(["info", "--num-bounds", "4"]) == 2
    assert "4 bounds with is_causal=True" in capsys.readouterr().out


def test_text_form():
    command = [sys.executable, "-m", "paddle_fm3", "info"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert "fm3_cpu   built" in result.stdout and "SIMD target" in result.stdout
    assert "cpu   serves  forward and backward" in result.stdout


def test_every_field_of_a_call_is_checked_or_passed_on():
    with pytest.raises(ValueError, match="device='tpu'"):
        backends.AttentionCall(device="tpu")
    with pytest.raises(ValueError, match="direction='sideways'"):
        backends.AttentionCall(direction="sideways")
    with pytest.raises(ValueError, match="d_qk=0 must be >= 1"):
        backends.AttentionCall(d_qk=0)
