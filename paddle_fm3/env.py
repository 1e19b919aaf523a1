# SPDX-License-Identifier: Apache-2.0
"""The environment variables of this package, all of them, read when asked and never at import.

FM3_LIB_DIR            folder of the compiled libraries, instead of the package's own _lib
FM3_NUM_THREADS        threads of the CPU kernels; unset or 0 means every core the process may use
FM3_TRANSPORT_ADDRESS  address of this machine at which CPU ranks exchange rows; unset: loopback
FM3_GPU_TRANSPORT      how planned rows travel between GPU ranks: ipc, nccl, or auto (ipc inside one machine)
FM3_GPU_FORWARD        what their forward does meanwhile: rows, whole, steps, or auto (docs/design_device.md)

Also read: NCCL_MAX_CTAS, NCCL's own limit of multiprocessors, which attention leaves to it while rows travel.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = ("FM3_LIB_DIR", "FM3_NUM_THREADS", "FM3_TRANSPORT_ADDRESS", "FM3_GPU_TRANSPORT", "FM3_GPU_FORWARD")
GPU_TRANSPORTS = ("auto", "ipc", "nccl")
GPU_FORWARDS = ("rows", "whole", "steps")


def lib_dir() -> Path:
    """Folder in which the compiled libraries are looked for."""
    return Path(os.environ.get("FM3_LIB_DIR") or Path(__file__).parent / "_lib")


def num_threads() -> int:
    """Threads of the CPU kernels; 0 means every core the process may use.

    Raises:
        ValueError: FM3_NUM_THREADS is not a whole number >= 0.
    """
    text = os.environ.get("FM3_NUM_THREADS", "").strip()
    if not text:
        return 0
    if not text.isdecimal():
        raise ValueError(f"FM3_NUM_THREADS={text!r}: expected a whole number >= 0 (0: every core)")
    return int(text)


def transport_address() -> str:
    """Address that CPU ranks of planned context parallelism listen at."""
    return os.environ.get("FM3_TRANSPORT_ADDRESS", "").strip() or "127.0.0.1"


def nccl_max_ctas() -> int:
    """Multiprocessors that NCCL may use, by its own variable; 0 if it is not set.

    Raises:
        ValueError: NCCL_MAX_CTAS is not a whole number.
    """
    text = os.environ.get("NCCL_MAX_CTAS", "").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f"NCCL_MAX_CTAS={text!r}: expected a whole number")
    return int(text)


def gpu_transport() -> str:
    """How the rows of planned context parallelism travel between GPU ranks.

    Raises:
        ValueError: FM3_GPU_TRANSPORT is none of the known ones.
    """
    return _one_of("FM3_GPU_TRANSPORT", GPU_TRANSPORTS)


def gpu_forward() -> str | None:
    """How a forward of planned context parallelism on GPUs waits for rows of other ranks; None: as suits the transport.

    Raises:
        ValueError: FM3_GPU_FORWARD is none of the known ones.
    """
    mode = _one_of("FM3_GPU_FORWARD", ("auto", *GPU_FORWARDS))
    return None if mode == "auto" else mode


def _one_of(name: str, known: tuple[str, ...]) -> str:
    """The variable's value; the first known one where it is not set."""
    value = os.environ.get(name, "").strip() or known[0]
    if value not in known:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}")
    return value
