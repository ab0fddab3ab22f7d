"""The front as a chart: plans, presets, runs and what is drawn, and one button that measures what matters."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare
from explorer.record import Policy
from explorer.ui.explore import front
from explorer.ui.explore.shown import shown
from tests import graphs
from tests.ui.explore.sliding import slide
from tests.ui.explore.visits import ALL, App, in_session
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, say, settle


def on_budget(at: AppTest) -> AppTest:
    at.session_state["tabs"] = "Budget"
    return settle(at.run())


def test_marks_are_plans_presets_runs_and_what_is_drawn(app: App) -> None:
    at = on_budget(settle(say(app(), on=ALL).button(key="run").click().run()))
    state, graph = at.session_state["explore"], graphs.gpt(6)
    seen: list[front.Mark] = []

    def collect() -> None:
        seen.extend(front.marks_of(state, shown(state), graph))

    in_session(at, collect)
    kinds = {kind: [mark for mark in seen if mark.kind == kind] for kind in ("plan", "preset", "run", "drawn")}
    assert len(kinds["plan"]) > 3 and len(kinds["drawn"]) == 1
    assert {mark.name for mark in kinds["preset"]} >= {"Recompute all", "Every second"}
    assert {mark.policy for mark in kinds["run"]} == {Policy(), Policy.recompute(ALL)}
    assert kinds["drawn"][0].measured and kinds["drawn"][0].policy == Policy.recompute(ALL)
    assert not any(mark.measured for mark in (*kinds["plan"], *kinds["preset"]))
    assert "Peak against time as a table" in [one.label for one in at.expander]


def test_one_button_measures_what_matters_and_shows_it(app: App, worker: FakeWorker) -> None:
    at = on_budget(app())
    button = at.button(key="measure_points")
    n = int(button.label.split()[1])
    assert 2 <= n <= 4
    at = button.click().run()
    for _ in range(n + 1):
        at = settle(at)
        at.run()
    assert len(worker.of(Compare)) == n and not at.session_state["explore"].to_measure
    assert len({job.request.candidate.policy for job in worker.of(Compare)}) == n
    assert not graph_data(at)["on"], "what is drawn stays"
    assert at.button(key="measure_points").disabled, "all that matters is measured"
    at = slide(at, 0)
    assert "≈" not in figures(at)["Step peak"], "a measured point shows what was measured"


def test_cancel_ends_the_measuring(app: App, worker: FakeWorker) -> None:
    at = on_budget(app())
    worker.slow = True
    at = at.button(key="measure_points").click().run()
    assert at.session_state["explore"].to_measure
    at = settle(at.button(key="cancel").click().run())
    assert not at.session_state["explore"].to_measure and len(worker.of(Compare)) == 1
