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

from paddle_fm3 import _c_api, _device_api, env

OP_NAME = "fm3_attention"

_HOW_TO_BUILD = {
    "fm3_cpu": "run `make build` in a checkout, or `pip install .`",
    "fm3_op": "run `make build` in a checkout, or `pip install .`, with the Python that has Paddle",
    "fm3_sm90": "configure with -DFM3_CUDA=ON (needs nvcc 12.8 or newer): `make build CUDA=ON`",
}

_lock = threading.RLock()
_is_op_registered = False


class NativeLibraryError(ImportError):
    """A compiled library is missing, does not load or is of another version; the message says which, where, and what to
    do."""


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
        NativeLibraryError: not built, does not load, or of another version.
    """
    library = _load("fm3_cpu", "cpu", _c_api.STRUCTS)
    library.fm3_cpu_set_num_threads(env.num_threads())
    return library


@functools.cache
def sm90_library() -> ctypes.CDLL:
    """The Hopper kernels through ctypes.

    Raises:
        NativeLibraryError: not built, does not load (no CUDA driver, say), or of another version.
    """
    return _load("fm3_sm90", "sm90", _c_api.STRUCTS + _device_api.STRUCTS)


def load_op() -> str:
    """Registers the custom op with Paddle, once a process, and returns its name.

    ``flashmask_attention`` calls it. Call it yourself before ``paddle.jit.load`` of a saved program that
    holds the op.

    Raises:
        NativeLibraryError: not built, built for another Paddle, does not load, or of another version.
    """
    global _is_op_registered
    with _lock:
        if not _is_op_registered:
            path = require_library("fm3_op")
            _check_paddle_version()
            cpu_library()  # the op links to it; loading it first applies FM3_NUM_THREADS
            from paddle.utils.cpp_extension import extension_utils

            try:
                _check_structs(ctypes.CDLL(str(path)), "fm3_op", _c_api.STRUCTS)
                extension_utils.load_op_meta_info_and_register_op(str(path))
            except NativeLibraryError:
                raise
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


def _load(name: str, backend: str, structs: tuple[type[ctypes.Structure], ...]) -> ctypes.CDLL:
    path = require_library(name)
    try:
        library = ctypes.CDLL(str(path))
        _check_structs(library, name, structs)
        return _c_api.declare(library, backend)
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"paddle_fm3: {path} does not load: {error}; {_HOW_TO_BUILD[name]}") from error


def _check_structs(library: ctypes.CDLL, name: str, structs: tuple[type[ctypes.Structure], ...]) -> None:
    """A library left from before an update would read past the end of what it is given, or miss what it is told."""
    misfits = _c_api.misfits(library, name, structs)
    if misfits:
        raise NativeLibraryError(
            f"paddle_fm3: {library._name} was built from another version of paddle_fm3 than this Python's: {misfits}; "
            f"{_HOW_TO_BUILD[name]}"
        )
