# SPDX-License-Identifier: Apache-2.0
"""The flag on and off: everything comes back; another PaddleNLP, or a model that bypasses attention, is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

paddlenlp = pytest.importorskip("paddlenlp")

from paddle.distributed import collective  # noqa: E402
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import (  # noqa: E402
    dygraph_sharding_optimizer,
    hybrid_parallel_optimizer,
)
from paddlenlp.trainer import PdArgumentParser, Trainer, trainer  # noqa: E402
from paddlenlp.transformers import Qwen2MoeConfig, moe_gate, moe_layer  # noqa: E402
from paddlenlp.transformers.llama import fusion_ops  # noqa: E402
from paddlenlp.transformers.llama import modeling as llama  # noqa: E402
from paddlenlp.transformers.qwen2 import modeling as qwen2  # noqa: E402
from paddlenlp.transformers.qwen2_moe import modeling as qwen2_moe  # noqa: E402

from paddle_fm3.integration.paddlenlp import (  # noqa: E402
    FlashMask3TrainingArguments,
    LayerMasks,
    disable,
    enable,
    is_enabled,
    number_layers,
)
from paddle_fm3.integration.paddlenlp import attention as flag_attention  # noqa: E402
from paddle_fm3.integration.paddlenlp.collator import PackedCollator  # noqa: E402
from paddle_fm3.integration.paddlenlp.settings import FlashMask3Settings  # noqa: E402
from paddle_fm3.testing import reference  # noqa: E402

PLACES = [
    (fusion_ops, "fusion_flash_attention"),
    (llama.LlamaAttention, "forward"),
    (qwen2.Qwen2Attention, "forward"),
    (qwen2_moe.Qwen2MoeAttention, "forward"),
    (llama.LlamaPretrainingCriterion, "forward"),
    (llama.LlamaRotaryEmbedding, "forward"),
    (qwen2.Qwen2PretrainingCriterion, "forward"),
    (qwen2.Qwen2RotaryEmbedding, "forward"),
    (qwen2_moe.Qwen2MoePretrainingCriterion, "forward"),
    (qwen2_moe.Qwen2MoeRotaryEmbedding, "forward"),
    (qwen2_moe, "load_balancing_loss_func"),
    (moe_gate, "paddle"),
    (moe_gate.PretrainedMoEGate, "topkgating"),
    (moe_gate.PretrainedMoEGate, "_priority"),
    (moe_gate.MoEGateMixin, "_cal_aux_loss"),
    (moe_layer.MoELayer, "__init__"),
    (moe_layer.MoELayer, "forward"),
    (qwen2_moe.Qwen2MoePretrainedModel, "_init_weights"),
    (hybrid_parallel_optimizer.HybridParallelClipGrad, "_dygraph_clip"),
    (hybrid_parallel_optimizer.HybridParallelClipGrad, "_comm_and_clip"),
    (dygraph_sharding_optimizer.DygraphShardingOptimizer, "_partition_parameters"),
    (dygraph_sharding_optimizer.DygraphShardingOptimizer, "reduce_gradients"),
    (dygraph_sharding_optimizer.DygraphShardingOptimizer, "_sharding_sync_parameters"),
    (dygraph_sharding_optimizer.DygraphShardingOptimizerV2, "__init__"),
    (trainer, "split_inputs_sequence_dim"),
    (trainer, "split_inputs_sequence_dim_load_balance"),
    (Trainer, "_wrap_model"),
    (Trainer, "_inner_training_loop"),
    (Trainer, "log"),
    (Trainer, "_save_checkpoint"),
    (Trainer, "save_model"),
    (Trainer, "_load_from_checkpoint"),
    (Trainer, "_load_optimizer_and_scheduler"),
    (collective, "_new_process_group_impl"),
]


def current() -> list[Any]:
    return [inspect.getattr_static(owner, name) for owner, name in PLACES]


@pytest.fixture(autouse=True)
def everything_off() -> Iterator[None]:
    disable()
    yield
    disable()


def test_enable_replaces_and_disable_restores_every_place() -> None:
    before = current()
    enable(FlashMask3Settings(expert_parallel=2))
    assert is_enabled()
    unchanged = [place for place, old, new in zip(PLACES, before, current(), strict=True) if old is new]
    assert not unchanged
    enable(FlashMask3Settings(cp_strategy="contiguous"))  # again: new settings, not a second layer
    disable()
    assert not is_enabled()
    assert all(old is new for old, new in zip(before, current(), strict=True))


def test_flag_on_the_command_line(tmp_path: Any) -> None:
    parser = PdArgumentParser((FlashMask3TrainingArguments,))
    common = ["--output_dir", str(tmp_path), "--device", "cpu", "--report_to", "none"]
    (arguments,) = parser.parse_args_into_dataclasses([*common])
    assert not arguments.use_flashmask3 and not is_enabled()
    assert arguments.cp_strategy == "fm3" and arguments.layer_masks() == LayerMasks()
    flags = ["--mask_window", "512", "--mask_layers", "window,full", "--mask_kind", "document", "--cp_nodes", "0,0,1"]
    (arguments,) = parser.parse_args_into_dataclasses([*common, *flags])
    assert arguments.layer_masks() == LayerMasks("document", 512, ("window", "full"))
    for own in (["--use_expert_parallel"], ["--expert_parallel_degree", "2"]):
        with pytest.raises(ValueError, match="PaddleNLP's own ways to split experts; leave them out"):
            parser.parse_args_into_dataclasses([*common, "--moe_expert_parallel", "2", *own])
    with pytest.raises(ValueError, match="cp_nodes='0,x': expected"):
        parser.parse_args_into_dataclasses([*common, "--cp_nodes", "0,x"])
    (arguments,) = parser.parse_args_into_dataclasses([*common, "--use_flashmask3", "--cp_strategy", "contiguous"])
    assert arguments.use_flashmask3 and arguments.cp_strategy == "contiguous" and is_enabled()
    disable()
    with pytest.raises(ValueError, match=r"cp_strategy='zigzag' is unknown; known: fm3, .*, dual_chunk, contiguous"):
        parser.parse_args_into_dataclasses([*common, "--use_flashmask3", "--cp_strategy", "zigzag"])
    assert not is_enabled()


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current()
    monkeypatch.setattr(paddlenlp, "__version__", "3.1.0")
    with pytest.raises(RuntimeError, match=r"works with paddlenlp 3\.0\.0b4; found 3\.1\.0"):
        enable()
    assert all(old is new for old, new in zip(before, current(), strict=True))


def test_changed_funnel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_ops, "fusion_flash_attention", lambda query, key: None)
    with pytest.raises(RuntimeError, match=r"fusion_flash_attention takes \['query', 'key'\]"):
        enable()
    assert not is_enabled()


def test_model_without_flash_attention_is_refused() -> None:
    class Model:
        config = Qwen2MoeConfig(use_flash_attention=False)

    enable()
    with pytest.raises(ValueError, match="needs the model's use_flash_attention=True"):
        Trainer._wrap_model(object(), Model())


@pytest.mark.parametrize("rank_count", [2, 3, 4])
def test_index_shapes_reach_the_operator(rank_count: int) -> None:
    """[b, s], [b, h_mask, s] and [b, h_mask, s, n] mean the same mask; int64 is taken."""
    enable()
    s, config = 12, Qwen2MoeConfig(use_flash_attention=True)
    rng = np.random.default_rng(0)
    q, k, v = (paddle.to_tensor(rng.standard_normal((1, s, 2, 8)).astype(np.float32)) for _ in range(3))
    ends = np.array([[5] * 5 + [s] * 7])
    indices = paddle.to_tensor(ends.reshape([1, s] if rank_count == 2 else [1, 1, s] + [1] * (rank_count - 3)))
    out = fusion_ops.fusion_flash_attention(q, config, k, v, None, False, attn_mask_startend_row_indices=indices)
    expected = reference.attention(q, k, v, ends.astype(np.int32).reshape(1, 1, s, 1), causal=True).out
    np.testing.assert_allclose(out.numpy(), expected.reshape(out.shape), atol=2e-6)


def test_layers_pick_their_mask() -> None:
    masks = LayerMasks.from_flags("causal_document", 3, "full,window")
    enable(FlashMask3Settings(masks=masks))
    s = 12
    config = Qwen2MoeConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, num_experts=2,
                            num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8, vocab_size=9,
                            intermediate_size=8, max_position_embeddings=s, use_flash_attention=True)  # fmt: skip
    model = qwen2_moe.Qwen2MoeForCausalLM(config)
    model.eval()
    batch = PackedCollator(s, masks=masks)([{"documents": [[1] * 5, [2] * 7]}])
    batch.pop("labels")
    batch = {name: paddle.to_tensor(x) for name, x in batch.items()}
    with pytest.raises(
        ValueError, match=r"the batch has 2 masks and this attention layer has no index; call number_la"
    ):
        model(**batch)
    number_layers(model)
    seen: list[Any] = []
    attend = flag_attention.flashmask_attention
    flag_attention.flashmask_attention = lambda q, k, v, startend_row_indices, **named: (
        seen.append(startend_row_indices.numpy()[0, 0, :, 0].tolist()) or attend(q, k, v, startend_row_indices, **named)
    )
    try:
        model(**batch)
    finally:
        flag_attention.flashmask_attention = attend
    full = [5] * 5 + [12] * 7
    assert seen == [full, [min(end, at + 3) for at, end in enumerate(full)]]
    enable()
    with pytest.raises(ValueError, match="the batch has 2 masks; --mask_layers full names 1"):
        model(**batch)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_dense_mask_is_followed(kind: str) -> None:
    """Paddle's own CPU attention ignores it when is_causal is set, as PaddleNLP always does."""
    enable()
    s, config = 12, Qwen2MoeConfig(use_flash_attention=True)
    rng = np.random.default_rng(0)
    q, k, v = (paddle.to_tensor(rng.standard_normal((1, s, 2, 8)).astype(np.float32)) for _ in range(3))
    ends = np.array([5] * 5 + [s] * 7, np.int32)
    visible = np.tril(np.ones((s, s), bool)) & (np.arange(s)[:, None] < ends)
    table = visible if kind == "bool" else np.where(visible, 0.0, np.finfo(np.float32).min).astype(np.float32)
    mask = paddle.to_tensor(table.reshape([1, 1, s, s]))
    expected = reference.attention(q, k, v, ends.reshape(1, 1, s, 1), causal=True).out
    for _ in range(2):  # the second layer finds the converted mask
        out = fusion_ops.fusion_flash_attention(q, config, k, v, mask, False)
        np.testing.assert_allclose(out.numpy(), expected.reshape(out.shape), atol=2e-6)
    later = np.tril(np.ones((s, s), bool)) if kind == "bool" else np.triu(np.full((s, s), -1e9, np.float32), 1)
    mask.set_value(paddle.to_tensor(later.reshape([1, 1, s, s])))  # refilled for another batch
    expected = reference.attention(q, k, v, None, causal=True).out
    out = fusion_ops.fusion_flash_attention(q, config, k, v, mask, False)
    np.testing.assert_allclose(out.numpy(), expected.reshape(out.shape), atol=2e-6)
    bias = paddle.to_tensor(np.full((1, 1, s, s), -0.5, np.float32))
    with pytest.raises(ValueError, match="a bias has no interval form"):
        fusion_ops.fusion_flash_attention(q, config, k, v, bias, False)
    with pytest.raises(ValueError, match="does not serve alibi"):
        fusion_ops.fusion_flash_attention(q, config, k, v, None, False, alibi=bias)
    with pytest.raises(ValueError, match=r"attention_mask.shape is \[1, 1, 12, 12\]; expected \[b, h, 6, 6\]"):
        fusion_ops.fusion_flash_attention(q[:, :6], config, k[:, :6], v[:, :6], mask, False)


