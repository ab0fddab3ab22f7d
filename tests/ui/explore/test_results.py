"""The tabs beside the graph: each stands before and after a run, and shows its record."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import DrawAutograd
from explorer.ui.explore.panels import OPERATIONS, STEP, TIME
from explorer.ui.explore.results import TABS
from tests import graphs
from tests.ui.explore.visits import ALL, App, press
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import say, settle, texts, widget


def test_every_tab_stands_before_and_after_a_run(app: App) -> None:
    at = app()
    for measured in (False, True):
        if measured:
            at = press(say(at, on=ALL), "run")
        for tab in TABS:
            at.session_state["tabs"] = tab
            at = settle(at.run())


def test_each_view_of_the_cost_has_its_chart_beside_the_totals(app: App) -> None:
    at = press(say(app(), on=ALL), "run")
    at.session_state["tabs"] = "Cost"
    for view in (OPERATIONS, TIME, STEP):
        at.session_state["cost_view"] = view
        at = settle(at.run())
        totals = next(frame.value for frame in at.dataframe if "run" in frame.value)
        assert list(totals["run"]) == ["baseline", "candidate"]
        assert list(totals["forward"])[0] == list(totals["forward"])[1] and len(set(totals["recompute"])) == 2
        assert len(at.get("plotly_chart")) == 1


def test_every_block_is_a_row(app: App) -> None:
    at = press(say(app(), on=ALL[:2]), "run")
    at.session_state["tabs"] = "Blocks"
    at = settle(at.run())
    (rows,) = [frame.value for frame in at.dataframe if "ran again" in frame.value]
    assert list(rows["block"])[1:] == [block.fqn for block in graphs.gpt(6).blocks][1:]
    again = dict(zip(rows["block"], rows["ran again"], strict=True))
    kept, candidate = (
        dict(zip(rows["block"], rows[f"saved, {run} (bytes)"], strict=True)) for run in ("kept", "candidate")
    )
    assert (again["blocks.0"], again["blocks.1"], again["blocks.2"]) == (1, 1, 0)
    assert candidate["blocks.0"] < kept["blocks.0"] and candidate["blocks.2"] == kept["blocks.2"]


def test_an_autograd_graph_is_drawn_on_request(app: App, worker: FakeWorker) -> None:
    at = app()
    at.session_state["tabs"] = "Autograd"
    at = settle(at.run())
    at = press(at, "draw")
    (job,) = worker.of(DrawAutograd)
    assert job.request.block == "blocks.0"
    assert at.get("graphviz_chart") or "blocks.0 kept" in texts(at)


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
