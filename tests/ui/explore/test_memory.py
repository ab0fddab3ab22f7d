"""Where the peak is: one run in bands, and what nobody ran dashed over what was measured."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from tests.ui.explore.visits import ALL, App, press
from tests.ui.page_driver import say, settle, widget


def test_a_policy_that_nobody_ran_is_dashed_over_the_measured_line(app: App) -> None:
    def foretold(at: AppTest) -> bool:
        return any("drawn policy, predicted" in chart.proto.spec for chart in at.get("plotly_chart"))

    at = app()
    assert at.get("plotly_chart") and not foretold(at)
    at = say(at, on=ALL)
    assert foretold(at)
    at = press(at, "run")
    assert not foretold(at)
    assert foretold(say(at, on=ALL[:2]))


def test_one_run_is_stacked_by_role_or_by_block(app: App) -> None:
    at = app()
    for stacked, words in ((False, "Stacked area chart of bytes by role"), (True, "bytes by block, recompute on top")):
        at = settle(widget(at, "toggle", "memory_by_block").set_value(stacked).run())
        assert any(words in chart.proto.alt for chart in at.get("plotly_chart"))
