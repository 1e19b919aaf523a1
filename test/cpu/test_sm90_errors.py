# SPDX-License-Identifier: Apache-2.0
"""What the Hopper library says without a GPU: sizes, refusals, and which rule a call broke."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from paddle_fm3 import _native
from paddle_fm3._c_api import BoundForm, BwdParams, BwdSchedule, DType, FwdParams, MaskView, Shape, Strides
from paddle_fm3._device_api import MergeParams, PackParams, PackWords, SumRowsParams

pytestmark = pytest.mark.skipif(not _native.is_built("fm3_sm90"), reason="needs libfm3_sm90.so (-DFM3_CUDA=ON)")
OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2
SOMEWHERE = 1 << 20  # an address that no call here reaches


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return _native.sm90_library()


def make_params(**changes: object) -> FwdParams:
    """A legal call of b=1, s=256, h=2, d=128; `changes` overwrite fields of the shape or of the call."""
    shape = Shape(1, 256, 256, 2, 2, 128, 128)
    for name in [name for name in changes if hasattr(shape, name)]:
        setattr(shape, name, changes.pop(name))
    mask = MaskView(None, None, BoundForm.NONE, 1, shape.b, 1, shape.s_q, shape.s_k)
    params = FwdParams(
        shape=shape, dtype=DType.BFLOAT16, softmax_scale=0.1, mask=mask, q=SOMEWHERE, k=SOMEWHERE, v=SOMEWHERE,
        out=SOMEWHERE, lse=SOMEWHERE,
        stride_q=Strides.contiguous(shape.s_q, shape.h_q, shape.d_qk),
        stride_k=Strides.contiguous(shape.s_k, shape.h_kv, shape.d_qk),
        stride_v=Strides.contiguous(shape.s_k, shape.h_kv, shape.d_v),
        stride_out=Strides.contiguous(shape.s_q, shape.h_q, shape.d_v),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(params, name, value)
    return params


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"dtype": DType.FLOAT32}, UNSUPPORTED, "dtype=float32; sm90 serves bfloat16 and float16; the cpu backend"),
        ({"d_qk": 12}, UNSUPPORTED, "d_qk=12, d_v=128; sm90 serves positive multiples of 8"),
        ({"d_v": 264}, UNSUPPORTED, "d_v=264; sm90 serves head dims up to 256"),
        ({"h_kv": 3}, INVALID_ARGUMENT, "h_q=2, h_kv=3; h_kv must divide h_q"),
        ({"q": None}, INVALID_ARGUMENT, "q is nullptr"),
        ({"softmax_scale": float("nan")}, INVALID_ARGUMENT, "softmax_scale"),
        ({"workspace_bytes": -1}, INVALID_ARGUMENT, "workspace_bytes=-1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_name_the_rule(library: ctypes.CDLL, changes: dict, status: int, message: str) -> None:
    params = make_params(**changes)
    assert library.fm3_sm90_fwd(ctypes.byref(params), None) == status
    text = library.fm3_sm90_last_error().decode()
    assert text.startswith("fm3_sm90_fwd: ") and message in text, text


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_without_a_gpu_the_call_says_so(library: ctypes.CDLL) -> None:
    params = make_params()
    assert library.fm3_sm90_fwd(ctypes.byref(params), None) == UNSUPPORTED
    assert "no usable CUDA device" in library.fm3_sm90_last_error().decode()


def test_nothing_to_do_needs_no_gpu(library: ctypes.CDLL) -> None:
    assert library.fm3_sm90_fwd(ctypes.byref(make_params(s_q=0)), None) == OK


def test_a_prepared_schedule_saves_its_bytes_of_workspace(library: ctypes.CDLL) -> None:
    bare, prepared = make_params(), make_params(schedule=SOMEWHERE)
    schedule_bytes = library.fm3_sm90_schedule_bytes(ctypes.byref(bare.mask))
    assert schedule_bytes > 0
    assert library.fm3_sm90_fwd_workspace_bytes(ctypes.byref(bare)) == (
        library.fm3_sm90_fwd_workspace_bytes(ctypes.byref(prepared)) + schedule_bytes
    )


def test_schedule_bytes_stay_small(library: ctypes.CDLL) -> None:
    """One mask head of 128K tokens: 5 MB, whatever the mask: 3.4 for lists of query tiles, 1.7 for lists of pairs."""
    mask = MaskView(None, None, BoundForm.NONE, 1, 1, 1, 131072, 131072)
    assert library.fm3_sm90_schedule_bytes(ctypes.byref(mask)) < 21 << 18  # 5.25 MiB


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_workspace_of_an_unserved_call_is_minus_one(library: ctypes.CDLL, direction: str) -> None:
    params = make_params(d_qk=12)
    if direction == "bwd":
        params = BwdParams(shape=params.shape, dtype=params.dtype, softmax_scale=0.1, mask=params.mask)
    assert getattr(library, f"fm3_sm90_{direction}_workspace_bytes")(ctypes.byref(params)) == -1
    assert "d_qk=12" in library.fm3_sm90_last_error().decode()


def make_bwd_params(**changes: object) -> BwdParams:
    """The backward of `make_params`, under a causal mask with one bound a key."""
    forward = make_params(**{name: changes.pop(name) for name in list(changes) if name.startswith(("d_", "s_", "h_"))})
    names = ("q", "k", "v", "out")
    params = BwdParams(
        shape=forward.shape, dtype=forward.dtype, softmax_scale=0.1, lse=SOMEWHERE, dout=SOMEWHERE,
        dq=SOMEWHERE, dk=SOMEWHERE, dv=SOMEWHERE, stride_dout=forward.stride_out, stride_dq=forward.stride_q,
        stride_dk=forward.stride_k, stride_dv=forward.stride_v, mask=forward.mask,
        **{name: SOMEWHERE for name in names}, **{f"stride_{name}": getattr(forward, f"stride_{name}") for name in names},
    )  # fmt: skip
    params.mask.form, params.mask.bounds = BoundForm.LOWER1, SOMEWHERE
    for name, value in changes.items():
        setattr(params, name, value)
    return params


def bwd_schedule(library: ctypes.CDLL, mask: MaskView, **changes: object) -> BwdSchedule:
    made = BwdSchedule(mask, SOMEWHERE, library.fm3_sm90_bwd_schedule_bytes(ctypes.byref(mask)))
    for name, value in changes.items():
        setattr(made if hasattr(made, name) else made.mask, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"s_k": 255}, "b=1, h_mask=1, s_q=256, s_k=255, form=1, is_causal=1, bounds=0x100000"),
        ({"s_q": 300}, "was made for a mask with b=1, h_mask=1, s_q=300"),
        ({"h_mask": 2}, "h_mask=2"),
        ({"is_causal": 0}, "is_causal=0"),
        ({"form": BoundForm.LOWER2}, "form=2"),
        ({"bounds": 2 * SOMEWHERE}, "bounds=0x200000"),
        ({"block_mask": SOMEWHERE}, "block_mask=0x100000"),
        ({"data": None}, "bwd_schedule.data is nullptr"),
        ({"data": SOMEWHERE + 8}, "bwd_schedule.data=0x100008; expected a multiple of 16 bytes"),
        ({"bytes": 1000}, "bwd_schedule.bytes=1000; fm3_sm90_bwd_schedule_bytes asks for "),
    ],
    ids=str,
)
def test_a_schedule_of_another_mask_is_refused(library: ctypes.CDLL, changes: dict, message: str) -> None:
    params = make_bwd_params()
    made = bwd_schedule(library, params.mask, **changes)
    params.bwd_schedule = ctypes.addressof(made)
    assert library.fm3_sm90_bwd(ctypes.byref(params), None) == INVALID_ARGUMENT
    text = library.fm3_sm90_last_error().decode()
    assert text.startswith("fm3_sm90_bwd: ") and message in text, text
    if "made for" in text:  # both are named
        assert "the call's has b=1, h_mask=1, s_q=256, s_k=256, form=1, is_causal=1, bounds=0x100000" in text, text


WAITS = {"ready_rows": SOMEWHERE, "ready_status": SOMEWHERE, "ready_timeout_us": 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remote_begin": -1}, "remote_begin=-1; expected 0 to s_k=256"),
        ({"remote_begin": 257}, "remote_begin=257; expected 0 to s_k=256"),
        ({"sent_lead_us": -5}, "sent_lead_us=-5; expected 0 or more"),
        ({"zero_sums": 3}, "zero_sums=3; expected 0, 1 or 2"),
        ({"zero_sums": -1, "sent_word": None}, "zero_sums=-1; expected 0, 1 or 2"),
        (
            {"ready_rows": SOMEWHERE, "ready_timeout_us": 9, "sent_word": None},
            "ready_rows is set with ready_timeout_us=9 and ready_status=nullptr; it needs a positive time and a",
        ),
        (WAITS | {"ready_timeout_us": 0}, "ready_rows is set with ready_timeout_us=0; it needs a positive time"),
        (WAITS | {"ready_timeout_us": -7, "sent_word": None}, "ready_rows is set with ready_timeout_us=-7; it needs"),
        (WAITS | {"ready_rows": SOMEWHERE + 1}, "ready_rows=0x100001; expected a multiple of 4 bytes"),
        (WAITS | {"ready_status": SOMEWHERE + 3}, "ready_status=0x100003; expected a multiple of 4 bytes"),
        (WAITS | {"remote_begin": 257, "sent_word": None}, "remote_begin=257; expected 0 to s_k=256"),
        ({"sent_word": SOMEWHERE + 2}, "sent_word=0x100002; expected a multiple of 4 bytes"),
    ],
    ids=str,
)
def test_words_and_flags_that_make_no_sense_are_refused(library: ctypes.CDLL, changes: dict, message: str) -> None:
    params = make_bwd_params(**{"sent_word": SOMEWHERE, "remote_begin": 128} | changes)
    assert library.fm3_sm90_bwd(ctypes.byref(params), None) == INVALID_ARGUMENT
    text = library.fm3_sm90_last_error().decode()
    assert text.startswith("fm3_sm90_bwd: ") and message in text, text


def test_keys_on_their_way_need_a_kernel_that_waits(library: ctypes.CDLL) -> None:
    params = make_bwd_params(d_qk=192, d_v=128, remote_begin=128, **WAITS)
    assert library.fm3_sm90_bwd(ctypes.byref(params), None) == UNSUPPORTED
    text = library.fm3_sm90_last_error().decode()
    assert "d_qk=192, d_v=128 with ready_rows; sm90 serves keys on their way at head dims up to 128" in text


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("is_deterministic", [0, 1])
def test_a_schedule_serves_any_head_dim_and_mode(library: ctypes.CDLL, d: int, is_deterministic: int) -> None:
    """As far as a machine without a GPU gets: to the question for one."""
    params = make_bwd_params(d_qk=d, d_v=d, is_deterministic=is_deterministic)
    made = bwd_schedule(library, params.mask)
    params.bwd_schedule = ctypes.addressof(made)
    assert library.fm3_sm90_bwd(ctypes.byref(params), None) == UNSUPPORTED
    assert "no usable CUDA device" in library.fm3_sm90_last_error().decode()


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"data": None}, INVALID_ARGUMENT, "bwd_schedule.data is nullptr"),
        ({"bytes": 1}, INVALID_ARGUMENT, "bwd_schedule.bytes=1; "),
        ({"bounds": None}, INVALID_ARGUMENT, "mask.bounds is nullptr"),
        ({"form": BoundForm.OUTER2}, UNSUPPORTED, "is_causal=1 with upper bounds"),
        ({"s_k": 64 * 65536, "bytes": 1 << 62}, UNSUPPORTED, "s_k=4194304; the sm90 backward serves up to 4194240"),
    ],
    ids=str,
)  # fmt: skip
def test_a_schedule_that_cannot_be_made(library: ctypes.CDLL, changes: dict, status: int, message: str) -> None:
    made = bwd_schedule(library, make_bwd_params().mask, **changes)
    if "form" in changes:
        made.bytes *= 2
    assert library.fm3_sm90_build_bwd_schedule(ctypes.byref(made), None) == status
    text = library.fm3_sm90_last_error().decode()
    assert text.startswith("fm3_sm90_build_bwd_schedule: ") and message in text, text
    assert library.fm3_sm90_build_bwd_schedule(None, None) == INVALID_ARGUMENT


def test_a_prepared_backward_needs_less_workspace(library: ctypes.CDLL) -> None:
    params = make_bwd_params()
    bare = library.fm3_sm90_bwd_workspace_bytes(ctypes.byref(params))
    made = bwd_schedule(library, params.mask)
    params.bwd_schedule = ctypes.addressof(made)
    prepared = library.fm3_sm90_bwd_workspace_bytes(ctypes.byref(params))
    assert 0 < bare - prepared < made.bytes  # a call makes the lists of one size of key tile
    empty = MaskView(None, None, BoundForm.NONE, 0, 1, 1, 0, 256)
    assert library.fm3_sm90_bwd_schedule_bytes(ctypes.byref(empty)) == 0
    nothing = BwdSchedule(empty, None, 0)
    assert library.fm3_sm90_build_bwd_schedule(ctypes.byref(nothing), None) == OK


def test_backward_schedule_bytes_stay_small(library: ctypes.CDLL) -> None:
    """One mask head of 128K tokens: lists by key tiles of 128 and of 64 take 3 MiB, and bounds 2; 4.3 where tiles may begin
    at documents, so that each size has its own, and row tiles 0.1."""
    mask = MaskView(SOMEWHERE, None, BoundForm.LOWER1, 1, 1, 1, 131072, 131072)
    assert library.fm3_sm90_bwd_schedule_bytes(ctypes.byref(mask)) < 63 << 17  # 7.875 MiB
    mask.block_mask = SOMEWHERE  # they stay on the grid
    assert library.fm3_sm90_bwd_schedule_bytes(ctypes.byref(mask)) < 11 << 19  # 5.5 MiB


def test_the_longest_masks_have_lists_on_the_grid(library: ctypes.CDLL) -> None:
    """With room for tiles that begin at documents there would be more of them than there may be."""
    for s_k in (64 * 61_680, 64 * 65_535):
        params = make_bwd_params(s_k=s_k, d_qk=256, d_v=256)
        assert library.fm3_sm90_bwd_workspace_bytes(ctypes.byref(params)) > 0, library.fm3_sm90_last_error()


@pytest.mark.parametrize("h_kv", [8, 1])
def test_a_backward_s_workspace_does_not_depend_on_the_mask(library: ctypes.CDLL, h_kv: int) -> None:
    """Beside prepared lists: its sums, which stay zeros (zero_sums), lie where those of another mask are looked for."""
    params = make_bwd_params(s_q=16384, s_k=16384, h_q=128, h_kv=h_kv)
    sizes = set()
    for form, bounds, block_mask, h_mask in (
        (BoundForm.NONE, None, None, 1), (BoundForm.LOWER1, SOMEWHERE, None, 1),
        (BoundForm.LOWER1, SOMEWHERE, SOMEWHERE, 1), (BoundForm.LOWER1, SOMEWHERE, None, 128),
    ):  # fmt: skip
        params.mask.form, params.mask.bounds, params.mask.block_mask = form, bounds, block_mask
        params.mask.h_mask = h_mask
        made = bwd_schedule(library, params.mask)
        params.bwd_schedule = ctypes.addressof(made)
        sizes.add(library.fm3_sm90_bwd_workspace_bytes(ctypes.byref(params)))
    assert len(sizes) == 1 and sizes.pop() > 0


@pytest.mark.parametrize(
    ("kernel", "params", "message"),
    [
        ("sum_rows", SumRowsParams(DType.BFLOAT16, 0, 65536, 1, 8), "b=65536; expected 0 to 65535"),
        ("sum_rows", SumRowsParams(DType.BFLOAT16, 0, 1, -1, 8), "num_rows=-1 with 8 elements each; expected 0 to 2000"),
        ("sum_rows", SumRowsParams(DType.BFLOAT16, 0, 1, 1 << 21, 8192),
         "num_rows=2097152 with 8192 elements each; expected 0 to 1953125 a batch entry"),
        ("pack", PackParams(-1, 1, 1, 8, SOMEWHERE, Strides(8, 8, 8)), "b=-1; expected 0 to 65535"),
        ("pack", PackParams(1, 1 << 22, 32, 128, SOMEWHERE, Strides(8, 8, 8)),
         "s=4194304 with 4096 elements each; expected 0 to 3906250 a batch entry"),
        ("merge", MergeParams(DType.BFLOAT16, 1, 65536, 1, 1, 8), "b=65536; expected 0 to 65535"),
    ],
)  # fmt: skip
def test_row_kernels_name_sizes_they_cannot_launch(
    library: ctypes.CDLL, kernel: str, params: ctypes.Structure, message: str
) -> None:
    function = getattr(library, f"fm3_sm90_{kernel}")
    rest = {"merge": (), "sum_rows": (1,), "pack": (1, None)}[kernel]
    assert function(ctypes.byref(params), *rest, None) == INVALID_ARGUMENT
    assert message in library.fm3_sm90_last_error().decode(), library.fm3_sm90_last_error()


def test_tensors_of_one_launch_are_alike(library: ctypes.CDLL) -> None:
    pack, sums = library.fm3_sm90_pack, library.fm3_sm90_sum_rows
    packs = (PackParams * 3)(*[PackParams(1, 0, 1, 8, SOMEWHERE, Strides(8, 8, 8))] * 3)
    for count in (0, 3):
        assert pack(packs, count, None, None) == INVALID_ARGUMENT
        assert f"count={count}; expected 1 to 2" in library.fm3_sm90_last_error().decode()
    packs[1].b = 2
    assert pack(packs, 2, None, None) == INVALID_ARGUMENT
    assert "tensors of one call differ in b" in library.fm3_sm90_last_error().decode()
    for other in (SumRowsParams(DType.BFLOAT16, 1, 1, 0, 8), SumRowsParams(DType.FLOAT16, 0, 1, 0, 8),
                  SumRowsParams(DType.BFLOAT16, 0, 2, 0, 8)):  # fmt: skip
        both = (SumRowsParams * 2)(SumRowsParams(DType.BFLOAT16, 0, 1, 0, 8), other)
        assert sums(both, 2, None) == INVALID_ARGUMENT
        assert "differ in b, dtype or is_out_float32" in library.fm3_sm90_last_error().decode()
    assert pack(None, 1, None, None) == INVALID_ARGUMENT
    for words, message in (
        (PackWords(num_ready=9, num_done=SOMEWHERE), "num_ready=9; expected 0 to 8"),
        (PackWords(num_ready=1), "ready words without num_done"),
        (PackWords(num_ready=1, num_done=SOMEWHERE), "ready word 0 is nullptr"),
    ):
        assert pack(packs, 1, ctypes.byref(words), None) == INVALID_ARGUMENT
        assert message in library.fm3_sm90_last_error().decode()
