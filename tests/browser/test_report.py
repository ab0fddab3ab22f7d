"""A report in a browser without network: it zooms, answers the pointer, and fits a narrow window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer.record import Comparison
from explorer.record.base import from_msgpack
from explorer.view.report.html import document, table
from explorer.view.report.parts import ReportOf
from explorer.view.report.report import report_text

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cpu.msgpack"


@pytest.fixture
def report(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Opened from disk, offline; a word on the console (a blocked request, an error) fails the test."""
    pair = from_msgpack(GOLDEN.read_bytes(), Comparison)
    file = tmp_path / "report.html"
    file.write_text(report_text(ReportOf(run=pair, name="a run")))
    context = browser.new_context(viewport={"width": 1100, "height": 900}, offline=True)
    page = context.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert not messages


def test_it_zooms_and_comes_back(report: Page) -> None:
    plot = report.locator("figure.zooms svg.plot").first
    whole = plot.get_attribute("viewBox")
    box = plot.bounding_box()
    assert box is not None and whole is not None
    report.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 60)
    report.mouse.down()
    report.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    report.mouse.up()
    zoomed = [float(number) for number in str(plot.get_attribute("viewBox")).split()]
    full = [float(number) for number in whole.split()]
    assert zoomed[0] == pytest.approx(0.25 * full[2], rel=0.02) and zoomed[2] == pytest.approx(0.25 * full[2], rel=0.02)
    report.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 60)
    assert [float(number) for number in str(plot.get_attribute("viewBox")).split()] == full


def test_the_pointer_reads_the_nearest_moment(report: Page) -> None:
    box = report.locator("figure.zooms svg.plot").first.bounding_box()
    assert box is not None
    report.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    tip = report.locator("#tip")
    tip.wait_for(state="visible")
    assert "held" in tip.inner_text() and "event" in tip.inner_text()


def test_a_narrow_window_scrolls_charts_and_not_the_page(report: Page) -> None:
    report.set_viewport_size({"width": 400, "height": 800})
    assert report.evaluate("document.documentElement.scrollWidth") == 400
    assert report.locator("figure").first.evaluate("figure => figure.scrollWidth > figure.clientWidth")


def test_a_sentence_in_a_narrow_table_keeps_its_width(browser: Browser) -> None:
    reason = "It plans models whose blocks their author declares by hand, to a budget that is not the peak."
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.set_content(document("Arena", [table([{f"figure {n}": "0.5 MiB" for n in range(12)} | {"why": reason}])]))
    cell = page.get_by_role("cell", name=reason).bounding_box()
    assert cell is not None and cell["width"] > 250 and cell["height"] < 100
    page.close()
