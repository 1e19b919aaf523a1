# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the compiled libraries; says exactly what is missing and how to build it.

    libfm3_cpu.so    CPU kernels (C ABI)
    libfm3_sm90.so   Hopper kernels (C ABI), built with -DFM3_CUDA=ON
    libfm3_op.so     the Paddle custom op, which calls the two above

Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from pathlib import Path
from typing import Any

from paddle_fm3 import _c_api, env

OP_NAME = "fm3_attention"

_HOW_TO_BUILD = {
    "fm3_cpu": "run `make build` in a checkout, or `pip install .`",
    "fm3_op": "run `make build` in a checkout, or `pip install .`, with the Python that has Paddle",
    "fm3_sm90": "configure with -DFM3_CUDA=ON (needs nvcc 12.8 or newer): `make build CUDA=ON`",
}

_lock = threading.RLock()
_is_op_registered = False


class NativeLibraryError(ImportError):
    """A compiled library is missing or does not load; the message says which, where, and what to do."""


def library_path(name: str) -> Path:
    """Where ``lib<name>.so`` is expected, whether or not it is there."""
    return env.lib_dir() / f"lib{name}.so"


def is_built(name: str) -> bool:
    return library_path(name).is_file()


def require_library(name: str) -> Path:
    """Path of ``lib<name>.so``.

    Raises:
        NativeLibraryError: the file does not exist.
    """
    path = library_path(name)
    if not path.is_file():
        raise NativeLibraryError(f"paddle_fm3: {path} does not exist; {_HOW_TO_BUILD[name]}")
    return path


def build_info() -> dict[str, Any]:
    """What the custom op was built with: compiler, Paddle version, CUDA. Empty if it is not built."""
    path = env.lib_dir() / "fm3_op.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@functools.cache
def cpu_library() -> ctypes.CDLL:
    """The CPU kernels through ctypes, with FM3_NUM_THREADS applied.

    Raises:
        NativeLibraryError: not built, or does not load.
    """
    library = _load("fm3_cpu", "cpu")
    library.fm3_cpu_set_num_threads(env.num_threads())
    return library


@functools.cache
def sm90_library() -> ctypes.CDLL:
    """The Hopper kernels through ctypes.

    Raises:
        NativeLibraryError: not built, or does not load (no CUDA driver, say).
    """
    return _load("fm3_sm90", "sm90")


def load_op() -> str:
    """Registers the custom op with Paddle, once a process, and returns its name.

    ``flashmask_attention`` calls it. Call it yourself before ``paddle.jit.load`` of a saved program that
    holds the op.

    Raises:
        NativeLibraryError: not built, built for another Paddle, or does not load.
    """
    global _is_op_registered
    with _lock:
        if not _is_op_registered:
            path = require_library("fm3_op")
            _check_paddle_version()
            cpu_library()  # the op links to it; loading it first applies FM3_NUM_THREADS
            from paddle.utils.cpp_extension import extension_utils

            try:
                extension_utils.load_op_meta_info_and_register_op(str(path))
            except Exception as error:
                raise NativeLibraryError(f"paddle_fm3: {path} does not load: {error}") from error
            _is_op_registered = True
    return OP_NAME


def _check_paddle_version() -> None:
    import paddle

    built_for = build_info().get("paddle_version")
    if built_for and built_for != paddle.version.full_version:
        raise NativeLibraryError(
            f"paddle_fm3: libfm3_op.so was built for Paddle {built_for} and this is Paddle "
            f"{paddle.version.full_version}; {_HOW_TO_BUILD['fm3_op']}"
        )


def _load(name: str, backend: str) -> ctypes.CDLL:
    path = require_library(name)
    try:
        return _c_api.declare(ctypes.CDLL(str(path)), backend)
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"paddle_fm3: {path} does not load: {error}; {_HOW_TO_BUILD[name]}") from error
