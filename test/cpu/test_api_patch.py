# SPDX-License-Identifier: Apache-2.0
"""enable() / disable(): every place Paddle exposes the function, nesting, exact restoration."""

from __future__ import annotations

import sys
import threading
import types

import numpy as np
import paddle
import pytest

import paddle_fm3
from paddle_fm3 import _native, patch

PLACES = [
    (sys.modules["paddle.nn.functional"], "flashmask_attention"),
    (sys.modules["paddle.nn.functional.flash_attention"], "flashmask_attention"),
]
ORIGINAL = paddle.nn.functional.flashmask_attention


@pytest.fixture(autouse=True)
def _always_restored():
    assert not paddle_fm3.is_enabled()
    yield
    while paddle_fm3.is_enabled():
        paddle_fm3.disable()
    assert all(getattr(module, name) is ORIGINAL for module, name in PLACES)


def _holders_of(function) -> set[str]:
    return {
        f"{module_name}.{name}"
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] in ("paddle", "paddlenlp")
        for name, value in list(vars(module).items())
        if value is function
    }


def test_every_place_is_replaced_and_restored():
    before = _holders_of(ORIGINAL)
    assert {f"{module.__name__}.{name}" for module, name in PLACES} <= before
    paddle_fm3.enable()
    assert _holders_of(ORIGINAL) == set()
    assert _holders_of(paddle_fm3.flashmask_attention) == before
    paddle_fm3.disable()
    assert _holders_of(ORIGINAL) == before


def test_enabled_function_computes():
    q = paddle.randn([1, 9, 2, 16])
    with paddle_fm3.enabled():
        got = paddle.nn.functional.flashmask_attention(q, q, q, causal=True)
    np.testing.assert_array_equal(got.numpy(), paddle_fm3.flashmask_attention(q, q, q, causal=True).numpy())


def test_nesting_and_exceptions():
    with paddle_fm3.enabled():
        with pytest.raises(KeyError), paddle_fm3.enabled():
            raise KeyError("inside")
        assert paddle_fm3.is_enabled()
        assert paddle.nn.functional.flashmask_attention is paddle_fm3.flashmask_attention
    assert paddle.nn.functional.flashmask_attention is ORIGINAL
    with pytest.raises(RuntimeError, match="not enabled"):
        paddle_fm3.disable()


def test_module_that_imported_by_name_while_enabled(monkeypatch):
    module = types.ModuleType("paddlenlp.late")
    monkeypatch.setitem(sys.modules, "paddlenlp.late", module)
    with paddle_fm3.enabled():
        module.flashmask_attention = paddle.nn.functional.flashmask_attention
    assert module.flashmask_attention is ORIGINAL


def test_somebody_elses_replacement_is_kept(monkeypatch):
    module = sys.modules["paddle.nn.functional"]

    def other():
        pass

    paddle_fm3.enable()
    monkeypatch.setattr(module, "flashmask_attention", other)
    with pytest.warns(UserWarning, match="replaced by somebody else"):
        paddle_fm3.disable()
    assert module.flashmask_attention is other
    module.flashmask_attention = ORIGINAL
    monkeypatch.undo()
    module.flashmask_attention = ORIGINAL


def test_missing_library_changes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("FM3_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(_native, "_is_op_registered", False)
    with pytest.raises(_native.NativeLibraryError, match=r"libfm3_op.so does not exist; run `make build`"):
        paddle_fm3.enable()
    assert not paddle_fm3.is_enabled()
    assert paddle.nn.functional.flashmask_attention is ORIGINAL


def test_threads_do_not_lose_counts():
    def work():
        for _ in range(50):
            with paddle_fm3.enabled():
                assert paddle_fm3.is_enabled()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert patch._depth == 0
