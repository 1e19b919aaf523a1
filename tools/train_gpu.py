#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on a Hopper GPU with the project's kernels and with dense attention, and compares the curves.

    tools/train_gpu.py --json results/training_gpu.jsonl     # 200 steps each; needs torch and libfm3_sm90.so
    tools/train_gpu.py --plot results/training_gpu.svg --json results/training_gpu.jsonl     # draw what is there

`refcheck` of fm3 is pass if it stays as close to exact (fp32) attention as dense attention with bf16 rounding does:
the mean distance of the losses at most 1.5 times as large, the largest at most twice, and the first step's gradient
norm within 1 %. The exit status is 1 if not.
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
    from paddle_fm3.testing.bench import RunIdentity, append_records, record
    from paddle_fm3.testing.gpu_training import ATTENTIONS, TrainingConfig, read_documents, train

    config = replace(TrainingConfig(), steps=arguments.steps)
    documents = read_documents(arguments.data)
    curves = {name: train(name, documents, config, sm90_library()) for name in ATTENTIONS}
    exact = curves["dense_fp32"]

    def distances(name: str) -> list[float]:
        return [abs(x - y) for x, y in zip(curves[name].losses, exact.losses, strict=True)]

    ours, allowed = distances("fm3"), distances("dense_bf16")
    is_close = (
        sum(ours) <= 1.5 * sum(allowed)
        and max(ours) <= 2 * max(allowed)
        and abs(curves["fm3"].grad_norms[0] - exact.grad_norms[0]) <= 0.01 * exact.grad_norms[0]
    )
    identity = RunIdentity.of_this_process(torch.cuda.get_device_name(), arguments.commit)
    for name, curve in curves.items():
        line = record(
            identity, "training", name, refcheck=is_close or name != "fm3", config=config.name, cp=1,
            steps=config.steps, b=config.b, s=config.s, loss_first=round(curve.losses[0], 5),
            loss_last=round(curve.losses[-1], 5), grad_norm_first=round(curve.grad_norms[0], 5),
            tokens_per_s=round(curve.tokens_per_s), loss_distance_mean=sum(distances(name)) / config.steps,
            loss_distance_max=max(distances(name)), losses=[round(loss, 5) for loss in curve.losses],
        )  # fmt: skip
        shown = {key: value for key, value in line.items() if key != "losses"}
        print(json.dumps(shown), flush=True)
        if arguments.json:
            append_records(arguments.json, [line])
    return 0 if is_close else 1


def plot(path: Path, lines: Path) -> None:
    """The newest run's curves, and their distance to exact attention on a logarithmic axis below."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fm3"  # the same picture from the same lines
    from matplotlib import pyplot

    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    records = [one for one in records if one["run"] == records[-1]["run"]]
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
