# SPDX-License-Identifier: Apache-2.0
"""The two warpgroups of the backward at head dim 64, which never meet: every order of their steps in a model of
ops/cuda/sm90_bwd/consumer_two_steps.cuh (its claim), and of two protocols that are broken on purpose."""

from __future__ import annotations

import itertools

Op = tuple[str, int, int]  # what; buffer of dS or signal; iteration


def program(group: int, kinds: str, num_buffers: int, *, signals_first: bool) -> list[Op]:
    """Of a warpgroup. A kind an iteration: "2" two steps, "E" the two last ones of a tile, "e" one step, the last."""
    ops: list[Op] = []
    for i, kind in enumerate(kinds):
        a, b = 2 * i % num_buffers, (2 * i + 1) % num_buffers
        ops.append(("store", a, i))
        if group == 1:
            ops.append(("signal", 0, i))
        if kind != "e":
            ops.append(("store", b, i))
        own_signal = [("signal", 1, i)] if group == 0 else []
        wait = [("wait", group, i)]
        ops += own_signal + wait if signals_first else wait + own_signal
        of_dq = a if kind == "e" or group == 0 else b
        ops.append(("read", of_dq, i))
        if kind in "eE":  # dV, then dK, leave by way of the other two buffers, which the next tile waits for
            ops.append(("stage", (a + 2) % num_buffers, i))
        ops.append(("read_end", of_dq, i))
        if kind in "eE":
            ops.append(("stage", (b + 2) % num_buffers, i))
    return ops


def broken_rule(kinds: str, num_buffers: int = 4, *, signals_first: bool = False) -> str:
    """The first rule that some order of both programs breaks, or ""."""
    programs = [program(group, kinds, num_buffers, signals_first=signals_first) for group in (0, 1)]
    # At a position of both, what either has done is known: signals sent, halves stored, dS being read.

    def state(group: int, at: int) -> tuple[list[int], dict[int, int], int | None]:
        sent, halves, reading = [0, 0], {}, None
        for what, idx, i in programs[group][:at]:
            if what == "signal":
                sent[idx] += 1
            elif what in ("store", "stage"):
                halves[idx] = i if what == "store" else -1
            elif what in ("read", "read_end"):
                reading = idx if what == "read" else None
        return sent, halves, reading

    states = [[state(group, at) for at in range(len(programs[group]) + 1)] for group in (0, 1)]
    seen, todo = {(0, 0)}, [(0, 0)]
    while todo:
        at = todo.pop()
        can_move = False
        for group, other in ((0, 1), (1, 0)):
            if at[group] == len(programs[group]):
                continue
            what, idx, i = programs[group][at[group]]
            sent, halves, reading = states[other][at[other]]
            if what == "wait":
                if sent[idx] > i + 1:
                    return "a signal comes twice before it is seen"
                if sent[idx] <= i:
                    continue
            if what in ("store", "stage") and reading == idx:
                return "a half is overwritten while it is read"
            if what in ("read", "read_end") and halves.get(idx) != i:
                return "what is read is not there"
            can_move = True
            step = (at[0] + 1, at[1]) if group == 0 else (at[0], at[1] + 1)
            if step not in seen:
                seen.add(step)
                todo.append(step)
        if not can_move and any(at[group] < len(programs[group]) for group in (0, 1)):
            return "both wait"
    return ""


def test_no_order_breaks_a_rule() -> None:
    broken = {kinds: rule for kinds in itertools.product("2Ee", repeat=6) if (rule := broken_rule("".join(kinds)))}
    assert not broken


def test_a_signal_before_the_wait_may_be_missed() -> None:
    assert broken_rule("22222", signals_first=True) == "a signal comes twice before it is seen"


def test_two_buffers_are_too_few() -> None:
    assert broken_rule("22222", num_buffers=2) in (
        "what is read is not there",
        "a half is overwritten while it is read",
    )
