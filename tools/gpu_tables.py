# SPDX-License-Identifier: Apache-2.0
"""The GPU tables of the README and of docs/measured_gpu.md: this project's kernels beside every peer, from
results/attention_gpu.jsonl, and training through them beside dense attention, from results/training_gpu.jsonl.

Peers that can be installed were timed in the same run. FlashAttention-3 and upstream FlashMask v3 cannot; theirs are
the figures of gpu_anchors.json times (a yardstick in this run / the same there): fa4, or flex where the run has no fa4,
on the same case, or on the causal case of the same length where fa4 has no such mask.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paddle_fm3.testing import training_rule  # noqa: E402

Record = dict[str, Any]
Triple = dict[str, float]  # phase -> TFLOP/s by visible pairs
PHASES = ("fwd", "bwd", "total")
ANCHORS: dict[str, dict[str, list[int]]] = json.loads(
    (Path(__file__).parent / "gpu_anchors.json").read_text(encoding="utf-8")
)["tflops"]
YARDSTICKS = ("fa4", "flex")
MASKED = ("window", "causal_document", "document")
COMMAND = "tools/bench_attention.py --device gpu --json results/attention_gpu.jsonl"
TRAINING_COMMAND = "tools/train_gpu.py --json results/training_gpu.jsonl"
LABELS = {
    "fm3": "fm3",
    "fm3_deterministic": "fm3 deterministic",
    "fa4": "FA4",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
}


def newest(records: Iterable[Record], dtype: str = "bfloat16") -> list[Record]:
    """The lines of `dtype` that passed, of each case those of the newest run that measured its fm3."""
    good = [
        one for one in records if one["bench"] == "attention" and one["refcheck"] == "pass" and one["dtype"] == dtype
    ]
    good.sort(key=lambda one: one["date"])
    run = {one["case"]: one["run"] for one in good if one["impl"] == "fm3"}
    return [one for one in good if one["run"] == run.get(one["case"])]


def collect(records: Iterable[Record], dtype: str = "bfloat16") -> dict[str, dict[str, Triple]]:
    """case -> impl -> phase -> TFLOP/s of the newest lines."""
    figures: dict[str, dict[str, Triple]] = {}
    for one in newest(records, dtype):
        impl = one["impl"] + ("_deterministic" if one["deterministic"] and one["phase"] != "fwd" else "")
        figures.setdefault(one["case"], {}).setdefault(impl, {})[one["phase"]] = one["tflops_exact"]
    return figures


def scaled(figures: dict[str, dict[str, Triple]], case: str, impl: str) -> Triple | None:
    """An anchor's figures at the speed of this run's machine, or None without anchor or yardstick."""
    anchor = ANCHORS.get(case, {}).get(impl)
    like = case if "fa4" in ANCHORS.get(case, {}) else f"{case.partition('_')[0]}_causal"
    yardstick = next((peer for peer in YARDSTICKS if peer in figures.get(like, {}) and peer in ANCHORS[like]), None)
    if anchor is None or yardstick is None:
        return None
    here, there = figures[like][yardstick], ANCHORS[like][yardstick]
    return {phase: anchor[idx] * here[phase] / there[idx] for idx, phase in enumerate(PHASES) if phase in here}


def _cell(triple: Triple | None) -> str:
    return "–" if triple is None else " / ".join(f"{triple[phase]:.0f}" if phase in triple else "–" for phase in PHASES)


def _best(candidates: Iterable[Triple | None], phase: str) -> float | None:
    values = [triple[phase] for triple in candidates if triple is not None and phase in triple]
    return max(values, default=None)


def _ratio(ours: Triple, theirs: float | None, phase: str) -> float | None:
    return None if theirs is None or phase not in ours else ours[phase] / theirs


def deterministic_cost(of_case: dict[str, Triple]) -> float | None:
    """Speed of the deterministic backward over the free one's."""
    repeatable = of_case.get("fm3_deterministic", {}).get("bwd")
    return None if repeatable is None else _ratio({"bwd": repeatable}, of_case["fm3"].get("bwd"), "bwd")


def cut(value: float, digits: int) -> str:
    """Not rounded: 0.996 is not 1.00."""
    return f"{math.floor(value * 10**digits + 1e-9) / 10**digits:.{digits}f}"


def _show(ratio: float | None) -> str:
    return "–" if ratio is None else cut(ratio, 2)


