# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of context parallelism on one rank: each is refused, naming the argument, what came and what was wanted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_fm3.distributed import flashmask_cp_attention, make_partition, plan_attention, shard_rows, unshard_rows
from paddle_fm3.distributed.comm import Communicator
from paddle_fm3.distributed.partition import Partition, contiguous_partition, dual_chunk_partition
from paddle_fm3.mask import causal_document

S = 64
MASK = causal_document([40, 24])
BOUNDS = MASK.to_bounds()[0]  # int32 [1, 1, S, 1]


def tensors(dtype: str = "float32", heads: tuple[int, int] = (4, 2), d: int = 8) -> dict[str, Any]:
    shapes = {"q": [1, S, heads[0], d], "k": [1, S, heads[1], d], "v": [1, S, heads[1], d]}
    return {name: paddle.ones(shape).astype(dtype) for name, shape in shapes.items()} | {
        "startend_row_indices": paddle.to_tensor(BOUNDS)
    }


# changes of a good call -> words of the error
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": None}, "q is a NoneType; expected a paddle.Tensor"),
    ({"k": np.ones([1, S, 2, 8])}, "k is a ndarray; expected a paddle.Tensor"),
    ({"startend_row_indices": BOUNDS}, "startend_row_indices is a ndarray; expected a paddle.Tensor"),
    ({"startend_row_indices": MASK}, r"is a ColumnMask; .* by paddle.to_tensor\(mask.to_bounds\(\)\[0\]\)"),
    (tensors("float64"), "q.dtype is float64; expected one of float32, bfloat16, float16"),
    (tensors(heads=(3, 2)), "q has 3 heads, k has 2; h_kv must divide h_q"),
    (tensors(heads=(4, 0)), "only s_local may be 0"),
    (tensors(d=0), "only s_local may be 0"),
    (
        {"startend_row_indices": paddle.to_tensor(BOUNDS.repeat(3, 1))},
        r"startend_row_indices.shape is \[1, 3, 64, 1\]; h_mask=3 must be 1, h_kv=2 or h_q=4; 1 is for every head",
    ),
    (
        tensors(heads=(8, 4)) | {"startend_row_indices": paddle.to_tensor(BOUNDS.repeat(2, 1))},
        r"h_mask=2 must be 1, h_kv=4 or h_q=8; each .*: paddle.repeat_interleave\(startend_row_indices, 2, axis=1\)",
    ),
    (
        {name: paddle.ones([2, S, 2, 8]) for name in "qkv"},
        r"\[1, 1, 64, 1\]; expected \[b=2, h_mask, s, n\]; one for every sample: startend_row_indices.expand\(\[2, -1,",
    ),
    (
        {"startend_row_indices": paddle.to_tensor(BOUNDS.astype("int64"))},
        "startend_row_indices.dtype is int64; expected int32",
    ),
    ({"block_mask": paddle.ones([1, 1, 1, 1])}, "block_mask.dtype is float32; expected int32"),
    ({"block_mask": paddle.ones([1, 1], "int32")}, r"block_mask.shape is \[1, 1\]; expected \[b=1, h_mask, ceil"),
    ({"causal": "no"}, "causal is 'no'; expected True or False"),
    ({"keep_gathered": 1}, "keep_gathered is 1; expected True or False"),
    ({"softmax_scale": float("nan")}, "softmax_scale is nan; expected a finite number"),
    ({"softmax_scale": "x"}, "softmax_scale is 'x'; expected a finite number"),
    ({"timeout_s": 0}, "timeout_s is 0; expected seconds, more than 0"),
    ({"reduce_dtype": "fp32"}, "reduce_dtype is 'fp32'; expected one of 'float32', 'input'"),
    ({"strategy": "zigzag"}, "strategy='zigzag' is unknown; known: dual_chunk, contiguous, fm3, "),
    ({"strategy": ["fm3"]}, r"strategy=\['fm3'\] is unknown"),
    ({"plan": "fm3"}, "plan is 'fm3'; expected a CpPlan, which plan_attention makes"),
    ({"partition": "dual_chunk"}, "partition is 'dual_chunk'; expected a Partition, which make_partition makes"),
    ({"topology": 8}, "topology is 8; expected a Topology"),
    ({"trace": "trace.json"}, "trace is 'trace.json'; expected a Trace"),
    ({"group": 3}, "group is 3; expected what paddle.distributed.new_group makes, a ProcessMesh, or None"),
    ({"partition": dual_chunk_partition(S, 4)}, "the partition is for 4 ranks; the group has 1"),
    ({"partition": dual_chunk_partition(32, 1)}, r"local rows by rank are \[64\]; the partition of s=32 wants \[32\]"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_wrong_call_is_refused_by_name(changes: dict[str, Any], words: str, is_planned: bool) -> None:
    call = tensors() | {"causal": True}
    if is_planned and not changes.keys() & {"plan", "partition", "strategy"}:
        call["plan"] = plan_attention(BOUNDS, causal=True, num_ranks=1)
    call |= changes
    with pytest.raises(ValueError, match=words):
        flashmask_cp_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_numpy_scalars_are_as_good_as_plain_ones() -> None:
    plan = plan_attention(BOUNDS, causal=True, num_ranks=1)
    results = [
        flashmask_cp_attention(*list(tensors().values()), causal=causal, plan=plan, softmax_scale=scale).numpy()
        for causal, scale in ((True, 0.5), (np.bool_(True), np.float32(0.5)))
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_partition("dual_chunk", S, 0), "num_ranks=0 must be a whole number >= 1"),
        (lambda: make_partition("contiguous", 0, 2), "s=0 must be a whole number >= 1"),
        (lambda: make_partition("dual_chunk", 3.5, 2), "s=3.5 must be a whole number >= 1"),
        (lambda: make_partition("fm3", 32, 2, BOUNDS, causal=True), "s=32; startend_row_indices has s=64 key columns"),
        (
            lambda: plan_attention(BOUNDS[0, 0], causal=True, num_ranks=2),
            r"is \[64, 1\]; expected int32 \[b, h_mask, s",
        ),
        (
            lambda: plan_attention(MASK, causal=True, num_ranks=2),
            r"is ColumnMask; .* ColumnMask gives by to_bounds\(\)",
        ),
        (lambda: shard_rows(paddle.ones([1, S]), dual_chunk_partition(S, 4), 7), r"rank=7 is not in \[0, 4\)"),
        (lambda: shard_rows(paddle.ones([1, S]), dual_chunk_partition(S, 4), 1, axis=3), "axis=3 of x.shape"),
        (lambda: unshard_rows(paddle.ones([1, 16]), dual_chunk_partition(S, 4)), r"axis 1 are \[16\]; .* for 4 ranks"),
    ],
)
def test_cuts_that_cannot_be_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_cut_through_a_block_mask_tile_is_refused_for_every_rank() -> None:
    """Also for the rank whose own chunks are whole tiles: the others would leave it waiting."""
    from paddle_fm3.distributed.localize import localize_mask
    from paddle_fm3.distributed.prepared import global_mask

    partition = Partition((0, 128, 250, 384), (2, 0, 1), 3)
    mask = global_mask(None, True, contiguous_partition(384, 1), 1, np.ones((1, 1, 3, 3), np.int32))
    for rank in range(3):
        with pytest.raises(ValueError, match=r"chunk \[128, 250\) cuts a block_mask tile"):
            localize_mask(mask, partition, rank)


def test_a_second_thread_is_refused_and_the_next_call_is_not() -> None:
    group = SimpleNamespace(id=12345, rank=0, nranks=2, process_group=None)
    met = []

    def other() -> None:
        try:
            with Communicator(group, 1.0).one_call("a call"):
                met.append("inside")
        except RuntimeError as error:
            met.append(str(error))

    for is_inside in (True, False):
        with Communicator(group, 60.0).one_call("a call"), Communicator(group, 1.0).one_call("the same thread, again"):
            if is_inside:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
    other()
    assert met[0].startswith("a call: another thread of rank 0 is in a call of this group") and met[1:] == ["inside"]
