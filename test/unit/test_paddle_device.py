# SPDX-License-Identifier: Apache-2.0
"""PaddleDevice waits between Paddle's work on memory and that of streams which Paddle does not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_fm3._c_api import MaskView
from paddle_fm3.distributed.device import Sm90Device
from paddle_fm3.distributed.paddle_device import PaddleDevice


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    found: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            found.append(name)
            return function(*arguments, **options)

        return noted

    monkeypatch.setattr(paddle, "to_tensor", noting("copy", paddle.to_tensor))
    monkeypatch.setattr(paddle, "empty", noting("memory", paddle.empty))
    monkeypatch.setattr(paddle.device, "synchronize", noting("wait", lambda: None))
    return found


def device() -> PaddleDevice:
    """Without a library, as far as memory goes."""
    made = PaddleDevice.__new__(PaddleDevice)
    made._tensors = {}
    return made


def test_an_upload_has_landed_when_it_returns(done: list[str]) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    made = device()
    address = made.upload(array)
    assert done == ["copy", "wait"]
    assert np.array_equal(made._tensors[address].numpy().view(np.int32), array.ravel())
    assert made.upload(np.empty((0, 4), np.int32)) in made._tensors


@pytest.mark.parametrize("name", ["schedule", "bwd_schedule"])
def test_a_schedule_is_made_in_memory_that_nothing_uses_any_more(
    name: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(self: Sm90Device, *arguments: Any) -> int:
        done.append("build")
        return self.malloc(64)

    monkeypatch.setattr(Sm90Device, name, build)
    made = device()
    address = getattr(made, name)(MaskView(), *((5,) if name == "schedule" else ()))
    assert done == ["wait", "build", "memory"] and address in made._tensors
    made.free(address)
    assert done[-1] == "wait" and address not in made._tensors
