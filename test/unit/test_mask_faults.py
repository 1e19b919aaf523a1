# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults in masks and schedules; the brute-force tests beside this file must go red on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_mask_algebra
import test_mask_builders
import test_mask_column
import test_mask_converters
import test_schedule

from paddle_fm3.mask import builders, column_mask, converters, encoding, intervals
from paddle_fm3.schedule import BlockSchedule


def _gaps_without_running_max(family, s_q):
    begin, end = intervals._sorted_by_begin(family, s_q)
    edge = np.zeros((1, *begin.shape[1:]), np.int32)
    return np.concatenate([edge, end]), np.concatenate([begin, edge + np.int32(s_q)])


def _first_runs(family):
    begin, end = (np.where(family[0] < family[1], x, 0) for x in family)
    order = np.argsort(begin >= end, axis=0, kind="stable")[:4]
    runs = [np.take_along_axis(x, order, axis=0).T for x in (begin, end)]
    return np.stack([np.pad(x, ((0, 0), (0, 4 - x.shape[1]))) for x in runs], axis=-1).astype(np.int32)


def _square_causal_ends(s_q, s_k):
    return np.clip(np.arange(s_k), 0, s_q).astype(np.int32)


def _whole_tiles_without_the_last(self, runs):
    begin, end = runs[..., 0].astype(np.int64), runs[..., 1].astype(np.int64)
    first = -(-begin // self.block_q)
    return first, np.maximum(first, end // self.block_q)


def _next_length_begins(real: Callable) -> Callable:
    """The upper bound adds the next document's length, as a well-known generator does."""

    def faulty(builder, documents, s, *, joins_tail):
        begin, end = real(builder, documents, s, joins_tail=joins_tail)
        rows = [np.repeat(np.cumsum(np.append(lengths[1:], 0)), lengths) for lengths in builders._batched(documents)]
        return np.stack(rows) if s is None else begin, end

    return faulty


def _seeds(test: Callable, **arguments: Any) -> Callable:
    def check() -> None:
        for seed in range(10):
            test(seed, **arguments)

    return check


def _rngs(test: Callable) -> Callable:
    def check() -> None:
        for seed in range(test_mask_builders.NUM_RANDOM):
            test(np.random.default_rng(seed))

    return check


runs = _seeds(test_schedule.test_runs_match_brute_force)
classes = _seeds(test_schedule.test_classes_and_counts_match_brute_force)

# fault -> (object, attribute, replacement, the test that must notice)
FAULTS: dict[str, tuple[Any, str, Any, Callable]] = {
    "nested intervals forgotten": (intervals, "gaps", _gaps_without_running_max, runs),
    "first runs kept, not the longest": ("paddle_fm3.schedule", "_longest_runs", _first_runs, runs),
    "last row tile never whole": (BlockSchedule, "_whole_tiles", _whole_tiles_without_the_last, classes),
    "causal rule aligned to the top left": (
        column_mask, "causal_ends", _square_causal_ends, test_mask_column.test_dense_matches_the_independent_definition,
    ),
    "encoder's causal rule aligned to the top left": (
        encoding, "causal_ends", _square_causal_ends, test_mask_column.test_to_bounds_round_trip,
    ),
    "tail of a column dropped by the encoder": (
        encoding, "_head_and_tail", lambda every, s_q: np.stack([every[0][0] * 0 + s_q, every[1][0]], -1),
        test_mask_column.test_to_bounds_round_trip,
    ),
    "every mask taken for causal": (
        encoding, "_below_diagonal", lambda every, s_q: (every[0][0], every[1][0]),
        test_mask_algebra.test_intersection_is_exact_or_refused_rightly,
    ),
    "next document's length added": (
        builders, "_document_bounds", _next_length_begins(builders._document_bounds),
        _rngs(test_mask_builders.test_documents),
    ),
    "window one key wider": (
        builders, "_lower", lambda lt_begin, s_q: builders._from([lt_begin + 1], s_q, is_causal=True),
        _rngs(test_mask_builders.test_sliding_window),
    ),
    "buckets compared from the wrong side": (
        builders, "_searchsorted", lambda rows, values, side: np.stack(
            [[np.searchsorted(rows[b, 0], values[b, 0], "left")] for b in range(len(rows))]
        ),
        _rngs(test_mask_builders.test_bucketed),
    ),
    "padding of the other side": (
        converters, "_from_valid_range",
        lambda begin, end, s, **kw: test_mask_converters.masks.key_padding(
            np.arange(s) >= s - (end - begin), is_causal=kw["is_causal"]
        ),
        _seeds(test_mask_converters.test_padding, side="right"),
    ),
    "a run of hidden rows lost": (
        converters, "hidden_runs", lambda hidden: tuple(x[:2] for x in test_mask_algebra.masks.algebra.hidden_runs(hidden)),
        test_mask_converters.test_dense_names_the_first_column_with_too_many_intervals,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault, monkeypatch):
    where, attribute, replacement, check = FAULTS[fault]
    check()  # green before
    if isinstance(where, str):
        monkeypatch.setattr(f"{where}.{attribute}", replacement)
    else:
        monkeypatch.setattr(where, attribute, replacement)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
