# SPDX-License-Identifier: Apache-2.0
"""The Paddle custom op on a Hopper GPU: Paddle's tensors, allocator, streams, autograd and graphs, against the oracle.

Written for a GPU build of Paddle whose own kernels may not run on the device (2.6.2 on Hopper: fills, casts, sums and
comparisons there leave memory as it was, without an error). So inputs are made on the host, every output gradient is
given, each tensor is used once, results are compared in NumPy, and free device memory holds NaN before each call.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

ml_dtypes = pytest.importorskip("ml_dtypes")
paddle = pytest.importorskip("paddle")

from paddle_fm3 import _native, _paddle  # noqa: E402
from paddle_fm3.mask import builders  # noqa: E402
from paddle_fm3.testing import reference  # noqa: E402
from paddle_fm3.testing.cases import AttentionCase, AttentionInputs, RawMask, make_inputs  # noqa: E402
from paddle_fm3.testing.compare import assert_close_to_oracle  # noqa: E402
from paddle_fm3.testing.hostile_cases import HOSTILE_CASES, hostile_case  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not paddle.is_compiled_with_cuda(), reason="needs a GPU build of Paddle"),
    pytest.mark.skipif(
        _native.build_info().get("paddle_with_cuda") != "ON" or not _native.is_built("fm3_sm90"),
        reason="needs libfm3_op.so built for a GPU Paddle: make build CUDA=ON PADDLE=<its paddle folder>",
    ),
]

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
POISON_BYTES = 64 << 20

Arrays = dict[str, NDArray]


def to_tensor(array: NDArray, *, needs_grad: bool = False, device: int = 0) -> paddle.Tensor:
    """On the GPU, by a copy from the host; bfloat16 is uint16 in Paddle's NumPy."""
    plain = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    return paddle.to_tensor(plain, place=paddle.CUDAPlace(device), stop_gradient=not needs_grad)


def to_array(tensor: paddle.Tensor) -> NDArray:
    array = tensor.detach().cpu().numpy()
    return array.view(ml_dtypes.bfloat16) if tensor.dtype == paddle.bfloat16 else array


def poison() -> None:
    """All memory that Paddle hands out next holds 0xFF: NaN as a float, -1 as an integer."""
    paddle.device.cuda.empty_cache()
    del_me = to_tensor(np.full(POISON_BYTES, 0xFF, np.uint8))
    del del_me


def mask_arguments(case: AttentionCase, device: int = 0) -> dict[str, object]:
    return {
        name: to_tensor(value, device=device) if isinstance(value, np.ndarray) else value
        for name, value in case.call_arguments().items()
    }


def run_op(
    case: AttentionCase, inputs: AttentionInputs, *, outputs: tuple[str, ...] = ("out", "lse"), device: int = 0, **options: object
) -> Arrays:  # fmt: skip
    """out, lse, dq, dk, dv; `outputs` are those that have a gradient."""
    from paddle_fm3 import flashmask_attention

    grads = {name: to_tensor(getattr(inputs, "d" + name), device=device) for name in outputs}
    q, k, v = (to_tensor(x, needs_grad=True, device=device) for x in (inputs.q, inputs.k, inputs.v))
    arguments = mask_arguments(case, device)
    poison()
    out, lse = flashmask_attention(q, k, v, **arguments, return_softmax_lse=True, **options)
    paddle.autograd.backward([{"out": out, "lse": lse}[name] for name in outputs], list(grads.values()))
    return dict(zip(OUTPUTS, map(to_array, (out, lse, q.grad, k.grad, v.grad)), strict=True))


