# SPDX-License-Identifier: Apache-2.0
"""The PaddleFormers adapter against PaddleFormers' own eager attention, in its real models."""

from __future__ import annotations

import importlib.util
import sys
import types

import numpy as np
import paddle
import pytest

pytest.importorskip("paddleformers", reason="paddleformers is not installed (requirements-paddlenlp.txt has it)")

# PaddleFormers imports a downloader of aistudio_sdk 0.3; PaddleNLP needs aistudio_sdk below 0.3. Nothing here downloads.
if importlib.util.find_spec("aistudio_sdk") is None or importlib.util.find_spec("aistudio_sdk.file_download") is None:
    downloader = types.ModuleType("aistudio_sdk.file_download")
    downloader.model_file_download = None
    sys.modules["aistudio_sdk.file_download"] = downloader

from paddleformers.nn.attention.interface import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from paddleformers.transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from paddle_fm3.integration import paddleformers as adapter
from paddle_fm3.mask import builders

S, VOCABULARY = 24, 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
MODELS = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    yield
    AttentionInterface._global_mapping.pop(adapter.DEFAULT_NAME, None)


def build(name: str):
    config_class, model_class = MODELS[name]
    paddle.seed(3)
    model = model_class(config_class(**SIZES))
    model.train()
    return model


def run(model, implementation: str, **masks):
    """Logits [b, S, vocabulary] and the gradient of every parameter."""
    model.config._attn_implementation = implementation
    tokens = paddle.to_tensor(np.random.default_rng(0).integers(0, VOCABULARY, (2, S)))
    logits = model(tokens, **masks)
    logits = logits[0] if isinstance(logits, tuple) else logits
    weights = paddle.to_tensor(np.random.default_rng(1).standard_normal(logits.shape).astype("float32"))
    (logits * weights).sum().backward()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return logits.numpy(), gradients


def assert_same(left, right):
    assert np.abs(left[0] - right[0]).max() < 2e-5
    assert left[1].keys() == right[1].keys() and len(left[1]) > 20
    for name, gradient in left[1].items():
        scale = max(1.0, np.abs(gradient).max())
        assert np.abs(gradient - right[1][name]).max() < 1e-5 * scale, name


@pytest.mark.parametrize("name", MODELS)
def test_a_causal_model_is_the_same(name):
    model = build(name)
    assert_same(run(model, "eager"), run(model, "flashmask3"))


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_the_dense_document_mask(name):
    mask = builders.causal_document([[10, 14], [3, 20, 1]])
    indices = paddle.to_tensor(mask.to_bounds()[0])  # [2, 1, S, 1]
    dense = paddle.to_tensor(mask.dense())  # [2, 1, S, S]
    model = build(name)
    packed = run(model, "flashmask3", attn_mask_startend_row_indices=indices)
    assert_same(run(model, "eager", attention_mask=dense), packed)
    assert_same(packed, run(model, "flashmask3", attn_mask_startend_row_indices=indices.squeeze(-1)))
    assert np.abs(packed[0] - run(model, "flashmask3")[0]).max() > 1e-3  # the mask matters


def test_right_padding_given_as_a_token_mask_is_kept():
    model = build("qwen3")
    tokens_mask = paddle.to_tensor(np.arange(S)[None] < np.array([[S], [15]]))  # [2, S]
    ours = run(model, "flashmask3", attention_mask=tokens_mask)
    assert_same(run(model, "eager", attention_mask=tokens_mask), ours)


def _layer(training: bool = True):
    layer = paddle.nn.Layer()
    layer.train() if training else layer.eval()
    return layer


def _qkv(h_q: int = 4, h_kv: int = 2, d: int = 8):
    rng = np.random.default_rng(5)
    return [paddle.to_tensor(rng.standard_normal((2, S, h, d), np.float32)) for h in (h_q, h_kv, h_kv)]


