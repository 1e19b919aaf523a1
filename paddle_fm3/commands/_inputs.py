# SPDX-License-Identifier: Apache-2.0
"""Masks from command-line arguments: lengths, a data file, a named pattern, a benchmark case, a dense table."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paddle_fm3.mask import builders, converters
from paddle_fm3.mask.column_mask import MAX_LENGTH, ColumnMask

# Builders whose parameters can be typed: numbers and lists of numbers.
PATTERNS: dict[str, Callable[..., ColumnMask]] = {
    builder.__name__: builder
    for builder in (
        builders.full,
        builders.causal,
        builders.sliding_window,
        builders.causal_document,
        builders.document,
        builders.causal_document_sliding_window,
        builders.share_question,
        builders.global_sliding_window,
        builders.causal_blockwise,
        builders.prefix_lm_document,
        builders.prefix_lm_causal,
        builders.qk_sparse,
        builders.random_eviction,
        builders.bucketed,
    )
}
# Of these, the ones that documents alone determine.
DOCUMENT_KINDS = ("causal_document", "document", "share_question", "causal_blockwise", "prefix_lm_document")


SOURCES = ("documents", "file", "pattern", "case", "dense", "bounds")


class InputError(ValueError):
    """What the user typed or the file holds cannot be used; the message says which part and what was expected."""


def add_mask_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the mask (one of)")
    group.add_argument("--documents", metavar="N,N,...", help="token counts of packed documents, e.g. 1041,2718,1420")
    group.add_argument("--file", metavar="PATH", help="document lengths: .json, .npy, or text with one sequence a line")
    group.add_argument("--pattern", metavar="NAME", help=f"one of: {', '.join(PATTERNS)}; parameters by --set")
    group.add_argument("--case", metavar="NAME", help="a benchmark mask, e.g. 32k_causal_document")
    group.add_argument(
        "--dense", metavar="PATH.npy", help="boolean table [s_q, s_k] or [b, h_mask, s_q, s_k], True = visible"
    )
    group.add_argument(
        "--bounds", metavar="PATH.npy", help="startend_row_indices, int32 [b, h_mask, s, n], as a model gets them"
    )
    parser.add_argument("--causal", action="store_true", help="--bounds come with causal=True")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
                        help="parameter of --pattern; VALUE is JSON: --set s=4096 --set window=512")  # fmt: skip
    parser.add_argument("--kind", choices=DOCUMENT_KINDS, default=None,
                        help="what documents mean (default causal_document)")  # fmt: skip
    parser.add_argument("--s", type=int, default=None, metavar="N",
                        help="fill sequences of --documents or --file up to N tokens by one document")  # fmt: skip


def mask_from_arguments(arguments: argparse.Namespace) -> ColumnMask:
    """The mask that the arguments of `add_mask_arguments` describe.

    Raises:
        InputError: none or several sources, or one that does not hold what it should.
    """
    given = [name for name in SOURCES if getattr(arguments, name) is not None]
    if len(given) != 1:
        shown = ", ".join(f"--{name}" for name in given) or "none"
        raise InputError(f"give one of {', '.join(f'--{name}' for name in SOURCES)} (came: {shown})")
    source = given[0]
    if arguments.causal and source != "bounds":
        raise InputError(f"--causal belongs to --bounds, not to --{source}")
    if arguments.settings and source != "pattern":
        raise InputError(f"--set belongs to --pattern, not to --{source}")
    if source not in ("documents", "file"):
        for name in ("kind", "s"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name} belongs to --documents and --file, not to --{source}")
    try:
        if source == "documents":
            return documents_mask([_lengths(arguments.documents)], arguments.kind or "causal_document", arguments.s)
        if source == "file":
            return documents_mask(read_lengths(arguments.file), arguments.kind or "causal_document", arguments.s)
        if source == "pattern":
            return _pattern_mask(arguments.pattern, arguments.settings)
        if source == "case":
            return _case_mask(arguments.case)
        if source == "bounds":
            bounds = _load_array(arguments.bounds)
            s_q = bounds.shape[2] if bounds.ndim == 4 else 0
            return ColumnMask.from_bounds(bounds, is_causal=arguments.causal, s_q=s_q)
        return converters.from_dense(_load_array(arguments.dense))
    except InputError:
        raise
    except (ValueError, KeyError, OSError) as error:
        raise InputError(error.args[0] if isinstance(error, KeyError) else str(error)) from error


def documents_mask(sequences: list[list[Any]], kind: str, s: int | None = None) -> ColumnMask:
    """Document mask of a batch of packed sequences; shorter ones are filled up with one more document.

    Args:
        sequences: for each sequence its document lengths (share_question: [question, answer, ...] each;
            prefix_lm_document: [prefix, rest] each).
        kind: one of DOCUMENT_KINDS.
        s: tokens a sequence; default the longest.
    """
    totals = [sum(sum(x) if isinstance(x, list) else x for x in sequence) for sequence in sequences]
    s = max(totals) if s is None else s
    if s > MAX_LENGTH:
        raise InputError(f"a sequence of {s} tokens is longer than {MAX_LENGTH}")
    if max(totals) > s:
        raise InputError(f"a sequence holds {max(totals)} tokens; --s {s} is too short")
    filled = []
    for sequence, total in zip(sequences, totals, strict=True):
        rest = [] if total == s else [[s - total] if isinstance(sequence[0], list) else s - total]
        filled.append([*sequence, *rest])
    if kind == "prefix_lm_document":
        if not all(isinstance(part, list) for sequence in filled for part in sequence):
            raise InputError("kind prefix_lm_document takes [prefix, rest] for each document, from a .json file")
        lengths = [[sum(part) for part in sequence] for sequence in filled]
        return builders.prefix_lm_document(lengths, [[part[0] for part in sequence] for sequence in filled])
    return PATTERNS[kind](filled)


def read_lengths(path: str | Path) -> list[list[Any]]:
    """Document lengths of one or more sequences from .json, .npy or text.

    Text: one sequence a line, lengths separated by blanks or commas, ``#`` begins a comment. JSON: a list of lengths,
    or a list of sequences; for shared questions a list of sequences of [question, answer, ...]. .npy: integers [n] or
    [b, n]; zeros at the end of a row are padding.

    Raises:
        InputError: no such file, not numbers, not positive.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path}")
    if path.suffix == ".npy":
        table = np.atleast_2d(np.load(path, allow_pickle=False))
        if not np.issubdtype(table.dtype, np.integer):
            raise InputError(f"{path}: dtype is {table.dtype}; expected integers")
        sequences = [np.trim_zeros(row, "b").tolist() for row in table]
    elif path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, list) or not content:
            raise InputError(f"{path}: expected a list of lengths or of sequences")
        sequences = [content] if isinstance(content[0], int) else content
    else:
        lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
        sequences = [_lengths(line) for line in lines if line]
    for sequence in sequences:
        _check_lengths(str(path), sequence)
    if not sequences:
        raise InputError(f"{path}: holds no lengths")
    return sequences


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"{text!r} is no list of token counts such as 1041,2718") from None
    _check_lengths(repr(text), lengths)
    return lengths


