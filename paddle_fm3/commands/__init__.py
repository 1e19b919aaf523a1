# SPDX-License-Identifier: Apache-2.0
"""Subcommands of ``python -m paddle_fm3``, one module each.

A module ``<name>.py`` here is the subcommand ``<name>``. It defines

    HELP: str                                          one line for the overview
    add_arguments(parser: ArgumentParser) -> None
    run(arguments: Namespace) -> int                   the exit status

Modules that begin with an underscore are parts shared by several commands.
"""
