# SPDX-License-Identifier: Apache-2.0
"""`python -m paddle_fm3 plan`: its figures against the planner's own, its report, its refusals."""

from __future__ import annotations

import json
import re
from xml.dom import minidom

import pytest

from paddle_fm3 import mask as masks
from paddle_fm3.__main__ import main
from paddle_fm3.commands import _plan_report
from paddle_fm3.distributed.cost import CostModel
from paddle_fm3.distributed.planner import build_plan
from paddle_fm3.distributed.timing import simulate_time
from paddle_fm3.distributed.topology import Topology
from paddle_fm3.integration.paddlenlp.config_schema import CONFIG_DIR

SMALL = ["--cp", "4", "--gpus-per-node", "2", "--h-q", "8", "--h-kv", "2", "--d", "64"]
COST = CostModel(h_q=8, h_kv=2, d=64)
ROW_BYTES = 2 * 2 * 64 * 2  # K and V, heads, head size, bfloat16
LENGTHS = [3000, 1000, 96, 4000, 96]


def planned(capsys, *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def expected(mask, strategy):
    topology = Topology.uniform(4, 2)
    plan = build_plan(mask, 4, topology=topology, strategy=strategy, cost=COST)
    return plan, simulate_time(plan, mask, COST)


def test_figures_are_the_plans(capsys):
    shown = planned(capsys, *SMALL, "--documents", ",".join(map(str, LENGTHS)))
    assert list(shown["strategies"]) == ["dual_chunk_allgather", "fm3", "contiguous_allgather", "ring"]
    assert (shown["num_ranks"], shown["num_nodes"], shown["s"], shown["is_simulated"]) == (4, 2, 8192, True)
    mask = masks.causal_document(LENGTHS)
    baseline = shown["strategies"]["dual_chunk_allgather"]
    for name, one in shown["strategies"].items():
        plan, timeline = expected(mask, name)
        assert one["imbalance"] == pytest.approx(plan.imbalance)
        assert one["slow_bytes"] == plan.slow_rows * ROW_BYTES
        assert one["fast_bytes"] == plan.fast_rows * ROW_BYTES
        assert one["peak_kv_bytes"] == plan.peak_k_rows * ROW_BYTES
        assert one["fwd_us"] == pytest.approx(timeline.fwd.us)
        assert one["bwd_us"] == pytest.approx(timeline.bwd.us)
        gain = (baseline["fwd_us"] + baseline["bwd_us"]) / (one["fwd_us"] + one["bwd_us"]) - 1
        assert one["attention_gain"] == pytest.approx(gain)
    assert baseline["attention_gain"] == 0
    assert "step" not in baseline  # no config, no training step


def test_each_sequence_of_a_file_is_planned_and_the_means_are_shown(capsys, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("8192\n" + " ".join(map(str, LENGTHS)) + "\n")
    shown = planned(capsys, *SMALL, "--file", str(path), "--strategy", "fm3")
    assert shown["num_sequences"] == 2 and list(shown["strategies"]) == ["dual_chunk_allgather", "fm3"]
    plans = [expected(masks.causal_document(lengths), "fm3") for lengths in ([8192], LENGTHS)]
    one = shown["strategies"]["fm3"]
    assert one["slow_bytes"] == sum(plan.slow_rows for plan, _ in plans) / 2 * ROW_BYTES
    assert one["bwd_us"] == pytest.approx(sum(timeline.bwd.us for _, timeline in plans) / 2)


def test_a_config_gives_a_training_step(capsys):
    shown = planned(capsys, "--config", "moe_118b_a14b_128k_cp16", "--strategy", "fm3", "--other-tflops", "100")
    assert (shown["num_ranks"], shown["num_nodes"], shown["s"]) == (16, 2, 131072)
    baseline, ours = (shown["strategies"][name] for name in ("dual_chunk_allgather", "fm3"))
    for one in (baseline, ours):
        step = one["step"]
        assert step["attention_s"] == pytest.approx(24 * (2 * one["fwd_us"] + one["bwd_us"]) * 1e-6)  # recompute
        assert step["other_s"] == pytest.approx(8 * 13.953196032e9 * 8192 / 100e12)
        assert step["tokens_per_s_per_gpu"] == pytest.approx(8192 / (step["attention_s"] + step["other_s"]))
        assert one["memory"]["gathered_kv_bytes"] == 3 * one["peak_kv_bytes"]
    assert ours["step_gain"] == pytest.approx(
        ours["step"]["tokens_per_s_per_gpu"] / baseline["step"]["tokens_per_s_per_gpu"] - 1
    )
    assert ours["step_gain"] > 0.02 and ours["imbalance"] < baseline["imbalance"] / 5
    assert shown["assumptions"]["h_q"] == 64 and shown["assumptions"]["other_tflops"] == 100


def test_other_ranks_than_the_configs_are_planned_without_its_training_step(capsys):
    """The step's tokens and the memory of a rank are the config's, for its own ranks; the figures of attention are not."""
    argv = ["plan", "--config", "moe_14b_a2b7_dpo_32k_cp4", "--strategy", "fm3", "--json", "--cp"]
    assert main([*argv, "2"]) == 0
    shown = capsys.readouterr()
    assert "plan: --cp 2 is planned, not the 4 ranks of config moe_14b_a2b7_dpo_32k_cp4; no training step" in shown.err
    other = json.loads(shown.out)
    assert other["num_ranks"] == 2 and other["assumptions"]["h_q"] == 16
    assert not any({"step", "memory"} & one.keys() for one in other["strategies"].values())
    assert main([*argv, "4"]) == 0
    shown = capsys.readouterr()
    own = json.loads(shown.out)
    assert "--cp" not in shown.err and own["num_ranks"] == 4 and all("step" in x for x in own["strategies"].values())


def test_links_and_rates_reach_the_model(capsys):
    argv = [*SMALL, "--documents", "8192", "--strategy", "ring"]
    slow = planned(capsys, *argv, "--slow-gb-per-s", "1", "--fwd-tflops", "5")
    assert slow["assumptions"]["slow"]["gb_per_s"] == 1 and slow["assumptions"]["fwd_tflops"] == 5
    assert slow["strategies"]["ring"]["fwd_us"] > 2 * planned(capsys, *argv)["strategies"]["ring"]["fwd_us"]


def test_text_names_the_assumptions(capsys):
    assert main(["plan", "--config", "moe_14b_a2b7_dpo_32k_cp4", "--strategy", "fm3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^fm3 +\d+\.\d\d% ", out, re.M) and "a training step (predicted; a GPU has 140.4 GiB)" in out
    assert "simulated, not measured. Assumptions: h_q=16, h_kv=16, d=128" in out


def test_html_report_is_whole_and_draws_every_rank(capsys, tmp_path):
    path, trace = tmp_path / "out" / "report.html", tmp_path / "trace.json"
    argv = [*SMALL, "--documents", ",".join(map(str, LENGTHS)), "--html", str(path), "--trace", str(trace)]
    shown = planned(capsys, *argv)
    text = path.read_text()
    assert "http" not in text.replace("http://www.w3.org", "") and "<script" not in text
    drawings = [minidom.parseString(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    assert len(drawings) == len(shown["strategies"])
    for drawing, name in zip(drawings, shown["strategies"], strict=True):
        labels = [node.firstChild.data for node in drawing.getElementsByTagName("text")]
        assert [label for label in labels if label.startswith("rank")] == [f"rank {r}, node {r // 2}" for r in range(4)]
        assert f"forward {shown['strategies'][name]['fwd_us'] / 1e3:.3f} ms" in labels
        titles = [node.firstChild.data for node in drawing.getElementsByTagName("title")]
        assert sum(title.startswith("backward step") for title in titles) >= 4  # every rank computes
        assert any("rows from rank" in title for title in titles)
    gain = f"{shown['strategies']['fm3']['attention_gain']:+.1%}"
    assert gain in text and "data:image/png;base64,iVBOR" in text
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_a_rank_s_lane_shows_what_arrives_at_it():
    mask = masks.causal_document(LENGTHS)
    plan = build_plan(mask, 4, topology=Topology.uniform(4, 2), cost=COST)
    timeline = simulate_time(plan, mask, COST, with_messages=True)
    for rank in range(4):
        titles = [
            title for *_, lane, title in _plan_report._phase_bars("forward", timeline.fwd, 0.0, rank) if lane == 1
        ]
        mine = plan.rank_plan(rank, mask)
        assert sum(int(title.split()[0]) for title in titles) == mine.num_k_rows - mine.num_q_rows
        assert not any(title.endswith(f"from rank {rank}") for title in titles)


def test_a_config_with_windows_is_not_planned_as_if_it_had_none(capsys, tmp_path):
    content = json.loads((CONFIG_DIR / "moe_118b_a14b_128k_cp16.json").read_text())
    content["data"].update(mask_window=4096, mask_layers="window,full")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    assert main(["plan", "--config", str(path)]) == 2
    assert "has layers with a window; plan compares strategies for one mask" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give one of --documents"),
        (["--documents", "4096"], "give --config, or --cp and a mask"),
        (["--config", "nothing"], "no config 'nothing'; shipped: moe_118b"),
        (["--config", "moe_118b_a14b_128k_cp16", "--documents", "4096"], "hold 4096 tokens; config moe_118b"),
        (["--cp", "0", "--documents", "4096"], "--cp 0 must be >= 1"),
        (
            ["--cp", "2", "--pattern", "full", "--set", "s_q=8", "--set", "s_k=16"],
            "context parallelism needs s_q = s_k",
        ),
        (["--cp", "2", "--documents", "4096", "--h-kv", "7"], "h_kv=7 must divide"),
        (["--cp", "2", "--documents", "4096", "--d", "0"], "d=0 must be > 0"),
        (["--cp", "2", "--documents", "4096", "--layers", "0"], "--layers 0 must be >= 1"),
        (["--cp", "2", "--documents", "4096", "--gpus-per-node", "0"], "--gpus-per-node 0 must be >= 1"),
        (["--cp", "2", "--documents", "4096", "--fwd-tflops", "nan"], "fwd_tflops=nan must be > 0"),
        (["--cp", "2", "--documents", "4096", "--bwd-tflops", "-1"], "bwd_tflops=-1.0 must be > 0"),
        (["--cp", "2", "--documents", "4096", "--other-tflops", "0"], "--other-tflops 0.0 must be > 0"),
        (["--cp", "2", "--documents", "4096", "--slow-gb-per-s", "nan"], "gb_per_s=nan must be > 0"),
        (["--cp", "2", "--documents", "4096", "--html", "/"], "Is a directory: '/'"),
        (["--cp", "2", "--documents", "4096", "--trace", "/"], "Is a directory: '/'"),
    ],
)
def test_what_does_not_fit_is_explained(capsys, argv, message):
    assert main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err
