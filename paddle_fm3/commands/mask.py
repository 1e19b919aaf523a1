# SPDX-License-Identifier: Apache-2.0
"""Builds a mask and says what it is: kind, density, tiles, input form, a picture.

    python -m paddle_fm3 mask --documents 1041,2718,1420,1191,1822
    python -m paddle_fm3 mask --file lengths.txt --kind document --png mask.png
    python -m paddle_fm3 mask --pattern sliding_window --set s=8192 --set window=512
    python -m paddle_fm3 mask --case 32k_prefix_document --json
    python -m paddle_fm3 mask --dense visible.npy
    python -m paddle_fm3 mask --bounds startend_row_indices.npy --causal

The exit status is 0, or 1 if the mask cannot be carried by the operator's input (the reason is printed), or 2 for
arguments that describe no mask.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from paddle_fm3 import explain, viz
from paddle_fm3.commands import _inputs

HELP = "build a mask from documents, a pattern or a file; show density and picture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _inputs.add_mask_arguments(parser)
    parser.add_argument("--png", metavar="PATH", help="also write a picture of the mask and of its 128 x 128 tiles")
    parser.add_argument("--rows", type=int, default=24, metavar="N", help="height of the text picture")
    parser.add_argument("--columns", type=int, default=48, metavar="N", help="width of the text picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    for name in ("rows", "columns"):
        if getattr(arguments, name) < 1:
            print(f"mask: --{name} {getattr(arguments, name)} must be >= 1", file=sys.stderr)
            return 2
    if arguments.png and not arguments.png.lower().endswith(".png"):
        print(f"mask: --png {arguments.png} must end in .png", file=sys.stderr)
        return 2
    try:
        mask = _inputs.mask_from_arguments(arguments)
    except _inputs.InputError as error:
        # A well-formed table that two intervals a column cannot hold is an answer, not a usage error.
        is_answer = arguments.dense is not None and "column (b, h_mask, k)" in str(error)
        if arguments.json and is_answer:
            print(json.dumps({"is_representable": False, "reason": str(error)}))
        else:
            print(f"mask: {'not representable: ' if is_answer else ''}{error}", file=sys.stderr)
        return 1 if is_answer else 2
    report = explain.explain(mask, picture_rows=arguments.rows, picture_columns=arguments.columns)
    if arguments.png:
        try:
            viz.save_mask(mask, arguments.png, title=report.kind)
        except OSError as error:
            print(f"mask: --png: {error}", file=sys.stderr)
            return 2
    if arguments.json:
        content = {"is_representable": True, "kind": report.kind, "content_hash": mask.content_hash()}
        print(json.dumps({**content, **dataclasses.asdict(report)}))
    else:
        print(report)
        if arguments.png:
            print(f"picture: {arguments.png}")
    return 0
