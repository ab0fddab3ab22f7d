"""Runs of a model as points; a click selects one in the list."""

from __future__ import annotations

from collections.abc import Callable

from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.ui.runs.points import points_of
from tests import graphs
from tests.ui.runs.listing import SPEC, saved


def test_the_runs_of_a_model_are_points_and_a_click_selects_one(
    runs_page: Callable[..., AppTest], store: Store
) -> None:
    saved(store, "both")
    run_id = store.save(graphs.compared(graphs.gpt(6), SPEC).baseline, "alone")
    placed = points_of(store.list())
    assert [(run.name, point.name) for run, point in placed] == [
        ("alone", "alone"), ("both", "both"), ("both", "everything kept")
    ]  # fmt: skip
    assert placed[1][1].verdict == "bitwise equal" and not placed[1][1].keeps_all and placed[2][1].keeps_all
    assert {point.conditions for _, point in placed} == {"small, cpu"}
    at = runs_page()
    at.session_state["run_plane"] = {"selection": {"points": [{"customdata": {"0": 0}}]}}
    assert at.get("plotly_chart"), "two points or more are drawn"
    state = at.session_state["runs"]
    state.select, state.order = run_id, state.order + 1  # what a click on a point leaves
    at.run()
    assert at.text_input(key=f"name_{run_id}").value == "alone"
