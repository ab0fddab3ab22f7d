"""The Cost tab: FLOPs and times of both runs as they were measured, and a chart for each view of them."""

from __future__ import annotations

import pytest

from explorer.ui.explore.cost import OPERATIONS, STEP, TIME
from tests.ui.explore.visits import ALL, App, press
from tests.ui.page_driver import say, settle


@pytest.mark.parametrize("view", [OPERATIONS, TIME, STEP])
def test_each_view_has_its_chart_beside_the_totals(app: App, view: str) -> None:
    at = press(say(app(), on=ALL), "run")
    at.session_state["tabs"] = "Cost"
    at.session_state["cost_view"] = view
    at = settle(at.run())
    totals = next(frame.value for frame in at.dataframe if "run" in frame.value)
    assert list(totals["run"]) == ["baseline", "candidate"]
    assert list(totals["forward"])[0] == list(totals["forward"])[1] and len(set(totals["recompute"])) == 2
    assert len(at.get("plotly_chart")) == 1
