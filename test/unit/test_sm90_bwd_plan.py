# SPDX-License-Identifier: Apache-2.0
"""How the Hopper backward cuts its work and in which order it is claimed: the device's own code on the host."""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from host_library import compile_for_host

NUM_SMS = 132
STEP_BYTES = 64 * 128 * 8  # Q, dO (bf16) and dQ (fp32) of 64 rows, head dim 128
UP, UP_ALIGNED, DOWN_ALIGNED = 0, 1, 2

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class PlanInput(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in (
        "group", "num_kv_heads", "num_k_tiles", "ring_heads", "max_part_heads", "can_cut", "num_sms", "step_bytes",
        "is_deterministic", "num_q_tiles",
    )]  # fmt: skip


class VisitSummary(ctypes.Structure):
    _fields_ = [("num_steps", ctypes.c_int64)] + [
        (name, ctypes.c_int32)
        for name in ("max_steps", "max_late_steps", "num_visiting", "num_apart_up", "num_apart_down")
    ]


class RemoteWork(ctypes.Structure):
    _fields_ = [("remote_tiles", ctypes.c_int32), ("max_steps", ctypes.c_int32), ("remote_steps", ctypes.c_int64),
                ("own_steps", ctypes.c_int64)]  # fmt: skip


class RemotePlan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("first_parts", "first_tiles", "split_parts")]


@dataclass(frozen=True)
class Plan:
    part_heads: int
    num_parts: int
    heads_together: int
    ring_slots: int
    is_in_order: int = 0
    wave_items: int = 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compile_for_host("sm90_bwd_steps.cc", tmp_path_factory.mktemp("plan"), "-Wno-unknown-pragmas")
    library.plan_cost.restype = ctypes.c_float
    return library