@lru_cache(maxsize=32)
def expected(
    case: AttentionCase, dtype: str, outputs: tuple[str, ...] = ("out", "lse")
) -> tuple[AttentionInputs, Arrays, Arrays]:
    """Inputs, exact results, and those of the naive low-precision formula."""
    inputs = make_inputs(case, DTYPES[dtype])
    arguments = case.call_arguments()
    arguments["dout"] = inputs.dout if "out" in outputs else np.zeros_like(inputs.dout)
    arguments["dlse"] = inputs.dlse if "lse" in outputs else np.zeros_like(inputs.dlse)
    exact = reference.attention(inputs.q, inputs.k, inputs.v, **arguments)
    naive = reference.low_precision_attention(DTYPES[dtype], inputs.q, inputs.k, inputs.v, **arguments)
    return inputs, *({name: getattr(x, name) for name in OUTPUTS} for x in (exact, naive))


def check(actual: Arrays, exact: Arrays, naive: Arrays, case: AttentionCase) -> None:
    for name in OUTPUTS:
        assert actual[name].dtype == (np.float32 if name == "lse" else actual["out"].dtype), name
        assert_close_to_oracle(actual[name], exact[name], naive[name], name, case)


def check_case(case: AttentionCase, dtype: str, **options: object) -> None:
    inputs, exact, naive = expected(case, dtype)
    check(run_op(case, inputs, **options), exact, naive, case)  # type: ignore[arg-type]


def is_served(case: AttentionCase) -> bool:
    """NOTE: Paddle 2.6 refuses a custom op one of whose outputs has no elements."""
    is_empty = 0 in (case.b, case.s_q, case.s_k)
    return case.d_qk % 8 == 0 and case.d_v % 8 == 0 and not (is_empty and _paddle.IS_PADDLE_2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in HOSTILE_CASES if is_served(case)], ids=lambda case: case.name)
def test_hostile(case: AttentionCase, dtype: str) -> None:
    check_case(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"d{heads[0]}_{heads[1]}")
@pytest.mark.parametrize("name", ["documents_mixed", "random_nc4_385x257_h4_2_hm2_d128_block_mask"])
def test_every_head_dim(name: str, heads: tuple[int, int], dtype: str) -> None:
    case = hostile_case(name)
    check_case(replace(case, name=f"{name}_d{heads}", d_qk=heads[0], d_v=heads[1]), dtype)


def _long_case() -> AttentionCase:
    """Several tiles in both directions, GQA, documents of odd length."""
    mask = builders.causal_document([500, 1, 233, 366])

    def build() -> RawMask:
        bounds, causal = mask.to_bounds()
        return RawMask(np.ascontiguousarray(np.broadcast_to(bounds, (2, *bounds.shape[1:]))), causal)

    return AttentionCase("paddle_gpu_long", 2, 1100, 1100, 4, 2, 128, 128, build_mask=build)


LONG_CASE = _long_case()


@pytest.mark.parametrize("outputs", [("out",), ("lse",)], ids=lambda outputs: f"only_{outputs[0]}")
def test_a_missing_output_gradient_counts_as_zero(outputs: tuple[str, ...]) -> None:
    case = hostile_case("documents_mixed_causal")
    inputs, exact, naive = expected(case, "bfloat16", outputs)
    check(run_op(case, inputs, outputs=outputs), exact, naive, case)


def test_deterministic_gradients_repeat_bitwise() -> None:
    case = LONG_CASE
    inputs, exact, naive = expected(case, "bfloat16")
    first = run_op(case, inputs, deterministic=True)
    check(first, exact, naive, case)
    for _ in range(3):
        again = run_op(case, inputs, deterministic=True)
        for name in OUTPUTS:
            assert np.array_equal(again[name].view(np.uint8), first[name].view(np.uint8)), name


