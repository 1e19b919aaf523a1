# SPDX-License-Identifier: Apache-2.0
"""The row kernels of context parallelism by themselves: K and V in one launch, and the words that a pack writes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paddle_fm3 import _native  # noqa: E402
from paddle_fm3._c_api import DType, Strides  # noqa: E402
from paddle_fm3._device_api import PackParams, PackWords, SumRowsParams  # noqa: E402
from paddle_fm3.distributed.device import Sm90Device  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so"),
]


@pytest.fixture(scope="module")
def device() -> Sm90Device:
    return Sm90Device(_native.sm90_library())


def pack_params(x: torch.Tensor, to: torch.Tensor) -> PackParams:
    b, s, h, d = x.shape
    return PackParams(
        b=b, s=s, h=h, d=d, from_=x.data_ptr(), stride_from=Strides(*x.stride()[:3]), to=to.data_ptr(),
        to_stride_b=to.stride(0),
    )  # fmt: skip


@pytest.mark.parametrize(("b", "s", "h", "dims"), [(2, 300, 3, (192, 128)), (1, 1, 1, (8, 64)), (3, 5, 2, (64, 0))])
def test_two_tensors_of_other_sizes_are_packed_at_once(
    device: Sm90Device, b: int, s: int, h: int, dims: tuple[int, int]
) -> None:
    """Of rows with room between them, to the front of wider buffers; what lies behind stays."""
    wide = [torch.randn(b, s, h + 1, d + 8, device="cuda").bfloat16() for d in dims]
    own = [x[:, :, 1:, : x.shape[3] - 8] for x in wide]
    buffers = [torch.full((b, s + 7, h, d), float("nan"), device="cuda", dtype=torch.bfloat16) for d in dims]
    params = (PackParams * 2)(*map(pack_params, own, buffers))
    stream = torch.cuda.current_stream().cuda_stream
    device.pack(params, None, stream)
    for x, buffer in zip(own, buffers, strict=True):
        assert torch.equal(buffer[:, :s], x) and buffer[:, s:].isnan().all()


def test_two_tensors_of_other_sizes_are_summed_at_once(device: Sm90Device) -> None:
    """Row i of K gets one staged row, row i of V none or two: narrow and wide ones, in float32."""
    stream, params, wanted, keep = torch.cuda.current_stream().cuda_stream, [], [], []
    for num_rows, elems, num_staged in ((301, 64, 1), (40, 24, 2)):
        part, narrow = (torch.randn(2, num_rows, elems, device="cuda").bfloat16() for _ in range(2))
        wide = torch.randn(2, num_rows, elems, device="cuda")
        out = torch.full((2, num_rows, elems), float("nan"), device="cuda", dtype=torch.bfloat16)
        at = torch.arange(num_rows, dtype=torch.int32)
        has = num_staged * (at % num_staged == 0).int()
        ends = has.cumsum(0).int()
        rows = torch.stack([num_rows - 1 - at, at, ends - has, ends], 1).contiguous().cuda()
        sums, entries = part.float(), []
        for row in at[has > 0].tolist():
            entries += [row, -1 - row][:num_staged]
            sums[:, row] += narrow[:, row].float()
            if num_staged == 2:
                sums[:, row] += wide[:, row]
        table = torch.tensor(entries, dtype=torch.int32, device="cuda")
        keep += [part, narrow, wide, rows, table]
        stride = num_rows * elems
        params.append(
            SumRowsParams(
                dtype=DType.BFLOAT16, is_out_float32=0, b=2, num_rows=num_rows, row_elems=elems, rows=rows.data_ptr(),
                entries=table.data_ptr(), part=part.data_ptr(), narrow=narrow.data_ptr(), wide=wide.data_ptr(),
                out=out.data_ptr(), part_stride_b=stride, narrow_stride_b=stride, wide_stride_b=stride,
                out_stride_b=stride,
            )
        )  # fmt: skip
        wanted.append((out, sums.bfloat16().flip(1)))
    device.sum_rows((SumRowsParams * 2)(*params), stream)
    for out, sums in wanted:
        assert torch.equal(out, sums)


def last_rows_as_copied(device: Sm90Device, is_early: bool) -> list[bool]:
    """Whether a copy engine that a word lets go finds all rows, by run; the word of `is_early` is written too soon."""
    k, v = (torch.randn(1, 32768, 8, 128, device="cuda").bfloat16() for _ in range(2))
    buffers = [torch.empty_like(k), torch.empty_like(v)]
    params = (PackParams * 2)(*map(pack_params, (k, v), buffers))
    own, other = (torch.cuda.Stream() for _ in range(2))
    # A kernel is loaded at its first launch, and that waits for streams that wait: for ever, if it comes behind one.
    device.pack(params, None, own.cuda_stream)
    torch.cuda.synchronize()
    memory = torch.zeros(4, 64, dtype=torch.int32, device="cuda")  # words a line apart; the last counts blocks
    begun, at_once, ready, num_done = (row.data_ptr() for row in memory)
    landed = [torch.empty(1, 512, 8, 128, dtype=torch.bfloat16).pin_memory() for _ in buffers]
    copies = device.copies(
        [(to.data_ptr(), x[:, -512:].data_ptr(), to.nbytes) for to, x in zip(landed, buffers, strict=True)]
    )
    found = []
    for number in range(1, 31):
        for x in buffers:
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        words = PackWords(num_ready=1, ready_value=number, num_done=num_done)
        words.begins[:2], words.begin_values[:2], words.ready[0] = (begun, at_once), (number, number), ready
        device.wait_word(other.cuda_stream, at_once if is_early else ready, number)
        device.copy(copies, other.cuda_stream)
        device.pack(params, words, own.cuda_stream)
        torch.cuda.synchronize()
        assert memory[:, 0].tolist() == [number, number, number, 0]
        found.append(all(torch.equal(to, x[:, -512:].cpu()) for to, x in zip(landed, (k, v), strict=True)))
    return found


def test_who_sees_the_ready_word_sees_all_rows(device: Sm90Device) -> None:
    assert all(last_rows_as_copied(device, is_early=False))
    assert not all(last_rows_as_copied(device, is_early=True))  # the copy is quick enough to tell


def test_words_are_written_without_rows(device: Sm90Device) -> None:
    """A rank that owns none: the launch has nothing to copy."""
    empty = torch.empty(1, 0, 2, 8, device="cuda", dtype=torch.bfloat16)
    memory = torch.zeros(5, 64, dtype=torch.int32, device="cuda")
    words = PackWords(num_ready=2, ready_value=7, num_done=memory[4].data_ptr())
    words.begins[0], words.begin_values[0] = memory[0].data_ptr(), 5
    words.ready[:2] = [memory[1].data_ptr(), memory[2].data_ptr()]
    params = (PackParams * 2)(*[pack_params(empty, torch.empty(1, 4, 2, 8, device="cuda").bfloat16())] * 2)
    device.pack(params, words, torch.cuda.current_stream().cuda_stream)
    assert memory[:, 0].tolist() == [5, 7, 8, 0, 0]