def _check_lengths(where: str, sequence: Any) -> None:
    flat = (
        [x for part in sequence for x in (part if isinstance(part, list) else [part])]
        if isinstance(sequence, list)
        else []
    )
    if not flat or not all(isinstance(x, int) and x > 0 for x in flat):
        raise InputError(f"{where}: {str(sequence)[:80]} is no list of positive token counts")


def _pattern_mask(name: str, settings: list[str]) -> ColumnMask:
    if name not in PATTERNS:
        raise InputError(f"--pattern {name!r} is unknown; known: {', '.join(PATTERNS)}")
    values = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            raise InputError(f"--set {setting}: expected KEY=VALUE with a JSON value, e.g. s=4096") from None
    signature = inspect.signature(PATTERNS[name])
    try:
        signature.bind(**values)
    except TypeError as error:
        known = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        raise InputError(f"--pattern {name}: {error}; parameters: {known}") from None
    try:
        return PATTERNS[name](**values)
    except TypeError as error:  # a list where a number belongs, a string in a list
        raise InputError(f"--pattern {name} with {values}: {error}") from error


def _case_mask(name: str) -> ColumnMask:
    from paddle_fm3.testing.cases import benchmark_case, paper_mask

    benchmark_case(name)  # refuses an unknown name with the list of known ones
    length, _, kind = name.partition("_")
    for variant in ("_gqa4", "_d64", "_d256"):
        kind = kind.removesuffix(variant)
    return paper_mask(length, kind)


def _load_array(path: str) -> np.ndarray:
    if not Path(path).is_file():
        raise InputError(f"no file {path}")
    return np.load(path, allow_pickle=False)
