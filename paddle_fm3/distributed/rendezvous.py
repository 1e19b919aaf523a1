# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group come to be connected: one TCP connection for each pair.

Sockets are bound to loopback unless FM3_TRANSPORT_ADDRESS names another address of this machine, and are closed as
soon as all ranks are there. A caller must show the token that was handed out through the group's own collectives.
"""

from __future__ import annotations

import hmac
import os
import platform
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from paddle_fm3 import env
from paddle_fm3.distributed.transport import TcpTransport, TransportError

_HELLO = struct.Struct("<8sI16s")  # magic, rank of the caller, token of the called
_HELLO_MAGIC = b"FM3hello"
_MAX_CALLERS = 64  # that have not shown a token yet

Record = dict[str, Any]


def connect(rank: int, num_ranks: int, exchange: Callable[[Record], list[Record]], timeout_s: float) -> TcpTransport:
    """Connects every pair of ranks. Collective.

    Args:
        exchange: hands this rank's small record to all and returns everyone's, by rank.

    Raises:
        TransportError: the same on every rank if one cannot listen, or the ranks are on several machines and an
            address is missing; else what this rank met within timeout_s.
    """
    token = secrets.token_bytes(16)
    listener, record = _listen(rank, num_ranks)
    try:
        records = exchange(record | {"token": token.hex(), "machine": machine_name()})
        error = _addresses_error(records)
        if listener is None or error:
            raise TransportError(error)
        return TcpTransport(rank, _connections(listener, rank, records, token, timeout_s))
    finally:
        if listener is not None:
            listener.close()


def _listen(rank: int, num_ranks: int) -> tuple[socket.socket | None, Record]:
    """A socket at the address of the environment, and where it is; or None, and why not."""
    address = env.transport_address()
    record: Record = {"error": None, "address": address}
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=num_ranks + _MAX_CALLERS)
    except OSError as error:
        return None, record | {"error": f"rank {rank} cannot listen at {address}: {error}"}
    here, port = listener.getsockname()[:2]
    if here in ("0.0.0.0", "::"):
        listener.close()
        why = f"FM3_TRANSPORT_ADDRESS={address} is no address that others can call; give that of one network"
        return None, record | {"error": f"rank {rank}: {why}"}
    return listener, record | {"address": here, "port": port}  # a name may mean another address elsewhere


def _addresses_error(records: list[Record]) -> str:
    """Why these ranks cannot meet; empty if they can. The same on every rank."""
    errors = [record["error"] for record in records if record["error"]]
    if not errors and len({record["machine"] for record in records}) > 1:
        lonely = [str(rank) for rank, record in enumerate(records) if record["address"].startswith(("127.", "::1"))]
        if lonely:
            return (
                "the ranks run on several machines; set FM3_TRANSPORT_ADDRESS to the address of the network to use on "
                f"rank {', '.join(lonely)}"
            )
    return "; ".join(errors)


def _connections(
    listener: socket.socket, rank: int, records: list[Record], token: bytes, timeout_s: float
) -> dict[int, socket.socket]:
    """To every other rank: lower ones are called, higher ones call."""
    deadline_s = time.monotonic() + timeout_s
    connections: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            connections[peer] = _call(records[peer], rank, deadline_s)
        for peer, connection in _answer(listener, range(rank + 1, len(records)), token, deadline_s):
            connections[peer] = connection
    except OSError as error:
        for connection in connections.values():
            connection.close()
        missing = [str(peer) for peer in range(len(records)) if peer != rank and peer not in connections]
        raise TransportError(
            f"rank {rank} has no connection to rank {', '.join(missing)} within {timeout_s:g} s: {error}"
        ) from error
    return connections


def machine_name() -> str:
    """Names this machine and its run since boot; two ranks with the same name share it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot_id.read_text().strip() if os.access(boot_id, os.R_OK) else ''}"


def _call(record: Record, rank: int, deadline_s: float) -> socket.socket:
    left_s = max(deadline_s - time.monotonic(), 0.1)
    connection = socket.create_connection((record["address"], record["port"]), left_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HELLO.pack(_HELLO_MAGIC, rank, bytes.fromhex(record["token"])))
    return connection


def _answer(
    listener: socket.socket, peers: Iterable[int], token: bytes, deadline_s: float
) -> Iterator[tuple[int, socket.socket]]:
    """Connections of the peers, as they call and show the token. Strangers are closed, and hold nobody up."""
    missing = set(peers)
    callers: dict[socket.socket, bytearray] = {}  # in order of arrival, with what they have said so far
    listener.setblocking(False)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)

            def dismiss(caller: socket.socket) -> bytearray:
                selector.unregister(caller)
                return callers.pop(caller)

            while missing:
                ready = selector.select(max(deadline_s - time.monotonic(), 0))
                if not ready and time.monotonic() >= deadline_s:
                    raise TimeoutError("timed out")
                for key, _ in ready:
                    if key.fileobj is listener:
                        caller = _accept(listener)
                        if caller is not None:
                            callers[caller] = bytearray()
                            selector.register(caller, selectors.EVENT_READ)
                        continue
                    caller = key.fileobj
                    if caller not in callers or not _has_spoken(caller, callers[caller]):
                        continue
                    peer = _peer_of(bytes(dismiss(caller)), token)
                    if peer in missing:
                        missing.remove(peer)
                        yield peer, caller
                    else:
                        caller.close()  # a stranger
                while len(callers) > _MAX_CALLERS:
                    oldest = next(iter(callers))
                    dismiss(oldest)
                    oldest.close()
    finally:
        for caller in callers:
            caller.close()


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        caller, _ = listener.accept()
    except (BlockingIOError, ConnectionError):  # it has gone again
        return None
    caller.setblocking(False)
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return caller


def _has_spoken(caller: socket.socket, said: bytearray) -> bool:
    """Whether the hello is complete, or will never be."""
    try:
        piece = caller.recv(_HELLO.size - len(said))
    except BlockingIOError:
        return False
    except OSError:
        return True
    said += piece
    return not piece or len(said) == _HELLO.size


def _peer_of(hello: bytes, token: bytes) -> int | None:
    """The rank that says hello; None for a stranger."""
    magic, peer, shown = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
    return peer if magic == _HELLO_MAGIC and hmac.compare_digest(shown, token) else None
