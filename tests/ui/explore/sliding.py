"""The slider over the cheapest plans: where it stands, and a drag of it."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from explorer.ui.explore import budget, plans
from explorer.ui.explore.shown import shown
from tests import graphs
from tests.ui.page_driver import component_data, settle


def slider(at: AppTest) -> list[str]:
    """Labels of the places it can stand at."""
    (labels,) = [data["labels"] for data in component_data(at) if "at" in data]
    return list(labels)


def slide(at: AppTest, place: int) -> AppTest:
    """What the component says while it is dragged, and the callback that it triggers."""
    state, graph = at.session_state["explore"], graphs.gpt(6)
    known = shown(state)
    budget._slide(state, graph, budget.points(state, known, graph, plans.look(known, graph)), place)
    return settle(at.run())
