# SPDX-License-Identifier: Apache-2.0
"""`python -m paddle_fm3 config`: the list, one config, and files that PaddleNLP's own parser takes."""

from __future__ import annotations

import json

import pytest

from paddle_fm3.__main__ import main
from paddle_fm3.integration.paddlenlp.config_schema import CONFIG_DIR, load_scenario, scenario_names


def test_the_list_has_every_config(capsys):
    assert main(["config"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == scenario_names()
    assert main(["config", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["moe_118b_a14b_128k_cp16"]["parameters"] == 118_139_707_392
    assert all(one["fits"] for one in shown.values())


def test_one_config_in_words(capsys):
    assert main(["config", "moe_118b_a14b_128k_cp16"]) == 0
    out = capsys.readouterr().out
    assert "parameters 118.1 B, active 13.95 B" in out
    assert "sharding_degree=8, sep_degree=16" in out and "experts split over 128 ranks" in out
    assert "memory, estimated: 70.4 of 79.6 GiB" in out and "  layout.topology: " in out


def test_a_config_that_does_not_fit_says_so(capsys, tmp_path):
    content = json.loads((CONFIG_DIR / "moe_118b_a14b_128k_cp8.json").read_text())
    content["layout"]["gpu_memory_gib"] = 80
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    assert main(["config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_written_files_start_a_run(tmp_path, capsys, monkeypatch):
    pytest.importorskip("paddlenlp")
    from paddlenlp.trainer import PdArgumentParser
    from paddlenlp.transformers import Qwen2MoeConfig

    from paddle_fm3.integration.paddlenlp import FlashMask3TrainingArguments, disable

    folder = tmp_path / "run"
    assert main(["config", "moe_tiny_cpu", "--write", str(folder)]) == 0
    # One process here: PaddleNLP then sets the degrees aside, as it always does.
    try:
        (arguments,) = PdArgumentParser((FlashMask3TrainingArguments,)).parse_json_file(str(folder / "trainer.json"))
    finally:
        disable()
    scenario = load_scenario("moe_tiny_cpu")
    assert arguments.use_flashmask3 and arguments.device == "cpu"
    assert (arguments.max_steps, arguments.learning_rate) == (80, 2e-3)
    trainer = json.loads((folder / "trainer.json").read_text())
    assert trainer["context_parallel_degree"] == 2
    config = Qwen2MoeConfig(**json.loads((folder / "model.json").read_text()))
    assert config.num_experts == scenario.model.num_experts and config.use_flash_attention
    assert json.loads((folder / "fleet.json").read_text())["sep_degree"] == 2


def test_the_expert_topology_keeps_degrees_out_of_the_trainer_file(tmp_path):
    content = json.loads((CONFIG_DIR / "moe_118b_a14b_128k_cp16.json").read_text())
    content["layout"].update(topology="expert", sharding_parallel_degree=128)
    content["layout"].update(expert_parallel_degree=64, moe_sharding_degree=2)
    (tmp_path / "mine.json").write_text(json.dumps(content))
    assert main(["config", str(tmp_path / "mine.json"), "--write", str(tmp_path)]) == 0
    trainer = json.loads((tmp_path / "trainer.json").read_text())
    assert not [key for key in trainer if key.endswith("_degree")]
    assert json.loads((tmp_path / "fleet.json").read_text())["ep_degree"] == 64


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "no config 'nothing'"),
        (["--write", "x"], "--write needs the name"),
        (["moe_tiny_cpu", "--write", "/dev/null/x"], "--write: [Errno"),
    ],
)
def test_wrong_arguments_are_explained(capsys, argv, message):
    assert main(["config", *argv]) == 2
    assert message in capsys.readouterr().err
