# SPDX-License-Identifier: Apache-2.0
"""The store of a gloo group: its port, and how it ends; and which groups are groups."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paddle.distributed.communication.group import Group

from paddle_fm3.distributed import comm, groups


def test_port_is_below_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "range").write_text("20100\t60999\n")
    monkeypatch.setattr(groups, "EPHEMERAL_RANGE", tmp_path / "range")
    monkeypatch.setattr(groups, "LOWEST_PORT", 20000)
    ports = {groups._free_port() for _ in range(50)}
    assert all(20000 <= port < 20100 for port in ports) and len(ports) > 5
    monkeypatch.setattr(groups, "EPHEMERAL_RANGE", tmp_path / "missing")
    assert 20000 <= groups._free_port() < 32768


def test_taken_port_is_not_handed_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        (tmp_path / "range").write_text(f"{port + 1} 60999")
        monkeypatch.setattr(groups, "EPHEMERAL_RANGE", tmp_path / "range")
        monkeypatch.setattr(groups, "LOWEST_PORT", port)  # the range holds this port alone
        assert groups._free_port() not in (0, port)


def test_a_group_of_one_process_is_no_context_parallelism() -> None:
    """Paddle says rank -1 to the only member of a group, as to a process outside."""
    assert groups.resolve_group(Group(-1, 10, [0])) is None
    with pytest.raises(ValueError, match=r"rank 0 is not a member of group 10 with ranks \[1\]"):
        groups.resolve_group(Group(-1, 10, [1]))


ENDING = """
import ctypes
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.pause, None, None)  # registered first, so run last, when all static objects are gone
from paddle_fm3.distributed import comm, groups
class Parent:
    def set(self, key, value):
        self.value = value
parent = Parent()
store = groups._make_group_store(parent, 0, 1, 7)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # never destroyed, as those that a process group holds
print("address", parent.value.decode(), flush=True)
"""
# The job's own store, in a job of one process.
ENDING_JOB = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.pause, None, None)
from paddle.base import core
from paddle_fm3.distributed import groups
address = f"127.0.0.1:{groups._free_port()}"
os.environ.update(
    PADDLE_TRAINER_ENDPOINTS=address, PADDLE_TRAINER_ID="0", PADDLE_TRAINERS_NUM="1", PADDLE_CURRENT_ENDPOINT=address
)
host, port = address.split(":")
store = core.TCPStore(host, int(port), True, 1, 60)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
groups.dist.is_initialized = lambda: True
groups.settle_job_store()
print("address", address, flush=True)
"""
PAUSE = "34 "  # the number of this system call on x86-64


@pytest.mark.parametrize("code", [ENDING, ENDING_JOB], ids=["group", "job"])
def test_a_rank_that_ends_does_not_abort_one_that_is_ending(code: str) -> None:
    """Callers leave the store of a process that is past its static destructors, by a close and by a reset."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            host, port = next(line.split()[1] for line in process.stdout if line.startswith("address ")).split(":")
            callers = [socket.create_connection((host, int(port)), 5) for _ in range(2)]
            deadline_s = time.monotonic() + 20
            with contextlib.suppress(PermissionError):  # then it has all of that time
                while not Path(f"/proc/{process.pid}/syscall").read_text().startswith(PAUSE):
                    assert time.monotonic() < deadline_s, "the process does not end"
                    time.sleep(0.02)
                deadline_s = time.monotonic()
            time.sleep(max(0.0, deadline_s - time.monotonic()))
            callers[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for caller in callers:
                caller.close()
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            process.kill()


def test_one_thread_at_a_time_asks_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits announces itself from a thread of its own, which may come late: at the next group's making."""

    class Store:
        busy: list[str] = []  # noqa: RUF012
        overlaps: list[str] = []  # noqa: RUF012

        def ask(self, what: str, answer: object) -> object:
            self.overlaps += [f"{what} during {other}" for other in self.busy]
            self.busy.append(what)
            time.sleep(0.1)
            self.busy.remove(what)
            return answer

        def add(self, key: str, amount: int) -> object:
            return self.ask("add", amount)

        def set(self, key: str, value: bytes) -> object:
            return self.ask("set", None)

        def get(self, key: str) -> object:
            return self.ask("get", b"127.0.0.1:1")

    store = Store()
    monkeypatch.setattr(comm.collective, "_default_store", store)
    monkeypatch.setattr(groups.core, "TCPStore", lambda *_: None)
    monkeypatch.setattr(groups, "_see_callers_leave", lambda *_: None)
    communicator = comm.Communicator(Group(0, 4321, [0, 1]), 1.0)
    for rank in (0, 1):
        communicator._announce(1)
        time.sleep(0.02)
        groups._make_group_store(store, rank, 2, 5)
    assert not store.overlaps, store.overlaps