def plan_input(
    heads: tuple[int, int], b: int, s: int, *, can_cut: bool = True, deterministic: bool = False
) -> PlanInput:
    """As the dispatch fills it in for 128 keys a tile and head dim 128."""
    h_q, h_kv = heads
    group, num_k_tiles = h_q // h_kv, -(-s // 128)
    can_cut = can_cut and group > 1
    part = max(x for x in range(1, group + 1) if group % x == 0 and (x * s * 512 <= 128 << 20 or x == 1 or not can_cut))
    slots = min(b * h_q // part, max(3, 1 + -(-(1024 if group > 1 else 2560) // num_k_tiles)))
    return PlanInput(group, b * h_kv, num_k_tiles, slots * part, part, can_cut, NUM_SMS, STEP_BYTES, deterministic,
                     -(-s // 64))  # fmt: skip


def summary(steps: np.ndarray, *, apart_up: int, apart_down: int) -> VisitSummary:
    late = int(steps[len(steps) // 2 :].max())
    return VisitSummary(int(steps.sum()), int(steps.max()), late, int((steps > 0).sum()), apart_up, apart_down)


def causal(s: int) -> VisitSummary:
    tiles = -(-s // 128)
    return summary(2 * np.arange(tiles, 0, -1), apart_up=tiles - 1, apart_down=4)


def full(s: int) -> VisitSummary:
    tiles = -(-s // 128)
    return summary(np.full(tiles, 2 * tiles), apart_up=0, apart_down=0)


def choose(library: ctypes.CDLL, given: PlanInput, visits: VisitSummary) -> Plan:
    plan = (ctypes.c_int32 * 6)()
    library.choose_plan(ctypes.byref(given), ctypes.byref(visits), plan)
    return Plan(*plan)


def item_places(
    library: ctypes.CDLL, num_k_tiles: int, num_head_parts: int, together: int, remote: RemotePlan | None = None,
    num_remote: int = 0,
) -> np.ndarray:  # fmt: skip
    """[num_items, 2]: head part, rank"""
    places = np.full((num_k_tiles * num_head_parts, 2), -1, np.int32)
    pointer = places.ctypes.data_as(ctypes.c_void_p)
    given = ctypes.byref(remote or RemotePlan())
    library.item_places(num_k_tiles, num_head_parts, together, given, num_remote, pointer)
    return places


def choose_remote(
    library: ctypes.CDLL, given: PlanInput, plan: Plan, steps: np.ndarray, num_remote: int, lead: float, late: bool
) -> RemotePlan:
    """`steps` of each key tile, the last num_remote of other ranks."""
    split = len(steps) - num_remote
    work = RemoteWork(num_remote, int(steps[split:].max(initial=0)), int(steps[split:].sum()), int(steps[:split].sum()))
    fields = (ctypes.c_int32 * len(vars(plan)))(*vars(plan).values())
    found = RemotePlan()
    library.choose_remote_plan(
        ctypes.byref(given), fields, ctypes.byref(work), ctypes.c_float(lead), late, ctypes.byref(found)
    )
    return found


def arranged(
    library: ctypes.CDLL, by_length: np.ndarray, num_remote: int, remote: RemotePlan, part: int, num_head_parts: int
) -> list[int]:
    """The key tiles of a head part, by rank."""
    is_split = part >= num_head_parts - remote.split_parts
    num_first = remote.first_tiles if part < remote.first_parts else 0
    pointer = by_length.ctypes.data_as(ctypes.c_void_p)
    return [
        library.arranged_tile(rank, len(by_length), num_remote, num_first, is_split, pointer)
        for rank in range(len(by_length))
    ]


def test_walks(library: ctypes.CDLL) -> None:
    def walk(visits: VisitSummary) -> int:
        return library.choose_walk(ctypes.byref(visits))

    assert walk(causal(8192)) == DOWN_ALIGNED
    assert walk(full(8192)) == UP_ALIGNED
    assert walk(summary(np.full(64, 10), apart_up=63, apart_down=63)) == UP  # window
    assert walk(VisitSummary(0, 0, 0, 0, 0, 0)) == UP_ALIGNED  # nothing is visible


@pytest.mark.parametrize("seed", range(200))
def test_every_plan_is_one_the_kernel_can_follow(library: ctypes.CDLL, seed: int) -> None:
    """Random sizes and masks: parts divide the group, the ring holds them, and whatever an item may wait for stands
    before it in the list."""
    draw = random.Random(seed)
    group, h_kv, b = draw.choice((1, 2, 3, 4, 6, 8, 16)), draw.randint(1, 6), draw.randint(1, 4)
    s = draw.choice((100, 1000, 4096, 8192))
    given = plan_input((group * h_kv, h_kv), b, s, can_cut=draw.random() < 0.8, deterministic=draw.random() < 0.5)
    tiles = given.num_k_tiles
    steps = np.array([draw.randint(0, 2 * tiles) for _ in range(tiles)])
    steps[0] = 1
    visits = summary(steps, apart_up=draw.randint(0, tiles), apart_down=draw.randint(0, tiles))
    plan = choose(library, given, visits)
    assert plan.part_heads * plan.num_parts == group
    assert plan.part_heads == group or given.can_cut
    assert 1 <= plan.part_heads * plan.ring_slots <= given.ring_heads

    num_head_parts = b * h_kv * plan.num_parts
    num_remote, lead = draw.randint(0, tiles), draw.choice((-1, 0, 10, 1000))
    remote = choose_remote(library, given, plan, steps, num_remote, lead, draw.random() < 0.5)
    assert 0 <= remote.split_parts <= num_head_parts and remote.split_parts % plan.num_parts == 0
    assert 0 <= remote.first_parts <= num_head_parts and remote.first_parts % plan.num_parts == 0
    assert lead >= 0 or remote.split_parts == 0
    places = item_places(library, tiles, num_head_parts, plan.heads_together, remote, num_remote)
    # In the split head parts all remote tiles come before own ones, but for those of the begin.
    by_length = np.argsort(-steps, kind="stable").astype(np.int32)
    lists = [arranged(library, by_length, num_remote, remote, part, num_head_parts) for part in range(num_head_parts)]
    assert all(sorted(tiles_of) == list(range(tiles)) for tiles_of in lists)
    last = [
        lists[part][rank] >= tiles - num_remote for part, rank in places[len(places) - tiles * remote.split_parts :]
    ]
    num_begin = 0 if remote.split_parts < num_head_parts else remote.first_tiles * num_head_parts
    assert last == [
        *[False] * num_begin, *[True] * (num_remote * remote.split_parts),
        *[False] * (len(last) - num_begin - num_remote * remote.split_parts),
    ]  # fmt: skip
    # And who starts first finds own keys.
    if remote.first_tiles and not plan.is_in_order:
        own = [lists[part][rank] < tiles - num_remote for part, rank in places[:NUM_SMS].tolist()]
        assert all(own[: min(len(own), remote.first_tiles * min(plan.heads_together, remote.first_parts))])
    assert len({(part, rank) for part, rank in places.tolist()}) == tiles * num_head_parts
    at = np.empty((num_head_parts, tiles), np.int64)
    at[places[:, 0], places[:, 1]] = np.arange(len(places))
    # The tiles of a head part in the order of its list (turns), and its parts one after the other (dK and dV).
    assert (np.diff(at, axis=1) > 0).all()
    assert (np.diff(at, axis=0) > 0).all()
    # A ring slot is free once every item of the head part that had it is done.
    before = at[: num_head_parts - plan.ring_slots].max(axis=1)
    assert (before < at[plan.ring_slots :].min(axis=1)).all()


def test_a_list_that_would_deadlock_is_noticed(library: ctypes.CDLL) -> None:
    """Eight heads in turns with four slots: the fifth head waits for the first, whose last tile comes after it."""
    at = item_places(library, 10, 8, 8)[:, 0]
    assert np.flatnonzero(at == 0).max() > np.flatnonzero(at == 4).min()


def test_enough_is_left_behind_tiles_of_other_ranks(library: ctypes.CDLL) -> None:
    """Multiprocessors that claim items in order, each with as many steps as it has: when the last remote tile is done,
    the lead that was asked for is left; those that come first find own keys; and the whole takes no longer."""

    def run(
        given: PlanInput, plan: Plan, steps: np.ndarray, num_remote: int, remote: RemotePlan
    ) -> tuple[float, float, int]:
        """Ends of the last remote item and of all, in steps; multiprocessors that begin with a remote tile."""
        tiles, num_head_parts = len(steps), given.num_kv_heads * plan.num_parts
        by_length = np.argsort(-steps, kind="stable").astype(np.int32)
        lists = [
            arranged(library, by_length, num_remote, remote, part, num_head_parts) for part in range(num_head_parts)
        ]
        free, last_remote, num_waiting = np.zeros(NUM_SMS), 0.0, 0
        for at, (part, rank) in enumerate(
            item_places(library, tiles, num_head_parts, plan.heads_together, remote, num_remote)
        ):
            tile = lists[part][rank]
            sm = int(free.argmin())
            free[sm] += steps[tile] * plan.part_heads + 3
            if tile >= tiles - num_remote:
                last_remote = max(last_remote, free[sm])
                num_waiting += at < NUM_SMS
        return last_remote, float(free.max()), num_waiting

    rng = np.random.default_rng(0)
    for own, received, heads in ((64, 50, (64, 8)), (64, 27, (32, 4)), (256, 200, (32, 4)), (64, 50, (16, 16))):
        steps = np.concatenate([rng.integers(2, 80, own), rng.integers(2, 100, received)])
        given = plan_input(heads, 1, 128 * len(steps))
        given.num_q_tiles = 2 * own
        plan = choose(library, given, summary(steps, apart_up=len(steps) - 1, apart_down=len(steps) - 1))
        _, plain_end, _ = run(given, plan, steps, received, RemotePlan())
        for lead, late in ((20, False), (60, False), (20, True), (60, True)):
            remote = choose_remote(library, given, plan, steps, received, lead, late)
            last_remote, end, num_waiting = run(given, plan, steps, received, remote)
            assert last_remote <= end - lead, (own, heads, remote)
            assert end <= 1.03 * plain_end, (own, heads, remote)
            # As many as the heads that take turns have own tiles for.
            assert num_waiting <= max(0, NUM_SMS - plan.heads_together * own) or not late, (own, heads, remote)
        for num_remote in (0, len(steps)):  # nothing is remote, nothing is own
            nothing = choose_remote(library, given, plan, steps, num_remote, 20, True)
            assert (nothing.split_parts, nothing.first_tiles) == (0, 0)


def test_choices(library: ctypes.CDLL) -> None:
    def chosen(heads: tuple[int, int], b: int, s: int, visits: VisitSummary, **options: bool) -> Plan:
        return choose(library, plan_input(heads, b, s, **options), visits)

    # No group: nothing to cut. Many items: one head at a time.
    assert chosen((32, 32), 16, 8192, causal(8192)) == Plan(1, 1, 1, 41)
    # Where an item would touch more than L2 holds, it has fewer heads.
    assert chosen((32, 4), 4, 32768, causal(32768)).part_heads == 2
    assert chosen((32, 4), 1, 131072, causal(131072)).part_heads == 1
    # 64 items of up to 1024 steps for 132 multiprocessors: one head an item, several in turns.
    few = chosen((8, 1), 1, 8192, causal(8192))
    assert few.part_heads == 1 and few.heads_together > 1
    assert chosen((8, 1), 1, 8192, causal(8192), can_cut=False).part_heads == 8
    # What test/gpu counts on: these groups are cut.
    for heads in ((16, 2), (12, 2), (8, 1)):
        assert chosen(heads, 3, 1500, causal(1500)).num_parts > 1
        assert chosen(heads, 3, 1500, full(1500)).num_parts > 1
    assert chosen((32, 4), 3, 8192, causal(8192)).num_parts > 1
    # In a fixed order, key tiles that begin at the same rows keep a distance.
    assert chosen((32, 32), 16, 8192, full(8192), deterministic=True).heads_together > 1
    assert chosen((32, 32), 16, 8192, full(8192)).heads_together == 1


# Masks of 8K rows of a rank (context parallelism): steps, of one key tile at most, late, visiting, apart up, apart down;
# and the plan that was the fastest of all on an H200, or within 0.4 % of it.
RANKS = {
    "causal documents 0": ((1705, 45, 45, 91, 52, 22), (64, 8), (4, 4)),
    "causal documents 1": ((1746, 60, 50, 78, 55, 15), (64, 8), (2, 4)),
    "prefix documents 0": ((2530, 77, 77, 82, 11, 16), (64, 8), (2, 4)),
    "prefix documents 1": ((2545, 108, 108, 102, 38, 12), (64, 8), (2, 8)),
    "documents 0": ((3296, 65, 65, 119, 8, 8), (64, 8), (2, 4)),
    "causal documents 1, 32/4": ((1746, 60, 50, 78, 55, 15), (32, 4), (2, 4)),
    "prefix documents 1, 32/4": ((2545, 108, 108, 102, 38, 12), (32, 4), (2, 8)),
    "documents 1, 32/4": ((3321, 60, 60, 116, 10, 10), (32, 4), (2, 4)),
}


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_s_plan_is_the_one_measured_best(library: ctypes.CDLL, name: str) -> None:
    summary_of, heads, (part_heads, together) = RANKS[name]
    visits = VisitSummary(*summary_of)
    given = plan_input(heads, 1, 128 * visits.num_visiting)
    given.num_q_tiles = 8192 // 64
    plan = choose(library, given, visits)
    assert (plan.part_heads, plan.heads_together) == (part_heads, together)


def test_keys_come_in_order_only_where_late_ones_are_cheap(library: ctypes.CDLL) -> None:
    def goes_by_key(heads: tuple[int, int], b: int, s: int, steps: np.ndarray) -> bool:
        given = plan_input(heads, b, s)
        visits = summary(steps, apart_up=len(steps) - 1, apart_down=4)
        return bool(library.goes_by_key(ctypes.byref(given), ctypes.byref(visits)))

    documents = np.tile(np.arange(42, 0, -2), 4)[:64]  # causal documents of 21 key tiles
    assert goes_by_key((32, 4), 16, 8192, documents)
    assert not goes_by_key((32, 4), 1, 8192, documents)  # few items: the longest first
    assert not goes_by_key((32, 32), 16, 8192, documents)  # no group to share rows
    assert goes_by_key((32, 32), 1, 131072, np.tile(documents, 16))  # rows beyond L2
    # A rank's own keys, then received ones that nearly every row sees: those must not start last.
    received = np.concatenate([np.arange(64, 0, -2), np.full(96, 128)])
    assert not goes_by_key((32, 4), 1, 16384, received)
    assert goes_by_key((32, 4), 64, 16384, received)


def test_parts_come_in_turns_where_few_come_in_turns_anyway(library: ctypes.CDLL) -> None:
    def in_order(visits: VisitSummary, **options: bool) -> bool:
        given = plan_input((32, 32), 16, 8192, **options)
        chosen = choose(library, given, visits).is_in_order
        assert chosen == library.adds_in_order(ctypes.byref(given), ctypes.byref(visits))
        return bool(chosen)

    def window(steps: int) -> VisitSummary:
        return summary(np.full(64, steps), apart_up=63, apart_down=63)

    assert in_order(window(10))  # five key tiles a row tile
    assert not in_order(window(18))
    with_sink = np.full(64, 8)
    with_sink[0] = 128  # a key that all rows see: its tile would start last
    assert not in_order(summary(with_sink, apart_up=62, apart_down=62))
    assert not in_order(causal(8192)) and not in_order(full(8192))
    assert in_order(causal(8192), deterministic=True)
    # What test/gpu counts on: a window of 300 of 1,500 rows, in the free mode.
    for heads in ((4, 4), (16, 2)):
        given, visits = plan_input(heads, 2, 1500), summary(np.full(12, 7), apart_up=11, apart_down=11)
        assert library.adds_in_order(ctypes.byref(given), ctypes.byref(visits))


def test_equal_walks_beyond_l2_begin_in_waves(library: ctypes.CDLL) -> None:
    def wave_items(visits: VisitSummary, heads: tuple[int, int] = (32, 32), s: int = 131072, **options: bool) -> int:
        return choose(library, plan_input(heads, 131072 // s, s, **options), visits).wave_items

    assert wave_items(full(131072)) == NUM_SMS
    assert wave_items(full(131072), deterministic=True) == NUM_SMS
    assert wave_items(full(32768), s=32768) == 0  # a head's rows fit into L2
    assert wave_items(causal(131072)) == 0
    eight = summary(np.full(1024, 128), apart_up=14, apart_down=14)  # full documents of 8K: short walks
    assert wave_items(eight) == 0
    steps = np.full(1024, 2048)
    steps[5] -= 1
    assert wave_items(summary(steps, apart_up=0, apart_down=0)) == 0
    assert wave_items(full(131072), heads=(32, 4)) == 0


def test_a_wave_waits_for_whole_waves_only(library: ctypes.CDLL) -> None:
    ends = [library.wave_end(work_idx, 300, 132) for work_idx in range(300)]
    assert ends == [132] * 132 + [264] * 132 + [0] * 36
    assert library.wave_end(263, 264, 132) == 264
    assert library.wave_end(5, 300, 0) == 0


def test_in_order_the_first_item_of_a_wave_waits_for_those_before_it(library: ctypes.CDLL) -> None:
    """Two heads of 200 key tiles, waves of 132: for the parts of its own head that are claimed before it, no others."""
    s = 200 * 128
    given = plan_input((2, 2), 1, s, deterministic=True)

    def waits(visits: VisitSummary, wave_items: int = 132) -> dict[int, int]:
        parts = {idx: library.wave_start_parts(ctypes.byref(given), ctypes.byref(visits), idx, idx % 200, wave_items)
                 for idx in range(400)}  # fmt: skip
        return {idx: count for idx, count in parts.items() if count}

    assert waits(full(s)) == {132: 132, 264: 64, 396: 196}
    assert waits(full(s), wave_items=200) == {}  # the first of its head
    assert waits(full(s), wave_items=0) == {}
    half = summary(np.full(200, 200), apart_up=1, apart_down=1)  # two equal documents: no row has all parts
    assert waits(half) == {}
    assert waits(causal(s)) == {}


def test_a_fixed_order_walks_down_only_by_key(library: ctypes.CDLL) -> None:
    def walk(
        heads: tuple[int, int], b: int, visits: VisitSummary, same_mask: bool = True, s: int = 8192, **options: bool
    ) -> int:
        given = plan_input(heads, b, s, **options)
        return library.choose_item_walk(ctypes.byref(given), ctypes.byref(visits), same_mask)

    fixed = {"deterministic": True}
    assert walk((32, 4), 16, causal(8192), **fixed) == DOWN_ALIGNED
    assert walk((32, 4), 16, causal(8192), same_mask=False, **fixed) == UP  # heads with orders of their own
    assert walk((32, 4), 1, causal(8192), **fixed) == UP  # the longest first is what few items need
    assert walk((32, 32), 16, causal(8192), **fixed) == UP
    assert walk((32, 32), 4, causal(32768), s=32768, **fixed) == UP
    assert walk((32, 32), 1, causal(131072), s=131072, **fixed) == DOWN_ALIGNED  # rows beyond L2
    documents = summary(np.tile(np.arange(42, 0, -2), 49)[:1024], apart_up=975, apart_down=48)
    assert walk((32, 32), 1, documents, s=131072, **fixed) == UP  # walks are short
    assert walk((32, 32), 16, causal(8192)) == DOWN_ALIGNED
    assert walk((32, 4), 16, full(8192), **fixed) == UP_ALIGNED
    # What test/gpu counts on.
    assert walk((3, 3), 1, causal(50176), s=50176, **fixed) == DOWN_ALIGNED
    assert choose(library, plan_input((1, 1), 1, 50176), full(50176)).wave_items == NUM_SMS
    given = plan_input((16, 8), 8, 2048, deterministic=True)
    assert library.choose_item_walk(ctypes.byref(given), ctypes.byref(causal(2048)), True) == DOWN_ALIGNED


def test_orders_and_walks_belong_together(library: ctypes.CDLL) -> None:
    """Turns are counted from the first key where rows are walked down, from the last one elsewhere (row_walk.cuh)."""

    def order(heads: tuple[int, int], visits: VisitSummary, **options: bool) -> tuple[int, int]:
        given = plan_input(heads, 16, 8192, **options)
        pointers = ctypes.byref(given), ctypes.byref(visits)
        walk = library.choose_item_walk(*pointers, True)
        return library.choose_order(*pointers, library.adds_in_order(*pointers), walk), walk

    by_length, first_keys, last_keys = 0, 1, 2
    assert order((32, 4), causal(8192), deterministic=True) == (first_keys, DOWN_ALIGNED)
    assert order((32, 32), causal(8192), deterministic=True) == (last_keys, UP)
    assert order((32, 4), full(8192), deterministic=True) == (last_keys, UP_ALIGNED)
    assert order((32, 4), causal(8192)) == (first_keys, DOWN_ALIGNED)
    assert order((32, 32), causal(8192)) == (by_length, DOWN_ALIGNED)
    assert order((32, 32), full(8192)) == (by_length, UP_ALIGNED)


def finishes(
    visits: list[list[int]], by_key: bool, down: bool, heads: int, num_ctas: int, rng: random.Random,
    turns_by_key: bool | None = None,
) -> bool:  # fmt: skip
    """Whether CTAs that claim key tiles in their order, and add to each row tile's sum in turns, all come to an end.

    `visits`: row tiles of each key tile. Every head part has the same; heads of an item are inside the rows.
    """
    keys = list(range(len(visits)))
    order = keys if by_key else keys[::-1]
    turn_order = keys if (by_key if turns_by_key is None else turns_by_key) else keys[::-1]
    turns = {(tile, row): sum(row in visits[before] for before in turn_order[:rank])
             for rank, tile in enumerate(turn_order) for row in visits[tile]}  # fmt: skip
    items = [(part, tile) for part in range(2) for tile in order]
    counts: dict[tuple[int, int, int], int] = {}
    next_item, walks = 0, [iter(()) for _ in range(num_ctas)]
    current: list[tuple[int, int, int, int] | None] = [None] * num_ctas  # part, head, row, turn
    ended, stuck = set(), set()
    while len(ended) < num_ctas:
        cta = rng.choice([idx for idx in range(num_ctas) if idx not in ended])
        if current[cta] is None:
            current[cta] = next(walks[cta], None)
        if current[cta] is None:
            if next_item == len(items):
                ended.add(cta)
            else:
                part, tile = items[next_item]
                next_item += 1
                rows = sorted(visits[tile], reverse=down)
                walks[cta] = iter([(part, head, row, turns[tile, row]) for row in rows for head in range(heads)])
            stuck.clear()
            continue
        part, head, row, turn = current[cta]
        if counts.get((part, head, row), 0) != turn:
            stuck.add(cta)
            if len(stuck | ended) == num_ctas:
                return False
            continue
        counts[part, head, row] = turn + 1
        current[cta] = None
        stuck.clear()
    wanted = {row: sum(row in rows for rows in visits) for row in range(64)}
    assert all(count == wanted[row] for (_, _, row), count in counts.items())
    return True


@pytest.mark.parametrize("seed", range(60))
def test_nobody_waits_forever_for_a_turn(seed: int) -> None:
    """Any mask, walked either way: turns follow the order of the list."""
    rng = random.Random(seed)
    visits = [[row for row in range(rng.randint(0, 8)) if rng.random() < 0.8] for _ in range(rng.randint(1, 8))]
    for by_key, down in itertools.product((False, True), repeat=2):
        assert finishes(visits, by_key, down, rng.randint(1, 3), rng.randint(1, 6), rng)


def test_turns_against_the_order_of_claims_are_noticed() -> None:
    assert not finishes([[0], [0]], True, True, 1, 1, random.Random(0), turns_by_key=False)


def test_the_cheapest_plan_is_chosen(library: ctypes.CDLL) -> None:
    for heads, b, s in itertools.product(((32, 4), (8, 1), (64, 8)), (1, 4), (4096, 32768)):
        given, visits = plan_input(heads, b, s), causal(s)
        plan = choose(library, given, visits)
        costs = {
            (part, together): library.plan_cost(ctypes.byref(given), ctypes.byref(visits), part, together)
            for part in range(1, given.max_part_heads + 1) if given.group % part == 0
            for together in (1, 2, 4, 8) if together == 1 or 2 * together <= given.ring_heads // part
        }  # fmt: skip
        cost = costs[plan.part_heads, plan.heads_together]
        # Parts for a gain of 1/128, heads in turns for one of 1/16.
        assert cost <= min(costs.values()) * 17 / 16
        assert cost <= min(cost for (_, together), cost in costs.items() if together == 1) * 129 / 128
