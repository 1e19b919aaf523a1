# SPDX-License-Identifier: Apache-2.0
"""A library left from another version of the package is refused when it is loaded, not read wrongly by its first call."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paddle_fm3 import _c_api, _device_api, _native

LOADS: dict[str, Callable[[], object]] = {
    "fm3_cpu": _native.cpu_library, "fm3_sm90": _native.sm90_library, "fm3_op": _native.load_op,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where libraries are looked for; nothing is loaded yet."""

    def forget() -> None:
        _native.cpu_library.cache_clear()
        _native.sm90_library.cache_clear()

    monkeypatch.setenv("FM3_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(_native, "_is_op_registered", False)
    forget()
    yield tmp_path
    forget()


def make_library(folder: Path, name: str, source: str) -> None:
    code = folder / "library.cc"
    code.write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", str(code), "-o", str(folder / f"lib{name}.so")], check=True)


def told_sizes(name: str, changed: dict[str, int]) -> str:
    """A library that knows the structs of this version, but for the changed sizes."""
    known = {struct.__name__: ctypes.sizeof(struct) for struct in _c_api.STRUCTS + _device_api.STRUCTS} | changed
    lines = [f'  if (!strcmp(name, "{struct}")) return {size};' for struct, size in known.items()]
    begin = f'#include <cstring>\nextern "C" long {name}_struct_bytes(const char* name) {{\n'
    return begin + "\n".join(lines) + "\n  return -1;\n}\n"


@pytest.mark.parametrize("name", LOADS)
def test_a_library_with_other_structs_is_refused(folder: Path, name: str) -> None:
    now = ctypes.sizeof(_c_api.BwdParams)
    if name == "fm3_op":  # the other one is in order
        shutil.copy(Path(_native.__file__).parent / "_lib" / "libfm3_cpu.so", folder)
    make_library(folder, name, told_sizes(name, {"BwdParams": now - 8}))
    with pytest.raises(_native.NativeLibraryError) as caught:
        LOADS[name]()
    message = str(caught.value)
    assert str(folder / f"lib{name}.so") in message
    assert f"BwdParams has {now - 8} bytes there and {now} here" in message and "FwdParams" not in message
    assert _native._HOW_TO_BUILD[name] in message


def test_a_library_without_sizes_is_refused(folder: Path) -> None:
    make_library(folder, "fm3_cpu", 'extern "C" const char* fm3_cpu_last_error() { return ""; }')
    with pytest.raises(_native.NativeLibraryError, match="another version.*has no fm3_cpu_struct_bytes.*make build"):
        _native.cpu_library()


def test_every_struct_of_the_interface_is_compared() -> None:
    library = _native.cpu_library()
    for module in (_c_api, _device_api):
        own = {x for x in vars(module).values() if isinstance(x, type) and issubclass(x, ctypes.Structure)}
        assert {x for x in own if x.__module__ == module.__name__} - {_c_api._Struct} == set(module.STRUCTS)
    assert _c_api.misfits(library, "fm3_cpu", _c_api.STRUCTS) == ""

    class BwdParams(_c_api.BwdParams):
        _fields_ = [("one_more", ctypes.c_int64)]

    assert "BwdParams has" in _c_api.misfits(library, "fm3_cpu", (BwdParams,))
    assert library.fm3_cpu_struct_bytes(None) == -1