@pytest.mark.parametrize("dispatch", ["index", "dense"])
def test_dispatch_mask_carries_no_gradient(dispatch: str) -> None:
    """Paddle lets gradients through a cast to bool; upstream's gate weights then drown in them."""
    config = Qwen2MoeConfig(hidden_size=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8,
                            shared_expert_intermediate_size=8, norm_topk_prob=True)  # fmt: skip
    enable(FlashMask3Settings(moe_dispatch=dispatch))
    paddle.seed(5)
    block = qwen2_moe.Qwen2MoeSparseMoEBlock(config)
    rng = np.random.default_rng(1)
    block.gate.weight.set_value(paddle.to_tensor(rng.standard_normal((8, 3)).astype(np.float32)))
    x = paddle.to_tensor(rng.standard_normal((1, 10, 8)).astype(np.float32))
    weight = paddle.to_tensor(rng.standard_normal((1, 10, 8)).astype(np.float32))

    def loss_at(value: np.ndarray) -> paddle.Tensor:
        block.gate.weight.set_value(paddle.to_tensor(value))
        return (block(x)[0] * weight).sum()

    start = block.gate.weight.numpy()
    loss_at(start).backward()
    gradient = block.gate.weight.grad.numpy()
    numeric = np.zeros_like(start)
    for index in np.ndindex(start.shape):
        step = np.zeros_like(start)
        step[index] = 1e-2
        numeric[index] = float(loss_at(start + step) - loss_at(start - step)) / 2e-2
    np.testing.assert_allclose(gradient, numeric, atol=0.02 * np.abs(numeric).max())


