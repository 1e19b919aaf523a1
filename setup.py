# SPDX-License-Identifier: Apache-2.0
"""Hands the native build to CMake; every other choice is in pyproject.toml and CMakeLists.txt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class BuildWithCMake(build_py):
    """Builds into the package folder of the wheel. CMake options: FM3_CMAKE_ARGS="-DFM3_CUDA=ON"."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout's libraries come from `make build`
            return
        build_dir = Path(self.get_finalized_command("build").build_temp).absolute() / "cmake"
        lib_dir = Path(self.build_lib).absolute() / "paddle_fm3" / "_lib"
        options = os.environ.get("FM3_CMAKE_ARGS", "").split()
        configure = ["cmake", "-S", ".", "-B", str(build_dir), "-G", "Ninja", f"-DFM3_LIB_DIR={lib_dir}"]
        subprocess.run([*configure, f"-DPython_EXECUTABLE={sys.executable}", *options], check=True)
        subprocess.run(["cmake", "--build", str(build_dir)], check=True)


class BinaryDistribution(Distribution):
    """The wheel holds compiled code, so it is tagged for this platform and Python."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithCMake}, distclass=BinaryDistribution)
