# SPDX-License-Identifier: Apache-2.0
"""Writes exactly the outputs: guard bytes around them, strided and misaligned tensors, memory that is O(s)."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from c_abi_support import DTYPES, assert_same_bits, backend, expected, native_mask, run, simd_targets

from paddle_fm3.testing import native_call
from paddle_fm3.testing.cases import HOSTILE_CASES, AttentionCase, RawMask, make_inputs
from paddle_fm3.testing.memory_probe import peak_extra_bytes

ODD_SHAPES = [  # s_q, s_k, h_q, h_kv, d_qk, d_v
    (1, 1, 1, 1, 1, 1),
    (129, 127, 3, 1, 17, 5),
    (130, 257, 2, 2, 64, 33),
    (64, 31, 4, 2, 96, 128),
]
NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which the mmap module lacks
GUARD = 64  # elements on each side


class Guarded:
    """An array inside a larger buffer, odd element offset, filled with a pattern around and in it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, *, gap: int = 0) -> None:
        b, s, h, d = shape
        row = d + gap  # elements between heads that nobody may touch
        self.buffer = np.full((2 * GUARD + 1 + b * s * h * row) * dtype.itemsize, 0xA5, np.uint8)
        elements = self.buffer.view(dtype)
        inside = elements[GUARD + 1 : GUARD + 1 + b * s * h * row].reshape(b, s, h, row)
        self.array = inside[..., :d]
        self._mask = np.ones(elements.shape, bool)
        self._mask[GUARD + 1 : GUARD + 1 + b * s * h * row].reshape(b, s, h, row)[..., :d] = False

    def assert_untouched_around(self, name: str) -> None:
        itemsize = self.array.itemsize
        around = self.buffer.reshape(-1, itemsize)[self._mask]
        assert (around == 0xA5).all(), f"{name}: {(around != 0xA5).any(axis=1).sum()} elements around it were written"


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", ODD_SHAPES, ids=str)
def test_only_outputs_are_written(sizes, dtype, gap):
    s_q, s_k, h_q, h_kv, d_qk, d_v = sizes
    case = AttentionCase("guard", 2, *sizes, build_mask=lambda: RawMask(None, False))
    inputs = make_inputs(case, DTYPES[dtype])
    mask = native_mask(case)
    for target in simd_targets():
        with backend(target=target):
            contiguous = run(case, inputs)
            guarded = {
                name: Guarded(contiguous[name].shape, DTYPES[dtype], gap=gap) for name in ("out", "dq", "dk", "dv")
            }
            lse = Guarded((2, h_q, s_q, 1), np.dtype(np.float32))
            params = native_call.forward_params(
                inputs.q, inputs.k, inputs.v, mask, d_qk**-0.5, guarded["out"].array, lse.array[..., 0]
            )
            native_call.check(native_call.cpu_library().fm3_cpu_fwd(params))
            native_call.backward(
                inputs.q, inputs.k, inputs.v, mask, guarded["out"].array, contiguous["lse"], inputs.dout, inputs.dlse,
                grads=tuple(guarded[name].array for name in ("dq", "dk", "dv")),
            )  # fmt: skip
        lse.assert_untouched_around("lse")
        np.testing.assert_array_equal(lse.array[..., 0], contiguous["lse"])
        for name, output in guarded.items():
            output.assert_untouched_around(f"{name} on {target}")
            assert_same_bits({name: contiguous[name]}, {name: np.ascontiguousarray(output.array)}, target)


def _strided(array: np.ndarray, layout: str) -> np.ndarray:
    """The same values with other strides; the last axis stays contiguous."""
    b, s, h, d = array.shape
    if layout == "heads_first":  # stored as [b, h, s, d]
        stored = np.empty((b, h, s, d), array.dtype).transpose(0, 2, 1, 3)
    elif layout == "padded":  # slices of a larger tensor
        stored = np.empty((b, s + 2, h + 1, d + 5), array.dtype)[:, 1 : s + 1, :h, 2 : d + 2]
    else:  # "reversed": negative strides on every outer axis
        stored = np.empty((b, s, h, d), array.dtype)[::-1, ::-1, ::-1]
    stored[...] = array
    return stored


