# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled half of the planner."""

from __future__ import annotations

import importlib.util
import sysconfig
from functools import lru_cache
from types import ModuleType

from paddle_fm3 import env


@lru_cache(maxsize=1)
def planner() -> ModuleType:
    """The module ``_planner``.

    Raises:
        ImportError: it has not been built; the message says where it was looked for and how to build it.
    """
    path = env.lib_dir() / f"_planner{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        raise ImportError(
            f"paddle_fm3: the context-parallel planner is not built: no file {path}; run `make build` "
            "(CMake option FM3_PLANNER)"
        )
    spec = importlib.util.spec_from_file_location("_planner", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
