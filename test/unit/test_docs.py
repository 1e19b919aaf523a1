# SPDX-License-Identifier: Apache-2.0
"""Every example of docs/ runs, every link and command leads somewhere, and generated pages are current."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from paddle_fm3.__main__ import build_parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TRAINING = "guide_training.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_page(page: Path) -> int:
    namespace: dict[str, object] = {}
    code = blocks(page, "python")
    for index, block in enumerate(code):
        exec(compile(block, f"{page.name}, block {index + 1}", "exec"), namespace)
    return len(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    if page.name == TRAINING:
        pytest.importorskip("paddlenlp")
        pytest.importorskip("paddleformers")
    monkeypatch.chdir(tmp_path)
    count = run_page(page)
    if page.name.startswith(("guide_", "design_")) and page.name != "design_kernels.md":
        assert count >= 1, "a guide without a runnable example"


def test_a_wrong_example_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page)


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            linked = page if not path else page.parent / path
            assert linked.exists(), f"{page.name}: {target}"
            if anchor:
                assert f"## {anchor}\n" in linked.read_text(encoding="utf-8"), f"{page.name}: {target}"


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text()
    missing = [page.name for page in PAGES if page.name != "README.md" and f"]({page.name})" not in index]
    assert not missing


def documented_commands() -> list[str]:
    found = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        found += re.findall(r"`(python -m paddle_fm3 [^`]*)`", text)
        found += [line for block in blocks(page, "bash") for line in block.splitlines() if "paddle_fm3" in line]
    return [command.partition("#")[0].strip() for command in found]


def test_commands_parse():
    commands = documented_commands()
    assert len(commands) >= 10
    for command in commands:
        words = shlex.split(command)[3:]
        build_parser().parse_args(words)  # exits, and so fails the test, on an unknown option


def test_tools_and_verbs_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`(tools/[\w/]+\.py)", text):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"
        for verb in re.findall(r"`make ([a-z-]+)", text):
            assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"{page.name}: make {verb}"


def test_files_named_in_the_text_exist():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:paddle_fm3|ops|test|distributed|results)/[\w/.]+\.(?:py|h|cc|cuh|cu|md))`", text):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_pages_speak_of_the_project_alone():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        assert not re.search(r"/(?:work|root|home|tmp)/", page.read_text(encoding="utf-8")), page.name


def test_pictures_are_small():
    sizes = [path.stat().st_size for path in DOCS.rglob("*.png")]
    assert len(sizes) >= 16 and sum(sizes) < 2**20


# --- generated pages -----------------------------------------------------------------------------


def test_gallery_is_current(tmp_path):
    gallery = tool("make_gallery")
    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == gallery.render(), "run tools/make_gallery.py"
    assert {path.stem for path in (DOCS / "gallery").glob("*.png")} == {entry.slug for entry in gallery.ENTRIES}
    entry = gallery.ENTRIES[2]
    gallery.write_picture(gallery.build(entry), tmp_path / "one.png")
    from matplotlib.image import imread

    shipped = imread(DOCS / "gallery" / f"{entry.slug}.png")
    assert abs(imread(tmp_path / "one.png") - shipped).mean() < 0.02  # another matplotlib may differ at edges


def test_config_page_is_current():
    assert tool("make_config_page").main(["--check"]) == 0


def test_tables_page_is_current():
    assert tool("reproduce").main(["--check"]) == 0


# --- statements that code can check --------------------------------------------------------------


def test_every_trainer_strategy_is_explained():
    from paddle_fm3.integration.paddlenlp.settings import CP_STRATEGIES

    text = (DOCS / TRAINING).read_text(encoding="utf-8")
    for name in CP_STRATEGIES:
        assert f"`{name}`" in text, name
    says_planned_is_missing = "are not yet among the strategies that the trainer executes" in " ".join(text.split())
    assert says_planned_is_missing == (set(CP_STRATEGIES) == {"dual_chunk", "contiguous"})


def test_every_planner_strategy_is_explained():
    from paddle_fm3.distributed.strategy import STRATEGIES

    text = (DOCS / "guide_plan.md").read_text(encoding="utf-8")
    for name in STRATEGIES:
        assert f"`{name}`" in text, name
