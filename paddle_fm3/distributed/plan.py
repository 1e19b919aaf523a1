# SPDX-License-Identifier: Apache-2.0
"""CpPlan: everything about one context-parallel attention that is decided before a byte moves. A value.

Every rank computes the same CpPlan from the same mask (`plan_hash` proves it) and takes its RankPlan from it.

Key buffer. Rank r computes with the key rows of its *key buffer*: first its own rows in local order, then the
rows it receives, stage by stage. `stage_rows[r, g]` is the buffer row where stage g begins; stage 0 is the own
rows. All `k_begin`/`k_end`/`*_row` below without `_global` are buffer rows.

Forward. For g = 1..num_stages, transfers of `gather` with stage g bring rows into stage g of the buffers: first
those of hop 0 (owner to a rank), then those of hop 1 (relayed inside a node by the rank that hop 0 of the same
stage brought them to). Stages do not depend on each other, except in a ring, where stage g relays stage g - 1.
Step i waits for stage `fwd_steps[i].stage` and computes with its key rows; results are merged by lse.

Backward. Steps likewise (gather again in the steps' order of stages, or keep the buffers): half of the own rows,
the stages from far to near (in a ring in order), the other half. dK/dV of a step's rows are partial sums.
Transfers of `reduce` with stage i (here: the step's index) may leave once the sender has finished step i and has
added what it received for these rows in earlier (stage, hop)s; the receiver adds them to its own partial sum of
the rows at `dst_row`. After all, the first rows of each buffer (its own) hold the full dK and dV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_fm3.distributed.localize import localize_columns
from paddle_fm3.distributed.native import planner
from paddle_fm3.distributed.partition import Partition
from paddle_fm3.distributed.rank_plan import TRANSFER_FIELDS, Int32Array, RankPlan, Step, Transfer
from paddle_fm3.distributed.strategy import Strategy
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.mask.column_mask import BLOCK_MASK_TILE, ColumnMask

_ARRAYS = ("range_begins", "key_ranges", "stage_rows", "gather", "reduce", "chunk_tiles", "chunk_weights")
_MAGIC = b"FM3PLAN2"


@dataclass(frozen=True, eq=False)
class CpPlan:
    """See the module's docstring.

    Attributes:
        partition, topology, strategy: what it was made for.
        num_stages: gather stages, the same for every rank (>= 1).
        range_begins: int32 ``[num_ranks + 1]`` into key_ranges.
        key_ranges: int32 ``[n, 2]`` (k_begin_global, num_rows), each rank's buffer in order.
        stage_rows: int32 ``[num_ranks, num_stages + 2]``.
        gather, reduce: int32 ``[n, 8]``, columns TRANSFER_FIELDS, in the order (stage, hop, src, dst, dst_row).
        chunk_tiles: int64 ``[num_chunks, 2]`` tiles visited, and of these tiles that hide nothing.
        chunk_weights: int64 ``[num_chunks]`` what the balance was made with.
        lower_bound: of the greatest rank load, over all assignments of these chunks.
        speeds: relative speed of each rank, or None for equal ones.
        mask_digest: `mask_digest` of the mask it was made for; "" if it is bound to none.
    """

    partition: Partition
    topology: Topology
    strategy: Strategy
    num_stages: int
    range_begins: Int32Array
    key_ranges: Int32Array
    stage_rows: Int32Array
    gather: Int32Array
    reduce: Int32Array
    chunk_tiles: NDArray[np.int64]
    chunk_weights: NDArray[np.int64]
    lower_bound: float
    speeds: tuple[float, ...] | None = None
    mask_digest: str = ""

    def __post_init__(self) -> None:
        num_ranks, num_chunks = self.partition.num_ranks, self.partition.num_chunks
        if self.topology.num_ranks != num_ranks:
            raise ValueError(f"CpPlan: topology has {self.topology.num_ranks} ranks, partition {num_ranks}")
        shapes = {
            "range_begins": (num_ranks + 1,),
            "key_ranges": (int(self.range_begins[-1]), 2),
            "stage_rows": (num_ranks, self.num_stages + 2),
            "gather": (len(self.gather), len(TRANSFER_FIELDS)),
            "reduce": (len(self.reduce), len(TRANSFER_FIELDS)),
            "chunk_tiles": (num_chunks, 2),
            "chunk_weights": (num_chunks,),
        }
        for name, shape in shapes.items():
            array = getattr(self, name)
            dtype = np.int64 if name.startswith("chunk") else np.int32
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"CpPlan: {name} is {array.dtype}{list(array.shape)}; expected {dtype.__name__}{list(shape)}"
                )
            array.setflags(write=False)

    # --- identity --------------------------------------------------------------------------------

    @cached_property
    def plan_hash(self) -> str:
        """32 hex digits; equal on every rank iff all decided the same."""
        head = json.dumps(self._head(), sort_keys=True).encode()
        return planner().content_hash([head, *(getattr(self, name) for name in _ARRAYS)]).hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpPlan) and self.plan_hash == other.plan_hash

    def __hash__(self) -> int:
        return int(self.plan_hash[:16], 16)

    def __repr__(self) -> str:
        return (
            f"CpPlan({self.strategy.name}, s={self.partition.s}, ranks={self.num_ranks}, "
            f"nodes={self.topology.num_nodes}, "
            f"chunks={self.partition.num_chunks}, stages={self.num_stages}, imbalance={self.imbalance:.4f}, "
            f"gap={self.gap:.4f}, slow_rows={self.slow_rows}, fast_rows={self.fast_rows}, "
            f"peak_k_rows={self.peak_k_rows}, hash={self.plan_hash[:8]})"
        )

    def _head(self) -> dict[str, Any]:
        return {
            "partition": asdict(self.partition),
            "topology": asdict(self.topology),
            "strategy": asdict(self.strategy),
            "num_stages": self.num_stages,
            "lower_bound": self.lower_bound,
            "speeds": self.speeds,
            "mask_digest": self.mask_digest,
        }

    def check_mask(self, digest: str, who: str = "CpPlan") -> None:
        """Raises ValueError if the plan was made for another mask than the one with this `mask_digest`."""
        if self.mask_digest not in ("", digest):
            raise ValueError(
                f"{who}: the plan ({self.strategy.name}, s={self.partition.s}, {self.num_ranks} ranks, hash "
                f"{self.plan_hash[:8]}) was made for the mask with digest {self.mask_digest}; this call has the mask "
                f"with digest {digest}. Plan each mask; plan_attention(partition=...) keeps the rows where they are"
            )

    # --- figures ---------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return self.partition.num_ranks

    @cached_property
    def rank_loads(self) -> NDArray[np.float64]:
        """Finish of each rank in the balance's units: sum of its chunks' weights over its speed."""
        loads = np.bincount(self.partition.chunk_ranks, self.chunk_weights, minlength=self.num_ranks)
        return loads / (1.0 if self.speeds is None else np.asarray(self.speeds))

    @property
    def imbalance(self) -> float:
        """Latest rank over the mean, minus 1."""
        mean = self.rank_loads.mean()
        return float(self.rank_loads.max() / mean - 1) if mean > 0 else 0.0

    @property
    def gap(self) -> float:
        """Latest rank over the lower bound, minus 1: 0 proves the balance optimal."""
        return float(self.rank_loads.max() / self.lower_bound - 1) if self.lower_bound > 0 else 0.0

    @cached_property
    def _is_slow(self) -> NDArray[np.bool_]:
        nodes = self.topology.as_array()
        return nodes[self.gather[:, 2]] != nodes[self.gather[:, 3]]

    @property
    def slow_rows(self) -> int:
        """K/V rows that the gather moves between nodes, over all ranks. The reduction moves as many back."""
        return int(self.gather[self._is_slow, 5].sum())

    @property
    def fast_rows(self) -> int:
        """K/V rows that the gather moves inside nodes."""
        return int(self.gather[~self._is_slow, 5].sum())

    @property
    def peak_k_rows(self) -> int:
        """Rows of the largest key buffer."""
        return int(self.stage_rows[:, -1].max())

    # --- per rank --------------------------------------------------------------------------------

    def fwd_steps(self, rank: int) -> tuple[Step, ...]:
        rows = self.stage_rows[rank].tolist()
        if not self.strategy.is_overlapped:
            return (Step(self.num_stages, 0, rows[-1]),)
        return tuple(Step(stage, rows[stage], rows[stage + 1]) for stage in range(self.num_stages + 1))

    def bwd_steps(self, rank: int) -> tuple[Step, ...]:
        """Own rows come in two steps: the first hides the first gather, the last hides the last reduction. Between
        them far stages come first: their gradients have the longest way."""
        rows = self.stage_rows[rank].tolist()
        if not self.strategy.is_overlapped:
            return (Step(self.num_stages, 0, rows[-1]),)
        has_remote = rows[-1] > rows[1]
        head = rows[1] if not has_remote else -(-rows[1] // (2 * BLOCK_MASK_TILE)) * BLOCK_MASK_TILE
        head = min(head, rows[1])
        remote = [Step(stage, rows[stage], rows[stage + 1]) for stage in self.bwd_stages()]
        return (Step(0, 0, head), *remote, Step(0, head, rows[1]))

    def bwd_stages(self) -> range:
        """Gather stages in the order in which backward needs them."""
        if self.strategy.move == "ring":
            return range(1, self.num_stages + 1)
        return range(self.num_stages, 0, -1)

    def key_ranges_of(self, rank: int) -> Int32Array:
        """int32 ``[n, 2]`` (k_begin_global, num_rows) of the rank's buffer."""
        return self.key_ranges[self.range_begins[rank] : self.range_begins[rank + 1]]

    def transfers(self, direction: str = "gather") -> Iterator[Transfer]:
        """The table "gather" or "reduce", row by row."""
        for row in getattr(self, direction).tolist():
            yield Transfer(*row)

    def rank_plan(self, rank: int, mask_global: ColumnMask) -> RankPlan:
        """What one rank executes, with the mask of its rows over its key buffer.

        Raises:
            ValueError: the rank does not exist, or the mask does not fit the partition or cannot be localised.
        """
        ranges = self.key_ranges_of(rank) if 0 <= rank < self.num_ranks else None
        if ranges is None:
            raise ValueError(f"CpPlan.rank_plan: rank={rank} is not in [0, {self.num_ranks})")
        return RankPlan(
            rank=rank,
            num_q_rows=int(self.stage_rows[rank, 1]),
            num_k_rows=int(self.stage_rows[rank, -1]),
            key_ranges=tuple((begin, rows) for begin, rows in ranges.tolist()),
            stage_rows=tuple(self.stage_rows[rank].tolist()),
            fwd_steps=self.fwd_steps(rank),
            bwd_steps=self.bwd_steps(rank),
            gather_sends=self.gather[self.gather[:, 2] == rank],
            gather_recvs=self.gather[self.gather[:, 3] == rank],
            reduce_sends=self.reduce[self.reduce[:, 2] == rank],
            reduce_recvs=self.reduce[self.reduce[:, 3] == rank],
            mask=localize_columns(mask_global, self.partition, rank, ranges),
        )

    # --- bytes and JSON --------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The plan as bytes: a JSON head, then the arrays; no pickle, little-endian."""
        head = self._head() | {
            "plan_hash": self.plan_hash,
            "shapes": {n: list(getattr(self, n).shape) for n in _ARRAYS},
        }
        encoded = json.dumps(head).encode()
        return b"".join(
            [_MAGIC, len(encoded).to_bytes(8, "little"), encoded]
            + [np.ascontiguousarray(getattr(self, name)).tobytes() for name in _ARRAYS]
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> CpPlan:
        """Raises ValueError if the bytes are not a plan or were damaged."""
        if data[:8] != _MAGIC:
            raise ValueError(f"CpPlan.from_bytes: starts with {data[:8]!r}, not {_MAGIC!r}")
        head_end = 16 + int.from_bytes(data[8:16], "little")
        with _damage_is_value_error(f"CpPlan.from_bytes: {len(data)} bytes"):
            head = json.loads(data[16:head_end])
            at, arrays = head_end, {}
            for name in _ARRAYS:
                dtype = np.dtype(np.int64 if name.startswith("chunk") else np.int32)
                shape = head["shapes"][name]
                count = int(np.prod(shape))
                arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape).copy()
                at += count * dtype.itemsize
            return cls._from_parts(head, arrays)

    def to_json(self) -> str:
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return json.dumps(self._head() | {"plan_hash": self.plan_hash, "arrays": arrays})

    @classmethod
    def from_json(cls, text: str) -> CpPlan:
        """Raises ValueError if the text is not a plan or was changed."""
        with _damage_is_value_error(f"CpPlan.from_json: {len(text)} characters"):
            head = json.loads(text)
            widths = {"key_ranges": 2, "gather": 8, "reduce": 8, "chunk_tiles": 2}
            arrays = {}
            for name in _ARRAYS:
                array = np.asarray(head["arrays"][name], np.int64 if name.startswith("chunk") else np.int32)
                arrays[name] = array.reshape(-1, widths[name]) if name in widths else array
            return cls._from_parts(head, arrays)

    @classmethod
    def _from_parts(cls, head: dict[str, Any], arrays: dict[str, Any]) -> CpPlan:
        def tuples(values: dict[str, Any]) -> dict[str, Any]:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}

        plan = cls(
            partition=Partition(**tuples(head["partition"])),
            topology=Topology(**tuples(head["topology"])),
            strategy=Strategy(**head["strategy"]),
            num_stages=head["num_stages"],
            lower_bound=head["lower_bound"],
            speeds=None if head["speeds"] is None else tuple(head["speeds"]),
            mask_digest=head["mask_digest"],
            **arrays,
        )
        if plan.plan_hash != head["plan_hash"]:
            raise ValueError(
                f"CpPlan: content hashes to {plan.plan_hash}, but it says {head['plan_hash']}: damaged or changed"
            )
        return plan


@contextmanager
def _damage_is_value_error(who: str) -> Iterator[None]:
    """Whatever goes wrong in reading a plan has one cause for the reader: these are not the plan's bytes."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{who} are no plan, or damaged: {type(error).__name__}: {error}") from error


def mask_digest(mask: ColumnMask) -> str:
    """32 hex digits that are equal for masks of equal content (and, but for chance, only for these).

    Of what is stored: the causal rule written out as bounds is the same mask to attention, and another content.
    """
    head = repr((mask.lt_begin.shape, mask.s_q, mask.is_causal, mask.block_mask is not None)).encode()
    bounds = [mask.lt_begin, mask.lt_end, mask.ut_begin, mask.ut_end]
    extra = [] if mask.block_mask is None else [mask.block_mask]
    arrays = [bound if bound.flags.c_contiguous else bound.copy() for bound in bounds + extra]
    return planner().content_hash([head, *arrays]).hex()
