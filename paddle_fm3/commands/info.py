# SPDX-License-Identifier: Apache-2.0
"""What is built here, and which backend would serve a given attention call and why not another.

    python -m paddle_fm3 info
    python -m paddle_fm3 info --device gpu --dtype bfloat16 --d-qk 192 --d-v 128
    python -m paddle_fm3 info --json

The exit status is 0 if some backend serves the call, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

import paddle_fm3
from paddle_fm3 import _native, backends, env

HELP = "what is built, and which backend serves a given call"

LIBRARIES = ("fm3_cpu", "fm3_op", "fm3_sm90")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = backends.AttentionCall()
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group = parser.add_argument_group("the call to explain")
    group.add_argument("--device", choices=sorted(set(backends.DEVICES.values())), default=defaults.device)
    group.add_argument("--dtype", default=defaults.dtype, help="float32, bfloat16 or float16")
    group.add_argument("--direction", choices=backends.DIRECTIONS, default=defaults.direction)
    for name in ("d_qk", "d_v", "h_q", "h_kv", "s_q", "s_k", "num_bounds"):
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=int, default=getattr(defaults, name), metavar="N")
    group.add_argument("--no-causal", dest="is_causal", action="store_false")
    group.add_argument("--deterministic", dest="is_deterministic", action="store_true")


def collect(call: backends.AttentionCall) -> dict[str, Any]:
    """Everything the command reports, as plain values."""
    return {
        "version": paddle_fm3.__version__,
        "python": platform.python_version(),
        "paddle": _installed_version("paddlepaddle", "paddlepaddle-gpu"),
        "paddlenlp": _installed_version("paddlenlp"),
        "lib_dir": str(env.lib_dir()),
        "libraries": {name: _native.is_built(name) for name in LIBRARIES},
        "build": _native.build_info(),
        "simd_target": _simd_target(),
        "num_threads": env.num_threads(),
        "call": dataclasses.asdict(call),
        "backends": [dataclasses.asdict(verdict) for verdict in backends.explain(call)],
    }


def run(arguments: argparse.Namespace) -> int:
    fields = [field.name for field in dataclasses.fields(backends.AttentionCall)]
    try:
        call = backends.AttentionCall(**{name: getattr(arguments, name) for name in fields})
    except ValueError as error:
        print(f"info: {error}")
        return 2
    info = collect(call)
    print(json.dumps(info, indent=2) if arguments.json else _text(info))
    return 0 if any(verdict["serves"] for verdict in info["backends"]) else 1


def _text(info: dict[str, Any]) -> str:
    build = info["build"]
    lines = [
        f"paddle_fm3 {info['version']}, Python {info['python']}, Paddle {info['paddle'] or 'not installed'}, "
        f"PaddleNLP {info['paddlenlp'] or 'not installed'}",
        f"libraries in {info['lib_dir']}",
        *(f"  {name:<9} {'built' if is_built else 'not built'}" for name, is_built in info["libraries"].items()),
    ]
    if build:
        lines.append(
            f"op built with {build['compiler']}, {build['build_type']}, CUDA {build['cuda']}, "
            f"for Paddle {build['paddle_version']}"
        )
    if info["simd_target"]:
        threads = info["num_threads"] or "every core"
        lines.append(f"CPU kernels: SIMD target {info['simd_target']}, threads: {threads}")
    call = ", ".join(f"{name}={value}" for name, value in info["call"].items())
    lines.append(f"call: {call}")
    for verdict in info["backends"]:
        lines.append(f"  {verdict['backend']:<5} {'serves' if verdict['serves'] else 'no':<7} {verdict['reason']}")
    return "\n".join(lines)


def _simd_target() -> str | None:
    try:
        return _native.cpu_library().fm3_cpu_simd_target().decode()
    except _native.NativeLibraryError:
        return None


def _installed_version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
