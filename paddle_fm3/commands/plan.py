# SPDX-License-Identifier: Apache-2.0
"""What context parallelism would do with your data: balance, traffic, memory, predicted time, before a GPU is used.

    python -m paddle_fm3 plan --config moe_118b_a14b_128k_cp16
    python -m paddle_fm3 plan --config moe_118b_a14b_128k_cp16 --file lengths.txt --html report.html
    python -m paddle_fm3 plan --cp 8 --gpus-per-node 4 --case 128k_document --h-q 32 --h-kv 4 --json

Each line of --file is one packed sequence and is planned by itself; figures are means over the sequences. Times come
from a model of kernels and links (the assumptions are printed), not from a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paddle_fm3.commands import _inputs
from paddle_fm3.commands._plan_figures import BASELINE, Setting, compare, setting_from_arguments, text_report
from paddle_fm3.distributed.strategy import STRATEGIES

HELP = "balance, traffic, memory and predicted time of context parallelism on your data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="NAME", help="a shipped training config or a file of your own")
    _inputs.add_mask_arguments(parser)
    parser.add_argument("--strategy", action="append", choices=sorted(STRATEGIES), default=[],
                        help=f"may be repeated; default fm3 and two baselines. {BASELINE} is always there")  # fmt: skip
    group = parser.add_argument_group("the cluster (default: the config's)")
    group.add_argument("--cp", type=int, metavar="N",
                       help="ranks that share a sequence; other than the config's: no training step")  # fmt: skip
    group.add_argument("--gpus-per-node", type=int, metavar="N")
    group.add_argument("--fast-gb-per-s", type=float, metavar="X", help="one direction of one GPU's link inside a node")
    group.add_argument("--slow-gb-per-s", type=float, metavar="X", help="the same between nodes")
    group = parser.add_argument_group("the model (default: the config's)")
    for name in ("h_q", "h_kv", "d", "layers"):
        group.add_argument("--" + name.replace("_", "-"), type=int, metavar="N")
    group.add_argument("--fwd-tflops", type=float, metavar="X", help="attention kernel on fully visible tiles, forward")
    group.add_argument("--bwd-tflops", type=float, metavar="X", help="the same, backward")
    group.add_argument("--other-tflops", type=float, metavar="X", help="what the rest of a training step reaches")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a report with timelines, one file")
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="write fm3's timeline for chrome://tracing or Perfetto"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    try:
        setting: Setting = setting_from_arguments(arguments)
        if setting.note:
            print(f"plan: {setting.note}", file=sys.stderr)  # not among the figures: these may be JSON
        comparison = compare(setting)
        if arguments.html or arguments.trace:
            from paddle_fm3.commands import _plan_report

            if arguments.html:
                _plan_report.write_html(comparison, arguments.html)
            if arguments.trace:
                _plan_report.write_trace(comparison, arguments.trace)
    except (ValueError, OSError) as error:  # an InputError is a ValueError
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(comparison.as_dict()) if arguments.json else text_report(comparison))
    return 0
