# SPDX-License-Identifier: Apache-2.0
"""Every shipped config: loads, keeps its promises, and refuses what it should."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest

from paddle_fm3.integration.paddlenlp import config_schema, model_size
from paddle_fm3.integration.paddlenlp.config_schema import Layout, load_scenario, scenario_from_dict, scenario_names

NAMES = scenario_names()
ROOT = Path(__file__).resolve().parents[2]


def _content(name: str = "moe_118b_a14b_128k_cp16") -> dict:
    return json.loads((config_schema.CONFIG_DIR / f"{name}.json").read_text())


def _expert_content() -> dict:
    """The same model on fleet's own grid for expert parallelism."""
    content = _content()
    content["layout"].update(topology="expert", sharding_parallel_degree=128)
    content["layout"].update(expert_parallel_degree=64, moe_sharding_degree=2)
    return content


def test_the_promised_configs_are_there():
    expected = {f"moe_118b_a14b_128k_cp{cp}" for cp in (8, 16, 32)}
    expected |= {"moe_14b_a2b7_sft_32k_cp4", "moe_14b_a2b7_dpo_32k_cp4", "moe_tiny_cpu"}
    assert expected <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_size_is_what_the_name_says(name):
    scenario = load_scenario(name)
    count = model_size.count_parameters(scenario.model)
    if name.startswith("moe_118b_a14b"):
        assert scenario.claims == {"total_billions": 118, "active_billions": 14}
        assert abs(count.total / 118e9 - 1) < 0.005
        assert abs(count.active / 14e9 - 1) < 0.02
    elif name.startswith("moe_14b_a2b7"):
        assert abs(count.total / 14.3e9 - 1) < 0.005
        assert abs(count.active / 2.7e9 - 1) < 0.02
    else:
        assert scenario.claims == {}


@pytest.mark.parametrize("name", NAMES)
def test_estimated_memory_fits_the_gpu_it_is_written_for(name):
    scenario = load_scenario(name)
    assert scenario.memory().total_bytes < 0.9 * scenario.layout.gpu_memory_gib * 2**30


@pytest.mark.parametrize("name", NAMES)
def test_every_parallel_degree_is_explained(name):
    scenario = load_scenario(name)
    content = _content(name)
    for field in ("context_parallel_degree", "expert_parallel_degree", "sharding_parallel_degree"):
        if getattr(scenario.layout, field) > 1:
            assert f"layout.{field}" in scenario.why
    for topic in scenario.why:  # a reason for a key that does not exist is a stale reason
        section, _, key = topic.partition(".")
        assert section in content, topic
        if key:
            kind = {"model": model_size.ModelShape, "layout": Layout, "data": config_schema.Data}
            kind |= {"training": config_schema.Training, "attention": config_schema.Attention}
            assert key in kind[section].__dataclass_fields__, topic


def test_the_long_context_config_is_the_published_setting():
    scenario = load_scenario("moe_118b_a14b_128k_cp16")
    assert (scenario.layout.num_gpus, scenario.layout.context_parallel_degree) == (128, 16)
    assert (scenario.data.max_seq_len, scenario.s_local) == (131072, 8192)
    assert (scenario.model.num_attention_heads, scenario.model.num_key_value_heads) == (64, 8)
    assert scenario.model.head_dim == 128
    assert scenario.data.mask == "causal_document"
    assert scenario.training.recompute
    assert scenario.layout.nodes_per_context_group == 2
    assert scenario.tokens_per_step == 128 // 16 * 131072


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        (None, "atention", "attention"),
        ("model", "num_expert", "num_experts"),
        ("layout", "context_paralel_degree", "context_parallel_degree"),
        ("data", "max_sequence_len", "max_seq_len"),
        ("attention", "cp_stratgy", "cp_strategy"),
        ("training", "learning_rat", "learning_rate"),
    ],
)
def test_an_unknown_key_is_named_with_its_neighbour(section, key, hint):
    content = _content()
    (content if section is None else content[section])[key] = 1
    with pytest.raises(ValueError, match=f"unknown key '{key}'; did you mean '{hint}'"):
        scenario_from_dict(content)