@pytest.mark.parametrize("layout", ["heads_first", "padded", "reversed"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strides_do_not_change_the_bits(layout, dtype):
    case = next(case for case in HOSTILE_CASES if case.name.startswith("random_c2_210x83_h4_2"))
    inputs, _, _ = expected(case, dtype)
    contiguous = run(case, inputs)
    mask = native_mask(case)
    q, k, v, dout = (_strided(x, layout) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    assert q.strides != inputs.q.strides
    out, lse = native_call.forward(q, k, v, mask, out=_strided(np.zeros_like(contiguous["out"]), layout))
    grads = tuple(_strided(np.ones_like(x), layout) for x in (inputs.q, inputs.k, inputs.v))
    native_call.backward(q, k, v, mask, out, lse, dout, inputs.dlse, grads=grads)
    strided = dict(zip(contiguous, (out, lse, *grads), strict=True))
    assert_same_bits(contiguous, {name: np.ascontiguousarray(x) for name, x in strided.items()}, layout)


def test_a_repeated_input_axis_may_have_stride_zero():
    """k and v broadcast over batch without a copy."""
    case = AttentionCase("broadcast", 3, 50, 60, 2, 2, 16, 16, build_mask=lambda: RawMask(None, True))
    inputs = make_inputs(case)
    mask = native_mask(case)
    k, v = (np.broadcast_to(x[:1], x.shape) for x in (inputs.k, inputs.v))
    out, _ = native_call.forward(inputs.q, k, v, mask)
    copied, _ = native_call.forward(inputs.q, k.copy(), v.copy(), mask)
    np.testing.assert_array_equal(out, copied)


def _far_apart(array: np.ndarray, axis: int) -> np.ndarray:
    """The same values with 2^31 + 64 elements between neighbours on `axis`; only the touched pages exist."""
    step = 2**31 + 64
    length = (array.shape[axis] - 1) * step + array.size
    pages = mmap.mmap(-1, length * array.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    strides = list(array.strides)
    strides[axis] = step * array.itemsize
    spread = np.ndarray(array.shape, array.dtype, buffer=pages, strides=strides)
    spread[...] = array
    return spread


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["b", "s", "h"])
def test_offsets_beyond_two_to_the_31(axis):
    """Every tensor's batch, row or head stride exceeds 32 bits of elements."""
    sizes = {0: (2, 9, 1), 1: (1, 3, 1), 2: (1, 9, 2)}[axis]  # b, s, h
    b, s, h = sizes
    case = AttentionCase("far", b, s, s, h, h, 8, 8, build_mask=lambda: RawMask(None, True))
    inputs = make_inputs(case, DTYPES["bfloat16"])
    close = run(case, inputs)
    mask = native_mask(case)
    q, k, v, dout = (_far_apart(x, axis) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = native_call.forward(q, k, v, mask, out=_far_apart(np.zeros_like(inputs.q), axis))
    grads = tuple(_far_apart(np.zeros_like(x), axis) for x in (inputs.q, inputs.k, inputs.v))
    native_call.backward(q, k, v, mask, out, lse, dout, inputs.dlse, grads=grads)
    far = dict(zip(close, (out, lse, *grads), strict=True))
    assert_same_bits(close, {name: np.ascontiguousarray(x) for name, x in far.items()}, axis)


@pytest.mark.parametrize("phase", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_linear_in_the_sequence(phase, dtype):
    """Twice the sequence, at most twice the memory, far below one [s, s] table of bits.

    The 4 MiB are for thread stacks, which the kernel may back with one huge page each.
    """
    small, large = (peak_extra_bytes(phase, dtype, s=s, d=64, window=64) for s in (16384, 32768))
    assert large < 2 * small + 4 * 2**20, (small, large)
    assert large < 32768 * 32768 // 8, large
