# SPDX-License-Identifier: Apache-2.0
"""How the loaders of the Hopper forward claim tiles where some entries of the lists have none, as a model of
ops/cuda/sm90_fwd/producer.cuh: teams of one or two CTAs, scheduled at random. A loader takes a phase of a claim after each
step; in a team of two neither copies a step before the other has copied the one two before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

PHASES, STAGES = 3, 2


class Claims:
    """The counter in global memory, and which of its tiles are there, with how many steps (0: an entry without a tile)."""

    def __init__(self, steps: list[int], num_teams: int) -> None:
        self.steps, self.num_teams, self.counter = steps, num_teams, 0

    def next(self) -> int:
        self.counter += 1
        return self.num_teams + self.counter - 1

    def is_gap(self, tile: int) -> bool:
        return tile < len(self.steps) and self.steps[tile] == 0


class Team:
    def __init__(self, claims: Claims, idx: int, num_ctas: int, mutant: str) -> None:
        self.claims, self.idx, self.num_ctas, self.mutant = claims, idx, num_ctas, mutant
        self.sent: list[int] = []  # from rank 0 to rank 1
        self.copied, self.taken = [0] * num_ctas, [[] for _ in range(num_ctas)]  # steps; tiles

    def loader(self, rank: int) -> Iterator[None]:
        claims, is_first, is_sender = self.claims, True, rank == 0 and self.num_ctas == 2
        tile, num_steps, phase, num_received, claimed = -1, 0, 1, 0, self.idx
        is_own = True  # whether `claimed` is the loader's to look at: its first tile, or rank 0's
        while True:
            if num_steps == 0 and phase == PHASES:
                tile, phase, is_first = claimed, 0, False
                if tile >= len(claims.steps):
                    return
                self.taken[rank].append(tile)
                num_steps = claims.steps[tile]
            if num_steps > 0:
                while min(self.copied) < self.copied[rank] + 1 - STAGES:
                    yield
                num_steps, self.copied[rank] = num_steps - 1, self.copied[rank] + 1
            yield
            if phase == 0:
                is_own = rank == 0
                if is_own:
                    claimed = claims.next()
            elif phase == 1:
                was_asked = not is_first
                while is_own and claims.is_gap(claimed):
                    is_own, was_asked = rank == 0, True
                    if is_own:
                        claimed = claims.next()
                    if self.mutant == "one a step":
                        break
                if self.mutant == "one a step" and is_own and claims.is_gap(claimed):
                    is_first = is_first and not was_asked
                    continue
                if is_sender and was_asked:
                    self.sent.append(claimed)
                elif not is_own:
                    while num_received == len(self.sent):
                        yield
                    claimed = self.sent[num_received]
                    num_received += 1
            if phase < PHASES:
                phase += 1


def run(rng: random.Random, num_ctas: int, mutant: str = "") -> None:
    num_tiles, share = rng.randint(0, 60), rng.choice([0.1, 0.5, 0.95])
    steps = [0 if rng.random() < share else rng.randint(1, 7) for _ in range(num_tiles)]
    claims = Claims(steps, rng.randint(1, 5))
    teams = [Team(claims, idx, num_ctas, mutant) for idx in range(claims.num_teams)]
    actors = [team.loader(rank) for team in teams for rank in range(num_ctas)]
    for _ in range(100_000):
        if not actors:
            break
        actor = rng.choice(actors)
        if next(actor, "done") == "done":
            actors.remove(actor)
    assert not actors, f"loaders wait for each other: {steps}"
    for team in teams:
        assert all(taken == team.taken[0] for taken in team.taken), "a team works on different tiles"
    assert sorted(tile for team in teams for tile in team.taken[0]) == [idx for idx, num in enumerate(steps) if num > 0]


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_each_tile_is_taken_once_and_nobody_waits_for_ever(num_ctas: int) -> None:
    for seed in range(300):
        run(random.Random(seed), num_ctas)


def test_the_model_notices_claims_passed_over_one_a_step() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        for seed in range(300):
            run(random.Random(seed), 2, "one a step")
