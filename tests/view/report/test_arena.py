"""An arena as a report: bouts are marks with their spread."""

from __future__ import annotations

from tests.view.report.read import figures_in, text_of


def test_bouts_are_marks_with_their_spread() -> None:
    text = text_of("arena")
    spreads = [trace["error_y"]["array"] for trace in figures_in(text)["arena"]["data"] if trace.get("error_y")]
    assert spreads and "It plans &lt;i&gt;chains&lt;/i&gt;." in text
