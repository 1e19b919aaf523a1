# SPDX-License-Identifier: Apache-2.0
"""Shared by every test: a fixed hypothesis profile, and a named reason for each test that cannot run."""

from __future__ import annotations

import shutil

import hypothesis
import pytest

# The same examples on every run: a red test must stay red until the code changes.
hypothesis.settings.register_profile("fm3", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fm3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: no nvidia-smi on this machine")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(no_gpu)