def test_column_mask_and_window() -> None:
    """A ColumnMask is taken to the device by the function itself; a window is rewritten as bounds."""
    from paddle_fm3 import flashmask_attention

    s = 300
    case = AttentionCase(
        "window", 1, s, s, 2, 1, 64, 64, build_mask=lambda: RawMask(*builders.sliding_window(s, 40).to_bounds())
    )
    inputs, exact, naive = expected(case, "bfloat16")
    for arguments in ({"startend_row_indices": builders.sliding_window(s, 40)}, {"window_size": 39, "causal": True}):
        q, k, v = (to_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
        poison()
        out = flashmask_attention(q, k, v, **arguments)
        assert_close_to_oracle(to_array(out), exact["out"], naive["out"], "out", (case, list(arguments)))


def test_same_meaning_as_on_the_cpu() -> None:
    """The same call on CPU tensors (float32 there, so that only the GPU's rounding differs)."""
    from paddle_fm3 import flashmask_attention

    for name in ("random_c2_211x338_h4_2_hm2_d128_block_mask", "kind_prefix_document", "causal_fewer_keys_hidden_rows"):
        case = hostile_case(name)
        inputs, _, naive = expected(case, "bfloat16")
        cpu = paddle.CPUPlace()
        q, k, v = (paddle.to_tensor(np.asarray(x, np.float32), place=cpu) for x in (inputs.q, inputs.k, inputs.v))
        arguments = {
            key: paddle.to_tensor(value, place=cpu) if isinstance(value, np.ndarray) else value
            for key, value in case.call_arguments().items()
        }
        out, lse = flashmask_attention(q, k, v, **arguments, return_softmax_lse=True)
        assert out.place.is_cpu_place()
        actual = run_op(case, inputs)
        assert_close_to_oracle(actual["out"], out.numpy(), naive["out"], "out", case)
        assert_close_to_oracle(actual["lse"], lse.numpy(), naive["lse"], "lse", case)


# --- streams and graphs ----------------------------------------------------------------------------------------------


def read_on_stream(tensor: paddle.Tensor, stream: int) -> NDArray:
    """The tensor's bytes as the stream sees them after its own work, whatever other streams do."""
    driver = ctypes.CDLL("libcuda.so.1")
    host = np.empty(tensor.shape, np.uint16)
    num_bytes = ctypes.c_size_t(host.nbytes)
    source, queue = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_void_p(stream)
    assert driver.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(host.ctypes.data), source, num_bytes, queue) == 0
    assert driver.cuStreamSynchronize(queue) == 0
    return host


