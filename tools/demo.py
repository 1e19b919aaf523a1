# SPDX-License-Identifier: Apache-2.0
"""The main job on a plain machine: trains a small Qwen2Moe on packed documents under context parallelism.

    python tools/demo.py                        documents: the sources and licences of the running Python
    python tools/demo.py --data FOLDER          your own .txt .md .py .jsonl .parquet files

Trains on 2 ranks (PaddleNLP's Trainer, --use_flashmask3), each sequence split by a plan of its own, then repeats the
same steps on 1 rank, each from the same weights, and compares every step's loss and gradient norm. Ends with exit code
1 if they differ by more than the printed tolerance.
Files are left in runs/<name>/: metrics_cp2.jsonl, metrics_cp1.jsonl, summary.json, demo.png, command.txt, logs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
from demo_parts import report, text  # noqa: E402

from paddle_fm3.integration.paddlenlp.settings import CP_STRATEGIES, DEFAULT_CP_STRATEGY  # noqa: E402
from paddle_fm3.testing import bench  # noqa: E402
from paddle_fm3.testing.processes import kill_tree  # noqa: E402

PATH_DEFAULTS = {"runs": str(REPOSITORY / "runs"), "json": None}
STALL_LIMIT_S = 240  # a run that reports no step for so long is given up


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder or file with .txt .md .py .jsonl .parquet text")
    parser.add_argument("--run", help="name of the folder under runs/ (default: date and time)")
    parser.add_argument("--runs", metavar="DIR", default=PATH_DEFAULTS["runs"], help="where run folders are made")
    parser.add_argument("--tokenizer", help="a tokenizer.json; default: bytes")
    parser.add_argument("--ranks", type=int, default=2, help="context-parallel ranks (default 2)")
    how = "how ranks share a sequence: %(choices)s (default %(default)s: by a plan for each sequence)"
    parser.add_argument("--strategy", choices=CP_STRATEGIES, default=DEFAULT_CP_STRATEGY, metavar="NAME", help=how)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens a packed sequence (default 2048)")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compare", action="store_true", help="skip the run on 1 rank")
    parser.add_argument("--json", metavar="FILE", help="append one `training` JSON line to this file")
    arguments = parser.parse_args()
    if arguments.hidden_size % 64 or arguments.hidden_size < 64:
        parser.error("--hidden-size must be a multiple of 64")
    if arguments.json and (arguments.no_compare or arguments.ranks == 1):
        parser.error("--json records a checked run: it needs --ranks above 1 and no --no-compare")
    for name, lowest in (("ranks", 1), ("steps", 2), ("seq_length", 128), ("batch_size", 1), ("experts", 2)):
        if getattr(arguments, name) < lowest:
            parser.error(f"--{name.replace('_', '-')} must be at least {lowest}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    run_dir = Path(arguments.runs) / (arguments.run or datetime.datetime.now().strftime("demo-%Y%m%d-%H%M%S"))
    try:
        return run_demo(arguments, run_dir)
    except text.DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ndemo: stopped by you; what was written so far is in {os.path.relpath(run_dir)}", file=sys.stderr)
        return 130


def run_demo(arguments: argparse.Namespace, run_dir: Path) -> int:
    files = text.find_files(arguments.data)
    tokenizer = text.load_tokenizer(arguments.tokenizer)
    s = arguments.seq_length
    packs = text.packed_sequences(
        files, tokenizer, s=s, num_sequences=arguments.steps * arguments.batch_size, max_document=s * 3 // 4,
        seed=arguments.seed,
    )  # fmt: skip
    statistics = report.mask_statistics(packs, s, arguments.strategy, arguments.ranks)
    run_dir.mkdir(parents=True, exist_ok=True)
    is_compared = arguments.ranks > 1 and not arguments.no_compare
    write_inputs(arguments, run_dir, packs, tokenizer.vocab_size, hands_over_weights=is_compared)
    command = "python tools/demo.py " + shlex.join(repeat_arguments(arguments, run_dir.name))
    (run_dir / "command.txt").write_text(command + "\n")
    print(
        f"{len(packs)} sequences of {s} tokens ({tokenizer.name}) from {len(files)} files, "
        f"{statistics.documents_per_sequence:.1f} documents each; {statistics.skipped_tiles:.0%} of the mask's tiles "
        "are skipped", flush=True,
    )  # fmt: skip

    metrics = train(run_dir, arguments.ranks, arguments.steps)
    single = None
    if is_compared:
        single = train(run_dir, 1, arguments.steps)
        shutil.rmtree(run_dir / "weights", ignore_errors=True)
    return finish(arguments, run_dir, packs, statistics, metrics, single, command)


def repeat_arguments(arguments: argparse.Namespace, run_name: str) -> list[str]:
    """Every option spelled out, so that changed defaults do not change the run."""
    options: list[str] = []
    for name, value in vars(arguments).items():
        if name in ("runs", "json") and value == PATH_DEFAULTS[name]:
            continue
        value = run_name if name == "run" else value
        flag = "--" + name.replace("_", "-")
        if value is True:
            options.append(flag)
        elif value is not None and value is not False:
            options += [flag, str(value)]
    return options


def write_inputs(
    arguments: argparse.Namespace,
    run_dir: Path,
    packs: list[list[list[int]]],
    vocab_size: int,
    *,
    hands_over_weights: bool = False,
) -> None:
    """config.json and packs.npz: all that a training process reads."""
    sequence_lengths = [sum(map(len, pack)) for pack in packs]
    document_lengths = [len(document) for pack in packs for document in pack]
    np.savez(
        run_dir / "packs.npz",
        tokens=np.concatenate([np.asarray(document, np.int32) for pack in packs for document in pack]),
        sequence_begins=np.concatenate([[0], np.cumsum(sequence_lengths)]),
        document_ends=np.cumsum(document_lengths),
    )
    config = {
        "s": arguments.seq_length,
        "vocab_size": vocab_size,
        "hidden_size": arguments.hidden_size,
        "num_layers": arguments.layers,
        "num_heads": max(arguments.hidden_size // 32, 2),
        "num_kv_heads": max(arguments.hidden_size // 64, 1),
        "num_experts": arguments.experts,
        "steps": arguments.steps,
        "warmup_steps": min(5, arguments.steps // 4),
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "strategy": arguments.strategy,
        "seed": arguments.seed,
        "hands_over_weights": hands_over_weights,
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(run_dir: Path, num_ranks: int, num_steps: int) -> list[dict[str, Any]]:
    """Runs train.py on num_ranks processes, shows its progress, and returns its metrics."""
    metrics_path = run_dir / f"metrics_cp{num_ranks}.jsonl"
    metrics_path.unlink(missing_ok=True)
    log_dir = run_dir / f"logs_cp{num_ranks}"
    log_dir.mkdir(exist_ok=True)
    script = [str(Path(__file__).with_name("demo_parts") / "train.py"), str(run_dir), str(num_ranks)]
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks), "--log_dir", str(log_dir)]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), *script]
    # Variables of an outer launcher would make this run believe it is a part of that one.
    environment = {name: value for name, value in os.environ.items() if not re.match("PADDLE_|FLAGS_", name)}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")])
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    environment["OMP_NUM_THREADS"] = environment["FM3_NUM_THREADS"] = str(threads)
    print(f"\ntraining on {num_ranks} rank{'s' if num_ranks > 1 else ''}, {threads} thread(s) each", flush=True)
    log_path = log_dir / "output.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            show_progress(process, metrics_path, num_steps)
        finally:
            kill_tree(process)
    metrics = report.read_metrics(metrics_path)
    if process.returncode != 0 or len(metrics) != num_steps:
        raise text.DemoError(
            f"the run on {num_ranks} rank(s) ended after {len(metrics)} of {num_steps} steps with code "
            f"{process.returncode}: {last_error(log_dir)} (logs: {os.path.relpath(log_dir)})"
        )
    return metrics


def show_progress(process: subprocess.Popen[bytes], metrics_path: Path, num_steps: int) -> None:
    """Prints steps as they arrive until the process ends; gives up on a run that stands still."""
    num_shown, last_change = 0, time.monotonic()
    while True:
        is_over = process.poll() is not None
        metrics = report.read_metrics(metrics_path)
        for record in metrics[num_shown:]:
            if record["step"] == 1 or record["step"] % 10 == 0 or record["step"] == num_steps:
                print(
                    f"  step {record['step']:4d}/{num_steps}   loss {record['loss']:.4f}   gradient norm "
                    f"{record['gradient_norm']:.4f}   {record['tokens_per_s']:,.0f} tokens/s", flush=True,
                )  # fmt: skip
        if len(metrics) > num_shown:
            num_shown, last_change = len(metrics), time.monotonic()
        if is_over or time.monotonic() - last_change > STALL_LIMIT_S:
            return
        time.sleep(0.3)


def last_error(log_dir: Path) -> str:
    """The last line of any log that reads like an error."""
    for path in sorted(log_dir.glob("*log*")):
        for line in reversed(path.read_text(errors="replace").splitlines()):
            if re.match(r"\w*(Error|Exception)\b", line):
                return line[:300]
    return "no error line in the logs"


def finish(
    arguments: argparse.Namespace,
    run_dir: Path,
    packs: list[list[list[int]]],
    statistics: report.MaskStatistics,
    metrics: list[dict[str, Any]],
    single: list[dict[str, Any]] | None,
    command: str,
) -> int:
    """Writes picture and summary, prints table and comparison, returns the exit code."""
    ranks = arguments.ranks
    tokens_per_s, attention_share = report.steady_rates(metrics)
    curves = {f"{ranks} rank(s)": [record["loss"] for record in metrics]}
    if single is not None:
        curves["1 rank"] = [record["loss"] for record in single]
    mask = report.mask_of(packs[0], arguments.seq_length)
    report.save_picture(run_dir / "demo.png", curves, mask, statistics.rank_load_tiles, arguments.strategy)
    loads = statistics.rank_load_tiles
    print()
    print(
        report.table(
            [
                ("loss, first -> last step", f"{metrics[0]['loss']:.4f} -> {metrics[-1]['loss']:.4f}"),
                ("tokens/s", f"{tokens_per_s:,.0f} on {ranks} rank(s)"),
                ("documents a sequence", f"{statistics.documents_per_sequence:.2f}"),
                ("mask density", f"{statistics.density:.1%} of all pairs"),
                ("tiles skipped", f"{statistics.skipped_tiles:.1%} of all 128 x 128 tiles"),
                ("attention's share of a step", f"{attention_share:.1%}, communication included"),
                ("visible tiles by rank", ", ".join(f"{load:.1f}" for load in loads)),
            ]
        )
    )
    summary = {
        "ranks": ranks,
        "strategy": arguments.strategy,
        "seq_length": arguments.seq_length,
        "steps": arguments.steps,
        "loss_first": metrics[0]["loss"],
        "loss_last": metrics[-1]["loss"],
        "tokens_per_s": tokens_per_s,
        "documents_per_sequence": statistics.documents_per_sequence,
        "mask_density": statistics.density,
        "tiles_skipped": statistics.skipped_tiles,
        "attention_share": attention_share,
        "rank_load_tiles": loads,
        "command": command,
    }
    exit_code = 0
    if single is not None:
        exit_code = compare(metrics, single, ranks, summary)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if arguments.json:
        identity = bench.RunIdentity.of_this_process(bench.cpu_name())
        line = bench.record(identity, "training", "paddle_fm3", refcheck=summary["is_agreed"], **summary)
        bench.append_records(arguments.json, [line])
    print(f"\nfiles: {os.path.relpath(run_dir)}/ (demo.png, metrics, logs)\nrepeat: {command}")
    return exit_code


def compare(metrics: list[dict[str, Any]], single: list[dict[str, Any]], ranks: int, summary: dict[str, Any]) -> int:
    """Prints whether both runs agree; 1 if they do not."""
    differences = report.largest_differences(metrics, single)
    tolerances = {"loss": report.LOSS_TOLERANCE, "gradient_norm": report.GRADIENT_TOLERANCE}
    print(
        f"\n{ranks} ranks against 1 rank, the same {len(metrics)} steps from the same weights, largest relative "
        "difference of any step:"
    )
    is_agreed = True
    for field, (difference, step) in differences.items():
        is_within = difference <= tolerances[field]
        is_agreed &= is_within
        verdict = "agrees" if is_within else "DIFFERS"
        bound = f"(tolerance {tolerances[field]:.0e})"
        print(f"  {field.replace('_', ' '):14s} {difference:.1e} at step {step} {bound}   {verdict}")
    print(
        "  (routing is per token, no token is dropped, and the load-balancing loss runs over the tokens of all\n"
        "  ranks, so both runs compute the same function; what is left is fp32 rounding in another order)"
    )
    summary["agreement"] = {field: difference for field, (difference, _) in differences.items()}
    summary["is_agreed"] = is_agreed
    return 0 if is_agreed else 1


if __name__ == "__main__":
    sys.exit(main())
