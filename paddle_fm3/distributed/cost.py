# SPDX-License-Identifier: Apache-2.0
"""CostModel: what a tile, a transferred row and a launch cost. The planner weighs and timing.py simulates with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 128  # rows and columns of one tile of work


@dataclass(frozen=True)
class Link:
    """One direction of one rank's link."""

    gb_per_s: float
    latency_us: float

    def __post_init__(self) -> None:
        if not (self.gb_per_s > 0 and self.latency_us >= 0):  # so that NaN is refused
            raise ValueError(f"Link: gb_per_s={self.gb_per_s} must be > 0 and latency_us={self.latency_us} >= 0")

    def us_per_row(self, row_bytes: int) -> float:
        return row_bytes / (self.gb_per_s * 1e3)


@dataclass(frozen=True)
class CostModel:
    """Shapes of one attention layer and rates of one device and its links.

    The defaults are stated figures, not measurements of this project: a Hopper GPU at the paper's kernel rates
    (tables 5-7), 400 Gbit/s a GPU between nodes, NVLink inside. A tile is 128 x 128 of one query head.

    Attributes:
        h_q, h_kv, d: query heads, key/value heads, head size; bytes_per_element of K and V.
        fwd_tflops, bwd_tflops: rate on tiles that hide nothing (4 and 10 * 128^2 * d operations a tile).
        partial_tile_cost: cost of a tile that hides something, relative to one that hides nothing.
        step_overhead_us: launching one more step and merging its result.
        fast, slow: links inside a node and between nodes.
    """

    h_q: int = 64
    h_kv: int = 8
    d: int = 128
    bytes_per_element: int = 2
    fwd_tflops: float = 550.0
    bwd_tflops: float = 500.0
    partial_tile_cost: float = 1.15
    step_overhead_us: float = 15.0
    fast: Link = Link(gb_per_s=300.0, latency_us=5.0)
    slow: Link = Link(gb_per_s=40.0, latency_us=15.0)

    def __post_init__(self) -> None:
        if self.h_q < 1 or self.h_kv < 1 or self.h_q % self.h_kv:
            raise ValueError(f"CostModel: h_kv={self.h_kv} must divide h_q={self.h_q}")
        for name in ("d", "fwd_tflops", "bwd_tflops", "partial_tile_cost"):
            if not getattr(self, name) > 0:  # so that NaN is refused
                raise ValueError(f"CostModel: {name}={getattr(self, name)} must be > 0")

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]], **fields: Any) -> CostModel:
        """Measured kernel rates: fm3's longest ``*_full`` case in bf16 among lines of ``results/attention_gpu*``, the
        newest line of each direction. ``fields`` are CostModel's own.

        Raises:
            ValueError: a direction has no such line.
        """
        rates: dict[str, tuple[tuple[int, str], float]] = {}
        for line in records:
            is_usable = (
                line.get("bench") == "attention" and line.get("impl") == "fm3" and line.get("refcheck") != "fail"
            )
            if not is_usable or line["dtype"] != "bfloat16" or not line["case"].endswith("_full"):
                continue
            found = ((line["s_q"], line["date"]), float(line["tflops_block"]))
            rates[line["phase"]] = max(rates.get(line["phase"], found), found)
        missing = [phase for phase in ("fwd", "bwd") if phase not in rates]
        if missing:
            raise ValueError(f"CostModel.from_records: no fm3 bfloat16 line of a *_full case for {', '.join(missing)}")
        return cls(**({"fwd_tflops": rates["fwd"][1], "bwd_tflops": rates["bwd"][1]} | fields))

    @property
    def row_bytes(self) -> int:
        """K and V of one row, all heads."""
        return 2 * self.h_kv * self.d * self.bytes_per_element

    @property
    def fwd_tile_us(self) -> float:
        """One tile that hides nothing, all query heads, forward."""
        return 4 * TILE * TILE * self.d * self.h_q / (self.fwd_tflops * 1e6)

    @property
    def bwd_tile_us(self) -> float:
        return 10 * TILE * TILE * self.d * self.h_q / (self.bwd_tflops * 1e6)

    def weights(self, h_mask: int) -> tuple[int, int]:
        """Integer cost of a partial and of a full tile of one mask head: the same on every machine."""
        tile_ns = 1e3 * (self.fwd_tile_us + self.bwd_tile_us) / h_mask
        return max(1, round(tile_ns * self.partial_tile_cost)), max(1, round(tile_ns))

    def tiles_us(
        self, num_partial: NDArray[np.int64], num_full: NDArray[np.int64], h_mask: int, *, is_forward: bool
    ) -> NDArray[np.float64]:
        """Time of that many tiles, summed over mask heads; element by element."""
        tile_us = self.fwd_tile_us if is_forward else self.bwd_tile_us
        return np.asarray((num_partial * self.partial_tile_cost + num_full) * tile_us / h_mask, np.float64)


DEFAULT_COST = CostModel()
# A rank that computes on one CPU core and sends over loopback, at the shapes of tools/bench_cp.py (AMD EPYC,
# 2026-11-29): transfers are short beside compute, and a step costs a pass over its queries and their output.
CPU_COST = CostModel(
    h_q=4, h_kv=2, d=64, bytes_per_element=4, fwd_tflops=0.09, bwd_tflops=0.095, step_overhead_us=2000.0,
    fast=Link(gb_per_s=1.0, latency_us=300.0), slow=Link(gb_per_s=1.0, latency_us=300.0),
)  # fmt: skip
