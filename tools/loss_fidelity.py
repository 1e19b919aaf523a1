#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does training with this attention follow training with PaddleNLP's own dense attention?

    tools/loss_fidelity.py                                      five hundred steps of every arm: half an hour, two cores
    tools/loss_fidelity.py --steps 10 --seq-length 256          a look at the tool
    tools/loss_fidelity.py --json results/fidelity_cpu.jsonl --picture docs/fidelity.png

A small Qwen2Moe is trained by PaddleNLP's Trainer on packed real documents, the same batches in every arm:

    dense          PaddleNLP's attention: matrix product, additive document mask, softmax
    dense_nudged   the same, every weight started one float32 step higher: what rounding alone does in training
    fm3_cp1        --use_flashmask3 on one process
    fm3_cp4        --use_flashmask3 on four context-parallel processes, --cp_strategy fm3

each from two seeds of the weights. The final loss is the mean over the last tenth of the steps; noise is how far the
dense arm's two seeds end apart. Exit code 1 if an arm ends further from the dense arm of its seed than the noise, or
differs from it by more than 1e-4 in one of the first 20 steps, when training has not amplified rounding yet (a lost
document mask shows there), or saw other batches, or did not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).resolve().parent)]

import demo  # noqa: E402
import numpy as np  # noqa: E402
from demo_parts import report, text  # noqa: E402

from paddle_fm3 import viz  # noqa: E402
from paddle_fm3.distributed.prepared import digest_of  # noqa: E402
from paddle_fm3.testing import bench  # noqa: E402

Metrics = list[dict[str, Any]]
Runs = dict[tuple[str, int], Metrics]  # (arm, seed) -> one record a step


@dataclass(frozen=True)
class Arm:
    """One way to compute attention."""

    attention: str  # "fm3" or "paddle_dense"
    num_ranks: int = 1
    strategy: str = "dual_chunk"
    is_nudged: bool = False


ARMS = {
    "dense": Arm("paddle_dense"),
    "dense_nudged": Arm("paddle_dense", is_nudged=True),
    "fm3_cp1": Arm("fm3"),
    "fm3_cp4": Arm("fm3", num_ranks=4, strategy="fm3"),
}
REFERENCE = "dense"
EARLY_STEPS = 20
RUNS = REPOSITORY / "runs" / "fidelity"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens a packed sequence (default 1024)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 1], metavar="SEED", help="of the weights")
    others = [name for name in ARMS if name != REFERENCE]
    parser.add_argument("--arms", nargs="+", choices=others, default=others, help="besides dense (default: all)")
    parser.add_argument("--data", help="folder or file with text (default: the sources of the running Python)")
    parser.add_argument("--runs", type=Path, metavar="DIR", default=RUNS, help="folder for logs and metrics")
    parser.add_argument("--keep", action="store_true", help="do not repeat arms that --runs holds, by the same commit")
    parser.add_argument("--json", metavar="FILE", help="append one `training` line an arm and seed to this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves (default: in --runs)")
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.seq_length < 128 or options.seeds[0] == options.seeds[1]:
        parser.error("--steps must be at least 2, --seq-length at least 128, and the two seeds different")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        runs = train_all(options)
    except text.DemoError as error:
        print(f"loss_fidelity: {error}", file=sys.stderr)
        return 2
    first, second = options.seeds
    noise = abs(final_loss(runs[REFERENCE, first]) - final_loss(runs[REFERENCE, second]))
    identity = bench.RunIdentity.of_this_process(bench.cpu_name())
    records = [record_of(identity, options, runs, name, seed, noise) for name, seed in runs]
    columns = ("arm", "seed", "loss_first", "loss_final", "final_gap", "early_gap", "worst_step_gap", "refcheck")
    print(f"\nfinal loss: mean of the last {tail(options.steps)} steps; noise between seeds: {noise:.5f}")
    print(bench.format_table(records, columns))
    draw(options.picture or options.runs / "fidelity.png", runs, options.seeds)
    if options.json:
        bench.append_records(options.json, records)
    return 0 if all(one["refcheck"] == "pass" for one in records) else 1


def train_all(options: argparse.Namespace) -> Runs:
    """Every arm from every seed, on the same batches."""
    s = options.seq_length
    tokenizer = text.load_tokenizer(None)
    packs = text.packed_sequences(
        text.find_files(options.data), tokenizer, s=s, num_sequences=options.steps, max_document=s * 3 // 4, seed=0
    )
    runs: Runs = {}
    for seed in options.seeds:
        for name in (REFERENCE, *options.arms):
            print(f"\n{name}, seed {seed}", end="")
            run_dir = options.runs / f"{name}_seed{seed}"
            runs[name, seed] = train(options, ARMS[name], run_dir, seed, packs, tokenizer.vocab_size)
    return runs


def train(
    options: argparse.Namespace, arm: Arm, run_dir: Path, seed: int, packs: list[list[list[int]]], vocab_size: int
) -> Metrics:
    """One arm from one seed, by the demo's training process."""
    run_dir.mkdir(parents=True, exist_ok=True)
    setup = argparse.Namespace(**vars(options), batch_size=1, strategy=arm.strategy, seed=seed)
    demo.write_inputs(setup, run_dir, packs, vocab_size)
    config_path = run_dir / "config.json"
    config = {**json.loads(config_path.read_text()), "attention": arm.attention, "nudge": arm.is_nudged}
    config_path.write_text(json.dumps(config, indent=2) + "\n")

    with np.load(run_dir / "packs.npz") as data:
        made_from = {"commit": bench.commit_id(), "config": config, "tokens": digest_of(data["tokens"])}
    marker = run_dir / "made_from.json"
    if options.keep and marker.exists() and json.loads(marker.read_text()) == made_from:
        print(" (kept)")
        return report.read_metrics(run_dir / f"metrics_cp{arm.num_ranks}.jsonl")
    marker.unlink(missing_ok=True)
    metrics = demo.train(run_dir, arm.num_ranks, options.steps)
    marker.write_text(json.dumps(made_from))
    return metrics


