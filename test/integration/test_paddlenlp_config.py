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
S = 1024
DOCUMENTS: dict[str, list[Any]] = {
    "moe_14b_a2b7_sft_32k_cp4": [600, 24, 400],
    "moe_14b_a2b7_dpo_32k_cp4": [[200, 120, 160], [60, 242, 242]],
    "moe_118b_a14b_128k_cp16": [700, 1, 323],
}
TINY_LAYOUTS = {2: {"sharding_parallel_degree": 1, "sharding_stage": 0}, 4: {"sharding_parallel_degree": 2}}
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
TINY_TRAINING = {
    "device": "cpu",
    "bf16": False,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "save_steps": 1,
}


def made_tiny(name: str, num_ranks: int) -> dict[str, Any]:
    content = json.loads((CONFIG_DIR / f"{name}.json").read_text())
    content["claims"] = {}
    content["model"].update(TINY_MODEL)
    content["layout"].update(num_gpus=num_ranks, gpus_per_node=2, context_parallel_degree=2, **TINY_LAYOUTS[num_ranks])
    if content["layout"].get("expert_parallel_degree", 1) > 1:
        content["layout"]["expert_parallel_degree"] = num_ranks
        content["model"]["num_experts_per_tok"] = 2
    content["data"].update(max_seq_len=S, documents=DOCUMENTS[name])
    content["training"].update(TINY_TRAINING)
    return content


def trained(folder: Path, num_ranks: int, work_dir: Path, *checkpoint: str) -> list[dict[str, Any]]:
    """What each rank reports."""
    result = launch(WORKER, [str(folder), *checkpoint], num_ranks, work_dir, timeout_s=240)
    assert result.exit_code == 0, result.tail()
    return [json.loads((folder / f"losses_rank{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_a_shipped_config_trains_with_tiny_sizes(name: str, tmp_path: Path) -> None:
    num_ranks = 4 if "118b" in name else 2  # the 118B layout: replicas, sharded states and split experts
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(made_tiny(name, num_ranks)))
    folder = tmp_path / "run"
    assert main(["config", str(config), "--write", str(folder)]) == 0
    (folder / "data.json").write_text(json.dumps(DOCUMENTS[name]))
    ranks = trained(folder, num_ranks, tmp_path)
    for first in range(0, num_ranks, 2):
        assert ranks[first] == ranks[first + 1]  # both ranks of a sequence report the loss over all its tokens
        assert len(ranks[first]["losses"]) == 3 and all(2 < loss < 8 for loss in ranks[first]["losses"])
    if num_ranks == 4:
        resumed = trained(folder, num_ranks, tmp_path, str(folder / "output" / "checkpoint-1"))
        assert len(resumed[0]["losses"]) == 2
        for first, again in zip(ranks, resumed, strict=True):
            assert again["losses"] == pytest.approx(first["losses"][1:], rel=1e-6)
    expected = "share_question" if "dpo" in name else "causal_document"
    assert (ranks[0]["mask"], ranks[0]["strategy"]) == (expected, "fm3")
