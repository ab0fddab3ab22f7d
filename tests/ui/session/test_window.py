"""The graph comes first and says how large the window is; charts and tables come when they are wanted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from tests.ui.page_driver import WINDOW, graph_data, say, settle

App = Callable[..., AppTest]


def n_charts(at: AppTest) -> int:
    return len(at.get("plotly_chart"))


def tell(at: AppTest, height: int, *, narrow: bool = False) -> AppTest:
    """The graph stands, and says what it sees."""
    at.session_state[at.session_state["draft"].widget] = {"window": {"height": height, "narrow": narrow}}
    return settle(at.run())


@pytest.fixture
def stranger(app: App) -> AppTest:
    """A visitor whose browser has said nothing yet."""
    app()
    at = app()
    del at.session_state["window"]
    return at.run()


def test_a_new_visitor_sees_the_graph_and_then_the_charts(stranger: AppTest) -> None:
    assert n_charts(stranger) == 0
    assert len(stranger.metric) == 6
    assert graph_data(stranger)["window"] == {"height": 800, "narrow": False, "known": False}
    at = tell(stranger, 812)
    assert n_charts(at) == 2
    assert graph_data(at)["window"] == {"height": 800, "narrow": False, "known": True}


def test_the_graph_fills_a_higher_window(stranger: AppTest) -> None:
    usual = graph_data(stranger)["height"]
    assert graph_data(tell(stranger, 1075))["height"] == usual + 260
    assert graph_data(tell(stranger, 5000))["height"] == usual + 800
    assert graph_data(tell(stranger, 300))["height"] == usual


def test_a_window_that_became_narrow_stacks_the_page(app: App) -> None:
    at = app()
    n_columns = len(at.columns)
    assert len(tell(at, 800, narrow=True).columns) < n_columns
    assert len(tell(at, 800).columns) == n_columns


def test_a_click_in_the_message_of_the_window_counts(stranger: AppTest) -> None:
    """Streamlit hands both states of the graph over in one rerun."""
    at = say(stranger, on=["blocks.3"])
    assert n_charts(at) == 0
    at.session_state[at.session_state["draft"].widget] = {
        **at.session_state[at.session_state["draft"].widget],
        "window": WINDOW,
    }
    at = settle(at.run())
    assert n_charts(at) == 2
    assert graph_data(at)["on"] == ["blocks.3"]


def test_a_table_is_made_when_it_is_unfolded(app: App) -> None:
    at = app()
    assert len(at.dataframe) == 0
    at.session_state["ledger_twin"] = True
    at.run()
    assert not at.exception
    (table,) = at.dataframe
    assert table.value["bytes"].sum() > 0
    at.session_state["ledger_twin"] = False
    assert len(at.run().dataframe) == 0
