# SPDX-License-Identifier: Apache-2.0
"""Tables 4, 6 and 7: one device. Measured by tools/bench_attention.py; here its records are put beside the paper's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduce_parts import paper

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
# What a CPU can run of the five masks: one sequence of 8K.
CPU_CASES = ("8k_full", "8k_causal", "8k_window", "8k_causal_document_sample2", "8k_document_sample2")


def has_gpu() -> bool:
    """Whether Paddle sees a GPU; decides what `measure` runs."""
    import paddle

    return bool(paddle.is_compiled_with_cuda()) and paddle.device.cuda.device_count() > 0


def measure(results: Path, *, is_quick: bool) -> int:
    """Runs the attention benchmark of this machine's device; appends to ``results``. Returns its exit status."""
    device = "gpu" if has_gpu() else "cpu"
    command = [sys.executable, str(ROOT / "tools" / "bench_attention.py"), "--device", device]
    for case in CPU_CASES if device == "cpu" else paper.TABLE_6:
        command += ["--case", case]
    if is_quick:
        command += ["--repeats", "1"]
    return subprocess.run([*command, "--json", str(results / f"attention_{device}.jsonl")], check=False).returncode


def newest(records: Sequence[Record], **wanted: Any) -> Record | None:
    """The newest passing record with these fields; one that need not be deterministic before one that is."""
    found = [
        one
        for one in records
        if one.get("refcheck") == "pass" and all(one.get(name) == value for name, value in wanted.items())
    ]
    return max(found, key=lambda one: (not one.get("deterministic"), one["date"]), default=None)


def improvement(records: Sequence[Record], peer: str, length: str | None) -> tuple[float, float, float, int] | None:
    """Least, most and mean improvement of fm3 over the peer in percent (forward and backward), and how many cases."""
    gains = []
    for case in sorted({one["case"] for one in records if one.get("bench") == "attention"}):
        if length is not None and not case.startswith(f"{length}_"):
            continue
        theirs = newest(records, case=case, impl=peer, phase="total", dtype="bfloat16")
        if theirs is None:
            continue
        ours = newest(records, case=case, impl="fm3", phase="total", dtype="bfloat16", run=theirs["run"])
        if ours is not None:
            gains.append(100 * (ours["tflops_exact"] / theirs["tflops_exact"] - 1))
    return (min(gains), max(gains), fmean(gains), len(gains)) if gains else None
