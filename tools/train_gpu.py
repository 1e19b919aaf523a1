#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on a Hopper GPU with the project's kernels and with dense attention, and compares the curves.

    tools/train_gpu.py --json results/training_gpu.jsonl     # 200 steps, five seeds; needs torch and libfm3_sm90.so
    tools/train_gpu.py --plot results/training_gpu.svg --json results/training_gpu.jsonl     # draw what is there

paddle_fm3/testing/training_rule.py says what is asked of fm3: of each seed before the arms part, and of the means
over all seeds. `refcheck` of a line is what its seed alone says; the exit status is 1 if the rule is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def measure(arguments: argparse.Namespace) -> int:
    import torch

    from paddle_fm3._native import sm90_library
    from paddle_fm3.testing import training_rule
    from paddle_fm3.testing.bench import RunIdentity, append_records, record
    from paddle_fm3.testing.gpu_training import ATTENTIONS, TrainingConfig, read_documents, train

    config = replace(TrainingConfig(), steps=arguments.steps)
    documents = read_documents(arguments.data)
    identity = RunIdentity.of_this_process(torch.cuda.get_device_name(), arguments.commit)
    lines = []
    for seed in arguments.seed or range(training_rule.MIN_SEEDS):
        curves = {name: train(name, documents, config, sm90_library(), seed=seed) for name in ATTENTIONS}
        arms = {
            name: record(
                identity, "training", name, refcheck=True, config=config.name, cp=1, steps=config.steps, b=config.b,
                s=config.s, seed=seed, loss_first=round(curve.losses[0], 5), loss_last=round(curve.losses[-1], 5),
                grad_norm_first=round(curve.grad_norms[0], 5), tokens_per_s=round(curve.tokens_per_s),
                **training_rule.distances(curve.losses, curves["dense_fp32"].losses),
                losses=[round(loss, 5) for loss in curve.losses],
            )
            for name, curve in curves.items()
        }  # fmt: skip
        if training_rule.faults_of_seed(arms):
            arms["fm3"]["refcheck"] = "fail"
        lines += arms.values()
        for line in arms.values():
            print(json.dumps({key: value for key, value in line.items() if key != "losses"}), flush=True)
        if arguments.json:
            append_records(arguments.json, arms.values())
    found = training_rule.faults(lines)
    print("\n".join(found) or "fm3 stays as near to fp32 as rounding lets it")
    return 1 if found else 0


def plot(path: Path, lines: Path) -> None:
    """The curves of the newest run's first seed, and their distance to exact attention on a logarithmic axis below."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fm3"  # the same picture from the same lines
    from matplotlib import pyplot

    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    records = [one for one in records if one["run"] == records[-1]["run"]]
    records = [one for one in records if one.get("seed") == records[0].get("seed")]
    exact = next(one["losses"] for one in records if one["impl"] == "dense_fp32")
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(2, 1))
    for one in records:
        above.plot(one["losses"], label=one["impl"], linewidth=1)
        if one["impl"] != "dense_fp32":
            distance = [max(abs(x - y), 1e-7) for x, y in zip(one["losses"], exact, strict=True)]
            below.semilogy(distance, label=one["impl"], linewidth=1)
    above.set_ylabel("loss"), below.set_ylabel("distance to fp32"), below.set_xlabel("step")
    above.legend(), below.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, action="append", help="of parameters and batches; may be repeated")
    parser.add_argument("--data", type=Path, default=ROOT, help="folder whose texts are the documents")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the records to this file, or draw it")
    parser.add_argument("--commit", help="of the measured tree, where it is a copy without git")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw the newest run of --json, train nothing")
    arguments = parser.parse_args()
    if arguments.plot:
        if arguments.json is None:
            parser.error("--plot needs --json, the lines to draw")
        plot(arguments.plot, arguments.json)
        return 0
    return measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