def test_four_bounds_are_not_causal():
    mask = builders.global_sliding_window(S, 2, 3, 3, b=2)
    bounds, is_causal = mask.to_bounds()
    assert bounds.shape[3] == 4 and not is_causal
    q, k, v = _qkv()
    ours, weights = adapter.attention_forward(
        _layer(), q, k, v, attn_mask_startend_row_indices=paddle.to_tensor(bounds)
    )
    dense = paddle.where(paddle.to_tensor(mask.dense()), 0.0, -1e9)
    module = _layer()
    module.num_key_value_groups = 2
    eager, _ = ALL_ATTENTION_FUNCTIONS["eager"](module, q, k, v, dense, scaling=8**-0.5)
    assert weights is None and ours.shape == [2, S, 32]
    assert np.abs((ours - eager).numpy()).max() < 1e-5


def test_not_causal_without_a_mask_and_another_scale():
    q, k, v = _qkv()
    ours, _ = adapter.attention_forward(_layer(), q, k, v, is_causal=False, scaling=0.5)
    module = _layer()
    module.num_key_value_groups = 2
    eager, _ = ALL_ATTENTION_FUNCTIONS["eager"](module, q, k, v, None, scaling=0.5)
    assert np.abs((ours - eager).numpy()).max() < 1e-5


def test_a_dense_mask_is_converted_once_and_again_when_it_changes(monkeypatch):
    calls, real = [], adapter.from_dense
    monkeypatch.setattr(adapter, "from_dense", lambda table: calls.append(1) or real(table))
    q, k, v = _qkv()
    dense = paddle.to_tensor(np.tril(np.ones((2, 1, S, S), bool)))
    first, _ = adapter.attention_forward(_layer(), q, k, v, dense)
    adapter.attention_forward(_layer(), q, k, v, dense)
    assert len(calls) == 1
    dense[:, :, :, 0] = False
    changed, _ = adapter.attention_forward(_layer(), q, k, v, dense)
    assert len(calls) == 2 and np.abs((first - changed).numpy()).max() > 1e-3
    dense.set_value(paddle.to_tensor(np.tril(np.ones((2, 1, S, S), bool))))  # leaves inplace_version as it is
    again, _ = adapter.attention_forward(_layer(), q, k, v, dense)
    np.testing.assert_array_equal(again.numpy(), first.numpy())


def test_what_cannot_be_served_is_refused():
    q, k, v = _qkv()
    with pytest.raises(NotImplementedError, match="sinks are not supported"):
        adapter.attention_forward(_layer(), q, k, v, sink=paddle.zeros([4]))
    with pytest.raises(ValueError, match="position bias"):
        adapter.attention_forward(_layer(), q, k, v, paddle.full([2, 1, S, S], -3.0))
    visible = np.ones((2, 1, S, S), bool)
    visible[:, :, [2, 5, 9], 4] = False
    with pytest.raises(ValueError, match=r"column \(b, h_mask, k\) = \(0, 0, 4\)"):
        adapter.attention_forward(_layer(), q, k, v, paddle.to_tensor(visible))
    with pytest.raises(ValueError, match="dropout"):
        adapter.attention_forward(_layer(), q, k, v, dropout=0.1)
    adapter.attention_forward(_layer(training=False), q, k, v, dropout=0.1)


def test_a_split_sequence_is_refused(monkeypatch):
    from paddle_fm3.distributed import groups

    monkeypatch.setattr(groups, "resolve_group", lambda: None)
    monkeypatch.setattr(groups, "group_size", lambda group: 4)
    with pytest.raises(NotImplementedError, match="context-parallel group of 4 ranks"):
        adapter.attention_forward(_layer(), *_qkv())


def test_layouts_and_versions(monkeypatch):
    adapter.register("turned", layout="bhld")
    q, k, v = _qkv()
    turned = ALL_ATTENTION_FUNCTIONS["turned"](_layer(), *(x.transpose([0, 2, 1, 3]) for x in (q, k, v)))[0]
    assert np.array_equal(turned.numpy(), adapter.attention_forward(_layer(), q, k, v)[0].numpy())
    AttentionInterface._global_mapping.pop("turned")
    with pytest.raises(ValueError, match="layout='lbhd' is unknown"):
        adapter.register(layout="lbhd")
    monkeypatch.setattr(adapter.importlib.metadata, "version", lambda name: "1.2.0")
    with pytest.raises(ValueError, match=r"version 1\.2\.0 is not one this adapter was tested with"):
        adapter.register()
