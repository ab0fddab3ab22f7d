"""Ranks of one step side by side, each a run of its own."""

from __future__ import annotations

from collections.abc import Callable

from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.ui.session import opened
from tests.view import reports as kinds


def test_ranks_stand_side_by_side_and_each_opens_as_a_run_of_its_own(
    runs_page: Callable[..., AppTest], store: Store
) -> None:
    store.save(kinds.ranks(), "both")
    at = runs_page(0)
    assert [row["rank"] for row in at.dataframe[-1].value.to_dict("records")] == [0, 1]
    assert len(at.get("plotly_chart")) == 2
    for _ in range(2):  # the second time it is listed already
        at = at.button(key="open_rank").click().run()
        assert not at.exception and at.session_state["switched"] == "explore"
    (alone,) = (run for run in store.list() if run.kind == "measurement")
    assert alone.name == "both, rank 1" and at.session_state[opened.KEY] == ["explore", alone.run_id]
