"""A report of each kind as text, and its drawings as trees."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from explorer.view.report.parts import Reported, ReportOf
from explorer.view.report.report import charts_of, report_text
from explorer.view.report.svg import svg
from tests.view.report.kinds import GRAPH, KINDS

MOST_BYTES = 2 * 1024**2
NAMES = "{http://www.w3.org/2000/svg}"


def text_of(kind: str) -> str:
    return report_text(ReportOf(run=KINDS[kind], name=f"a {kind}", graph=GRAPH if kind == "pipeline" else None))


def drawn(kind: str, chart: str) -> ET.Element:
    return ET.fromstring(svg(charts_of(KINDS[kind])[chart]))


def boxes(tree: ET.Element) -> list[dict[str, float]]:
    """The bars, not the marks of the legend."""
    bars = [rect for rect in tree.iter(f"{NAMES}rect") if rect.find(f"{NAMES}title") is not None]
    return [{name: float(str(bar.get(name))) for name in ("x", "y", "width", "height")} for bar in bars]


def of(run: Reported) -> ReportOf:
    return ReportOf(run=run, name="gpt, every second", created=1e9)