def tail(num_steps: int) -> int:
    return max(1, num_steps // 10)


def losses(metrics: Metrics) -> np.ndarray:
    """[steps]"""
    return np.array([one["loss"] for one in metrics])


def final_loss(metrics: Metrics) -> float:
    return float(losses(metrics)[-tail(len(metrics)) :].mean())


def early_gap(metrics: Metrics, reference: Metrics) -> float:
    """Largest relative difference of the first steps."""
    ours, theirs = losses(metrics)[:EARLY_STEPS], losses(reference)[:EARLY_STEPS]
    return float((np.abs(ours - theirs) / theirs).max())


def is_comparable(name: str, metrics: Metrics, reference: Metrics) -> bool:
    """Same batches, attention of the right kind in every step, finite losses that fell."""
    is_ours = ARMS[name].attention == "fm3"
    # The timer sits in the place that the flag replaces: PaddleNLP's dense attention never passes it.
    has_right_kind = all((one["attention_s"] > 0) == is_ours for one in metrics)
    has_same_batches = [one["batch"] for one in metrics] == [one["batch"] for one in reference]
    values = losses(metrics)
    return has_right_kind and has_same_batches and bool(np.isfinite(values).all()) and final_loss(metrics) < values[0]


def record_of(
    identity: bench.RunIdentity, options: argparse.Namespace, runs: Runs, name: str, seed: int, noise: float
) -> bench.Record:
    """The line of one arm and seed, all its losses included."""
    metrics, reference = runs[name, seed], runs[REFERENCE, seed]
    arm = ARMS[name]
    gap = final_loss(metrics) - final_loss(reference)
    early = early_gap(metrics, reference)
    is_faithful = abs(gap) <= noise and early <= report.LOSS_TOLERANCE
    tokens_per_s, _ = report.steady_rates(metrics)
    return bench.record(
        identity,
        "training",
        arm.attention,
        refcheck=is_comparable(name, metrics, reference) and is_faithful,
        config=f"qwen2_moe_{options.layers}x{options.hidden_size}_e{options.experts}_s{options.seq_length}",
        arm=name,
        seed=seed,
        cp=arm.num_ranks,
        strategy=arm.strategy if arm.num_ranks > 1 else None,
        steps=len(metrics),
        loss_first=metrics[0]["loss"],
        loss_last=metrics[-1]["loss"],
        loss_final=round(final_loss(metrics), 7),
        final_gap=round(gap, 7),
        early_gap=float(f"{early:.3g}"),
        worst_step_gap=round(float(np.abs(losses(metrics) - losses(reference)).max()), 7),
        noise_between_seeds=round(noise, 7),
        grad_norm_first=metrics[0]["gradient_norm"],
        tokens_per_s=round(tokens_per_s, 1),
        losses=[round(float(loss), 6) for loss in losses(metrics)],
    )


def draw(path: Path, runs: Runs, seeds: list[int]) -> None:
    """Left every curve; right how far each is from the dense arm of its seed, and how far the seeds are apart."""
    figure, (left, right) = viz.new_figure(2, panel_inches=(6.5, 4.4))
    width = tail(len(next(iter(runs.values())))) // 4 + 1  # steps of the moving mean

    def smooth(values: np.ndarray) -> np.ndarray:
        return np.convolve(values, np.full(width, 1 / width), mode="valid")

    styles = {"dense": "-", "dense_nudged": ":", "fm3_cp1": "--", "fm3_cp4": "-."}
    for (name, seed), metrics in runs.items():
        steps = np.arange(width, len(metrics) + 1)
        label = f"{name}, seed {seed}"
        colour = f"C{seeds.index(seed)}"
        left.plot(steps, smooth(losses(metrics)), styles[name], color=colour, label=label, linewidth=1.2)
        if name != REFERENCE:
            gap = np.abs(losses(metrics) - losses(runs[REFERENCE, seed]))
            # Differences of exactly 0 have no place on a logarithmic axis: drawn at float32's resolution.
            gap = np.maximum(smooth(gap), 1e-8)
            line = "-" if seed == seeds[0] else "--"
            right.plot(steps, gap, line, color=f"C{list(ARMS).index(name) + 1}", label=label, linewidth=1.2)
    between = np.abs(losses(runs[REFERENCE, seeds[0]]) - losses(runs[REFERENCE, seeds[1]]))
    right.plot(steps, np.maximum(smooth(between), 1e-8), color="black", label="dense, between the seeds", linewidth=1.2)
    left.set(xlabel="step", ylabel="loss", title=f"loss, mean of {width} steps")
    right.set(xlabel="step", ylabel="loss difference", title="distance from the dense arm of the seed", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    viz.save(figure, path)
    print(f"picture: {os.path.relpath(path)}")


if __name__ == "__main__":
    sys.exit(main())
