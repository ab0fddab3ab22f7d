"""An arena as a report: bouts are marks, the budget is a line."""

from __future__ import annotations

from explorer.view.report.report import charts_of
from explorer.view.report.svg import svg
from tests.view.report.kinds import arena
from tests.view.report.read import text_of


def test_bouts_are_marks_with_their_spread_and_the_budget_is_a_line() -> None:
    text = svg(charts_of(arena())["arena"])
    assert text.count('class="spread"') == 2 and ">wrong<" in text and ">50 %<" in text
    assert "It plans &lt;i&gt;chains&lt;/i&gt;." in text_of("arena")
