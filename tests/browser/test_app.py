"""The whole path in a real browser: model, toggle, run, compare, export; refresh; and who may connect."""

from __future__ import annotations

import http.client
import re
import socket
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.measured import ANSWERED, confirm_marks, stacks_when_narrow
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def explore(page: Page, app: Served) -> Page:
    """The page once the baseline of the tiny model is measured."""
    page.goto(app.url)
    page.get_by_role("treeitem").first.wait_for()
    page.get_by_text("Measured with everything kept.").wait_for()
    return settled(page)


def test_model_toggle_run_compare_export_and_refresh(explore: Page, tmp_path: Path) -> None:
    page = explore
    page.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    page.locator('[data-id="head"]').click()  # no other test of this app runs the policy
    confirm_marks(page, re.compile(r"^5 (of \d+ )?blocks$"))
    page.locator(".figure .value").first.get_by_text("≈").wait_for()
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_role("button", name="Cancel").wait_for()
    page.wait_for_url("**job=**")
    page.reload()  # finds the run under way
    page.locator('[data-id="layers"][aria-checked="true"]').wait_for()
    page.get_by_text(ANSWERED).wait_for()
    page.wait_for_function("() => !location.search.includes('job=')")
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

    press(page, page.get_by_role("link", name="Runs"))
    page.get_by_text("Select a row to open").wait_for()


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
        settled(tab)
        checked = {
            block for block in ("head", "layers") if tab.locator(f'[data-id="{block}"][aria-checked="true"]').count()
        }
        assert checked == blocks


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
    page.locator(".figure .value").first.get_by_text("≈").wait_for()
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


def test_the_graph_follows_the_slider_and_a_typed_budget_and_a_run_keeps_it(explore: Page) -> None:
    page = explore
    page.get_by_text("Type a budget, or drag").wait_for()
    slider = settled(page).get_by_role("slider", name="Memory for time")
    box = slider.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 4, box["y"] + box["height"] / 2, steps=6)
    page.locator(".figure .value").first.get_by_text("≈").wait_for()  # while it is held
    page.mouse.up()
    press(page, page.get_by_role("button", name="Undo"))
    confirm_marks(page, re.compile(r"^0 (of \d+ )?blocks$"))

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
    stacks_when_narrow(page, "results")
