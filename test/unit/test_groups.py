# SPDX-License-Identifier: Apache-2.0
"""The port of a gloo group's store: free, and outside the range from which connections take theirs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from paddle.distributed.communication.group import Group

from paddle_fm3.distributed import groups


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
