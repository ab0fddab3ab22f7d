"""The whole path in a real browser: model, toggle, run, compare, export; refresh; and who may connect."""

from __future__ import annotations

import http.client
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import TIMEOUT_MS
from tests.browser.measured import ANSWERED, APP, guided
from tests.browser.served import START_S, Served, start
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


HERE = Path(__file__).resolve().parent


@pytest.fixture
def explore(page: Page, app: Served) -> Page:
    """The page once the baseline of the tiny model is measured."""
    page.goto(app.url)
    page.get_by_role("treeitem").first.wait_for()
    page.get_by_text("Measured with everything kept.").wait_for()
    return settled(page)


def confirm_marks(page: Page, text: str | re.Pattern[str]) -> None:
    page.locator(".figure .value").get_by_text(text, exact=True).wait_for()


def test_model_toggle_run_compare_export_and_refresh(explore: Page, tmp_path: Path) -> None:
    page = explore
    page.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    page.locator('[data-id="head"]').click()  # no other test of this app runs the policy
    confirm_marks(page, re.compile(r"^5 (of \d+ )?blocks$"))
    assert "≈" in page.locator(".figure .value").first.inner_text()
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_role("button", name="Cancel").wait_for()
    page.get_by_text(ANSWERED).wait_for()
    confirm_marks(page, re.compile(r"^5 (of \d+ )?blocks$"))
    confirm_marks(page, "bitwise equal")
    for tab in ("Cost", "Gradients", "Memory"):
        press(page, page.get_by_role("tab", name=tab))
        evidence = page.get_by_text(re.compile("^Every bit of"))
        evidence.or_(page.get_by_test_id("stPlotlyChart").locator("visible=true")).first.wait_for()
        assert page.get_by_test_id("stException").count() == 0

    bar = settled(page).locator(".st-key-ledger .bars .point path").first
    bar.scroll_into_view_if_needed()
    settled(page)
    bar.click(force=True)
    page.locator('[data-id][aria-selected="true"]').wait_for()

    press(page, page.get_by_role("button", name="Policy file"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Policy with evidence").click()
    saved = tmp_path / "policy.yaml"
    download.value.save_as(saved)
    from explorer import load_policy
    from explorer.plan.policy.file import load

    assert set(load_policy(saved).blocks) == {"head", *(f"layers.{i}" for i in range(4))}
    evidence = load(saved).evidence
    assert evidence is not None
    assert evidence.verdict == "bitwise equal"
    page.keyboard.press("Escape")

    page.reload()
    page.locator('[data-id="layers"][aria-checked="true"]').wait_for()
    press(page, page.get_by_role("link", name="Runs"))
    page.get_by_text("Select a row to open").wait_for()


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


PLOT = """() => {
    const chart = document.querySelector(".st-key-first .js-plotly-plot"), { l, t, w, h } = chart._fullLayout._size
    const { x, y } = chart.getBoundingClientRect()
    return { x: x + l, y: y + t, width: w, height: h }
}"""


@pytest.fixture
def new_app(tmp_path: Path) -> Iterator[Served]:
    """An app whose store is empty: nobody has visited it."""
    app = start(APP, home=tmp_path)
    yield app
    app.process.terminate()
    app.process.wait(timeout=START_S)


MOST_CONTROLS = 35
LEAST_PLOT, MOST_ABOVE = 420, 120
"""Pixels of height of the timeline's plot, and of all that stands above it in its column, at 1440 x 900."""


def has_few_controls_and_a_large_chart(page: Page) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    controls = settled(page).evaluate((HERE / "controls.js").read_text())["controls"]
    assert 20 < len(controls) <= MOST_CONTROLS, controls
    column = page.locator(".st-key-results").bounding_box()
    plot = page.locator(".st-key-results .nsewdrag").first.bounding_box()
    assert column is not None and plot is not None
    assert plot["height"] >= LEAST_PLOT and plot["y"] - column["y"] <= MOST_ABOVE, (plot, column)


def test_a_first_visit_answers_before_the_worker_and_its_path_ends_with_a_policy_that_a_script_applies(
    page: Page, held_worker: Path, new_app: Served, tmp_path: Path
) -> None:
    held: list[Route] = []
    holds = [True]
    page.route("**/PlotlyChart.*", lambda route: held.append(route) if holds else route.continue_())
    page.goto(new_app.url)
    page.get_by_text("Choose blocks that compute their activations again").wait_for()
    page.get_by_text("recorded on another machine").wait_for()
    page.get_by_role("treeitem").first.wait_for()
    drawn = settled(page).locator(".sketch > svg").bounding_box()
    holds.clear()
    for route in held:
        route.continue_()
    page.locator(".st-key-first .js-plotly-plot .scatterlayer .trace").first.wait_for()
    page.locator(".sketch").wait_for(state="hidden")
    page.unroute("**/PlotlyChart.*")
    assert drawn == pytest.approx(page.evaluate(PLOT), abs=2), "Plotly's chart covers its sketch"
    page.get_by_text("starting").first.wait_for()
    has_few_controls_and_a_large_chart(page)
    path = guided(page, tmp_path / "policy.yaml")
    texts = [next(path) for _ in range(3)]
    assert "held at its worst moment: 216.8 MiB" in texts[0]
    confirm_marks(page, re.compile(r"^12 (of \d+ )?blocks$"))
    page.get_by_text("recorded on another machine").wait_for()
    held_worker.touch()
    page.get_by_text("recorded on another machine").wait_for(state="detached")
    texts += path
    assert "216.8 MiB became 55.8 MiB" in texts[4] and "bitwise equal" in texts[4]

    from explorer import apply_policy, load_policy
    from sample_models.gpt import SIZES, build

    model, (tokens, targets), loss = build(**SIZES["small"] | {"width": 16, "length": 8, "batch": 1, "vocabulary": 32})
    apply_policy(model, load_policy(tmp_path / "policy.yaml"))
    ran = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: ran.append(1))
    loss(model(tokens), targets).backward()
    assert len(ran) == 2 * len(model.blocks) == 24, "each block runs once more in backward"


def test_two_visitors_at_once_see_their_own_marks(page: Page, app: Served) -> None:
    wanted: list[set[str]] = [{"head"}, {"layers"}]
    tabs = [page, page.context.new_page()]
    for tab in tabs:
        tab.goto(app.url)
    for tab, blocks in zip(tabs, wanted):
        tab.locator('[data-id="head"]').wait_for()
        if "head" in blocks:
            tab.locator('[data-id="head"]').click()
        if "layers" in blocks:
            tab.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    for tab, blocks in zip(tabs, wanted):
        confirm_marks(tab, re.compile(rf"^{len(blocks & {'head'}) + 4 * len(blocks & {'layers'})} (of \d+ )?blocks?$"))
        checked = {
            block for block in ("head", "layers") if tab.locator(f'[data-id="{block}"][aria-checked="true"]').count()
        }
        assert checked == blocks


def test_a_refresh_finds_the_run_under_way(explore: Page) -> None:
    page = explore
    page.locator('[data-id="head"]').click()
    confirm_marks(page, re.compile(r"^1 (of \d+ )?blocks?$"))
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.wait_for_url("**job=**")
    page.reload()
    page.locator('[data-id="head"][aria-checked="true"]').wait_for()
    page.get_by_text(ANSWERED).wait_for()
    assert "job=" not in page.url


@pytest.mark.parametrize(("path", "panel"), [("", "results"), ("/pipeline", "pipeline_results")])
def test_a_window_made_narrow_stacks_the_page(page: Page, app: Served, path: str, panel: str) -> None:
    page.goto(app.url + path)
    page.get_by_role("treeitem").first.wait_for()
    beside = page.locator(f".st-key-{panel}")
    beside.wait_for()
    settled(page)

    def below() -> bool:
        """False also while one of them is being drawn anew."""
        graph, results = page.locator(".graph").bounding_box(), beside.bounding_box()
        return graph is not None and results is not None and results["y"] > graph["y"] + graph["height"] - 1

    assert not below()
    page.set_viewport_size({"width": 800, "height": 900})
    for _ in range(TIMEOUT_MS // 250):
        if below():
            return
        page.wait_for_timeout(250)
    pytest.fail("the charts stayed beside the graph")


def test_a_factory_that_raises_is_a_sentence_and_the_app_lives(page: Page, app: Served, tiny: str) -> None:
    page.goto(f"{app.url}/?model={tiny.replace(':build', ':broken')}")
    page.get_by_text("the factory says no").first.wait_for()
    press(page, page.get_by_text("Traceback").first)
    assert page.get_by_test_id("stException").count() == 0


def test_ranks_are_chosen_drawn_and_toggled(explore: Page) -> None:
    """A real play of two ranks, and of the policy that is drawn."""
    page = explore
    press(page, page.get_by_role("button", name="Options"))
    number = page.get_by_role("spinbutton", name="ranks", exact=True)
    number.fill("2")
    number.press("Enter")
    page.get_by_text("predict on, 2 ranks, FSDP2 x 2").wait_for()
    page.keyboard.press("Escape")
    bars = page.locator(".st-key-ranks_at_peak")
    bars.get_by_text("ranks 0 to 1", exact=True).wait_for()
    page.get_by_text(re.compile(r"^all-gather \(\d+\)$")).first.wait_for()
    settled(page).locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    confirm_marks(page, re.compile(r"^4 (of \d+ )?blocks$"))
    assert "≈" in page.locator(".figure .value").first.inner_text()
    press(page, page.get_by_role("button", name="Predict", exact=True))
    page.get_by_text("Both runs").first.wait_for()
    bars.get_by_text("recomputed", exact=True).wait_for()
    assert page.get_by_test_id("stException").count() == 0


def handshake(port: int, host: str, origin: str | None) -> int:
    """Status of a WebSocket handshake as a page at `origin` would make it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {
        "Host": host,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    if origin:
        headers["Origin"] = origin
    connection.request("GET", "/_stcore/stream", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_only_this_machine_may_connect_and_no_site_may_frame_the_page(app: Served) -> None:
    port = app.port
    for path in ("/", "/pipeline", "/_stcore/health"):
        with urllib.request.urlopen(f"http://localhost:{port}{path}") as response:
            assert response.headers["X-Frame-Options"] == "DENY"
            assert response.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
            links = re.findall(r"</static/js/(\w+)\.\S+\.js>; rel=modulepreload", str(response.headers))
            named = [] if path.startswith("/_") else ["BidiComponent", "PlotlyChart", "recordbatch", "serialization"]
            assert sorted(links) == named, "a document names the chart library and what components need"
    own = f"localhost:{port}"
    assert handshake(port, own, f"http://{own}") == 101
    assert handshake(port, own, "http://evil.example") == 403
    assert handshake(port, f"evil.example:{port}", f"http://evil.example:{port}") == 403
    outside = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, type=socket.SOCK_STREAM)]
    for address in {address for address in outside if not str(address).startswith(("127.", "::1"))}:
        with pytest.raises(OSError), socket.create_connection((address, port), timeout=5):
            pass


def test_a_budget_is_typed_the_graph_follows_and_a_run_keeps_it(explore: Page) -> None:
    page = explore
    field = page.get_by_label("Budget", exact=True).first
    field.fill("1 KiB")
    field.press("Enter")
    page.get_by_text("least that can be reached").wait_for()
    assert page.locator('[data-id][aria-checked="true"]').count() == 0
    page.get_by_text("Type a budget, or drag").wait_for(state="detached")
    field.fill("80 %")
    field.press("Enter")
    page.get_by_text("predicted: within").wait_for()
    page.locator(".figure .value").first.get_by_text("≈").wait_for()
    confirm_marks(page, re.compile(r"^[1-9]\d* (of \d+ )?blocks?$"))
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_text("measured: within").wait_for()
    press(page, page.get_by_role("tab", name="Budget"))
    page.locator(".st-key-front .scatterlayer .point").first.wait_for()
    press(page, page.get_by_role("button", name="Undo"))
    confirm_marks(page, re.compile(r"^0 (of \d+ )?blocks$"))


def test_the_graph_follows_the_slider_while_it_is_held(explore: Page) -> None:
    page = explore
    page.get_by_text("Type a budget, or drag").wait_for()
    slider = settled(page).get_by_role("slider", name="Memory for time")
    box = slider.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 4, box["y"] + box["height"] / 2, steps=6)
    page.locator(".figure .value").first.get_by_text("≈").wait_for()
    page.mouse.up()
    press(page, page.get_by_role("button", name="Undo"))
    confirm_marks(page, re.compile(r"^0 (of \d+ )?blocks$"))
