# SPDX-License-Identifier: Apache-2.0
"""From a shipped config to training steps: the path a user takes, with the sizes made tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import launch

from paddle_fm3.__main__ import main
from paddle_fm3.integration.paddlenlp.config_schema import CONFIG_DIR

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("paddlenlp_config_worker.py")
S = 512
DOCUMENTS: dict[str, list[Any]] = {
    "moe_14b_a2b7_sft_32k_cp4": [300, 12, 200],
    "moe_14b_a2b7_dpo_32k_cp4": [[100, 60, 80], [30, 121, 121]],
}
TINY_MODEL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": S,
}
# Everything else stays as shipped: mask, strategy, schedule, recompute, master gradients ...
TINY_TRAINING = {"device": "cpu", "bf16": False, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0}


def made_tiny(name: str) -> dict[str, Any]:
    content = json.loads((CONFIG_DIR / f"{name}.json").read_text())
    content["claims"] = {}
    content["model"].update(TINY_MODEL)
    content["layout"].update(num_gpus=2, gpus_per_node=2, context_parallel_degree=2)
    content["layout"].update(sharding_parallel_degree=1, sharding_stage=0)
    content["data"].update(max_seq_len=S, documents=DOCUMENTS[name])
    content["training"].update(TINY_TRAINING)
    return content


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_a_shipped_config_trains_with_tiny_sizes(name: str, tmp_path: Path) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(made_tiny(name)))
    folder = tmp_path / "run"
    assert main(["config", str(config), "--write", str(folder)]) == 0
    (folder / "data.json").write_text(json.dumps(DOCUMENTS[name]))
    result = launch(WORKER, [str(folder)], 2, tmp_path, timeout_s=120)
    assert result.exit_code == 0, result.tail()
    ranks = [json.loads((folder / f"losses_rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]  # every rank reports the loss over all tokens
    assert len(ranks[0]["losses"]) == 2 and all(2 < loss < 8 for loss in ranks[0]["losses"])
    expected = "share_question" if "dpo" in name else "causal_document"
    assert (ranks[0]["mask"], ranks[0]["strategy"]) == (expected, "fm3")
