"""The tabs beside the graph: each stands before and after a run, and shows its record."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import DrawAutograd
from explorer.ui.explore.results import OPERATIONS, STEP, TABS, TIME
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import ALL, App, open_tab, press, say, settle, texts, widget


def test_every_tab_shows_its_record_before_and_after_a_run(app: App) -> None:
    at = app()
    for tab in TABS:
        assert [shown.label for shown in open_tab(at, tab).tabs] == TABS
    at = open_tab(press(say(at, on=list(ALL[:2])), "run"), "Cost")
    for view in (OPERATIONS, TIME, STEP):
        at.session_state["cost_view"] = view
        at = settle(at.run())
        totals = next(frame.value for frame in at.dataframe if "run" in frame.value)
        assert list(totals["run"]) == ["baseline", "candidate"]
        assert list(totals["forward"])[0] == list(totals["forward"])[1] and len(set(totals["recompute"])) == 2
        assert len(at.get("plotly_chart")) == 1
    at = open_tab(at, "Blocks")
    (rows,) = [frame.value for frame in at.dataframe if "ran again" in frame.value]
    assert list(rows["block"])[1:] == [block.fqn for block in graphs.gpt(6).blocks][1:]
    again = dict(zip(rows["block"], rows["ran again"], strict=True))
    kept, candidate = (
        dict(zip(rows["block"], rows[f"saved, {run} (bytes)"], strict=True)) for run in ("kept", "candidate")
    )
    assert (again["blocks.0"], again["blocks.1"], again["blocks.2"]) == (1, 1, 0)
    assert candidate["blocks.0"] < kept["blocks.0"] and candidate["blocks.2"] == kept["blocks.2"]
    for tab in ("Memory", "Budget", "Gradients", "Autograd"):
        open_tab(at, tab)


def test_an_autograd_graph_is_drawn_on_request(app: App, worker: FakeWorker) -> None:
    at = press(open_tab(app(), "Autograd"), "draw")
    (job,) = worker.of(DrawAutograd)
    assert job.request.block == "blocks.0"
    assert at.get("graphviz_chart") or "blocks.0 kept" in texts(at)


def test_the_memory_chart_has_an_unmeasured_policy_dashed_and_one_run_by_role_or_by_block(app: App) -> None:
    def dashed(at: AppTest) -> bool:
        return any("drawn policy, predicted" in chart.proto.spec for chart in at.get("plotly_chart"))

    at = app()
    for stacked, words in ((True, "bytes by block, recompute on top"), (False, "Stacked area chart of bytes by role")):
        at = settle(widget(at, "toggle", "memory_by_block").set_value(stacked).run())
        assert any(words in chart.proto.alt for chart in at.get("plotly_chart"))
    assert at.get("plotly_chart") and not dashed(at)
    at = say(at, on=list(ALL))
    assert dashed(at)
    at = press(at, "run")
    assert not dashed(at)
    assert dashed(say(at, on=list(ALL[:2])))
