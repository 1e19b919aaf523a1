# SPDX-License-Identifier: Apache-2.0
"""The shipped training configs: what they are, whether they fit, and files that start a run.

    python -m paddle_fm3 config                                       # the list
    python -m paddle_fm3 config moe_118b_a14b_128k_cp16               # sizes, layout, memory, reasons
    python -m paddle_fm3 config moe_14b_a2b7_sft_32k_cp4 --write run  # run/trainer.json, run/model.json, run/fleet.json

trainer.json is for PaddleNLP's argument parser with FlashMask3TrainingArguments, model.json for Qwen2MoeConfig,
fleet.json is what fleet.init takes as hybrid_configs. A path to a config of your own is checked and shown the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paddle_fm3.integration.paddlenlp.config_schema import Scenario, load_scenario, scenario_names
from paddle_fm3.integration.paddlenlp.model_size import count_parameters

HELP = "shipped training configs: sizes, memory, layout; write the files of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a shipped config, or the path of one")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write trainer.json, model.json and fleet.json there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        if arguments.write:
            print("config: --write needs the name of a config", file=sys.stderr)
            return 2
        scenarios = {name: load_scenario(name) for name in scenario_names()}
        if arguments.json:
            print(json.dumps({name: summary(scenario) for name, scenario in scenarios.items()}))
        else:
            width = max(map(len, scenarios))
            print("\n".join(f"{name:<{width}}  {scenario.what}" for name, scenario in scenarios.items()))
        return 0
    try:
        scenario = load_scenario(arguments.name)
    except (ValueError, FileNotFoundError) as error:
        print(f"config: {error}", file=sys.stderr)
        return 2
    print(json.dumps(summary(scenario)) if arguments.json else _text(arguments.name, scenario))
    if arguments.write:
        try:
            written = write_run(scenario, arguments.write)
        except OSError as error:
            print(f"config: --write: {error}", file=sys.stderr)
            return 2
        print("wrote " + ", ".join(map(str, written)), file=sys.stderr)
    return 0


def summary(scenario: Scenario) -> dict[str, Any]:
    count = count_parameters(scenario.model)
    return {
        "what": scenario.what,
        "parameters": count.total,
        "active_parameters": count.active,
        "layout": {**vars(scenario.layout), "data_parallel_degree": scenario.layout.data_parallel_degree},
        "s": scenario.data.max_seq_len,
        "s_local": scenario.s_local,
        "mask": scenario.data.mask,
        "tokens_per_step": scenario.tokens_per_step,
        "memory_estimate_bytes": scenario.memory().as_dict(),
        "fits": scenario.memory().total_bytes < scenario.layout.gpu_memory_gib * 2**30,
        "why": scenario.why,
    }


def write_run(scenario: Scenario, folder: Path) -> list[Path]:
    """The three files. With topology "expert" trainer.json has no degrees: fleet is initialised with fleet.json."""
    is_expert = scenario.layout.topology == "expert"
    trainer = scenario.training_fields() if is_expert else scenario.trainer_arguments()
    files = {
        "trainer.json": {"output_dir": str(folder / "output"), **trainer},
        "model.json": scenario.model_config(),
        "fleet.json": scenario.layout.fleet_hybrid_configs(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in files]


def _text(name: str, scenario: Scenario) -> str:
    shown = summary(scenario)
    layout, memory = scenario.layout, dict(shown["memory_estimate_bytes"])
    total = memory.pop("total_bytes") / 2**30
    parts = ", ".join(f"{part.removesuffix('_bytes')} {size / 2**30:.2f}" for part, size in memory.items() if size)
    lines = [
        f"{name}: {scenario.what}",
        f"parameters {shown['parameters'] / 1e9:.4g} B, active {shown['active_parameters'] / 1e9:.4g} B",
        f"{layout.num_gpus} GPUs, {layout.num_replicas} sequences at once, {shown['tokens_per_step']:,} tokens a step",
        f"{shown['s']:,} tokens a sequence, {shown['s_local']:,} a rank; mask {shown['mask']}",
        "fleet: " + ", ".join(f"{k}={v}" for k, v in layout.fleet_hybrid_configs().items() if k != "order"),
        *([f"experts split over {layout.expert_parallel_degree} ranks"] if layout.expert_parallel_degree > 1 else []),
        f"memory, estimated: {total:.1f} of {layout.gpu_memory_gib:g} GiB ({parts})",
        *(f"  {topic}: {reason}" for topic, reason in scenario.why.items()),
    ]
    return "\n".join(lines)