def geometric_mean(ratios: Sequence[float | None]) -> str:
    """Of those that are there, with their number if some are missing."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return "–"
    mean = math.exp(sum(map(math.log, known)) / len(known))
    return cut(mean, 3) + ("" if len(known) == len(ratios) else f" (of {len(known)})")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def _count(ratios: Sequence[float | None], bar: float) -> str:
    """How many reach the bar, of those that are there."""
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{sum(ratio >= bar for ratio in known)} of {len(known)}"


def _caption(records: Sequence[Record], cases: Sequence[str], text: str) -> str:
    lines = [*newest(records), *({**one, "case": f"{one['case']}, fp16"} for one in newest(records, "float16"))]
    used = [one for one in lines if one["impl"] == "fm3" and one["case"] in cases]
    devices, commits = (", ".join(sorted({one[key] for one in used})) for key in ("device", "commit"))
    return f"{text} {devices}; commit {commits}; {max(one['date'] for one in used)[:10]}; `{COMMAND}`."


def anchor_cases(records: Sequence[Record]) -> str:
    """The fifteen cases of the paper's table: fm3, its peers, and the ratios to the best of them."""
    figures = collect(records)
    cases = [case for case in ANCHORS if case in figures and "fa3" in ANCHORS[case] and not case.endswith("_gqa4")]
    if not cases:
        return f"Not measured yet: `{COMMAND}`.\n"
    others = [impl for impl in ("cudnn", "flex") if any(impl in figures[case] for case in cases)]
    rows, forward, total, masked, deterministic, num_scaled = [], [], [], [], [], 0
    for case in cases:
        ours, fa3 = figures[case]["fm3"], scaled(figures, case, "fa3")
        peers = {impl: figures[case].get(impl) for impl in ("fa4", *others)}
        if peers["fa4"] is None:
            num_scaled += 1
            peers["fa4"] = scaled(figures, case, "fa4")
        ratios = [_ratio(ours, _best([fa3, *peers.values()], phase), phase) for phase in ("fwd", "total")]
        cost = deterministic_cost(figures[case])
        forward.append(ratios[0]), total.append(ratios[1]), deterministic.append(cost)
        if case.partition("_")[2] in MASKED:
            masked.append(_ratio(ours, None if fa3 is None else fa3["fwd"], "fwd"))
        rows.append(
            [case, _cell(ours), *(_cell(peer) for peer in peers.values()), _cell(fa3), *map(_show, ratios), _show(cost)]
        )
    fa4 = {0: "FA4", len(cases): "FA4, scaled"}.get(num_scaled, "FA4, in part scaled")
    header = ["case", "fm3", fa4, *(LABELS[impl] for impl in others), "FA3, scaled", "forward ÷ best", "total ÷ best",
              "deterministic ÷ free backward"]  # fmt: skip
    means = (
        f"Best: of all other columns, the scaled ones too. Geometric means: forward {geometric_mean(forward)}, total "
        f"{geometric_mean(total)} of the best; forward of the masked cases {geometric_mean(masked)} of FA3's; "
        f"deterministic backward {geometric_mean(deterministic)} of the free one. At least the best: forward in "
        f"{_count(forward, 1)} cases, total in {_count(total, 1)}."
    )
    text = "TFLOP/s by visible pairs, forward / backward / total; bf16, head_dim 128, 32 heads, 128K tokens a case."
    if num_scaled:
        text += " Scaled: measured earlier, times FlexAttention here ÷ then, case by case."
    return "\n".join([*markdown(header, rows), "", means, "", _caption(records, cases, text)]) + "\n"


