# SPDX-License-Identifier: Apache-2.0
"""The parameter formula against models that PaddleNLP really builds; the memory formula against plain sums."""

from __future__ import annotations

import dataclasses

import pytest

from paddle_fm3.integration.paddlenlp.config_schema import Training, load_scenario, scenario_names
from paddle_fm3.integration.paddlenlp.model_size import (
    FORMULAS,
    MemoryEstimate,
    ModelShape,
    count_parameters,
    estimate_memory,
)

SHAPES = [
    ModelShape(96, 64, 2, 4, 2, 4, 2, 48, 80, 128),
    ModelShape(50, 48, 3, 6, 6, 5, 1, 16, 24, 64),
    ModelShape(128, 64, 2, 8, 1, 6, 3, 40, 40, 64),
]


def _build(shape: ModelShape):
    pytest.importorskip("paddlenlp")
    from paddlenlp.transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**vars(shape), intermediate_size=shape.shared_expert_intermediate_size))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"h{shape.hidden_size}_e{shape.num_experts}")
def test_formula_equals_the_parameters_that_paddlenlp_allocates(shape):
    parameters = {name: int(p.size) for name, p in _build(shape).named_parameters()}
    count = count_parameters(shape)
    experts = sum(size for name, size in parameters.items() if ".experts." in name)
    assert count.experts == experts > 0
    assert count.total == sum(parameters.values())
    assert count.active == count.total - experts + experts * shape.num_experts_per_tok // shape.num_experts


def test_every_field_of_the_configs_is_one_that_paddlenlp_knows():
    pytest.importorskip("paddlenlp")
    from paddlenlp.trainer import TrainingArguments
    from paddlenlp.transformers import Qwen2MoeConfig

    from paddle_fm3.integration.paddlenlp import FlashMask3TrainingArguments

    known = {field.name for field in dataclasses.fields(FlashMask3TrainingArguments)}
    assert {field.name for field in dataclasses.fields(TrainingArguments)} < known
    for name in scenario_names():
        scenario = load_scenario(name)
        assert set(scenario.training_fields()) <= known
        if scenario.layout.topology == "hybrid":
            assert set(scenario.trainer_arguments()) <= known
        config = Qwen2MoeConfig(**scenario.model_config())
        for key, value in scenario.model_config().items():
            assert getattr(config, key) == value, key
    assert Training.__dataclass_fields__["recompute_granularity"].default == "full"


def test_the_tiny_config_builds_in_paddlenlp_with_the_size_it_is_counted_at():
    shape = load_scenario("moe_tiny_cpu").model
    assert sum(int(p.size) for p in _build(shape).parameters()) == count_parameters(shape).total


def _estimate(**options) -> MemoryEstimate:
    return estimate_memory(SHAPES[0], **{"b": 1, "s": 128, "cp": 1, **options})


def test_memory_splits_as_the_layout_says():
    count = count_parameters(SHAPES[0])
    plain = _estimate()
    assert plain.weights_bytes == 2 * count.total
    assert plain.gradients_bytes == 2 * count.total
    assert plain.optimizer_bytes == 12 * count.total
    assert _estimate(has_f32_gradients=True).gradients_bytes == 4 * count.total
    assert _estimate(ep=2).weights_bytes == 2 * (count.dense + count.experts // 2)
    assert _estimate(sharding=4, expert_sharding=2, ep=2).optimizer_bytes == pytest.approx(
        12 * (count.dense / 4 + count.experts / 4), abs=1
    )
    assert _estimate(sharding=4, expert_sharding=4, sharding_stage=3).weights_bytes == pytest.approx(
        2 * count.total / 4, abs=1
    )
    assert _estimate(has_reference_model=True).reference_model_bytes == plain.weights_bytes
    assert _estimate(pp=2).weights_bytes == count.total
    f32 = _estimate(is_bfloat16=False)
    assert (f32.weights_bytes, f32.gradients_bytes, f32.optimizer_bytes) == tuple(b * count.total for b in (4, 4, 8))
    assert f32.checkpoints_bytes == 2 * plain.checkpoints_bytes


def test_memory_of_activations_follows_the_local_length():
    whole, half = _estimate(), _estimate(cp=2)
    assert half.checkpoints_bytes * 2 == whole.checkpoints_bytes == 2 * 128 * 64 * 2  # 2 B x tokens x hidden x layers
    assert half.logits_bytes * 2 == whole.logits_bytes == 8 * 128 * 96
    assert half.router_bytes * 2 == whole.router_bytes
    assert (whole.gathered_kv_bytes, half.gathered_kv_bytes) == (0, 2 * 128 * 32 * 6)
    kept = _estimate(is_recomputed=False)
    assert kept.checkpoints_bytes == 0
    assert kept.layer_bytes == whole.layer_bytes / 2 * 3  # two layers kept, one being differentiated


def test_every_part_has_a_stated_formula_and_counts_once():
    estimate = _estimate(cp=2)
    parts = estimate.as_dict()
    assert set(FORMULAS) == set(parts) - {"total_bytes"}
    bigger = dataclasses.replace(estimate, weights_bytes=estimate.weights_bytes + 1000)
    assert bigger.total_bytes == estimate.total_bytes + 1000