def test_runs_on_the_stream_of_the_guard() -> None:
    """Under a stream guard the op is done while the default stream is still busy: neither order nor a device-wide wait
    ties it to the latter."""
    from paddle_fm3 import flashmask_attention

    case = LONG_CASE
    inputs, _, _ = expected(case, "bfloat16")
    wanted = run_op(case, inputs)
    q, k, v = (to_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    arguments = mask_arguments(case)
    busy = to_tensor(np.ones((8192, 8192), np.float32))
    poison()
    side = paddle.device.cuda.Stream()
    done = paddle.device.cuda.Event()
    paddle.device.cuda.synchronize()
    for _ in range(100):  # over 100 ms of the default stream
        paddle.matmul(busy, busy)
    done.record()
    with paddle.device.cuda.stream_guard(side):
        out = flashmask_attention(q, k, v, **arguments)
    got = read_on_stream(out, side.cuda_stream)
    is_busy = not done.query()
    paddle.device.cuda.synchronize()
    assert is_busy, "the default stream was idle before the op was read: this run shows nothing"
    assert np.array_equal(got.view(np.uint8).reshape(-1), wanted["out"].view(np.uint8).reshape(-1))


def test_graph_capture_and_replay() -> None:
    """Forward and backward are captured; a replay follows new values of q and of the bounds in the same memory."""
    from paddle.device.cuda.graphs import CUDAGraph

    from paddle_fm3 import flashmask_attention

    case = LONG_CASE
    bounds = np.ascontiguousarray(np.minimum(case.build_mask().startend_row_indices + 57, case.s_k))
    other = replace(case, name="graph", build_mask=lambda: RawMask(bounds, True))
    inputs, exact, naive = expected(case, "bfloat16")
    other_inputs, other_exact, other_naive = expected(other, "bfloat16")
    tensors = [to_tensor(x, needs_grad=True) for x in (inputs.q, inputs.k, inputs.v)]
    dout, dlse = to_tensor(inputs.dout), to_tensor(inputs.dlse)
    arguments = mask_arguments(case)

    def step() -> list[paddle.Tensor]:
        out, lse = flashmask_attention(*tensors, **arguments, return_softmax_lse=True, deterministic=True)
        return [out, lse, *paddle.grad([out, lse], tensors, grad_outputs=[dout, dlse])]

    wanted = [to_array(x) for x in step()]  # also loads the kernels, which a capture may not
    check(dict(zip(OUTPUTS, wanted, strict=True)), exact, naive, case)
    poison()
    paddle.device.cuda.synchronize()
    graph = CUDAGraph()
    graph.capture_begin()
    results = step()
    graph.capture_end()
    for _ in range(2):
        graph.replay()
        paddle.device.cuda.synchronize()
        for name, result, array in zip(OUTPUTS, results, wanted, strict=True):
            assert np.array_equal(to_array(result).view(np.uint8), array.view(np.uint8)), name
    refilled = [*tensors, dout, dlse, arguments["startend_row_indices"]]
    contents = [other_inputs.q, other_inputs.k, other_inputs.v, other_inputs.dout, other_inputs.dlse, bounds]
    for tensor, array in zip(refilled, contents, strict=True):
        address = tensor.data_ptr()
        tensor.get_tensor().set(
            array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array, paddle.CUDAPlace(0)
        )
        assert tensor.data_ptr() == address
    graph.replay()
    paddle.device.cuda.synchronize()
    got = dict(zip(OUTPUTS, map(to_array, results), strict=True))
    check(got, other_exact, other_naive, other)


def test_takes_no_memory_behind_paddle() -> None:
    """What the driver has left does not change over calls: workspaces come from Paddle's allocator."""
    case = LONG_CASE
    inputs, _, _ = expected(case, "bfloat16")
    runtime = ctypes.CDLL("libcuda.so.1")

    def free_bytes() -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert runtime.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value

    run_op(case, inputs)
    q, k, v = (to_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    arguments = mask_arguments(case)
    from paddle_fm3 import flashmask_attention

    flashmask_attention(q, k, v, **arguments)
    before, held = free_bytes(), paddle.device.cuda.memory_allocated()
    for _ in range(50):
        flashmask_attention(q, k, v, **arguments)
    paddle.device.cuda.synchronize()
    assert free_bytes() == before
    assert paddle.device.cuda.memory_allocated() == held


def test_another_device_than_the_current_one() -> None:
    if paddle.device.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = hostile_case("documents_mixed_causal")
    inputs, exact, naive = expected(case, "bfloat16")
    check(run_op(case, inputs, device=1), exact, naive, case)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dims", "dtype", "message"),
    [
        ((64, 64), np.float32, "dtype=float32; sm90 serves bfloat16 and float16; the cpu backend serves it"),
        ((12, 12), np.float16, "d_qk=12, d_v=12; sm90 serves positive multiples of 8"),
        ((320, 64), np.float16, "d_qk=320, d_v=64; sm90 serves head dims up to 256"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(head_dims: tuple[int, int], dtype: type, message: str) -> None:
    from paddle_fm3 import flashmask_attention

    d_qk, d_v = head_dims
    q, k = (to_tensor(np.zeros((1, 16, 1, d_qk), dtype)) for _ in range(2))
    v = to_tensor(np.zeros((1, 16, 1, d_v), dtype))
    with pytest.raises((ValueError, RuntimeError, OSError), match="fm3_attention: the sm90 forward refused") as raised:
        flashmask_attention(q, k, v, causal=True)
    assert message in str(raised.value)


def test_tensors_on_two_devices_are_refused() -> None:
    from paddle_fm3 import flashmask_attention

    x = np.zeros((1, 16, 1, 64), np.float16)
    k = paddle.to_tensor(x, place=paddle.CPUPlace())
    with pytest.raises((ValueError, RuntimeError, OSError), match="move them to one device"):
        flashmask_attention(to_tensor(x), k, to_tensor(x), causal=True)
