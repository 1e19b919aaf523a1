# SPDX-License-Identifier: Apache-2.0
"""The barrier protocol of the Hopper forward, as a model: every actor a coroutine, scheduled at random.

The model follows ops/cuda/sm90_fwd (loader, mask warps, two consumer groups, phases of mbarriers), for one CTA
and for a pair of CTAs which copy K and V for each other, also one that parts behind its last tile. What arrives at the
other CTA's barriers takes its time. It checks that nobody deadlocks, that nobody reads a buffer which holds something else or is being overwritten, and that each
group multiplies each step once, in order. Mutants show that the model can fail.
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
    """Shared memory and barriers of one CTA; `mutant` names a deliberate fault.

    K and V are copied in as many parts as the team has CTAs (`join`), each by another CTA's loader.
    """

    tiles: Tiles
    mutant: str = ""
    v_stages: int = STAGES  # with one, V has a barrier of its own to be overwritten
    rank: int = 0
    team: list[Machine] = field(default_factory=list)
    k_full: list[Barrier] = field(default_factory=list)
    k_empty: list[Barrier] = field(default_factory=list)
    v_full: list[Barrier] = field(default_factory=list)
    v_empty: list[Barrier] = field(default_factory=list)
    turns: list[Barrier] = field(default_factory=lambda: barriers(GROUPS, 2))  # named barriers
    q_full: list[Barrier] = field(default_factory=list)
    q_empty: list[Barrier] = field(default_factory=list)
    mask_full: list[Barrier] = field(default_factory=lambda: barriers(MASK_SLOTS, 1))
    mask_empty: list[Barrier] = field(default_factory=lambda: barriers(MASK_SLOTS, GROUPS))
    k: list[list[StepId | None]] = field(default_factory=list)  # [stage][part]
    v: list[list[StepId | None]] = field(default_factory=list)
    step: list[tuple[int, StepId] | None] = field(default_factory=lambda: [None] * STAGES)
    q: list[tuple[int, int] | None] = field(default_factory=list)  # (tile, group)
    mask: list[StepId | None] = field(default_factory=lambda: [None] * MASK_SLOTS)
    done: list[list[StepId]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])
    written: list[list[int]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])
    under_way: list[tuple[str, int]] = field(
        default_factory=list
    )  # the other CTA's arrivals: barriers' names and slots

    def join(self, team: list[Machine], num_q_slots: int) -> None:
        """Makes the machine a member of `team`: one CTA alone or two. num_q_slots: kQSlots."""
        parts = len(team)
        self.team, self.rank = team, team.index(self)
        self.k_full, self.v_full = barriers(STAGES, 1 + parts), barriers(self.v_stages, 1 + parts)
        empty = 1 if self.mutant == "other cta not awaited" else parts
        self.k_empty, self.v_empty = barriers(STAGES, GROUPS * empty), barriers(self.v_stages, GROUPS * empty)
        self.q_full, self.q_empty = barriers(num_q_slots, 1), barriers(num_q_slots, 1)
        self.q = [None] * num_q_slots
        self.k = [[None] * parts for _ in range(STAGES)]
        self.v = [[None] * parts for _ in range(self.v_stages)]

    def part(self, tiles: Tiles) -> None:
        """restart_barriers: the machine goes on alone, with other tiles. Named barriers are not made anew, so that nothing
        may be left in them; they have no parity."""
        self.check_result()
        for turn in self.turns:
            self.check(turn.left, turn.arrivals)
            turn.phase = 0
        self.tiles, self.done, self.written = tiles, [[] for _ in range(GROUPS)], [[] for _ in range(GROUPS)]
        if self.mutant != "old barriers":
            self.mask_full, self.mask_empty = barriers(MASK_SLOTS, 1), barriers(MASK_SLOTS, GROUPS)
        self.join([self], len(self.q))

    def whole(self, step: StepId) -> list[StepId]:
        return [step] * len(self.team)

    def check(self, found: object, wanted: object) -> None:
        if found != wanted:
            raise ProtocolError(f"a buffer holds {found}, {wanted} was to be read")

    def loader(self) -> Iterator[None]:
        k_pos, v_pos, q_pos = Ring(STAGES), Ring(self.v_stages), Ring(len(self.q))
        pending: StepId | None = None
        next_q = (0, 0)  # (tile, group)

        def load_pending_v() -> Iterator[None]:
            if self.v_stages == 1 and self.mutant != "v not awaited":
                yield from self.v_empty[v_pos.slot].wait(v_pos.parity ^ 1)
            self.v_full[v_pos.slot].arrive()  # with the bytes to expect
            yield
            for member in self.team:
                member.v[v_pos.slot][self.rank] = None
            yield
            for member in self.team:
                member.v[v_pos.slot][self.rank] = pending
                member.v_full[v_pos.slot].arrive()
            v_pos.next()

        def load_q() -> Iterator[None]:
            nonlocal next_q
            if self.mutant != "q not awaited":
                yield from self.q_empty[q_pos.slot].wait(q_pos.parity ^ 1)
            self.q[q_pos.slot] = None
            yield
            self.q[q_pos.slot] = next_q
            self.q_full[q_pos.slot].arrive()
            q_pos.next()
            next_q = (next_q[0], 1) if next_q[1] == 0 else (next_q[0] + 1, 0)

        def load_q_ahead() -> Iterator[None]:
            """With the claim of the next tile: where there is a slot more than groups, the first group's."""
            if len(self.q) > GROUPS and next_q[0] < len(self.tiles):
                yield from load_q()

        yield from load_q_ahead()
        for tile_idx, tile in enumerate(self.tiles):
            for step_idx, is_partial in enumerate(tile):
                if pending is not None and self.mutant == "v before k":
                    yield from load_pending_v()
                    pending = None
                yield from self.k_empty[k_pos.slot].wait(k_pos.parity ^ 1)
                is_last = step_idx == len(tile) - 1
                flags = (FIRST if step_idx == 0 else 0) | (LAST if is_last else 0) | (PARTIAL if is_partial else 0)
                self.step[k_pos.slot] = (flags, (tile_idx, step_idx))
                self.k_full[k_pos.slot].arrive()  # with the bytes to expect
                yield
                for member in self.team:
                    member.k[k_pos.slot][self.rank] = None
                yield
                for member in self.team:
                    member.k[k_pos.slot][self.rank] = (tile_idx, step_idx)
                    member.k_full[k_pos.slot].arrive()
                k_pos.next()
                if pending is not None:
                    yield from load_pending_v()
                pending = (tile_idx, step_idx)
                while step_idx == 0 and next_q[0] == tile_idx:
                    yield from load_q()
                if step_idx == 2 or (is_last and step_idx < 2):  # the last phase of a claim
                    yield from load_q_ahead()
        yield from self.k_empty[k_pos.slot].wait(k_pos.parity ^ 1)
        self.step[k_pos.slot] = (END, (-1, -1))
        for _ in range(1 + len(self.team)):  # a plain arrival: no bytes are expected
            self.k_full[k_pos.slot].arrive()
        if pending is not None:
            yield from load_pending_v()

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
        k_pos, v_pos, mask_pos, next_q, num_turns = (
            Ring(STAGES),
            Ring(self.v_stages),
            Ring(MASK_SLOTS),
            Ring(len(self.q)),
            0,
        )
        q_slot = -1
        if group == 1:
            next_q.next()

        def wait_q() -> Iterator[None]:
            nonlocal q_slot
            yield from self.q_full[next_q.slot].wait(next_q.parity)
            q_slot = next_q.slot
            next_q.next()
            next_q.next()

        def check_qk(step: StepId) -> None:
            self.check((self.k[k_pos.slot], self.q[q_slot]), (self.whole(step), (step[0], group)))

        def multiply_qk(step: StepId) -> Iterator[None]:
            check_qk(step)
            yield
            check_qk(step)

        def read_mask(flags: int, step: StepId) -> Iterator[None]:
            if flags & PARTIAL:
                yield from self.mask_full[mask_pos.slot].wait(mask_pos.parity)
                yield
                self.check(self.mask[mask_pos.slot], step)

        def release_qk(flags: int) -> None:
            if self.mutant != "k released early":
                self.release("k_empty", k_pos.slot)
            k_pos.next()
            if flags & LAST:
                self.q_empty[q_slot].arrive()
            if flags & PARTIAL:
                self.mask_empty[mask_pos.slot].arrive()
                mask_pos.next()

        def wait_step(slot: int, parity: int) -> Iterator[None]:
            nonlocal flags, next_step
            yield from self.k_full[slot].wait(parity)
            held = self.step[slot]
            if held is None:
                raise ProtocolError("a step is read that was not written")
            flags, next_step = held

        def multiply_pv(step: StepId) -> Iterator[None]:
            yield from self.v_full[v_pos.slot].wait(v_pos.parity)
            self.check(self.v[v_pos.slot], self.whole(step))
            self.done[group].append(step)

        def finish_pv(step: StepId) -> Iterator[None]:
            yield
            self.check(self.v[v_pos.slot], self.whole(step))
            if self.v_stages == 1:
                self.release("v_empty", v_pos.slot)
            v_pos.next()

        if group == 1:
            self.turns[0].arrive()
        step: StepId | None = None
        flags, next_step = 0, (-1, -1)
        yield from wait_step(k_pos.slot, k_pos.parity)
        while not flags & END:
            if flags & FIRST:
                yield from wait_q()
            if step is not None:  # the kernel's first product stands alone
                self.turns[group].arrive()
                yield from self.turns[group].wait(num_turns % 2)
                num_turns += 1
            if self.mutant == "k released early":
                self.release("k_empty", k_pos.slot)
            yield from multiply_qk(next_step)
            if step is None:
                yield from read_mask(flags, next_step)
                now, step, after = flags, next_step, Ring(STAGES, k_pos.slot, k_pos.parity)
                after.next()
                yield from wait_step(after.slot, after.parity)
                release_qk(now)
                continue
            yield from multiply_pv(step)
            self.turns[1 - group].arrive()
            yield from read_mask(flags, next_step)
            yield from finish_pv(step)
            if flags & FIRST:
                self.written[group].append(step[0])
            now, step, after = flags, next_step, Ring(STAGES, k_pos.slot, k_pos.parity)
            after.next()
            yield from wait_step(after.slot, after.parity)  # before K of this step is given back
            check_qk(step)  # Q, K and the mask stay until the sums were looked at
            if now & PARTIAL:
                self.check(self.mask[mask_pos.slot], step)
            release_qk(now)
        if step is not None:
            yield from multiply_pv(step)
            self.written[group].append(step[0])
        if group == 0:
            self.turns[0].arrive()

    def release(self, name: str, slot: int) -> None:
        for member in self.team:
            if member is self:
                getattr(self, name)[slot].arrive()
            else:
                member.under_way.append((name, slot))

    def deliver(self, rng: random.Random) -> None:
        """One arrival that is under way, at the barrier that stands there now."""
        name, slot = self.under_way.pop(rng.randrange(len(self.under_way)))
        getattr(self, name)[slot].arrive()

    def state(self) -> list[tuple[int, int]]:
        groups = (self.k_full, self.k_empty, self.v_full, self.v_empty, self.q_full, self.q_empty,
                  self.mask_full, self.mask_empty, self.turns)  # fmt: skip
        return [(barrier.phase, barrier.left) for group in groups for barrier in group]

    def actors(self) -> dict[str, Iterator[None]]:
        return {
            "loader": self.loader(),
            "masker": self.masker(),
            "group 0": self.consumer(0),
            "group 1": self.consumer(1),
        }

    def check_result(self) -> None:
        wanted = [(tile_idx, step_idx) for tile_idx, tile in enumerate(self.tiles) for step_idx in range(len(tile))]
        for group in range(GROUPS):
            self.check(self.done[group], wanted)
            self.check(self.written[group], list(range(len(self.tiles))))


