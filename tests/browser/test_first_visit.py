"""A first visit: sentences and a sketch before the worker answers, few controls, and a path to an applied policy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.measured import confirm_marks, guided
from tests.browser.served import ROOT, START_S, Served, start
from tests.browser.settled import settled

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

HERE = Path(__file__).resolve().parent
HELD = """import os, pathlib, sys, time
if "explorer.child_process.fork_server" in " ".join(sys.orig_argv):
    while not (pathlib.Path(__file__).parent / "go").exists():
        time.sleep(0.05)
"""
"""Runs in each process at its start: the fork server waits for a file."""


@pytest.fixture
def held_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that starts once this file exists."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "go"


SKETCH = """() => {
    const sketch = document.querySelector(".sketch > svg");
    const { x, y, width, height } = sketch ? sketch.getBoundingClientRect() : {};
    return width ? { x, y, width, height } : false;
}"""
"""Where the sketch is drawn, once it is: a sketch that is drawn again has no place for a moment."""
PLOT = """() => {
    const chart = document.querySelector(".st-key-first .js-plotly-plot"), { l, t, w, h } = chart._fullLayout._size
    const { x, y } = chart.getBoundingClientRect()
    return { x: x + l, y: y + t, width: w, height: h }
}"""


@pytest.fixture
def new_app(tmp_path: Path) -> Iterator[Served]:
    """An app that nobody has visited. Its GPT has the recorded structure and a smaller batch."""
    tree = tmp_path / "tree"
    for name in ("explorer", "sample_models", ".streamlit"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # about to be renamed
    shutil.copyfile(ROOT / "app.py", tree / "app.py")
    gpt = tree / "sample_models" / "gpt.py"
    gpt.write_text(gpt.read_text().replace('"batch": 8', '"batch": 1'))
    app = start(tree / "app.py", home=tmp_path / "home", root=tree)
    yield app
    app.process.terminate()
    app.process.wait(timeout=START_S)


MOST_CONTROLS = 36  # Redo, too: early clicks were taken back
LEAST_PLOT, MOST_ABOVE = 400, 120
"""Pixels of height of the timeline's plot, and of all that stands above it in its column, at 1440 x 900."""


IS_LARGE = """least => {
    const plot = document.querySelector(".st-key-results .nsewdrag")
    return plot && plot.getBoundingClientRect().height >= least
}"""


def has_few_controls_and_a_large_chart(page: Page) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.wait_for_function(IS_LARGE, arg=LEAST_PLOT)  # the server draws the chart for the new height of the window
    controls = settled(page).evaluate((HERE / "controls.js").read_text())["controls"]
    assert 20 < len(controls) <= MOST_CONTROLS, controls
    column = page.locator(".st-key-results").bounding_box()
    plot = page.locator(".st-key-results .nsewdrag").first.bounding_box()
    assert column is not None and plot is not None
    assert plot["y"] - column["y"] <= MOST_ABOVE, (plot, column)


LEAST = re.compile(r"^12 of 12 blocks.*")
"""The plan at the slider's least memory."""
PARTS = (".strip", ".tools", ".slide", ".graph", ".sketch")


def places(page: Page) -> list[float]:
    """Edges of the figures, the tools, the slider, the graph and the first chart: of the preview, later of the page."""
    boxes = [page.locator(part).bounding_box() for part in PARTS]
    return [edge for box in boxes if box is not None for edge in box.values()]


def test_a_first_visit_answers_before_the_worker_and_its_path_ends_with_a_policy_that_a_script_applies(
    page: Page, held_worker: Path, new_app: Served, tmp_path: Path
) -> None:
    held: list[Route] = []
    scripts: list[Route] = []
    holds = [True]
    first_words = page.locator("#first-words", has_text="Choose blocks that compute their activations again")
    page.route("**/PlotlyChart.*", lambda route: held.append(route) if holds else route.continue_())
    page.route("**/static/js/index.*", lambda route: scripts.append(route))
    page.goto(new_app.url, wait_until="commit")
    first_words.wait_for()
    page.locator("#preview .sketch > svg").wait_for()
    preview = places(page)
    assert page.get_by_text("recorded on another machine").count() == 1
    early = page.locator("#preview")
    early.get_by_role("slider").press("Home")
    early.locator(".figure .value").get_by_text(LEAST).wait_for()
    early.locator(".presets").click()
    early.get_by_role("menuitem", name="Every second").click()
    early.locator(".figure .value").get_by_text("6 of 12 blocks", exact=True).wait_for()
    for button, count in (("Recompute all", "12 of 12 blocks"), ("Keep all", "0 of 12 blocks")):
        early.locator(".graph").get_by_role("button", name=button).first.click()
        early.locator(".figure .value").get_by_text(count, exact=True).wait_for()
    page.unroute("**/static/js/index.*")
    for route in scripts:
        route.continue_()
    page.locator("#preview").wait_for(state="detached")
    page.get_by_text("recorded on another machine").filter(visible=True).wait_for()
    first_words.wait_for(state="hidden")
    page.get_by_text("Choose blocks that compute their activations again").filter(visible=True).wait_for()
    page.get_by_role("treeitem").first.wait_for()
    drawn = settled(page).wait_for_function(SKETCH).json_value()
    assert places(page) == pytest.approx(preview, abs=1), "nothing moved"
    holds.clear()
    for route in held:
        route.continue_()
    page.locator(".st-key-first .js-plotly-plot .scatterlayer .trace").first.wait_for()
    page.locator(".sketch").wait_for(state="hidden")
    page.unroute("**/PlotlyChart.*")
    assert drawn == pytest.approx(page.evaluate(PLOT), abs=2), "Plotly's chart covers its sketch"
    page.get_by_text("starting").first.wait_for()
    undo, redo = (page.get_by_role("button", name=name) for name in ("Undo", "Redo"))
    early_steps = ("12 of 12 blocks", "6 of 12 blocks", LEAST, "0 of 12 blocks")
    for count in early_steps:  # each early step was kept, once, in its order
        undo.click()
        confirm_marks(page, count)
    undo.wait_for(state="hidden")
    assert redo.is_visible()
    has_few_controls_and_a_large_chart(page)
    path = guided(page, tmp_path / "policy.yaml")
    texts = [next(path) for _ in range(3)]
    assert "held at its worst moment: 216.8 MiB" in texts[0]
    confirm_marks(page, re.compile(r"^12 (of \d+ )?blocks$"))
    page.get_by_text("recorded on another machine").filter(visible=True).wait_for()
    held_worker.touch()
    page.get_by_text("recorded on another machine").wait_for(state="detached")
    texts += path
    before, after = map(float, re.findall(r"([\d.]+) MiB became ([\d.]+) MiB", texts[4])[0])
    assert after < before < 216.8 and "bitwise equal" in texts[4], "the run of this machine took the record's place"

    from explorer import apply_policy, load_policy
    from sample_models.gpt import SIZES, build

    model, (tokens, targets), loss = build(**SIZES["small"] | {"width": 16, "length": 8, "batch": 1, "vocabulary": 32})
    apply_policy(model, load_policy(tmp_path / "policy.yaml"))
    ran = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: ran.append(1))
    loss(model(tokens), targets).backward()
    assert len(ran) == 2 * len(model.blocks) == 24, "each block runs once more in backward"
