# SPDX-License-Identifier: Apache-2.0
"""The barrier protocol of the Hopper forward, as a model: every actor a coroutine, scheduled at random.

The model follows ops/cuda/sm90_fwd (loader, mask warps, two consumer groups, phases of mbarriers). It checks
that nobody deadlocks, that nobody reads a buffer which holds something else or is being overwritten, and that
each group multiplies each step once, in order. Mutants show that the model can fail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

FIRST, LAST, PARTIAL, END = 1, 2, 4, 8
STAGES, MASK_SLOTS, GROUPS = 2, 4, 2
Tiles = list[list[bool]]  # of each query tile: is the step partial?
StepId = tuple[int, int]


class ProtocolError(Exception):
    """A deadlock or a read of the wrong buffer."""


@dataclass
class Barrier:
    arrivals: int
    left: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.left = self.arrivals

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.left, self.phase = self.arrivals, self.phase + 1

    def wait(self, parity: int) -> Iterator[None]:
        while self.phase % 2 == parity:
            yield


@dataclass
class Ring:
    count: int
    slot: int = 0
    parity: int = 0

    def next(self) -> None:
        self.slot += 1
        if self.slot == self.count:
            self.slot, self.parity = 0, self.parity ^ 1


def barriers(count: int, arrivals: int) -> list[Barrier]:
    return [Barrier(arrivals) for _ in range(count)]


@dataclass
class Machine:
    """Shared memory and barriers of one CTA; `mutant` names a deliberate fault."""

    tiles: Tiles
    mutant: str = ""
    k_full: list[Barrier] = field(default_factory=lambda: barriers(STAGES, 1))
    k_empty: list[Barrier] = field(default_factory=lambda: barriers(STAGES, GROUPS))
    v_full: list[Barrier] = field(default_factory=lambda: barriers(STAGES, 1))
    v_empty: list[Barrier] = field(default_factory=lambda: barriers(STAGES, GROUPS))
    q_full: list[Barrier] = field(default_factory=lambda: barriers(GROUPS, 1))
    q_empty: list[Barrier] = field(default_factory=lambda: barriers(GROUPS, 1))
    mask_full: list[Barrier] = field(default_factory=lambda: barriers(MASK_SLOTS, 1))
    mask_empty: list[Barrier] = field(default_factory=lambda: barriers(MASK_SLOTS, GROUPS))
    turns: list[Barrier] = field(default_factory=lambda: barriers(GROUPS, 2))  # named barriers
    k: list[StepId | None] = field(default_factory=lambda: [None] * STAGES)
    v: list[StepId | None] = field(default_factory=lambda: [None] * STAGES)
    step: list[tuple[int, StepId] | None] = field(default_factory=lambda: [None] * STAGES)
    q: list[int | None] = field(default_factory=lambda: [None] * GROUPS)
    mask: list[StepId | None] = field(default_factory=lambda: [None] * MASK_SLOTS)
    done: list[list[StepId]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])
    written: list[list[int]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])

    def check(self, found: object, wanted: object) -> None:
        if found != wanted:
            raise ProtocolError(f"a buffer holds {found}, {wanted} was to be read")

    def loader(self) -> Iterator[None]:
        k_pos, v_pos, q_parity = Ring(STAGES), Ring(STAGES), 0
        pending: StepId | None = None

        def load_pending_v() -> Iterator[None]:
            yield from self.v_empty[v_pos.slot].wait(v_pos.parity ^ 1)
            self.v[v_pos.slot] = None
            yield
            self.v[v_pos.slot] = pending
            self.v_full[v_pos.slot].arrive()
            v_pos.next()

        for tile_idx, tile in enumerate(self.tiles):
            for step_idx, is_partial in enumerate(tile):
                yield from self.k_empty[k_pos.slot].wait(k_pos.parity ^ 1)
                self.k[k_pos.slot] = None
                yield
                is_last = step_idx == len(tile) - 1
                flags = (FIRST if step_idx == 0 else 0) | (LAST if is_last else 0) | (PARTIAL if is_partial else 0)
                self.step[k_pos.slot] = (flags, (tile_idx, step_idx))
                self.k[k_pos.slot] = (tile_idx, step_idx)
                self.k_full[k_pos.slot].arrive()
                k_pos.next()
                if pending is not None:
                    yield from load_pending_v()
                pending = (tile_idx, step_idx)
                if step_idx == 0:
                    yield from self.load_q(tile_idx, q_parity)
                    q_parity ^= 1
        yield from self.k_empty[k_pos.slot].wait(k_pos.parity ^ 1)
        self.step[k_pos.slot] = (END, (-1, -1))
        self.k_full[k_pos.slot].arrive()
        if pending is not None:
            yield from load_pending_v()

    def load_q(self, tile_idx: int, parity: int) -> Iterator[None]:
        for group in range(GROUPS):
            yield from self.q_empty[group].wait(parity ^ 1)
            self.q[group] = None
            yield
            self.q[group] = tile_idx
            self.q_full[group].arrive()

    def masker(self) -> Iterator[None]:
        pos = Ring(MASK_SLOTS)
        for tile_idx, tile in enumerate(self.tiles):
            for step_idx, is_partial in enumerate(tile):
                if not is_partial:
                    continue
                if self.mutant != "mask not awaited":
                    yield from self.mask_empty[pos.slot].wait(pos.parity ^ 1)
                self.mask[pos.slot] = None
                yield
                self.mask[pos.slot] = (tile_idx, step_idx)
                self.mask_full[pos.slot].arrive()
                pos.next()

    def consumer(self, group: int) -> Iterator[None]:
        k_pos, v_pos, mask_pos, q_parity, num_turns = Ring(STAGES), Ring(STAGES), Ring(MASK_SLOTS), 0, 0

        def wait_step() -> Iterator[None]:
            yield from self.k_full[k_pos.slot].wait(k_pos.parity)

        def multiply_qk(step: StepId) -> Iterator[None]:
            self.check(self.q[group], step[0])
            yield
            self.check((self.k[k_pos.slot], self.q[group]), (step, step[0]))

        def release_k() -> None:
            self.k_empty[k_pos.slot].arrive()
            k_pos.next()

        def finish_qk(flags: int, step: StepId) -> Iterator[None]:
            if flags & LAST:
                self.q_empty[group].arrive()
            if flags & PARTIAL:
                yield from self.mask_full[mask_pos.slot].wait(mask_pos.parity)
                yield
                self.check(self.mask[mask_pos.slot], step)
                self.mask_empty[mask_pos.slot].arrive()
                mask_pos.next()

        def multiply_pv(step: StepId) -> Iterator[None]:
            yield from self.v_full[v_pos.slot].wait(v_pos.parity)
            self.check(self.v[v_pos.slot], step)
            self.done[group].append(step)
            if self.mutant == "v released early":
                self.v_empty[v_pos.slot].arrive()

        def finish_pv(step: StepId) -> Iterator[None]:
            yield
            self.check(self.v[v_pos.slot], step)
            if self.mutant != "v released early":
                self.v_empty[v_pos.slot].arrive()
            v_pos.next()

        if group == 1:
            self.turns[0].arrive()
        step: StepId | None = None
        while True:
            yield from wait_step()
            flags, next_step = self.step[k_pos.slot] or (0, (-2, -2))
            if flags & END:
                break
            if flags & FIRST:
                yield from self.q_full[group].wait(q_parity)
                q_parity ^= 1
            if step is None:  # the kernel's first product stands alone
                yield from multiply_qk(next_step)
                release_k()
                yield from finish_qk(flags, next_step)
                step = next_step
                continue
            self.turns[group].arrive()
            yield from self.turns[group].wait(num_turns % 2)
            num_turns += 1
            if self.mutant == "k released early":
                self.k_empty[k_pos.slot].arrive()
            yield from multiply_qk(next_step)
            yield from multiply_pv(step)
            self.turns[1 - group].arrive()
            if flags & (FIRST | LAST | PARTIAL):
                k_pos.next() if self.mutant == "k released early" else release_k()
                yield from finish_qk(flags, next_step)
                yield from finish_pv(step)
                if flags & FIRST:
                    self.written[group].append(step[0])
            else:  # the reference kept: Q and K stay until the sums were looked at
                yield from finish_pv(step)
                self.check((self.k[k_pos.slot], self.q[group]), (next_step, next_step[0]))
                k_pos.next() if self.mutant == "k released early" else release_k()
            step = next_step
        if step is not None:
            yield from multiply_pv(step)
            self.written[group].append(step[0])
        if group == 0:
            self.turns[0].arrive()

    def state(self) -> list[tuple[int, int]]:
        groups = (self.k_full, self.k_empty, self.v_full, self.v_empty, self.q_full, self.q_empty,
                  self.mask_full, self.mask_empty, self.turns)  # fmt: skip
        return [(barrier.phase, barrier.left) for group in groups for barrier in group]

    def run(self, rng: random.Random) -> None:
        actors = {"loader": self.loader(), "masker": self.masker(), "0": self.consumer(0), "1": self.consumer(1)}
        speed = {name: rng.random() + 0.05 for name in actors}
        idle, before = 0, self.state()
        while actors:
            name = rng.choices(list(actors), [speed[name] for name in actors])[0]
            try:
                next(actors[name])
            except StopIteration:
                del actors[name]
                idle = 0
                continue
            after = self.state()
            idle = idle + 1 if after == before else 0
            before = after
            if idle > 2000:
                raise ProtocolError(f"deadlock: {sorted(actors)} wait for each other")
        wanted = [(tile_idx, step_idx) for tile_idx, tile in enumerate(self.tiles) for step_idx in range(len(tile))]
        for group in range(GROUPS):
            self.check(self.done[group], wanted)
            self.check(self.written[group], list(range(len(self.tiles))))


def random_tiles(rng: random.Random) -> Tiles:
    return [[rng.random() < 0.5 for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(0, 6))]


def test_every_interleaving_drawn_is_safe() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        Machine(random_tiles(rng)).run(rng)


@pytest.mark.parametrize("mutant", ["k released early", "v released early", "mask not awaited"])
def test_the_model_notices(mutant: str) -> None:
    with pytest.raises(ProtocolError):
        for seed in range(400):
            rng = random.Random(seed)
            Machine(random_tiles(rng), mutant).run(rng)
