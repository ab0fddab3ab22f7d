"""The tabs beside the graph stand before and after a run."""

from __future__ import annotations

import pytest

from tests.ui.explore.visits import ALL, App, press
from tests.ui.page_driver import say, settle


@pytest.mark.parametrize("tab", ["Memory", "Cost", "Gradients", "Blocks", "Autograd"])
@pytest.mark.parametrize("measured", [False, True])
def test_every_tab_stands_before_and_after_a_run(app: App, tab: str, measured: bool) -> None:
    at = app()
    if measured:
        at = press(say(at, on=ALL), "run")
    at.session_state["tabs"] = tab
    settle(at.run())
