# SPDX-License-Identifier: Apache-2.0
"""Names a failed test at once: a run on a GPU may be cut short before pytest's own list."""

from __future__ import annotations

import pytest


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
