"""A report of each kind as text, and the figures that stand in it."""

from __future__ import annotations

import json
import re
from typing import Any

from explorer.view.report.html import plotly_js
from explorer.view.report.parts import Reported, ReportOf
from explorer.view.report.report import report_text
from tests.view.report.kinds import GRAPH, KINDS

MOST_BYTES = 4 * 1024**2
"""Of a report besides plotly.js."""
_FIGURE = re.compile(
    r'<figure class="chart" role="img" aria-label="(?P<alt>[^"]*)" data-name="(?P<name>[^"]*)">'
    r'<div[^>]*></div><script type="application/json">(?P<figure>.*?)</script></figure>',
    re.S,
)


def text_of(kind: str) -> str:
    return besides_plotly(
        report_text(ReportOf(run=KINDS[kind], name=f"a {kind}", graph=GRAPH if kind == "pipeline" else None))
    )


def besides_plotly(text: str) -> str:
    return text.replace(plotly_js(), "")


def besides_figures(text: str) -> str:
    return _FIGURE.sub("", besides_plotly(text))


def figures_in(text: str) -> dict[str, dict[str, Any]]:
    """Name of each chart in a report, and its figure as the browser reads it."""
    return {found["name"]: json.loads(found["figure"]) for found in _FIGURE.finditer(text)}


def of(run: Reported) -> ReportOf:
    return ReportOf(run=run, name="gpt, every second", created=1e9)
