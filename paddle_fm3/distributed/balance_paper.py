# SPDX-License-Identifier: Apache-2.0
"""The paper's own balancing, HCC-IPO (section 3.3), kept so that its tables can be reproduced and compared.

Needs num_chunks divisible by num_ranks, like the paper.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.balance import Balance
from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.distributed.workload import MaskScan

KEY_BLOCK = 128  # unit of the communication estimate
MAX_SWAP_ROUNDS = 100
DEFAULT_EPS = 0.3  # loads may stray this far from the mean during swaps (the paper's runs; its default is 0.05)


def ipo(weights: NDArray[np.int64], num_ranks: int, *, last_phase: int = 3) -> tuple[NDArray[np.int32], int, int]:
    """Iterative partition optimisation: 1 longest first, 2 pairs, 3 triples, each step only if the maximum falls.

    Returns:
        (chunk_ranks, greatest load, times that phase 3 improved on phase 2).
    """
    return planner().balance_paper(np.ascontiguousarray(weights, np.int64), num_ranks, last_phase)


def hcc_ipo(scan: MaskScan, weights: NDArray[np.int64], topology: Topology, *, eps: float = DEFAULT_EPS) -> Balance:
    """IPO over all ranks, machine swaps that lower the greatest traffic, then IPO again inside each machine.

    Raises:
        ValueError: chunks do not divide among the ranks, or nodes differ in size.
    """
    num_chunks, num_ranks = len(weights), topology.num_ranks
    if num_chunks % num_ranks:
        raise ValueError(f"hcc_ipo: {num_chunks} chunks do not divide among {num_ranks} ranks, which the paper needs")
    ranks, _, _ = ipo(weights, num_ranks)
    ranks = np.array(ranks)
    nodes_of_rank = topology.as_array()
    if topology.num_nodes > 1:
        is_needed = needed_key_blocks(scan)
        owner_chunk = np.searchsorted(
            scan.chunk_begins_global, np.arange(is_needed.shape[1]) * KEY_BLOCK, side="right"
        ) - 1  # fmt: skip
        swap_machines(ranks, weights, nodes_of_rank, is_needed, owner_chunk, eps)
        for node in range(topology.num_nodes):
            members = np.nonzero(nodes_of_rank == node)[0]
            chunks = np.nonzero(nodes_of_rank[ranks] == node)[0]
            ranks[chunks] = members[ipo(weights[chunks], len(members))[0]]
    loads = np.bincount(ranks, weights, minlength=num_ranks)
    capacity = np.full(num_ranks, num_chunks // num_ranks, np.int32)
    bound = planner().lower_bound(np.ascontiguousarray(weights, np.int64), capacity, np.ones(num_ranks))
    return Balance(tuple(ranks.tolist()), float(loads.max()), bound)


def needed_key_blocks(scan: MaskScan) -> NDArray[np.bool_]:
    """``[num_chunks, num_key_blocks]``: whether some row of the chunk sees some key of the block."""
    num_chunks, num_blocks = len(scan.chunk_begins_global) - 1, -(-scan.mask.s_k // KEY_BLOCK)
    is_needed = np.zeros((num_chunks, num_blocks), bool)
    for chunk_begin, chunk_end, k_begin, k_end in scan.needs().tolist():
        is_needed[chunk_begin:chunk_end, k_begin // KEY_BLOCK : -(-k_end // KEY_BLOCK)] = True
    return is_needed


def swap_machines(
    ranks: NDArray[np.int32],
    weights: NDArray[np.int64],
    nodes_of_rank: NDArray[np.int32],
    is_needed: NDArray[np.bool_],
    owner_chunk: NDArray[np.int64],
    eps: float,
) -> None:
    """Swaps chunks between the machines with most and least traffic while the greater of the two falls. In place.

    A machine's traffic is the number of key blocks that its chunks need and none of its chunks owns.
    """
    num_ranks, num_nodes = len(nodes_of_rank), int(nodes_of_rank.max()) + 1
    loads = np.bincount(ranks, weights, minlength=num_ranks).astype(np.float64)
    highest, lowest = loads.mean() * (1 + eps), loads.mean() * (1 - eps)
    is_own = owner_chunk[None, :] == np.arange(len(ranks))[:, None]  # [num_chunks, num_key_blocks]
    # 0 and 1 as float32: all pairs of a swap are counted by matrix products.
    needed, own = is_needed.astype(np.float32), is_own.astype(np.float32)
    needed_own = needed * own

    def volumes_after(gives: NDArray[np.int64], takes: NDArray[np.int64]) -> NDArray[np.float32]:
        """``[len(gives), len(takes)]``: traffic of the machine with ``gives`` after exchanging one for the other."""
        is_used = (needed[gives].sum(axis=0) - needed[gives]) > 0  # without the chunk given, by the others
        is_foreign = ~(own[gives].any(axis=0) & ~is_own[gives])
        used_foreign = (is_used & is_foreign).astype(np.float32)
        free_foreign = (~is_used & is_foreign).astype(np.float32)
        # Needed before, plus newly needed, minus the blocks among both that the taken chunk brings along.
        new = needed[takes] - needed_own[takes]
        return used_foreign.sum(axis=1)[:, None] + free_foreign @ new.T - used_foreign @ own[takes].T

    for _ in range(MAX_SWAP_ROUNDS):
        members = [np.nonzero(nodes_of_rank[ranks] == node)[0] for node in range(num_nodes)]
        volumes = [
            int((is_needed[chunks].any(axis=0) & ~is_own[chunks].any(axis=0)).sum()) for chunks in members
        ]  # fmt: skip
        most, least = int(np.argmax(volumes)), int(np.argmin(volumes))
        if most == least:
            return
        # after[x, y]: the greater of the two volumes if x and y changed places
        after = np.maximum(volumes_after(members[most], members[least]), volumes_after(members[least], members[most]).T)
        delta = weights[members[least]][None, :] - weights[members[most]][:, None]
        load_x, load_y = loads[ranks[members[most]]][:, None] + delta, loads[ranks[members[least]]][None, :] - delta
        is_allowed = (lowest <= load_x) & (load_x <= highest) & (lowest <= load_y) & (load_y <= highest)
        after = np.where(is_allowed, after, np.inf)
        at = np.unravel_index(int(np.argmin(after)), after.shape)
        if after[at] >= volumes[most]:
            return
        x, y = int(members[most][at[0]]), int(members[least][at[1]])
        moved = weights[y] - weights[x]
        loads[ranks[x]] += moved
        loads[ranks[y]] -= moved
        ranks[x], ranks[y] = ranks[y], ranks[x]
