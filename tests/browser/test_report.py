"""A report in a browser without network: it zooms, answers the pointer, and fits a narrow window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer.record import Comparison
from explorer.record.base import from_msgpack
from explorer.view.report.html import document, table
from explorer.view.report.report import ReportOf, report_text

if TYPE_CHECKING:
    from playwright.sync_api import Page

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cpu.msgpack"


@pytest.fixture
def report(from_disk: Callable[[Path], Page], tmp_path: Path) -> Page:
    """The report of a run, opened from disk."""
    path = tmp_path / "report.html"
    path.write_text(report_text(ReportOf(run=from_msgpack(GOLDEN.read_bytes(), Comparison), name="a run")))
    return from_disk(path)


def plot_of(report: Page) -> tuple[float, float, float, float]:
    """Box of the first chart's plot, once Plotly has drawn it."""
    plot = report.locator("figure.chart .nsewdrag").first
    plot.wait_for()
    box = plot.bounding_box()
    assert box is not None
    return box["x"], box["y"], box["width"], box["height"]


def window_of(report: Page) -> list[float]:
    return list(report.locator("figure.chart .js-plotly-plot").first.evaluate("plot => plot._fullLayout.xaxis.range"))


def test_it_zooms_answers_the_pointer_follows_the_scheme_and_fits_a_narrow_window(report: Page) -> None:
    x, y, wide, _ = plot_of(report)
    whole = window_of(report)
    report.mouse.move(x + 0.25 * wide, y + 60)
    report.mouse.down()
    report.mouse.move(x + 0.5 * wide, y + 60)
    report.mouse.up()
    report.wait_for_function(
        "whole => document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range[0] > whole", arg=whole[0]
    )
    zoomed = window_of(report)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.25 * (whole[1] - whole[0]), rel=0.05)
    report.mouse.dblclick(x + 0.5 * wide, y + 60)
    report.wait_for_function(
        "whole => document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range[0] === whole", arg=whole[0]
    )

    report.mouse.move(x + 0.4 * wide, y + 60)
    tip = report.locator(".hoverlayer .hovertext, .hoverlayer .legend").first
    tip.wait_for()
    assert "MiB" in tip.inner_html()

    title = report.locator("figure.chart .gtitle").first
    light = title.evaluate("text => getComputedStyle(text).fill")
    report.emulate_media(color_scheme="dark")
    report.wait_for_function(
        "light => getComputedStyle(document.querySelector('figure.chart .gtitle')).fill !== light", arg=light
    )

    report.set_viewport_size({"width": 400, "height": 800})
    assert report.evaluate("document.documentElement.scrollWidth") == 400
    assert report.locator("figure.chart").first.evaluate("figure => figure.scrollWidth > figure.clientWidth")


def test_a_sentence_in_a_narrow_table_keeps_its_width(from_disk: Callable[[Path], Page], tmp_path: Path) -> None:
    reason = "It plans models whose blocks their author declares by hand, to a budget that is not the peak."
    file = tmp_path / "arena.html"
    file.write_text(document("Arena", [table([{f"figure {n}": "0.5 MiB" for n in range(12)} | {"why": reason}])]))
    page = from_disk(file)
    page.set_viewport_size({"width": 400, "height": 800})
    cell = page.get_by_role("cell", name=reason).bounding_box()
    assert cell is not None and cell["width"] > 250 and cell["height"] < 100
