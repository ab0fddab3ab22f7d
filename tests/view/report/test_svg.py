"""Charts as SVG say what the page's own picture says: every figure of the golden run, drawn without Plotly."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from explorer.plan.memory.series import held
from explorer.record import Comparison
from explorer.record.base import from_msgpack
from explorer.record.lab import LabChart, LabOutcome, LabSeries
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.units import byte_axis
from explorer.view.lab import lab_chart
from explorer.view.report.ink import filled, plain
from explorer.view.report.report import charts_of
from explorer.view.report.scales import rounds
from explorer.view.report.svg import svg, svg_with_hovers

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cpu.msgpack"
NAMES = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)


@pytest.fixture(scope="module")
def charts(pair: Comparison) -> dict[str, Chart]:
    return charts_of(pair)


def words_of(tree: ET.Element) -> list[str]:
    return ["".join(text.itertext()) for text in tree.iter(f"{NAMES}text")]


def numbers(way: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", way)]


def test_every_chart_is_a_drawing_that_says_its_question_and_what_it_shows(charts: dict[str, Chart]) -> None:
    assert len(charts) == 13
    for chart in charts.values():
        tree = ET.fromstring(svg(chart))
        assert words_of(tree)[0] == plain(chart.figure.layout.title.text)
        assert tree.get("aria-label") == chart.alt
        assert "nan" not in svg(chart) and "NaN" not in svg(chart)


def test_the_highest_point_of_the_line_is_the_peak(pair: Comparison, charts: dict[str, Chart]) -> None:
    """Read back from the path: pixels to bytes by the axis's own range."""
    tree = ET.fromstring(svg(charts["memory-timeline"]))
    plot = next(part for part in tree.iter(f"{NAMES}svg") if part.get("class") == "plot")
    height = float(str(plot.get("height")))
    lines = [path for path in plot.iter(f"{NAMES}path") if path.get("fill") == "none"]
    unit, _ = byte_axis(pair.baseline.held_peak_bytes or 0)
    top = charts["memory-timeline"].figure.layout.yaxis.range[1] * unit
    for line, run in zip(lines, (pair.baseline, pair.candidate)):
        ups = [float(up) for up in re.findall(r"[,V](-?[\d.]+)", str(line.get("d")))]
        assert run.allocations is not None
        assert (1 - min(ups) / height) * top == pytest.approx(int(held(run.allocations).max()), rel=0.002)


def test_bars_are_as_long_as_their_numbers(pair: Comparison, charts: dict[str, Chart]) -> None:
    tree = ET.fromstring(svg(charts["saved-bytes-by-block"]))
    widths = [
        float(str(bar.get("width"))) for bar in tree.iter(f"{NAMES}rect") if bar.find(f"{NAMES}title") is not None
    ]
    figure = charts["saved-bytes-by-block"].figure
    values = [float(value) for trace in figure.data for value in trace.x]
    assert len(widths) == len(values)
    scale = max(widths) / max(values)
    assert all(math.isclose(width, value * scale, abs_tol=0.1) for width, value in zip(widths, values))


def test_stacked_bars_of_the_ledger_add_up(charts: dict[str, Chart]) -> None:
    tree = ET.fromstring(svg(charts["candidate-at-the-peak"]))
    ends: dict[str, float] = {}
    for bar in tree.iter(f"{NAMES}rect"):
        if bar.find(f"{NAMES}title") is not None and float(str(bar.get("width"))):
            row, start = str(bar.get("y")), float(str(bar.get("x")))
            assert start == pytest.approx(ends.get(row, 0.0), abs=0.11)
            ends[row] = start + float(str(bar.get("width")))


def test_hovers_are_json_that_ends_no_script(charts: dict[str, Chart]) -> None:
    drawn = svg_with_hovers(charts["memory-timeline"])
    hovers = re.search(r'<script type="application/json">(.*)</script>$', drawn, re.S)
    assert hovers is not None and "</" not in hovers[1]
    entries = json.loads(hovers[1])
    assert any("held, candidate" in text for _, text in entries)
    assert all(isinstance(place, float | int) for place, _ in entries)


def test_names_of_a_model_are_text_and_nothing_else() -> None:
    """A block may be called what it wants."""
    wild = LabSeries(name="<script>alert(1)</script>", y=(1.0, None), part="other")
    chart = LabChart(kind="bars", title="a < b & c", x_title="", y_title="n", x=("<b", "q&"), series=(wild, wild))
    outcome = LabOutcome(
        experiment="x", switches={}, device="cpu", rows=(), chart=chart, findings=('say "no"',), seconds=1.0
    )
    drawn = svg(lab_chart(outcome))
    assert "<script>" not in drawn
    ET.fromstring(drawn)
    lines = LabChart(kind="lines", title="t", x_title="n", y_title="y", x=("1", "2"), series=(wild,))
    ET.fromstring(svg(lab_chart(LabOutcome(
        experiment="x", switches={}, device="cpu", rows=(), chart=lines, findings=(), seconds=1.0
    ))))  # fmt: skip


def test_round_numbers_and_filled_templates() -> None:
    assert rounds(0, 42) == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert rounds(3, 3) == [3]
    assert filled("<b>%{customdata[1]}</b> at %{x:.2f}<br>%{y}<extra></extra>", ["a", "b"], {"x": 1.234, "y": "c"}) == (
        "b at 1.23\nc"
    )