def run(
    tiles: Tiles,
    rng: random.Random,
    num_ctas: int,
    v_stages: int,
    mutant: str = "",
    num_q_slots: int = 0,
    rest: list[Tiles] | None = None,
) -> None:
    """One interleaving of one or two CTAs over the same list, to the end. rest: what each of them then has alone."""
    team = [Machine(tiles, mutant, v_stages) for _ in range(num_ctas)]
    for machine in team:
        machine.join(team, num_q_slots or (3 if num_ctas == 1 else 2))
    num_done = [0] * num_ctas  # actors that are through with the team's list

    def life(rank: int, name: str) -> Iterator[None]:
        machine = team[rank]
        yield from machine.actors()[name]
        if rest is None:
            return
        num_done[rank] += 1
        while (num_done[rank] if mutant == "parts too soon" else min(num_done)) < len(machine.actors()):
            yield
        # What the other CTA has done before it released is done when this one has acquired.
        while machine.under_way and mutant != "parts without release":
            yield
        if machine.tiles is tiles:  # the first of the CTA to come here
            machine.part(rest[rank])
        yield from machine.actors()[name]

    actors = {f"{name} of {rank}": life(rank, name) for rank in range(num_ctas) for name in team[rank].actors()}
    speed = {name: rng.random() + 0.05 for name in actors}
    idle, before = 0, [machine.state() for machine in team]
    haste = rng.choice([0.03, 0.3])  # of arrivals at the other CTA
    while actors:
        for machine in team:
            if machine.under_way and rng.random() < haste:
                machine.deliver(rng)
        name = rng.choices(list(actors), [speed[name] for name in actors])[0]
        try:
            next(actors[name])
        except StopIteration:
            del actors[name]
            idle = 0
            continue
        after = [machine.state() for machine in team]
        idle = idle + 1 if after == before else 0
        before = after
        if idle > 2000:
            raise ProtocolError(f"deadlock: {sorted(actors)} wait for each other")
    for machine in team:
        machine.check_result()


