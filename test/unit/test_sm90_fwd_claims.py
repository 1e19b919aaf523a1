# SPDX-License-Identifier: Apache-2.0
"""How the loaders of the Hopper forward claim tiles where some entries of the lists have none, and pairs of tiles before those
that are in no pair, as a model of ops/cuda/sm90_fwd/producer.cuh: teams of one or two CTAs, scheduled at random. A loader
takes a phase of a claim after each step; in a team of two neither copies a step before the other has copied the one two before
it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

PHASES, STAGES = 3, 2
Entries = list[int]  # how many steps each one has that is handed out; 0: an entry without a tile


class Claims:
    """The counter in global memory, and what is handed out: entries of the teams, and behind them, if there is such, entries
    of each CTA alone."""

    def __init__(self, entries: Entries, rest: Entries | None, num_teams: int) -> None:
        self.entries, self.rest, self.num_teams, self.counter = entries, rest, num_teams, 0

    def next(self) -> int:
        self.counter += 1
        return self.counter - 1


@dataclass
class Walk:
    """What one or two CTAs do with entries; a claim is of entry `base` + claim."""

    claims: Claims
    entries: Entries
    base: int
    num_ctas: int
    mutant: str = ""
    sent: list[int] = field(default_factory=list)  # entries, from rank 0 to rank 1
    copied: list[int] = field(default_factory=lambda: [0, 0])  # steps
    taken: list[list[int]] = field(default_factory=lambda: [[], []])  # entries
    last_claim: int = 0  # of rank 0

    def is_gap(self, claim: int) -> bool:
        return self.base + claim < len(self.entries) and self.entries[self.base + claim] == 0

    def loader(self, rank: int, claim: int) -> Iterator[None]:
        """`claim`: the first one."""
        is_first, is_sender = True, rank == 0 and self.num_ctas == 2
        entry, num_steps, phase, num_received = -1, 0, 1, 0
        is_own = True  # whether `claim` is the loader's to look at: its first one, or rank 0's
        while True:
            if num_steps == 0 and phase == PHASES:
                phase, is_first = 0, False
                if entry >= len(self.entries):
                    return
                self.taken[rank].append(entry)
                num_steps = self.entries[entry]
            if num_steps > 0:
                while min(self.copied[: self.num_ctas]) < self.copied[rank] + 1 - STAGES:
                    yield
                num_steps, self.copied[rank] = num_steps - 1, self.copied[rank] + 1
            yield
            if phase == 0:
                is_own = rank == 0
                if is_own:
                    claim = self.claims.next()
            elif phase == 1:
                was_asked = not is_first
                while is_own and self.is_gap(claim):
                    is_own, was_asked = rank == 0, True
                    if is_own:
                        claim = self.claims.next()
                    if self.mutant == "one a step":
                        break
                if self.mutant == "one a step" and is_own and self.is_gap(claim):
                    is_first = is_first and not was_asked
                    continue
                entry = self.base + claim
                if rank == 0:
                    self.last_claim = claim
                if is_sender and was_asked:
                    self.sent.append(entry)
                elif not is_own:
                    while num_received == len(self.sent):
                        yield
                    entry = self.sent[num_received]
                    num_received += 1
            if phase < PHASES:
                phase += 1


class Team:
    def __init__(self, claims: Claims, idx: int, num_ctas: int, mutant: str) -> None:
        self.claims, self.idx, self.num_ctas, self.mutant = claims, idx, num_ctas, mutant
        self.together = Walk(claims, claims.entries, claims.num_teams, num_ctas, mutant)
        self.alone: list[Walk] = []
        self.num_done = 0

    def loader(self, rank: int) -> Iterator[None]:
        claims, num_teams = self.claims, self.claims.num_teams
        yield from self.together.loader(rank, self.idx - num_teams)
        if claims.rest is None:
            return
        self.num_done += 1
        while self.num_done < self.num_ctas:  # leave_team
            yield
        base = num_teams - len(claims.entries)
        if self.mutant == "counts from the rest's first team on":
            base = self.num_ctas * num_teams - len(claims.entries)
        elif self.mutant == "counts as if there were no pairs":
            base = num_teams
        is_new = rank != 0
        if self.mutant == "both begin with the last claim":
            is_new = False
        elif self.mutant == "both claim anew":
            is_new = True
        elif self.mutant == "claims once more and keeps that":
            self.together.last_claim = claims.next() if rank == 0 else self.together.last_claim
        walk = Walk(claims, claims.rest, base, 1)
        self.alone.append(walk)
        yield from walk.loader(0, claims.next() if is_new else self.together.last_claim)


def run(rng: random.Random, num_ctas: int, *, has_rest: bool = False, mutant: str = "") -> None:
    def entries() -> Entries:
        share = rng.choice([0, 0.1, 0.5, 0.95])
        return [
            0 if rng.random() < share else rng.randint(1, 7) for _ in range(rng.choice([0, 3, 60, rng.randint(0, 60)]))
        ]

    claims = Claims(entries(), entries() if has_rest else None, rng.randint(1, 5))
    teams = [Team(claims, idx, num_ctas, mutant) for idx in range(claims.num_teams)]
    actors = [team.loader(rank) for team in teams for rank in range(num_ctas)]
    for _ in range(200_000):
        if not actors:
            break
        actor = rng.choice(actors)
        if next(actor, "done") == "done":
            actors.remove(actor)
    assert not actors, f"loaders wait for each other: {claims.entries}"

    def check(walks: list[Walk], wanted: Entries) -> None:
        taken = sorted(entry for walk in walks for entry in walk.taken[0])
        assert taken == [idx for idx, num in enumerate(wanted) if num > 0], "an entry is lost or taken twice"

    for team in teams:
        taken = team.together.taken
        assert all(taken[rank] == taken[0] for rank in range(num_ctas)), "a team works on different tiles"
    check([team.together for team in teams], claims.entries)
    if claims.rest is not None:
        check([walk for team in teams for walk in team.alone], claims.rest)


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_each_tile_is_taken_once_and_nobody_waits_for_ever(num_ctas: int) -> None:
    for seed in range(300):
        run(random.Random(seed), num_ctas)


def test_pairs_and_then_tiles_that_are_in_none() -> None:
    """Also where there are no pairs, or nothing behind them, or fewer than there are teams."""
    for seed in range(600):
        run(random.Random(seed), 2, has_rest=True)


def test_the_model_notices_claims_passed_over_one_a_step() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        for seed in range(300):
            run(random.Random(seed), 2, mutant="one a step")


@pytest.mark.parametrize(
    "mutant",
    [
        "both begin with the last claim",
        "both claim anew",
        "claims once more and keeps that",
        "counts as if there were no pairs",
        "counts from the rest's first team on",
    ],
)
def test_the_model_notices_what_goes_wrong_behind_the_pairs(mutant: str) -> None:
    with pytest.raises(AssertionError, match="lost or taken twice"):
        for seed in range(300):
            run(random.Random(seed), 2, has_rest=True, mutant=mutant)
