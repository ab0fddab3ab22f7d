"""Charts as SVG say what the page's own picture says: every figure of the golden run, drawn without Plotly."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

from explorer.record.lab import LabChart, LabOutcome, LabSeries
from explorer.view.drawing.chart import Chart
from explorer.view.lab import lab_chart
from explorer.view.report.ink import plain
from explorer.view.report.svg import svg, svg_with_hovers
from tests.view.report.read import NAMES


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