def random_tiles(rng: random.Random) -> Tiles:
    return [[rng.random() < 0.5 for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(0, 6))]


@pytest.mark.parametrize(("num_ctas", "v_stages"), [(1, 2), (2, 2), (1, 1)])
def test_every_interleaving_drawn_is_safe(num_ctas: int, v_stages: int) -> None:
    for seed in range(300 // num_ctas):
        rng = random.Random(seed)
        run(random_tiles(rng), rng, num_ctas, v_stages)


def test_a_pair_that_parts_is_safe() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        run(random_tiles(rng), rng, 2, 2, num_q_slots=3, rest=[random_tiles(rng) for _ in range(2)])


MUTANTS = [
    (1, 2, "k released early"),
    (1, 2, "v before k"),
    (1, 1, "v not awaited"),
    (1, 2, "mask not awaited"),
    (1, 2, "q not awaited"),
    (2, 2, "q not awaited"),
    (2, 2, "other cta not awaited"),
]


@pytest.mark.parametrize(("num_ctas", "v_stages", "mutant"), MUTANTS)
def test_the_model_notices(num_ctas: int, v_stages: int, mutant: str) -> None:
    with pytest.raises(ProtocolError):
        for seed in range(400):
            rng = random.Random(seed)
            run(random_tiles(rng), rng, num_ctas, v_stages, mutant)


@pytest.mark.parametrize("mutant", ["parts too soon", "parts without release", "old barriers", "other cta not awaited"])
def test_the_model_notices_in_a_pair_that_parts(mutant: str) -> None:
    with pytest.raises(ProtocolError):
        for seed in range(400):
            rng = random.Random(seed)
            run(random_tiles(rng), rng, 2, 2, mutant, num_q_slots=3, rest=[random_tiles(rng) for _ in range(2)])
