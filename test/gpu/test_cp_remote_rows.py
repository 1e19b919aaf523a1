# SPDX-License-Identifier: Apache-2.0
"""The forward that starts before all keys are there: they come by copy engines from a stream that lags behind."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu_support import forward_of_ready_keys  # noqa: E402

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3._device_api import LocalFirst  # noqa: E402
from paddle_fm3.distributed.device import Sm90Device  # noqa: E402
from paddle_fm3.testing import gpu_cp_timing  # noqa: E402
from paddle_fm3.testing.cases import benchmark_case, resized  # noqa: E402
from paddle_fm3.testing.gpu_call import GpuMask, Sm90  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so"),
]


@pytest.fixture(scope="module")
def device() -> Sm90Device:
    return Sm90Device(_native.sm90_library())


@pytest.mark.parametrize(("num_pieces", "num_first_cols"), [(1, gpu_cp_timing.MOST_COLS), (5, 20_000)])
@pytest.mark.parametrize(
    ("name", "b", "h_q", "h_kv"),
    [("8k_full", 1, 8, 2), ("8k_causal", 1, 8, 2), ("8k_document", 1, 8, 2),
     ("8k_causal", 3, 4, 4), ("32k_causal", 1, 10, 5),  # two of five key heads at a time
     ("8k_document", 4, 4, 2), ("32k_causal_document", 1, 4, 4),  # query tiles begin at documents
     ("8k_document", 4, 4, 4)],  # so that pairs of them would be walked, were the keys all there
)  # fmt: skip
def test_keys_are_nan_until_they_arrive(
    device: Sm90Device, name: str, b: int, h_q: int, h_kv: int, num_pieces: int, num_first_cols: int
) -> None:
    case = resized(benchmark_case(name), b=b, h_q=h_q, h_kv=h_kv)
    late = gpu_cp_timing.LateKeys(device, case, num_local=2000, num_pieces=num_pieces, num_first_cols=num_first_cols)
    sm90 = Sm90(device._library)
    plain, plain_lse = sm90.forward(late.q, late.k_full, late.v_full, late.mask)
    out, lse = forward_of_ready_keys(sm90, late.q, late.k_full, late.v_full, late.mask)
    assert (out.float() - plain.float()).norm() <= 3e-3 * plain.float().norm()
    assert torch.allclose(lse, plain_lse, rtol=0, atol=1e-3)
    try:
        for delay_ms in (0.0, 2.0):
            late.poison()
            late.run(delay_ms=delay_ms)
            torch.cuda.synchronize()
            assert late.status == 0
            assert torch.equal(late.out, out) and torch.equal(late.lse, lse)
    finally:
        late.close()


@pytest.mark.parametrize(
    ("ends", "num_cols", "num_first"),
    [((4096,), gpu_cp_timing.MOST_COLS, 31), ((4096, 6144), gpu_cp_timing.MOST_COLS, 47), ((4096, 6144), 20_000, 6),
     ((1024, 6144), 40_000, 14)],
)  # fmt: skip
def test_local_tiles_come_first_and_nothing_else_changes(
    device: Sm90Device, ends: tuple[int, ...], num_cols: int, num_first: int
) -> None:
    case = resized(benchmark_case("8k_causal"), b=1, h_q=4, h_kv=4)
    mask = GpuMask.of(case)
    q, k, v = (torch.randn(1, 8192, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    plain = Sm90(device._library).forward(q, k, v, mask)
    schedule = Sm90(device._library).build_schedule(mask)
    first = LocalFirst(len(ends), num_cols)
    first.k_ends[: len(ends)] = ends
    device._call("order_local_first", mask.view, schedule.data_ptr(), first, torch.cuda.current_stream().cuda_stream)
    again = Sm90(device._library).forward(q, k, v, mask, schedule=schedule)
    assert torch.equal(plain[0], again[0]) and torch.equal(plain[1], again[1])
    wanted, found_first = wanted_tiles(ends, num_cols)
    assert gpu_cp_timing.tile_order(schedule, mask) == wanted and found_first == num_first


def wanted_tiles(ends: tuple[int, ...], num_cols: int) -> tuple[list[int], int]:
    """The order of 8K causal, and how many tiles come first. Query tile t visits columns [0, 128 (t + 1)) in steps of 160,
    the last one of 80 if that is enough and it is not the only one; it copies whole ones."""
    shown = [(tile + 1) * 128 for tile in range(64)]
    copied = [-(-cols // 160) * 160 for cols in shown]
    visited = [-(-cols // 80) * 80 if cols > 160 else 160 for cols in shown]
    rest = sorted(range(64), key=lambda tile: (-visited[tile], tile))
    wanted: list[int] = []
    for end in ends:
        for tile in [tile for tile in rest if copied[tile] <= end]:
            if sum(visited[one] for one in wanted) < num_cols:
                wanted.append(tile)
                rest.remove(tile)
    return wanted + rest, len(wanted)


def test_keys_that_never_come_end_in_a_status(device: Sm90Device) -> None:
    case = resized(benchmark_case("8k_full"), b=1, h_q=8, h_kv=2)
    late = gpu_cp_timing.LateKeys(device, case, num_local=2000, num_pieces=1)
    try:
        late.poison()
        late.run(delay_ms=0.0, is_sent=False, timeout_us=20_000)
        torch.cuda.synchronize()  # the kernel ends
        assert 2000 < late.status <= 8192
    finally:
        late.close()
