# SPDX-License-Identifier: Apache-2.0
"""The HTML report of `plan`: one file without scripts or outside resources. Pictures are SVG, the mask a PNG inside."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from paddle_fm3 import viz
from paddle_fm3.commands._plan_figures import BASELINE, Comparison, assumptions
from paddle_fm3.distributed.timing import Phase, PlanTimeline

WIDTH, LEFT, ROW, GAP = 960, 90, 10, 5  # pixels: picture, its labels, one bar, between ranks
COLOURS = {"compute": "#1f4e79", "receive": "#7fb2d9", "send": "#b4542b"}
_STYLE = """body{font:15px/1.5 sans-serif;max-width:1060px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{max-width:100%}h1,h2{font-weight:600}.note{color:#666}"""

Bar = tuple[float, float, str, int, str]  # begin_us, end_us, colour, lane (0 compute, 1 receive, 2 send), title


def write_trace(comparison: Comparison, path: Path) -> None:
    """The timeline of fm3 (or of the last strategy), for chrome://tracing."""
    names = list(comparison.timelines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(comparison.timelines["fm3" if "fm3" in names else names[-1]].to_chrome_trace(), encoding="utf-8")


def write_html(comparison: Comparison, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(comparison), encoding="utf-8")


def render(comparison: Comparison) -> str:
    setting = comparison.setting
    title = f"Context-parallel plan: {html.escape(setting.name)}"
    mask = setting.masks[0]
    parts = [
        "<!doctype html><html lang='en'><meta "
        f"charset='utf-8'><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>",
        f"<p>{len(setting.masks)} sequence(s) of {mask.s_q:,} tokens, {setting.num_ranks} ranks on "
        f"{setting.topology.num_nodes} "
        f"node(s). Density {comparison.density:.4f}; {comparison.density_block:.4f} in 128 x 128 tiles.</p>",
        "<p class='note'>Simulated on the stated rates, not measured. Pictures show the first sequence.</p>",
        f"<img alt='the mask' src='data:image/png;base64,{_mask_picture(comparison)}'>",
        "<h2>One attention layer</h2>",
        _layer_table(comparison),
    ]
    if comparison.steps:
        parts += ["<h2>A training step</h2>", _step_table(comparison)]
    longest_us = max(timeline.total_us for timeline in comparison.timelines.values())
    for name, timeline in comparison.timelines.items():
        parts += [f"<h2>Timeline: {html.escape(name)}</h2>", _loads(timeline), timeline_svg(timeline, longest_us)]
    shown = _table(["assumption", "value"], [[name, str(value)] for name, value in assumptions(setting).items()])
    return "\n".join([*parts, "<h2>Assumptions</h2>", shown, "</html>"])


def _mask_picture(comparison: Comparison) -> str:
    figure, (axes,) = viz.new_figure(1, panel_inches=(3.2, 3.0))
    viz.draw_mask(axes, comparison.setting.masks[0], title="")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90, format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def _layer_table(comparison: Comparison) -> str:
    head = ["strategy", "imbalance", "gap to bound", "between nodes MiB", "inside nodes MiB", "peak K/V rows",
            "forward ms", "backward ms", "exposed ms", "plan ms", "against baseline"]  # fmt: skip
    rows = []
    for name, one in comparison.figures.items():
        gain = "baseline" if name == BASELINE else f"{comparison.attention_gain(name):+.1%}"
        rows.append(
            [name, f"{one.imbalance:.2%}", f"{one.gap:.2%}",
             f"{one.slow_bytes / 2**20:.1f}", f"{one.fast_bytes / 2**20:.1f}", f"{one.peak_kv_rows:,.0f}",
             f"{one.fwd_us / 1e3:.3f}", f"{one.bwd_us / 1e3:.3f}", f"{one.exposed_us / 1e3:.3f}",
             f"{one.plan_ms:.1f}", gain]
        )  # fmt: skip
    return _table(head, rows)


def _step_table(comparison: Comparison) -> str:
    rows = []
    for name, step in comparison.steps.items():
        gain = "baseline" if name == BASELINE else f"{comparison.step_gain(name):+.1%}"
        memory = comparison.memory(name)
        assert memory is not None
        rows.append([name, f"{step.attention_s:.3f}", f"{step.other_s:.3f}", f"{step.tokens_per_s_per_gpu:.1f}", gain,
                     f"{memory['total_bytes'] / 2**30:.1f}"])  # fmt: skip
    return _table(["strategy", "attention s", "other s", "tokens/s/GPU", "against baseline", "memory GiB"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _loads(timeline: PlanTimeline) -> str:
    loads = timeline.plan.rank_loads
    mean = loads.mean() or 1.0
    shown = ", ".join(f"{load / mean:.2f}" for load in loads)
    return f"<p class='note'>Load of each rank over the mean: {shown}</p>"


def timeline_svg(timeline: PlanTimeline, longest_us: float) -> str:
    """Per rank a lane of compute steps, one of arrivals and one of gradients sent; backward follows forward."""
    num_ranks = timeline.plan.num_ranks
    rank_height = 3 * ROW + GAP
    scale = (WIDTH - LEFT - 10) / max(longest_us, 1e-9)
    height = num_ranks * rank_height + 44
    parts = [f"<svg viewBox='0 0 {WIDTH} {height}' role='img' font-family='sans-serif' font-size='10'>"]
    for rank in range(num_ranks):
        top = rank * rank_height + 18
        parts.append(
            f"<text x='4' y='{top + 2 * ROW}'>rank {rank}, node {timeline.plan.topology.node_of_rank[rank]}</text>"
        )
        for begin_us, end_us, colour, lane, title in _bars(timeline, rank):
            width = max((end_us - begin_us) * scale, 0.3)
            parts.append(
                f"<rect x='{LEFT + begin_us * scale:.2f}' y='{top + lane * ROW}' width='{width:.2f}' "
                f"height='{ROW - 1}' "
                f"fill='{colour}'><title>{title}: {begin_us:.0f} to {end_us:.0f} us</title></rect>"
            )
    border = LEFT + timeline.fwd.us * scale
    parts.append(
        f"<line x1='{border:.2f}' x2='{border:.2f}' y1='14' y2='{height - 26}' stroke='#888' stroke-dasharray='3'/>"
    )
    parts.append(f"<text x='{LEFT}' y='11'>forward {timeline.fwd.us / 1e3:.3f} ms</text>")
    parts.append(f"<text x='{border + 4:.2f}' y='11'>backward {timeline.bwd.us / 1e3:.3f} ms</text>")
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 130
        parts.append(f"<rect x='{x}' y='{height - 18}' width='10' height='10' fill='{colour}'/>")
        label = {"compute": "compute", "receive": "K/V arriving", "send": "gradients sent"}[name]
        parts.append(f"<text x='{x + 14}' y='{height - 9}'>{label}</text>")
    return "".join([*parts, "</svg>"])


def _bars(timeline: PlanTimeline, rank: int) -> list[Bar]:
    bars: list[Bar] = []
    for name, phase, offset in (("forward", timeline.fwd, 0.0), ("backward", timeline.bwd, timeline.fwd.us)):
        bars += _phase_bars(name, phase, offset, rank)
    return bars


def _phase_bars(name: str, phase: Phase, offset: float, rank: int) -> list[Bar]:
    bars: list[Bar] = []
    steps = zip(phase.step_begin_us[rank].tolist(), phase.step_end_us[rank].tolist(), strict=True)
    for step, (begin, end) in enumerate(steps):
        if end > begin:
            bars.append((offset + begin, offset + end, COLOURS["compute"], 0, f"{name} step {step}"))
    for _, _, src, dst, rows, begin, end in phase.gather:
        if dst == rank:
            bars.append((offset + begin, offset + end, COLOURS["receive"], 1, f"{rows} rows from rank {src}"))
    for _, _, src, dst, rows, begin, end in phase.reduce:
        if src == rank:
            bars.append((offset + begin, offset + end, COLOURS["send"], 2, f"gradients of {rows} rows to rank {dst}"))
    return bars
