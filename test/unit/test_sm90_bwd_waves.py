# SPDX-License-Identifier: Apache-2.0
"""Waits of the fixed order in the Hopper backward, all at once: turns, places in the ring, and waves (`wave_start_parts`
of ops/cuda/sm90_bwd/plan.h), by writers of few CTAs in any order. Nobody may wait for ever, whatever the masks are."""

from __future__ import annotations

import ctypes
import random
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
from host_library import compile_for_host
from test_sm90_bwd_plan import PlanInput, RemotePlan, item_places, summary

Rows = list[set[int]]  # row tiles that a key tile visits, by key tile
WAVE_TURNS = 3  # kWaveTurns

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host("sm90_bwd_steps.cc", tmp_path_factory.mktemp("waves"), "-Wno-unknown-pragmas")


@dataclass
class Call:
    """Heads of one call, group 1: each (batch, head) has one of the masks."""

    masks: list[Rows]
    mask_of: list[int]  # by head
    num_rows: int
    together: int = 1
    ring_slots: int = 0  # 0: one a head
    wave_items: int = 0
    remote: RemotePlan = field(default_factory=RemotePlan)
    num_remote: int = 0


def waits_of(library: ctypes.CDLL, call: Call) -> list[tuple[int, int, int]]:
    """By place in the list of work: head, rank, and for how many parts its wave waits."""
    num_tiles = len(call.masks[0])
    given = PlanInput(group=1, num_k_tiles=num_tiles, num_q_tiles=call.num_rows, is_deterministic=1)
    visits = [summary(np.array([len(rows) for rows in mask]), apart_up=0, apart_down=0) for mask in call.masks]
    places = item_places(library, num_tiles, len(call.mask_of), call.together, call.remote, call.num_remote)
    return [
        (head, rank, library.wave_start_parts(
            ctypes.byref(given), ctypes.byref(visits[call.mask_of[head]]), idx, rank, call.wave_items))
        for idx, (head, rank) in enumerate(places.tolist())
    ]  # fmt: skip


def is_ended(call: Call, items: list[tuple[int, int, int]], num_ctas: int, rng: random.Random) -> bool:
    """Whether all items come to an end. A CTA claims its next item at any time while it works on one. Key tiles come from
    the last one on, rows are walked up, and a sum leaves the ring when it has all its parts, which zeroes its count."""
    num_heads, slots = len(call.mask_of), call.ring_slots or len(call.mask_of)
    num_tiles = len(call.masks[0])
    wanted = [[sum(row in rows for rows in mask) for row in range(call.num_rows)] for mask in call.masks]
    counts = np.zeros((slots, call.num_rows), int)
    left = [sum(count > 0 for count in wanted[mask]) for mask in call.mask_of]  # sums in the ring, by head
    claimed: list[list[int]] = [[] for _ in range(num_ctas)]
    at = [-1] * num_ctas  # row of the walk; -1: its waits are ahead
    wave_row = max(0, call.num_rows - WAVE_TURNS * num_ctas)
    next_item, num_ended = 0, 0
    stuck: set[int] = set()
    while num_ended < len(items):
        if len(stuck) == num_ctas:
            return False
        cta = rng.choice([idx for idx in range(num_ctas) if idx not in stuck])
        if next_item < len(items) and len(claimed[cta]) < (2 if rng.random() < 0.3 else 1):
            claimed[cta].append(next_item)
            next_item += 1
        if not claimed[cta]:
            stuck.add(cta)
            continue
        head, rank, wave_parts = items[claimed[cta][0]]
        mask = call.masks[call.mask_of[head]]
        walk = sorted(mask[num_tiles - 1 - rank])
        slot = head % slots
        if at[cta] < 0:
            if walk and head >= slots and left[head - slots] > 0 or counts[slot, wave_row] < wave_parts:
                stuck.add(cta)
                continue
            at[cta] = 0
        elif at[cta] < len(walk):
            row = walk[at[cta]]
            turn = sum(row in mask[num_tiles - 1 - before] for before in range(rank))
            if counts[slot, row] != turn:
                stuck.add(cta)
                continue
            counts[slot, row] += 1
            if counts[slot, row] == wanted[call.mask_of[head]][row]:
                counts[slot, row] = 0
                left[head] -= 1
            at[cta] += 1
        if at[cta] == len(walk):
            claimed[cta].pop(0)
            at[cta] = -1
            num_ended += 1
        stuck.clear()
    assert left == [0] * num_heads
    return True


def random_call(rng: random.Random) -> Call:
    """All rows, or what a mask leaves; waves as if the first mask asked for them, whatever the others are."""
    num_tiles, num_rows, num_heads = rng.randint(1, 9), rng.randint(1, 12), rng.randint(1, 6)
    every = [set(range(num_rows)) for _ in range(num_tiles)]
    some = [{row for row in range(num_rows) if rng.random() < 0.8} for _ in range(num_tiles)]
    masks = [every, some][:: rng.choice((1, -1))]
    together = rng.choice([count for count in (1, 2, 4) if count <= max(1, num_heads // 2)])
    slots = rng.randint(min(num_heads, 2 * together), num_heads)
    most = num_heads if slots == num_heads else slots // 2
    split = rng.choice([0, *range(together, most + 1)])
    num_remote = rng.randint(1, num_tiles - 1) if split and num_tiles > 1 else 0
    return Call(masks, [rng.randint(0, 1) for _ in range(num_heads)], num_rows, together, slots,
                rng.randint(1, 12), RemotePlan(0, 0, split if num_remote else 0), num_remote)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_ever_in_waves(library: ctypes.CDLL, seed: int) -> None:
    rng = random.Random(seed)
    num_waiting = 0
    for _ in range(20):
        call = random_call(rng)
        items = waits_of(library, call)
        num_waiting += sum(parts > 0 for _, _, parts in items)
        assert is_ended(call, items, rng.randint(1, 5), rng), call
    assert num_waiting > 5


@pytest.mark.parametrize("what", ["a part more", "a row left out", "a mask of another head"])
def test_a_wait_that_nobody_ends_is_noticed(library: ctypes.CDLL, what: str) -> None:
    every = [{0, 1, 2, 3} for _ in range(4)]
    holes = [{0, 1, 2, 3}, {1, 2, 3}, {0, 1, 2, 3}, {1, 2, 3}]
    call = Call([every, holes], [0, 1], 4, wave_items=3)
    items = waits_of(library, call)
    assert [parts for _, _, parts in items] == [0, 0, 0, 3, 0, 0, 0, 0]
    assert is_ended(call, items, 2, random.Random(0))
    if what == "a part more":
        items[3] = (*items[3][:2], 4)
    elif what == "a row left out":
        call.mask_of = [1, 1]
    else:
        items[6] = (*items[6][:2], 2)
    assert not is_ended(call, items, 2, random.Random(0))
