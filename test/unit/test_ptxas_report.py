# SPDX-License-Identifier: Apache-2.0
"""tools/ptxas_report.py on logs as nvcc 13.0 writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "ptxas_report.py"
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zkernel' for 'sm_90a'
ptxas info    : Function properties for _Zkernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
SERIALISED = (
    "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    " insufficient register resources for the wgmma pipeline in the function '_Zkernel'\n"
)


def report(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), str(folder)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "spills", "is_serialised", "status", "says"),
    [
        ("sm90_fwd.d128_bf16", 0, False, 0, "sm90_fwd/d128_bf16"),
        ("sm90_fwd.d128_bf16", 8, False, 1, "spills"),
        ("sm90_fwd.d128_bf16", 0, True, 1, "C7511"),
        ("sm90_fwd.d256_bf16", 48, True, 0, "C7511"),
        ("schedule.build", 8, False, 0, "schedule/build"),
    ],
)
def test_rules(tmp_path: Path, name: str, spills: int, is_serialised: bool, status: int, says: str) -> None:
    text = (SERIALISED if is_serialised else "") + LOG.format(stack=spills, stores=spills, loads=0)
    (tmp_path / f"{name}.log").write_text(text)
    done = report(tmp_path)
    assert done.returncode == status, done.stdout
    line = done.stdout.splitlines()[1]
    assert says in line and line.split()[1:4] == ["168", str(spills), str(spills)]


def test_a_folder_without_logs_is_an_error(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.returncode == 1 and "FM3_CUDA=ON" in done.stderr


def test_launcher_keeps_the_messages_and_the_exit_status(tmp_path: Path) -> None:
    source = tmp_path / "sm90_fwd" / "instantiations" / "d128_bf16.cu"
    fake = [sys.executable, "-c", "import sys; sys.stderr.write('said'); sys.exit(3)", str(source), "-o", "x.o"]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--log", str(tmp_path / "logs"), "--", *fake], capture_output=True, text=True
    )
    assert done.returncode == 3 and done.stderr == "said"
    assert (tmp_path / "logs" / "sm90_fwd.d128_bf16.log").read_text() == "said"