def test_a_missing_key_and_an_unknown_name_are_named(tmp_path):
    content = _content()
    del content["model"]["hidden_size"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"mine\.json: model lacks hidden_size"):
        load_scenario(path)
    with pytest.raises(FileNotFoundError, match="shipped: .*moe_tiny_cpu"):
        load_scenario("moe_119b")


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("layout", {"num_gpus": 96}, "must divide num_gpus=96"),
        ("layout", {"moe_sharding_degree": 4}, "moe_sharding_degree=4 belongs to topology 'expert'"),
        ("layout", {"expert_parallel_degree": 24}, "expert_parallel_degree=24 must divide num_gpus=128"),
        ("layout", {"sharding_stage": 2}, "is served with tensor and pipeline degree 1 and sharding stage 0 or 1"),
        ("layout", {"sharding_stage": 0}, "sharding_stage=0 with sharding_parallel_degree=8"),
        ("layout", {"topology": "mesh"}, "topology='mesh' is unknown"),
        ("data", {"max_seq_len": 131000}, "documents hold 131072 tokens"),
        ("data", {"mask": "diagonal"}, "mask='diagonal' is unknown"),
        ("data", {"mask_window": 512, "mask_layers": "full"}, "a window > 0 belongs to layers that use it"),
        ("data", {"mask": "prefix_lm_document"}, r"prefix_lm_document \[prefix, rest\]"),
        ("attention", {"cp_plans_ahead": -1}, "plans_ahead=-1 must be >= 0"),
        ("data", {"documents": "paper_9k"}, "expected a list or paper_"),
        ("attention", {"cp_strategy": "zigzag"}, "cp_strategy='zigzag' is unknown"),
        ("training", {"recompute_granularity": "some"}, "recompute_granularity='some' is unknown"),
        ("model", {"num_experts": 100}, "must divide num_experts=100"),
        ("model", {"num_key_value_heads": 7}, "num_key_value_heads=7 must divide"),
        ("model", {"max_position_embeddings": 65536}, "max_position_embeddings=65536 < max_seq_len"),
        ("claims", {"total": 1}, "unknown key 'total'"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(section, changes, message):
    content = _content()
    content[section].update(changes)
    with pytest.raises(ValueError, match=message):
        scenario_from_dict(content)


@pytest.mark.parametrize(
    ("s", "cp", "message"),
    [
        (131072 + 128, 16, "multiple of 256"),
        (2048 * 24, 16, "multiple of the planner's 2048-token chunk"),
        (4097, 16, "multiple of context_parallel"),
    ],
)
def test_a_sequence_that_does_not_split_into_chunks_is_refused(s, cp, message):
    content = _content()
    content["layout"]["context_parallel_degree"] = cp
    content["data"] = {"max_seq_len": s, "mask": "causal_document", "documents": [s]}
    content["model"]["max_position_embeddings"] = 2**20
    with pytest.raises(ValueError, match=message):
        scenario_from_dict(content)


def test_hybrid_degrees_use_every_gpu():
    layout = Layout("hybrid", 64, 8, 80, context_parallel_degree=4, sharding_parallel_degree=8, sharding_stage=1)
    assert (layout.data_parallel_degree, layout.num_replicas) == (2, 16)
    degrees = layout.fleet_hybrid_configs()
    product = 1
    for name in degrees["order"]:
        product *= degrees[f"{name}_degree"]
    assert product == 64
    with pytest.raises(ValueError, match="must divide num_gpus=64"):
        Layout("hybrid", 64, 8, 80, context_parallel_degree=3)
    with pytest.raises(ValueError, match="expert_parallel_degree=4 in topology 'hybrid' is served with tensor"):
        Layout("hybrid", 64, 8, 80, expert_parallel_degree=4, tensor_parallel_degree=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 96}, "= num_gpus=96"),
        ({"moe_sharding_degree": 4}, "must equal sharding 128"),
        ({"context_parallel_degree": 24}, "must divide sharding"),
        ({"sharding_stage": 0}, "sharding_stage=0 with sharding_parallel_degree=128"),
        ({"expert_parallel_degree": 1, "moe_sharding_degree": 128}, "needs expert_parallel_degree > 1"),
    ],
)
def test_an_expert_topology_that_does_not_divide_is_refused(changes, message):
    content = _expert_content()
    scenario_from_dict(content)
    content["layout"].update(changes)
    with pytest.raises(ValueError, match=message):
        scenario_from_dict(content)


def test_the_expert_topology_is_not_passed_off_as_trainer_flags():
    with pytest.raises(ValueError, match="topology 'expert' is not one of"):
        scenario_from_dict(_expert_content()).trainer_arguments()


def test_split_experts_and_where_their_states_are():
    """Memory by hand: dense weights whole, a 128th of the experts; dense states over 8 replicas, experts' with them."""
    scenario = load_scenario("moe_118b_a14b_128k_cp16")
    count = model_size.count_parameters(scenario.model)
    memory = scenario.memory()
    assert memory.weights_bytes == pytest.approx(2 * (count.dense + count.experts / 128), rel=1e-9)
    assert memory.optimizer_bytes == pytest.approx(12 * (count.dense / 8 + count.experts / 128), rel=1e-9)
    fields = scenario.trainer_arguments()
    degrees = ("context_parallel_degree", "sharding_parallel_degree", "moe_expert_parallel")
    assert [fields[name] for name in degrees] == [16, 8, 128] and fields["sharding"] == "stage1"


def test_the_tiny_config_is_what_the_demo_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    demo = importlib.import_module("demo")
    arguments = demo.parse_arguments()
    scenario = load_scenario("moe_tiny_cpu")
    demo.write_inputs(arguments, tmp_path, [[[1, 2], [3]]], scenario.model.vocab_size)
    written = json.loads((tmp_path / "config.json").read_text())
    model, training = scenario.model, scenario.training
    expected = {
        "s": scenario.data.max_seq_len, "vocab_size": model.vocab_size, "hidden_size": model.hidden_size,
        "num_layers": model.num_hidden_layers, "num_heads": model.num_attention_heads,
        "num_kv_heads": model.num_key_value_heads, "num_experts": model.num_experts, "steps": training.max_steps,
        "warmup_steps": training.warmup_steps, "batch_size": training.per_device_train_batch_size,
        "learning_rate": training.learning_rate, "strategy": scenario.attention.cp_strategy, "seed": training.seed,
    }  # fmt: skip
    assert {name: written[name] for name in expected} == expected
    assert arguments.ranks == scenario.layout.context_parallel_degree


def test_every_config_says_its_mask_and_nodes_to_the_trainer():
    for name in NAMES:
        fields, scenario = load_scenario(name).training_fields(), load_scenario(name)
        assert fields["mask_kind"] == scenario.data.mask
        assert fields["cp_nodes"] == str(min(8, scenario.layout.context_parallel_degree))
        if scenario.layout.num_gpus > 2:
            assert fields["cp_strategy"] == "fm3"
    content = _content()
    content["layout"]["gpus_per_node"] = 4
    content["data"].update(mask_window=4096, mask_layers="window,full")
    fields = scenario_from_dict(content).training_fields()
    assert (fields["cp_nodes"], fields["mask_window"], fields["mask_layers"]) == ("4", 4096, "window,full")


def test_a_scenario_is_a_value():
    content = _content()
    assert scenario_from_dict(content) == scenario_from_dict(copy.deepcopy(content))
