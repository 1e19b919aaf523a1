# SPDX-License-Identifier: Apache-2.0
"""Names a failed test at once: a run on a GPU may be cut short before pytest's own list. And a fixture."""

from __future__ import annotations

import ctypes
import shutil

import pytest
from bwd_lists_support import compile_library


class _FailuresAtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            reason = report.longreprtext.strip().splitlines()[-1:] or [""]
            terminal.write_line(f"\nFAILED {report.nodeid}: {reason[0]}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_FailuresAtOnce(config))


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The Hopper backward's lists, made on the host."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return compile_library(tmp_path_factory.mktemp("lists"))
