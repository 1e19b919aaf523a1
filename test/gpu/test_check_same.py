# SPDX-License-Identifier: Apache-2.0
"""The kernel behind `MaskGuard`: one value that differs anywhere is found, in dense and strided masks of any size."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3.distributed.device import Sm90Device  # noqa: E402
from paddle_fm3.distributed.mask_guard import NOTHING_KEPT, DeviceArray, MaskGuard  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so"),
]

SIZES = [(1, 1, 1, 1), (1, 1, 7, 1), (2, 3, 341, 2), (1, 1, 4096, 4), (2, 1, 500_003, 2)]


def layouts(values: np.ndarray) -> dict[str, torch.Tensor]:
    """The same values dense, not at a multiple of 16 bytes, with other axes' order, and with room between rows."""
    b, h, s, n = values.shape
    dense = torch.from_numpy(values.copy()).cuda()
    shifted = torch.empty(dense.numel() + 1, dtype=torch.int32, device="cuda")[1:].view(values.shape)
    swapped = torch.empty((b, s, n, h), dtype=torch.int32, device="cuda").permute(0, 3, 1, 2)
    wide = torch.empty((b, h, s, n + 3), dtype=torch.int32, device="cuda")[..., 1 : n + 1]
    for view in (shifted, swapped, wide):
        view.copy_(dense)
    return {"dense": dense, "shifted": shifted, "swapped": swapped, "wide": wide}


def outputs() -> list[torch.Tensor]:
    return [torch.zeros(1000 * 8, dtype=torch.bfloat16, device="cuda"), torch.zeros(333, device="cuda")]


def spans(tensors: list[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((x.data_ptr(), x.numel() * x.element_size()) for x in tensors)


def given(tensor: torch.Tensor) -> tuple[DeviceArray, ...]:
    return (DeviceArray(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())),)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "shifted", "swapped", "wide"])
def test_one_value_anywhere(layout: str, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-(2**31), 2**31 - 1, sizes, np.int32)
    guard, stream = MaskGuard(Sm90Device(_native.sm90_library())), torch.cuda.current_stream()
    kept, mask = guard.keep(values), layouts(values)[layout]
    places = {0, values.size - 1, *rng.integers(0, values.size, 4)}
    for place in map(int, places):
        where = tuple(int(i) for i in np.unravel_index(place, sizes))
        for bit in (1, -(2**31)):
            same, stale, later = outputs(), outputs(), outputs()
            guard.watch(kept, given(mask), spans(same), stream.cuda_stream)
            stream.synchronize()
            guard.check()
            assert not any(bool(x.any()) for x in same), (where, "what is the same was called different")
            mask[where] = int(values[where]) ^ bit
            for results in (stale, later):  # every call that sees it, not only the first
                guard.watch(kept, given(mask), spans(results), stream.cuda_stream)
            stream.synchronize()
            assert all(bool(x.isnan().all()) for x in (*stale, *later)), (where, "outputs of a stale mask are left")
            with pytest.raises(ValueError, match="the mask of an earlier call"):
                guard.check()
            guard.check()  # told once
            mask[where] = int(values[where])


def test_a_failure_makes_results_nan_and_is_no_stale_mask() -> None:
    guard, stream = MaskGuard(Sm90Device(_native.sm90_library())), torch.cuda.current_stream()
    values = np.arange(4096, dtype=np.int32).reshape(1, 1, 4096, 1)
    kept, mask = guard.keep(values), layouts(values)["dense"]
    failed = torch.zeros(1, dtype=torch.int32).pin_memory()
    for is_failed in (False, True):
        failed[0] = int(is_failed)
        for arguments in ((kept, given(mask)), (NOTHING_KEPT, ())):
            results = outputs()
            guard.watch(*arguments, spans(results), stream.cuda_stream, failed.data_ptr())
            stream.synchronize()
            guard.check()
            assert all(bool(x.isnan().all() if is_failed else not x.any()) for x in results)
