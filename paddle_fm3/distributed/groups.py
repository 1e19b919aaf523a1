# SPDX-License-Identifier: Apache-2.0
"""Which Paddle process group carries context parallelism, and a repair that gloo subgroups need."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import collective

STORE_TIMEOUT_S = 300
LOWEST_PORT = 10000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# NOTE: a process has one connection to the job's store, and Paddle does not guard it: of two threads that ask at once,
# one takes the other's answer.
store_lock = threading.Lock()
_original_new_process_group: Any = None
_is_job_store_settled = False
_group_stores: dict[int, Any] = {}  # group id -> its TCPStore, kept alive as long as the process


def resolve_group(group: Any | None = None) -> Any | None:
    """The group to split the sequence over.

    Args:
        group: a Paddle ``Group``, or None to look it up: fleet's context-parallel group if the topology has
            one, else its sep group.

    Returns:
        The group, or None for one of a single process (context parallelism of degree 1).

    Raises:
        RuntimeError: several processes, no group given, and fleet has no context or sep group.
        ValueError: this process is not a member of the given group, or it is no group.
    """
    if group is not None:
        if not hasattr(group, "nranks"):
            raise ValueError(
                f"resolve_group: group is {group!r}; expected what paddle.distributed.new_group makes, a ProcessMesh, "
                "or None to look it up"
            )
        if group.nranks == 1 and dist.get_rank() in group.ranks:  # NOTE: Paddle gives even its member the rank -1
            return None
        if group.rank < 0:
            raise ValueError(
                f"resolve_group: rank {dist.get_rank()} is not a member of group {group.id} with ranks {group.ranks}"
            )
        return group
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    topology = fleet_topology()
    if topology is None:
        raise RuntimeError(
            f"resolve_group: {dist.get_world_size()} processes but no context-parallel group: pass group=..., or call "
            "fleet.init with sep_degree > 1 (PaddleNLP: --context_parallel_degree or --sep_parallel_degree)"
        )
    # `get_context_parallel_group` exists only on the topology that fleet builds for ep_degree > 1.
    get_group = getattr(topology, "get_context_parallel_group", None) or topology.get_sep_parallel_group
    return usable(get_group())


def group_size(group: Any | None) -> int:
    """Ranks in the group; 1 for None."""
    return 1 if group is None else group.nranks


def group_rank(group: Any | None) -> int:
    """This process's rank inside the group; 0 for None."""
    return 0 if group is None else group.rank


def is_gloo(group: Any) -> bool:
    """Whether the group's collectives run over gloo (CPU tensors)."""
    return group.process_group is not None and group.process_group.name().upper() == "GLOO"


def fleet_topology() -> Any | None:
    """What fleet.init built; None if it was not called."""
    try:
        return dist.fleet.get_hybrid_communicate_group()
    except AttributeError:  # fleet.init was not called
        return None


def usable(group: Any) -> Any | None:
    """The group, or None for one of a single member: fleet's have no process group behind them."""
    return None if group is None or group.nranks <= 1 else group


def enable_gloo_subgroups() -> None:
    """Gives every gloo group created from now on a key-value store of its own. Undone by the disable twin.

    Paddle lets all gloo groups meet under the same keys of one store, so the second group of a process usually
    fails ("Connection refused"). Call this before ``fleet.init``; NCCL groups are left alone.
    """
    global _original_new_process_group
    if _original_new_process_group is not None:
        return
    _original_new_process_group = collective._new_process_group_impl

    def new_process_group(
        backend: str, store: Any, rank: int, world_size: int, group_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        group_id = kwargs.get("group_id", args[1] if len(args) > 1 else 0)
        if backend == "gloo" and group_id != 0:
            store = _group_stores[group_id] = _make_group_store(store, rank, world_size, group_id)
        return _original_new_process_group(backend, store, rank, world_size, group_name, *args, **kwargs)

    collective._new_process_group_impl = new_process_group


def disable_gloo_subgroups() -> None:
    """Restores Paddle's own group creation; groups that exist keep working."""
    global _original_new_process_group
    if _original_new_process_group is not None:
        collective._new_process_group_impl = _original_new_process_group
        _original_new_process_group = None


@contextmanager
def gloo_subgroups() -> Iterator[None]:
    """`enable_gloo_subgroups` for the groups made inside."""
    was_enabled = _original_new_process_group is not None
    enable_gloo_subgroups()
    try:
        yield
    finally:
        if not was_enabled:
            disable_gloo_subgroups()


def _make_group_store(parent_store: Any, rank: int, world_size: int, group_id: int) -> Any:
    key = f"paddle_fm3/group_store/{group_id}"
    if rank == 0:
        host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").split(":")[0]
        port = _free_port()
        # NOTE: published before the store is built, because building it blocks until all members connect.
        with store_lock:
            parent_store.set(key, f"{host}:{port}".encode())
    else:
        with store_lock:
            host, port_text = bytes(parent_store.get(key)).decode().split(":")
        port = int(port_text)
    store = core.TCPStore(host, port, rank == 0, world_size, STORE_TIMEOUT_S)
    if rank == 0:
        _see_callers_leave(host, port)
    return store


def settle_job_store() -> None:
    """Does for the job's own store, in the process that holds it, what `_see_callers_leave` says. Once a process."""
    global _is_job_store_settled
    if _is_job_store_settled or not dist.is_initialized() or dist.get_rank() != 0:
        return
    _is_job_store_settled = True
    address = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):  # then the end of a launch is as safe as Paddle's own
        _see_callers_leave(host, int(port))


def _see_callers_leave(host: str, port: int) -> None:
    """Shows this process's store threads what it is like when a caller closes its connection, and when it resets it.

    NOTE: the thread of a store of Paddle 3.3.1 and 2.6.2 outlives the static objects of its process. The first time
    that it meets either, it asks glog whether to log it, under a lock that is destroyed by then; another rank that
    ended in the same moment would abort this one, its work done: exit code -6, no message. What was asked once is not
    asked again.
    """
    for is_reset in (False, True):
        with socket.create_connection((host, port), STORE_TIMEOUT_S) as caller:
            if is_reset:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _free_port() -> int:
    """A port that nobody listens at and that no outgoing connection can take before the store is built.

    NOTE: the system hands out the ports of its ephemeral range to connections, and the ranks make many at this very
    moment; a port that it would offer here can be gone again when the store wants it.
    """
    try:
        lowest_ephemeral = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        lowest_ephemeral = 32768
    below = range(min(LOWEST_PORT, lowest_ephemeral - 1), lowest_ephemeral)
    for port in (*random.SystemRandom().sample(below, min(len(below), 64)), 0):  # 0: whatever the system offers
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise RuntimeError("paddle_fm3: no free port for the store of a gloo group")