def test_experts_by_index_are_those_of_the_dense_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, of an expert that no token chose as well. No expert is called without a row: not every
    kernel takes that, and a message without rows would be one that ranks must agree on."""
    rows: list[int] = []
    forward = qwen2_moe.Qwen2MoeMLP.forward
    monkeypatch.setattr(qwen2_moe.Qwen2MoeMLP, "forward", lambda self, x: rows.append(x.shape[0]) or forward(self, x))
    config = Qwen2MoeConfig(hidden_size=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8,
                            shared_expert_intermediate_size=8)  # fmt: skip
    rng = np.random.default_rng(4)
    gate = rng.standard_normal((8, 5)).astype(np.float32)
    inputs = rng.standard_normal((2, 7, 8)).astype(np.float32)
    inputs[..., 0], gate[:, 3], gate[0, 3] = 1.0, 0.0, -50.0  # so nobody chooses expert 3
    found: dict[str, dict[str, np.ndarray]] = {}
    for dispatch in ("dense", "index"):
        enable(FlashMask3Settings(moe_dispatch=dispatch))
        paddle.seed(3)
        block = qwen2_moe.Qwen2MoeSparseMoEBlock(config)
        block.gate.weight.set_value(paddle.to_tensor(gate))
        x = paddle.to_tensor(inputs, stop_gradient=False)
        rows.clear()
        out, _ = block(x)
        if dispatch == "index":
            assert (
                min(rows) == 1 and sum(rows) == 2 * 14 + 5 + 2
            )  # choices, a row more for each, the shared expert's batch
        (out * out).sum().backward()
        found[dispatch] = {"out": out.numpy(), "x": x.grad.numpy()}
        for name, parameter in block.named_parameters():
            assert parameter.grad is not None, name
            found[dispatch][name] = parameter.grad.numpy()
    assert not found["dense"]["experts.3.up_proj.weight"].any() and found["dense"]["experts.0.up_proj.weight"].any()
    assert found["dense"].keys() == found["index"].keys()
    for name, expected in found["dense"].items():
        atol = 2e-6 * max(np.abs(expected).max(), 1e-3)
        np.testing.assert_allclose(found["index"][name], expected, rtol=1e-5, atol=atol, err_msg=name)


def test_bad_expert_settings_are_named() -> None:
    with pytest.raises(ValueError, match="moe_dispatch='sparse' must be 'index' or 'dense'"):
        FlashMask3Settings(moe_dispatch="sparse")
    with pytest.raises(ValueError, match="expert_parallel=0 with moe_dispatch='index'; it must be >= 1"):
        FlashMask3Settings(expert_parallel=0)
    with pytest.raises(ValueError, match="expert_parallel=2 with moe_dispatch='dense'"):
        FlashMask3Settings(expert_parallel=2, moe_dispatch="dense")
