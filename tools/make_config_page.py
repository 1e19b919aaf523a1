#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configs.md: the shipped training configs, their sizes, layouts and estimated memory, and their reasons.

tools/make_config_page.py           rewrite the page
tools/make_config_page.py --check   exit status 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paddle_fm3.integration.paddlenlp.config_schema import Scenario, load_scenario, scenario_names  # noqa: E402
from paddle_fm3.integration.paddlenlp.model_size import FORMULAS, count_parameters  # noqa: E402

PAGE = ROOT / "docs" / "configs.md"
GIB = 2**30


def overview(scenarios: dict[str, Scenario]) -> list[str]:
    lines = [
        "| config | parameters | active | GPUs | tokens a sequence | CP | tokens a rank | mask | memory a GPU, "
        "estimated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, scenario in scenarios.items():
        count, layout = count_parameters(scenario.model), scenario.layout
        memory = scenario.memory().total_bytes / GIB
        lines.append(
            f"| [{name}](#{name}) | {count.total / 1e9:.4g} B | {count.active / 1e9:.4g} B | {layout.num_gpus} | "
            f"{scenario.data.max_seq_len:,} | {layout.context_parallel_degree} | {scenario.s_local:,} | "
            f"{scenario.data.mask} | "
            f"{memory:.3g} of {layout.gpu_memory_gib:g} GiB |"
        )
    return lines


def section(name: str, scenario: Scenario) -> list[str]:
    layout, memory = scenario.layout, scenario.memory().as_dict()
    total = memory.pop("total_bytes")
    degrees = {
        "topology": layout.topology,
        "nodes a CP group": layout.nodes_per_context_group,
        "CP": layout.context_parallel_degree,
        "EP": layout.expert_parallel_degree,
        "expert sharding": layout.moe_sharding_degree,
        "sharding": f"{layout.sharding_parallel_degree} (stage {layout.sharding_stage})"
        if layout.sharding_stage
        else "none",
        "sequences at once": layout.num_replicas,
        "tokens a step": f"{scenario.tokens_per_step:,}",
        "strategy": scenario.attention.cp_strategy,
    }
    shown = ", ".join(f"{part.removesuffix('_bytes')} {size / GIB:.3g}" for part, size in memory.items() if size)
    return [
        f"## {name}",
        "",
        scenario.what,
        "",
        ", ".join(f"{key} {value}" for key, value in degrees.items()) + ".",
        "",
        f"Memory, GiB: {shown}; at once at most {total / GIB:.3g}.",
        "",
        *(f"* `{topic}`: {reason}" for topic, reason in scenario.why.items()),
        "",
    ]


def render() -> str:
    scenarios = {name: load_scenario(name) for name in scenario_names()}
    lines = [
        "# Shipped training configs",
        "",
        "Files: `paddle_fm3/integration/paddlenlp/configs/`. Written by `tools/make_config_page.py` from the files "
        "themselves. Parameters are "
        "counted by formula; the formula is tested against models that PaddleNLP builds. Memory is an estimate by "
        "the formulas at the end, not a "
        "measurement. See what a config would do with your data: `python -m paddle_fm3 plan --config NAME --file "
        "lengths.txt`.",
        "",
        *overview(scenarios),
        "",
    ]
    for name, scenario in scenarios.items():
        lines += section(name, scenario)
    lines += [
        "## How memory is estimated",
        "",
        "For bfloat16; a float32 run has 4 B where 2 B stand and no master copy.",
        "",
        *(f"* {part.removesuffix('_bytes')}: {text}." for part, text in FORMULAS.items()),
    ]
    lines += [
        "",
        "The total is the states and checkpoints plus the larger of one layer (with gathered K/V and router) and the "
        "logits.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the page is out of date")
    if parser.parse_args(argv).check:
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == render()
        print(
            "docs/configs.md is current"
            if is_current
            else "docs/configs.md is out of date: run tools/make_config_page.py"
        )
        return 0 if is_current else 1
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
