# SPDX-License-Identifier: Apache-2.0
"""Peer copies cut short: a program that makes no further call does not go on with rows that never came."""

from __future__ import annotations

import pytest
from program import run_program

from paddle_fm3.distributed.device_held import EXIT_STATUS

# Rank 0 waits for rows of rank 1, which never posts them; both live in this process.
SCRIPT = """
    import sys, time
    from device_support import Group, on_ranks
    from paddle_fm3.distributed import device_held
    from paddle_fm3.distributed.device_ipc import IpcTransport
    from paddle_fm3.distributed.device_transport import Batch, Piece
    from paddle_fm3.distributed.transport import TransportError

    device_held.EXIT_GRACE_S = 0.5
    group = Group(2, 0, make_transport=lambda *arguments: IpcTransport(*arguments, timeout_s=1.0))
    on_ranks(2, lambda rank: group.ranks[rank].transport.register({"key": 256}))
    transport = group.ranks[0].transport
    transport.post(Batch("rows stage 1", recvs=(Piece(1, "key", 0, 64, "key", 0),)), group.ranks[0].stream)
    group.world.run(10.0)
    print("streams ran to their end", flush=True)
    if sys.argv[1] == "goes on":
        time.sleep(30)
    else:
        time.sleep(0.2)
        try:
            transport.check()
        except TransportError as error:
            print("raised", error, flush=True)
        time.sleep(2)
    print("alive", flush=True)
"""
REASON = "rank 0 of 2: gave up on 'rows stage 1' after 1 s: nothing came from rank 1 (stalled)"


@pytest.mark.parametrize(
    ("how", "status", "out", "err"),
    [
        ("goes on", EXIT_STATUS, "streams ran to their end\n", f"context parallelism: {REASON}\n"),
        ("asks", 0, f"streams ran to their end\nraised {REASON}\nalive\n", ""),
    ],
)
def test_a_program_with_rows_that_never_came(how: str, status: int, out: str, err: str) -> None:
    done = run_program(SCRIPT, how)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)
