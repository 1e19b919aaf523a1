# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a context-parallel group must have in common, compared before any data moves.

Every rank evaluates the same table of records, so all of them raise the same message, or none does.
"""

from __future__ import annotations

from typing import Any

from paddle_fm3.distributed.partition import Partition

Record = dict[str, Any]

# Field of a record -> how the message names it. These must be equal on all ranks.
SHARED_FIELDS = {
    "b": "batch size",
    "h_q": "query heads",
    "h_kv": "key/value heads",
    "d_qk": "query/key head_dim",
    "d_v": "value head_dim",
    "dtype": "dtype",
    "gradients": "what needs gradients",
    "causal": "causal",
    "num_bounds": "bounds a key column",
    "h_mask": "mask heads",
    "softmax_scale": "softmax_scale",
    "deterministic": "deterministic",
    "reduce_dtype": "reduce_dtype",
    "keep_gathered": "keep_gathered",
    "partition": "partition (digest)",
    "strategy": "strategy",
    "topology": "topology",
    "block_mask": "block_mask (digest)",
}


def check_agreement(records: list[Record]) -> None:
    """Raises the same ValueError on every rank if a rank failed its own checks or the ranks disagree.

    Args:
        records: one a rank, in rank order, as exchanged.

    Raises:
        ValueError: names the rank and its own error, or each field that differs with every rank's value.
    """
    failed = [(rank, record["error"]) for rank, record in enumerate(records) if record["error"]]
    if failed:
        said = {error for _, error in failed}
        raise ValueError(
            "flashmask_cp_attention: "
            + "; ".join(sorted(said) if len(failed) == len(records) else [f"rank {r}: {text}" for r, text in failed])
        )
    differing = []
    for field, name in SHARED_FIELDS.items():
        values = [record.get(field) for record in records]
        if any(value != values[0] for value in values):
            differing.append(f"{name} is " + ", ".join(f"{value} on rank {r}" for r, value in enumerate(values)))
    if differing:
        raise ValueError("flashmask_cp_attention: the ranks disagree: " + "; ".join(differing))


def check_lengths(records: list[Record], partition: Partition) -> bool:
    """Checks every rank's row and column counts against the partition.

    Returns:
        True if the bounds cover all s key columns on every rank, False if each rank brought its own columns.

    Raises:
        ValueError: the same on every rank; names the ranks and what they brought.
    """
    if partition.num_ranks != len(records):
        raise ValueError(
            f"flashmask_cp_attention: the partition is for {partition.num_ranks} ranks; the group has {len(records)}"
        )
    rows = [record["s_local"] for record in records]
    wanted = [partition.num_rows(rank) for rank in range(partition.num_ranks)]
    if rows != wanted:
        raise ValueError(
            f"flashmask_cp_attention: local rows by rank are {rows}; the partition of s={partition.s} wants {wanted}"
        )
    columns = [record["s_bounds"] for record in records]
    if all(count in (None, partition.s) for count in columns):
        return True
    if columns == wanted:
        return False
    raise ValueError(
        f"flashmask_cp_attention: startend_row_indices has {columns} key columns by rank; wanted all s={partition.s} "
        f"on every rank, or each rank's own: {wanted}"
    )


def check_whole_masks(records: list[Record], strategy: str) -> None:
    """Raises the same ValueError on every rank unless each brought all key columns: the mask decides the cut."""
    rows = [record["s_local"] for record in records]
    s = sum(rows)
    columns = [record["s_bounds"] for record in records]
    if any(count not in (None, s) for count in columns):
        raise ValueError(
            f"flashmask_cp_attention: startend_row_indices has {columns} key columns by rank; strategy={strategy!r} "
            f"plans from the whole mask: pass all s={s} on every rank (local rows by rank are {rows}, together {s}), "
            "or plan=plan_attention(...)"
        )


def check_same_mask(records: list[Record]) -> None:
    """Raises the same ValueError on every rank if masks given in whole differ in content."""
    digests = [record["mask_digest"] for record in records]
    if any(digest != digests[0] for digest in digests):
        listed = ", ".join(f"{digest} on rank {rank}" for rank, digest in enumerate(digests))
        raise ValueError(
            "flashmask_cp_attention: startend_row_indices (or block_mask) differ in content between ranks; "
            f"digests: {listed}"
        )
