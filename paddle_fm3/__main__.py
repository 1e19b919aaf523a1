# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_fm3 <command>``: the commands are the modules of paddle_fm3/commands."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

import paddle_fm3
from paddle_fm3 import commands


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paddle_fm3", description=paddle_fm3.__doc__)
    parser.add_argument("--version", action="version", version=f"paddle_fm3 {paddle_fm3.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module_info in sorted(pkgutil.iter_modules(commands.__path__), key=lambda info: info.name):
        if module_info.name.startswith("_"):  # shared parts, no command
            continue
        module = importlib.import_module(f"{commands.__name__}.{module_info.name}")
        subparser = subparsers.add_parser(
            module_info.name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
