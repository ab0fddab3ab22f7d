"""SVG's own words: text with Plotly's tags, hovers filled in, patterns that read without colour."""

from __future__ import annotations

from explorer.view.report.ink import filled
from explorer.view.report.scales import rounds


def test_round_numbers_and_filled_templates() -> None:
    assert rounds(0, 42) == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert rounds(3, 3) == [3]
    assert filled("<b>%{customdata[1]}</b> at %{x:.2f}<br>%{y}<extra></extra>", ["a", "b"], {"x": 1.234, "y": "c"}) == (
        "b at 1.23\nc"
    )
