# SPDX-License-Identifier: Apache-2.0
"""What PaddleDevice puts on a GPU is there when it returns, for every stream, also beside a process that keeps the GPU
busy. (Of plain `paddle.to_tensor` copies of this size a quarter is not: see docs/design_device.md.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from paddle_fm3 import _native

paddle = pytest.importorskip("paddle")

NUM_WORDS = 8192  # 32 KB: as much as the tables of a small mask
NUM_ROUNDS = 400

# Copies of page-locked memory beside attention: short copies of others come late then.
BUSY = """
import mmap
import numpy as np, paddle
from paddle_fm3 import _native, flashmask_attention
from paddle_fm3.distributed.device import Sm90Device

NUM_BYTES = 64 << 20
q = paddle.to_tensor(np.ones([1, 8192, 8, 128], np.float16))
flashmask_attention(q, q, q, causal=True)
device = Sm90Device(_native.sm90_library())
host = np.frombuffer(mmap.mmap(-1, NUM_BYTES), np.uint8).ctypes.data
device.host_register(host, NUM_BYTES)
there, back = (device.malloc(NUM_BYTES) for _ in range(2))
streams = [device.stream_create() for _ in range(2)]
while True:
    for _ in range(10):
        out = flashmask_attention(q, q, q, causal=True)
        device.copy(device.copies([(there, host, NUM_BYTES)]), streams[0])
        device.copy(device.copies([(host, back, NUM_BYTES)]), streams[1])
    paddle.device.synchronize()
    print("busy", flush=True)
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not paddle.is_compiled_with_cuda(), reason="needs a GPU build of Paddle"),
    pytest.mark.skipif(
        _native.build_info().get("paddle_with_cuda") != "ON" or not _native.is_built("fm3_sm90"),
        reason="needs libfm3_op.so built for a GPU Paddle: make build CUDA=ON PADDLE=<its paddle folder>",
    ),
]


@pytest.fixture
def busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "busy\n"
        yield
        assert process.poll() is None, "the GPU was not kept busy"
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(120)
def test_an_upload_is_there_for_every_stream(busy: None) -> None:
    from paddle_fm3.distributed.paddle_device import PaddleDevice, address_of

    device = PaddleDevice()
    stream = device.stream_create()  # ordered behind none of Paddle's
    seen = paddle.empty([NUM_WORDS], "int32")
    wrong = []
    for number in range(NUM_ROUNDS):
        address = device.upload(np.full(NUM_WORDS, number, np.int32))
        device.copy(device.copies([(address_of(seen), address, 4 * NUM_WORDS)]), stream)
        paddle.device.synchronize()
        wrong += [number] if (seen.numpy() != number).any() else []
        device.free(address)  # the next one gets the same memory, with this one's content
    assert not wrong, f"{len(wrong)} of {NUM_ROUNDS} had not landed, the first at {wrong[0]}"
