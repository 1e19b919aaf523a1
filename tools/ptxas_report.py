#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and warnings of every compiled Hopper kernel.

    tools/ptxas_report.py build/ops/cuda/ptxas        the table; exit status 1 if a rule is broken
    tools/ptxas_report.py --log DIR -- nvcc ... -o X  runs nvcc and keeps what ptxas said in DIR (the build
                                                      uses this as its compiler launcher)

Rules, for kernels of head_dim 128: no spill, and no wgmma products serialised by ptxas (C75xx). The others'
are shown.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALISED = re.compile(r"\((C75\d\d)\).*?'(\S+)'")
_HEAD_DIM = re.compile(r"^d(\d+)")


@dataclass
class Kernel:
    """What ptxas said of one entry function."""

    file: str  # stem of the source, e.g. sm90_fwd/d128_bf16
    function: str  # mangled name
    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0  # stores + loads
    warning: str = ""  # e.g. C7511

    @property
    def broken_rule(self) -> str:
        """Which rule the kernel breaks, or ""."""
        match = _HEAD_DIM.match(Path(self.file).name)
        if match is None or match.group(1) != "128":
            return ""
        return "spills" if self.spill_bytes else "serialised" if self.warning else ""


def parse(text: str, file: str) -> list[Kernel]:
    """Kernels of one compiler log (ptxas -v)."""
    warnings = {function: code for code, function in _SERIALISED.findall(text)}
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if match := _FUNCTION.search(line):
            kernels.append(Kernel(file, match.group(1), warning=warnings.get(match.group(1), "")))
        elif kernels and (match := _SPILLS.search(line)):
            stack, stores, loads = (int(group) for group in match.groups())
            kernels[-1].stack_bytes, kernels[-1].spill_bytes = stack, stores + loads
        elif kernels and (match := _REGISTERS.search(line)):
            kernels[-1].registers = int(match.group(1))
    return kernels


def run_compiler(log_dir: Path, command: list[str]) -> int:
    """Runs the compiler; keeps its messages in `log_dir` and shows them only if it fails."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    sources = [argument for argument in command if argument.endswith(".cu")]
    if sources and "-o" in command:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = Path(sources[-1])
        folder = path.parent.parent.name if path.parent.name == "instantiations" else path.parent.name
        (log_dir / f"{folder}.{path.stem}.log").write_text(done.stderr, encoding="utf-8")
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
    return done.returncode


def report(log_dir: Path) -> int:
    """Prints the table; the number of broken rules."""
    logs = sorted(log_dir.glob("*.log"))
    if not logs:
        print(f"ptxas_report: {log_dir} holds no *.log; build with -DFM3_CUDA=ON first", file=sys.stderr)
        return 1
    kernels = [
        kernel for log in logs for kernel in parse(log.read_text(encoding="utf-8"), log.stem.replace(".", "/", 1))
    ]
    print(f"{'kernel':<28}{'registers':>10}{'stack':>8}{'spills':>8}  {'wgmma serialised':<18}rule broken")
    for kernel in kernels:
        numbers = f"{kernel.registers:>10}{kernel.stack_bytes:>8}{kernel.spill_bytes:>8}"
        print(f"{kernel.file:<28}{numbers}  {kernel.warning:<18}{kernel.broken_rule}".rstrip())
    return sum(bool(kernel.broken_rule) for kernel in kernels)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of compiler logs")
    parser.add_argument("--log", type=Path, metavar="DIR", help="run the compiler after --, keep its messages in DIR")
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[given.index("--") + 1 :] if "--" in given else []
    options = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    if options.log is not None:
        if not command:
            parser.error("--log needs a compiler command after --")
        return run_compiler(options.log, command)
    if options.folder is None:
        parser.error("give the folder of compiler logs")
    return 1 if report(options.folder) else 0


if __name__ == "__main__":
    sys.exit(main())
