# SPDX-License-Identifier: Apache-2.0
"""The figures of `plan`: one mask and one strategy after another, then a step of training around them."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from paddle_fm3.commands import _inputs
from paddle_fm3.commands._progress import Progress
from paddle_fm3.distributed.cost import CostModel, Link
from paddle_fm3.distributed.planner import build_plan
from paddle_fm3.distributed.timing import PlanTimeline, simulate_time
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.integration.paddlenlp.config_schema import Scenario, load_scenario
from paddle_fm3.integration.paddlenlp.model_size import count_parameters
from paddle_fm3.mask.column_mask import ColumnMask
from paddle_fm3.schedule import build_schedule

BASELINE = "dual_chunk_allgather"
DEFAULT_STRATEGIES = ("fm3", "contiguous_allgather", "ring")
# What the published 118B-A14B run implies for everything but attention: about 7.5 s for 8192 tokens a GPU (from its
# throughput and attention gains at 70, 80 and 86 % sparsity), at 8 x 14e9 operations a token (forward, backward,
# recompute).
OTHER_TFLOPS = 120.0


@dataclass(frozen=True)
class Setting:
    """What is planned, for whom."""

    name: str
    masks: tuple[ColumnMask, ...]
    topology: Topology
    cost: CostModel
    strategies: tuple[str, ...]
    layers: int
    is_recomputed: bool
    scenario: Scenario | None  # None too where --cp is not the config's: its step and memory are for its own ranks
    other_tflops: float
    note: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks


@dataclass(frozen=True)
class Figures:
    """One strategy, means over the sequences. Bytes are those of one layer's forward gather, over all ranks.

    Attributes:
        imbalance: latest rank over the mean rank - 1, by work. gap: over the proven lower bound - 1.
        peak_kv_rows: rows of the largest K/V buffer of a rank.
        exposed_us: forward and backward beyond the mean rank's compute: waiting and imbalance.
        plan_ms: building the plan, once a mask.
    """

    strategy: str
    imbalance: float
    gap: float
    slow_bytes: float
    fast_bytes: float
    peak_kv_rows: float
    peak_kv_bytes: float
    fwd_us: float
    bwd_us: float
    exposed_us: float
    plan_ms: float

    @property
    def attention_us(self) -> float:
        return self.fwd_us + self.bwd_us


@dataclass(frozen=True)
class Step:
    """A predicted training step of one strategy (needs a config)."""

    attention_s: float
    other_s: float
    tokens_per_s_per_gpu: float


@dataclass
class Comparison:
    """All strategies on the same data; the baseline is first."""

    setting: Setting
    density: float
    density_block: float
    figures: dict[str, Figures] = field(default_factory=dict)
    timelines: dict[str, PlanTimeline] = field(default_factory=dict)  # of the first sequence
    steps: dict[str, Step] = field(default_factory=dict)

    def attention_gain(self, strategy: str) -> float:
        """How much faster than the baseline, forward and backward, -1 to infinity."""
        return self.figures[BASELINE].attention_us / self.figures[strategy].attention_us - 1

    def step_gain(self, strategy: str) -> float:
        return self.steps[strategy].tokens_per_s_per_gpu / self.steps[BASELINE].tokens_per_s_per_gpu - 1

    def memory(self, strategy: str) -> dict[str, int] | None:
        """The config's estimate with this plan's K/V buffer in it: values and float32 gradients."""
        scenario = self.setting.scenario
        if scenario is None:
            return None
        gathered = round(self.figures[strategy].peak_kv_bytes * 3) if scenario.layout.context_parallel_degree > 1 else 0
        return replace(scenario.memory(), gathered_kv_bytes=gathered).as_dict()

    def as_dict(self) -> dict[str, Any]:
        setting = self.setting
        strategies = {}
        for name, figures in self.figures.items():
            entry = {**asdict(figures), "attention_gain": self.attention_gain(name)}
            if name in self.steps:
                entry |= {
                    "step": asdict(self.steps[name]),
                    "step_gain": self.step_gain(name),
                    "memory": self.memory(name),
                }
            strategies[name] = entry
        return {
            "name": setting.name,
            "is_simulated": True,
            "num_sequences": len(setting.masks),
            "s": setting.masks[0].s_q,
            "num_ranks": setting.num_ranks,
            "num_nodes": setting.topology.num_nodes,
            "density_exact": self.density,
            "density_block": self.density_block,
            "baseline": BASELINE,
            "strategies": strategies,
            "assumptions": assumptions(setting),
        }


def assumptions(setting: Setting) -> dict[str, Any]:
    found = {**asdict(setting.cost), "layers": setting.layers, "forwards_per_step": 2 if setting.is_recomputed else 1}
    return found | ({"other_tflops": setting.other_tflops} if setting.scenario else {})


def setting_from_arguments(arguments: argparse.Namespace) -> Setting:
    """Raises InputError, ValueError or FileNotFoundError for what does not fit together."""
    scenario = load_scenario(arguments.config) if arguments.config else None
    has_mask = any(getattr(arguments, name) is not None for name in _inputs.SOURCES)
    if scenario is not None and scenario.data.mask_window:
        raise _inputs.InputError(
            f"config {arguments.config} has layers with a window; plan compares strategies for one mask. Plan each "
            "with --cp and --pattern causal_document_sliding_window or --documents"
        )
    if scenario is not None and not has_mask:
        lengths = scenario.data.document_lengths()
        masks = [_inputs.documents_mask([lengths], scenario.data.mask)]
    else:
        if scenario is not None and arguments.kind is None and (arguments.file or arguments.documents):
            arguments.kind = scenario.data.mask
        masks = _split_batch(_inputs.mask_from_arguments(arguments))
    if scenario is not None and masks[0].s_q != scenario.data.max_seq_len:
        raise _inputs.InputError(
            f"the sequences hold {masks[0].s_q} tokens; config {arguments.config} is for {scenario.data.max_seq_len} "
            "(--s fills up with one more document)"
        )
    cp = arguments.cp
    if cp is None and scenario is not None:
        cp = scenario.layout.context_parallel_degree
    if cp is None:
        raise _inputs.InputError("give --config, or --cp and a mask")
    for option, value in (("cp", cp), ("gpus-per-node", arguments.gpus_per_node), ("layers", arguments.layers)):
        if value is not None and value < 1:
            raise _inputs.InputError(f"--{option} {value} must be >= 1")
    if arguments.other_tflops is not None and not arguments.other_tflops > 0:
        raise _inputs.InputError(f"--other-tflops {arguments.other_tflops} must be > 0")
    note = None
    if scenario is not None and cp != scenario.layout.context_parallel_degree:
        own_ranks = f"the {scenario.layout.context_parallel_degree} ranks of config {arguments.config}"
        note = f"--cp {cp} is planned, not {own_ranks}; no training step and no memory"
    per_node = arguments.gpus_per_node or (scenario.layout.gpus_per_node if scenario else 8)
    strategies = dict.fromkeys((BASELINE, *(arguments.strategy or DEFAULT_STRATEGIES)))
    return Setting(
        name=arguments.config or "your mask",
        masks=tuple(masks),
        topology=Topology.uniform(cp, per_node),
        cost=_cost(arguments, scenario),
        strategies=tuple(strategies),
        layers=arguments.layers or (scenario.model.num_hidden_layers if scenario else 1),
        is_recomputed=scenario.training.recompute if scenario else False,
        scenario=scenario if note is None else None,
        other_tflops=arguments.other_tflops or OTHER_TFLOPS,
        note=note,
    )


def _cost(arguments: argparse.Namespace, scenario: Scenario | None) -> CostModel:
    shape: dict[str, Any] = {}
    if scenario is not None:
        model = scenario.model
        shape = {"h_q": model.num_attention_heads, "h_kv": model.num_key_value_heads, "d": model.head_dim}
    for name in ("h_q", "h_kv", "d", "fwd_tflops", "bwd_tflops"):
        if getattr(arguments, name) is not None:
            shape[name] = getattr(arguments, name)
    cost = CostModel(**shape)
    links = {}
    for name in ("fast", "slow"):
        rate = getattr(arguments, f"{name}_gb_per_s")
        if rate is not None:
            links[name] = Link(gb_per_s=rate, latency_us=getattr(cost, name).latency_us)
    return replace(cost, **links)


def _split_batch(mask: ColumnMask) -> list[ColumnMask]:
    return [mask.select(b=slice(b_idx, b_idx + 1)) for b_idx in range(mask.b)]


def compare(setting: Setting) -> Comparison:
    """Plans and plays every strategy on every sequence."""
    schedules = [build_schedule(mask) for mask in setting.masks]
    found = Comparison(
        setting,
        density=fmean(schedule.density for schedule in schedules),
        density_block=fmean(schedule.density_block for schedule in schedules),
    )
    with Progress("plans", len(setting.strategies) * len(setting.masks)) as progress:
        for strategy in setting.strategies:
            rows = []
            for mask_idx, mask in enumerate(setting.masks):
                progress.step(f"{strategy}, sequence {mask_idx + 1}")
                row, timeline = _figures(setting, mask, strategy, with_messages=mask_idx == 0)
                rows.append(row)
                if mask_idx == 0:
                    found.timelines[strategy] = timeline
            names = [name for name in asdict(rows[0]) if name != "strategy"]
            found.figures[strategy] = Figures(strategy, **{n: fmean(getattr(row, n) for row in rows) for n in names})
            if setting.scenario is not None:
                found.steps[strategy] = _step(setting, setting.scenario, found.figures[strategy])
    return found


def _figures(setting: Setting, mask: ColumnMask, strategy: str, *, with_messages: bool) -> tuple[Figures, PlanTimeline]:
    begin_s = time.perf_counter()
    plan = build_plan(mask, setting.num_ranks, topology=setting.topology, strategy=strategy, cost=setting.cost)
    plan_ms = (time.perf_counter() - begin_s) * 1e3
    timeline = simulate_time(plan, mask, setting.cost, with_messages=with_messages)
    row_bytes = setting.cost.row_bytes
    figures = Figures(
        strategy,
        imbalance=plan.imbalance,
        gap=plan.gap,
        slow_bytes=plan.slow_rows * row_bytes,
        fast_bytes=plan.fast_rows * row_bytes,
        peak_kv_rows=plan.peak_k_rows,
        peak_kv_bytes=plan.peak_k_rows * row_bytes,
        fwd_us=timeline.fwd.us,
        bwd_us=timeline.bwd.us,
        exposed_us=timeline.exposed_us,
        plan_ms=plan_ms,
    )
    return figures, timeline


def _step(setting: Setting, scenario: Scenario, figures: Figures) -> Step:
    """Attention of all layers as planned; the rest at a stated rate.

    The rest is 6 operations an active parameter and token, 8 with recompute.
    """
    forwards = 2 if setting.is_recomputed else 1
    sequences = scenario.training.per_device_train_batch_size * scenario.training.gradient_accumulation_steps
    attention_s = sequences * setting.layers * (forwards * figures.fwd_us + figures.bwd_us) * 1e-6
    tokens = sequences * scenario.s_local
    operations = (4 + 2 * forwards) * count_parameters(scenario.model).active * tokens
    other_s = operations / (setting.other_tflops * 1e12) / scenario.layout.tensor_parallel_degree
    return Step(attention_s, other_s, tokens / (attention_s + other_s))


def text_report(comparison: Comparison) -> str:
    setting = comparison.setting
    mib = 2.0**20
    head = (
        f"{setting.name}: {len(setting.masks)} sequence{'s' if len(setting.masks) > 1 else ''} of "
        f"{setting.masks[0].s_q} tokens "
        f"over {setting.num_ranks} rank{'s' if setting.num_ranks > 1 else ''} on {setting.topology.num_nodes} "
        f"{'nodes' if setting.topology.num_nodes > 1 else 'node'}; density {comparison.density:.4f}, "
        f"{comparison.density_block:.4f} in 128 x 128 tiles"
    )
    rows = [
        [
            "strategy",
            "imbalance",
            "gap",
            "slow MiB",
            "fast MiB",
            "peak K/V rows",
            "fwd ms",
            "bwd ms",
            "exposed ms",
            "vs baseline",
        ]
    ]
    for name, one in comparison.figures.items():
        rows.append(
            [name, f"{one.imbalance:.2%}", f"{one.gap:.2%}",
             f"{one.slow_bytes / mib:.1f}", f"{one.fast_bytes / mib:.1f}", f"{one.peak_kv_rows:.0f}",
             f"{one.fwd_us / 1e3:.3f}", f"{one.bwd_us / 1e3:.3f}", f"{one.exposed_us / 1e3:.3f}",
             "baseline" if name == BASELINE else f"{comparison.attention_gain(name):+.1%}"]
        )  # fmt: skip
    lines = [
        head,
        "",
        "one attention layer (bytes: its forward gather, all ranks; the backward reduction moves as many rows back)",
    ]
    lines += _aligned(rows)
    if comparison.steps:
        rows = [["strategy", "attention s", "other s", "tokens/s/GPU", "vs baseline", "memory GiB"]]
        for name, step in comparison.steps.items():
            memory = comparison.memory(name)
            assert memory is not None
            gain = "baseline" if name == BASELINE else f"{comparison.step_gain(name):+.1%}"
            rows.append([name, f"{step.attention_s:.3f}", f"{step.other_s:.3f}",
                         f"{step.tokens_per_s_per_gpu:.1f}", gain,
                         f"{memory['total_bytes'] / 2**30:.1f}"])  # fmt: skip
        assert setting.scenario is not None
        lines += [
            "",
            f"a training step (predicted; a GPU has {setting.scenario.layout.gpu_memory_gib:.1f} GiB)",
            *_aligned(rows),
        ]
    shown = ", ".join(f"{name}={_short(value)}" for name, value in assumptions(setting).items())
    return "\n".join([*lines, "", f"simulated, not measured. Assumptions: {shown}"])


def _short(value: Any) -> str:
    return f"{value['gb_per_s']:g} GB/s + {value['latency_us']:g} us" if isinstance(value, dict) else f"{value:g}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