def other_cases(records: Sequence[Record]) -> str:
    """The other masks and grouped heads beside upstream FlashMask v3 and FA3, both scaled."""
    figures = collect(records)
    cases = [case for case in ANCHORS if case in figures and ("fa3" not in ANCHORS[case] or case.endswith("_gqa4"))]
    if not cases:
        return f"Not measured yet: `{COMMAND}`.\n"
    rows, forward, total, grouped = [], [], [], []
    for case in cases:
        ours = figures[case]["fm3"]
        upstream, fa3 = scaled(figures, case, "flashmask_v3"), scaled(figures, case, "fa3")
        ratios = [_ratio(ours, _best([upstream], phase), phase) for phase in ("fwd", "total")]
        if not case.endswith("_gqa4"):
            forward.append(ratios[0]), total.append(ratios[1])
        fa3_total = _ratio(ours, _best([fa3], "total"), "total")
        grouped.append(fa3_total)
        rows.append([case, _cell(ours), _cell(figures[case].get("fa4")), _cell(upstream), _cell(fa3),
                     *map(_show, (*ratios, fa3_total, deterministic_cost(figures[case])))])  # fmt: skip
    header = ["case", "fm3", "FA4", "FlashMask v3, scaled", "FA3, scaled", "forward ÷ FlashMask v3",
              "total ÷ FlashMask v3", "total ÷ FA3", "deterministic ÷ free backward"]  # fmt: skip
    means = (
        f"Geometric means over the masks with 32 key heads: forward {geometric_mean(forward)}, total "
        f"{geometric_mean(total)} of FlashMask v3's; at least 1.05 times its forward in {_count(forward, 1.05)}, 1.03 "
        f"times its total in {_count(total, 1.03)}. Grouped heads: at least 1.05 times FA3's total in "
        f"{_count(grouped, 1.05)}."
    )
    text = (
        "TFLOP/s by visible pairs, forward / backward / total; `_gqa4`: 32 query and 4 key/value heads. Scaled: "
        "measured earlier, times a peer here ÷ then: FA4 where the case has it, else FA4 or FlexAttention on the "
        "causal mask of that length."
    )
    return "\n".join([*markdown(header, rows), "", means, "", _caption(records, cases, text)]) + "\n"


def head_dims(records: Sequence[Record]) -> str:
    """Head dims, head counts and fp16, which have no anchors, beside the peers of the same run."""
    figures, half = collect(records), collect(records, "float16")
    rows_of = {case: figures[case] for case in figures if case not in ANCHORS}
    rows_of |= {f"{case}, fp16": half[case] for case in half}
    if not rows_of:
        return f"Not measured yet: `{COMMAND}`.\n"
    impls = [impl for impl in LABELS if any(impl in row for row in rows_of.values())]
    rows = [[label, *(_cell(row.get(impl)) for impl in impls)] for label, row in rows_of.items()]
    text = (
        "TFLOP/s by visible pairs, forward / backward / total; `_gqa8`: 64 query and 8 key/value heads; "
        "`_d192v128`: d_qk 192, d_v 128."
    )
    table = markdown(["case", *(LABELS[impl] for impl in impls)], rows)
    return "\n".join([*table, "", _caption(records, list(rows_of), text)]) + "\n"


def training(records: Sequence[Record]) -> str:
    """The newest commit's training: a line an arm, over its seeds, and whether the rule of training_rule.py holds.
    Seeds may be of several processes; no speeds, as those may have shared a GPU."""
    if not records:
        return f"Not measured yet: `{TRAINING_COMMAND}`.\n"
    commit = max(records, key=lambda one: one["date"])["commit"]
    seeds = training_rule.by_seed({"seed": 0, **one} for one in records if one["commit"] == commit)
    for arms in seeds.values():
        exact = arms["dense_fp32"]["losses"]
        for arm, line in arms.items():
            arms[arm] = {**line, **training_rule.distances(line["losses"], exact)}
    lines = [line for arms in seeds.values() for line in arms.values()]
    rows = []
    for arm in ("fm3", "dense_bf16", "dense_fp32"):
        own = [line for line in lines if line["impl"] == arm]
        spread = [_spread([line[field] for line in own]) for field in training_rule.FIELDS]
        rows.append([arm, _spread([line["loss_last"] for line in own], "{:.4f}"), *spread])
    header = ["attention", "last loss", f"distance, first {training_rule.EARLY_STEPS} steps", "distance, all steps",
              "largest distance"]  # fmt: skip
    faults = training_rule.faults(lines)
    verdict = "The rule holds." if not faults else f"The rule is broken: {'; '.join(faults)}."
    if len(seeds) < training_rule.MIN_SEEDS:
        verdict = f"Whole runs are not judged below {training_rule.MIN_SEEDS} seeds; " + (
            f"against single ones: {'; '.join(faults[:-1])}."
            if faults[1:]
            else "the first steps of each are as they should."
        )
    one = lines[0]
    text = (
        f"Mean (smallest to largest) over seeds ({len(seeds)}), {one['steps']} steps each; distances are of losses to "
        f"those of fp32 attention. {verdict} {one['device']}; commit {one['commit']}; "
        f"{one['date'][:10]}; `{TRAINING_COMMAND}`."
    )
    return "\n".join([*markdown(header, rows), "", text]) + "\n"


def _spread(values: Sequence[float], style: str = "{:.1e}") -> str:
    mean, low, high = (style.format(x) for x in (statistics.fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"
