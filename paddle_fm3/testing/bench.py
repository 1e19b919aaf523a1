# SPDX-License-Identifier: Apache-2.0
"""Benchmark records: timing statistics, the run's identity, JSON lines and a printed table.

Shared by every `tools/bench_*.py`. One line in `results/` is one JSON object with `schema`, `bench`, `run`,
`commit`, `date`, `device`, `impl` and `refcheck`, then the fields of its kind of measurement.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from paddle_fm3.testing.cases import AttentionCase

SCHEMA = 1
REPOSITORY = Path(__file__).resolve().parents[2]
Record = dict[str, Any]


@dataclass(frozen=True)
class TimingStats:
    """Spread of repeated timings of one call, in milliseconds."""

    ms_median: float
    ms_p10: float
    ms_p90: float
    repeats: int

    @classmethod
    def from_ms(cls, times_ms: Sequence[float]) -> TimingStats:
        """Raises ValueError for an empty sequence."""
        if len(times_ms) == 0:
            raise ValueError("TimingStats: no timings were given")
        p10, median, p90 = np.percentile(np.asarray(times_ms, float), [10, 50, 90])
        return cls(float(median), float(p10), float(p90), len(times_ms))

    def fields(self) -> Record:
        return {
            "ms_median": round(self.ms_median, 4),
            "ms_p10": round(self.ms_p10, 4),
            "ms_p90": round(self.ms_p90, 4),
            "repeats": self.repeats,
        }


def time_call(call: Callable[[], object], *, repeats: int, warmup: int = 1) -> TimingStats:
    """Wall-clock statistics of ``call()``, which must return only when its work is done."""
    for _ in range(warmup):
        call()
    times_ms = []
    for _ in range(repeats):
        begin = perf_counter()
        call()
        times_ms.append((perf_counter() - begin) * 1e3)
    return TimingStats.from_ms(times_ms)


@dataclass(frozen=True)
class RunIdentity:
    """What every line of one run has in common, so that lines of one run can be put side by side."""

    run: str
    commit: str
    date: str
    device: str

    @classmethod
    def of_this_process(cls, device: str, commit: str | None = None) -> RunIdentity:
        """``device`` is the hardware's own name: `cpu_name()`, or what the GPU driver reports. ``commit``: what the
        measured tree is a copy of, where it is no git checkout."""
        now = datetime.datetime.now(datetime.timezone.utc)
        return cls(uuid.uuid4().hex[:12], commit or commit_id(), now.isoformat(timespec="seconds"), device)


def commit_id() -> str:
    """Short commit of the checkout, with ``-dirty`` if tracked files differ from it; "unknown" outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    """Model name of the processor as /proc/cpuinfo gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def record(identity: RunIdentity, bench: str, impl: str, *, refcheck: bool, **fields: Any) -> Record:
    """One result line; ``fields`` are those of the kind of measurement."""
    return {
        "schema": SCHEMA,
        "bench": bench,
        "run": identity.run,
        "commit": identity.commit,
        "date": identity.date,
        "device": identity.device,
        "impl": impl,
        "refcheck": "pass" if refcheck else "fail",
        **fields,
    }


def attention_record(
    identity: RunIdentity,
    impl: str,
    case: AttentionCase,
    phase: str,
    dtype: str,
    stats: TimingStats,
    *,
    refcheck: bool,
    deterministic: bool,
    **extra: Any,
) -> Record:
    """A line of bench "attention". ``phase`` is "fwd", "bwd" or "total"; ``extra`` holds the device's own
    fields (`matmul_tflops` on a GPU; `sgemm_gflops` and `threads` on a CPU)."""
    seconds = stats.ms_median * 1e-3
    return record(
        identity,
        "attention",
        impl,
        refcheck=refcheck,
        case=case.name,
        phase=phase,
        dtype=dtype,
        **case.shape,
        deterministic=deterministic,
        **stats.fields(),
        tflops_exact=_significant(case.flops(phase) / seconds * 1e-12),
        tflops_block=_significant(case.flops(phase, is_block=True) / seconds * 1e-12),
        density_exact=_significant(case.density_exact),
        density_block=_significant(case.density_block),
        **extra,
    )


def _significant(value: float) -> float:
    return float(f"{value:.5g}")


def append_records(path: str | Path, records: Iterable[Record]) -> None:
    """Appends one JSON object a line; makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        for one in records:
            lines.write(json.dumps(one) + "\n")


def format_table(records: Sequence[Record], columns: Sequence[str]) -> str:
    """Aligned text table of the given fields; a record without a field shows "-"."""
    rows = [list(columns)] + [[_cell(one.get(name)) for name in columns] for one in records]
    widths = [max(len(row[column_idx]) for row in rows) for column_idx in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class BenchOptions:
    """What the command line asks a device's benchmark for; an empty tuple means the device's default."""

    cases: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    repeats: int | None = None
    threads: int | None = None  # CPU only
    commit: str | None = None  # of a copy that is no git checkout
    rounds: int | None = None  # GPU only
