# SPDX-License-Identifier: Apache-2.0
"""Random masks and partitions for the planner's tests, and dense tables from the definition."""

from __future__ import annotations

import numpy as np

from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask.column_mask import ColumnMask


def dense_visible(mask: ColumnMask) -> np.ndarray:
    """True where visible, [b, h_mask, s_q, s_k], straight from ColumnMask's docstring."""
    q_idx = np.arange(mask.s_q)[:, None]
    k_idx = np.arange(mask.s_k)[None, :]
    lt_begin, lt_end, ut_begin, ut_end = (
        bound[:, :, None, :] for bound in (mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end)
    )
    hidden = ((lt_begin <= q_idx) & (q_idx < lt_end)) | ((ut_begin <= q_idx) & (q_idx < ut_end))
    if mask.is_causal:
        hidden = hidden | (k_idx > q_idx + (mask.s_k - mask.s_q))
    if mask.block_mask is not None:
        hidden = hidden | (mask.block_mask[:, :, q_idx // 128, k_idx // 128] == 0)
    return ~hidden


def random_mask(rng: np.random.Generator, s: int, *, b: int = 1, h_mask: int = 1) -> ColumnMask:
    """Any bound form; noisy, smooth, document-like or constant columns; empty, overlapping and full intervals."""
    is_causal, num_bounds = [(True, 1), (True, 2), (False, 2), (False, 4)][rng.integers(4)]
    kind = rng.integers(4)
    shape = (b, h_mask, s, num_bounds)
    if kind == 0:  # noise
        bounds = rng.integers(-2, s + 3, shape)
    elif kind == 1:  # smooth: bounds move with the column
        bounds = np.arange(s)[None, None, :, None] + rng.integers(-s, s + 1, (b, h_mask, 1, num_bounds))
    elif kind == 2:  # documents
        cuts = np.unique(np.concatenate([[0, s], rng.integers(0, s + 1, rng.integers(0, 6))]))
        document = np.searchsorted(cuts, np.arange(s), side="right") - 1
        begin, end = cuts[document], cuts[document + 1]
        columns = {
            1: [end],
            2: [end, np.full(s, s)] if is_causal else [end, begin],
            4: [end, np.full(s, s), 0 * end, begin],
        }
        bounds = np.broadcast_to(np.stack(columns[num_bounds], -1), shape)
    else:  # a few constant runs
        bounds = np.repeat(rng.integers(0, s + 1, (b, h_mask, 3, num_bounds)), -(-s // 3), axis=2)[:, :, :s]
    return ColumnMask.from_bounds(np.ascontiguousarray(bounds, np.int32), is_causal=is_causal, s_q=s)


def random_partition(rng: np.random.Generator, s: int, num_ranks: int) -> Partition:
    """Unequal or equal chunks with any owners; some ranks may own nothing."""
    if rng.random() < 0.5:
        length = 2 ** int(rng.integers(0, 6)) if rng.random() < 0.7 else int(rng.integers(1, s + 1))
        begins = [*range(0, s, length), s]
    else:
        cuts = rng.choice(np.arange(1, s), min(s - 1, int(rng.integers(0, 8))), replace=False) if s > 1 else []
        begins = [0, *sorted(map(int, cuts)), s]
    owners = rng.integers(0, num_ranks, len(begins) - 1)
    return Partition(tuple(begins), tuple(map(int, owners)), num_ranks)


def random_topology(rng: np.random.Generator, num_ranks: int) -> Topology:
    """Nodes of any sizes, members not necessarily consecutive."""
    nodes = rng.integers(0, rng.integers(1, num_ranks + 1), num_ranks)
    return Topology(tuple(np.unique(nodes, return_inverse=True)[1].tolist()))
