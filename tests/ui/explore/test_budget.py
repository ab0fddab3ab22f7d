"""A budget as a person uses it: typed, dragged or clicked; the graph follows, undo brings the old policy back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare, FindPlans
from explorer.record import Failure, Policy
from explorer.record.plan import Wish
from explorer.ui.explore import blocks, budget, front, plans
from explorer.ui.explore.shown import predicted, shown
from explorer.view.drawing.units import mib
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import component_data, figures, graph_data, say, settle, texts, widget

App = Callable[..., AppTest]
MIB = 2**20
ALL = [f"blocks.{i}" for i in range(6)]


def typed(at: AppTest, text: str) -> AppTest:
    """The field after Enter, and the page once the worker has answered."""
    widget(at, "text_input", "budget").set_value(text).run()
    at.run()
    return settle(at.run())


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


def peak_bytes(at: AppTest) -> float:
    return float(figures(at)["Step peak"].replace("≈", "").split()[-2]) * MIB


@pytest.mark.parametrize(("text", "most"), [("60 MiB", 60 * MIB), ("50 %", 52.25 * MIB), ("1 GiB", 1024 * MIB)])
def test_a_typed_budget_is_drawn_and_undone(app: App, text: str, most: float) -> None:
    at = say(app(), on=["head"])
    at = typed(at, text)
    assert peak_bytes(at) <= most
    assert f"within {mib(most)}" in texts(at)
    assert bool(graph_data(at)["on"]) == (most < 104 * MIB)
    at = settle(at.button(key="undo").click().run())
    assert graph_data(at)["on"] == ["head"]


def test_time_can_be_the_budget(app: App) -> None:
    at = typed(app(), "+30 % time")
    assert float(figures(at)["Step time"].split("×")[1].split()[0]) <= 1.3
    assert graph_data(at)["on"] and "Proven" in texts(at)


def test_nothing_is_said_of_plans_that_nobody_has_looked_for(app: App) -> None:
    at = say(app(), on=["head"])
    state, graph = at.session_state["explore"], graphs.gpt(6)
    known = shown(state)
    foreseen = predicted(known, graph, state.draft.spec.policy)
    points = budget.points(state, known, graph, plans.look(known, graph))
    assert points and budget.stands(state, known, points, foreseen)[0]
    assert budget.stands(state, known, (), foreseen) == ("", None)


@pytest.mark.parametrize("text", ["-3", "abc", "0", "60"])
def test_what_is_no_budget_gets_a_sentence_and_changes_nothing(app: App, worker: FakeWorker, text: str) -> None:
    at = typed(say(app(), on=["head"]), text)
    assert [one for one in at.markdown if one.value.startswith(":small[:red[")], texts(at)
    assert graph_data(at)["on"] == ["head"]
    assert all(job.request.wish == Wish() for job in worker.of(FindPlans))
    assert not [one for one in typed(at, "").markdown if one.value.startswith(":small[:red[")]


def test_an_impossible_budget_is_told_what_can_be_reached(app: App) -> None:
    at = typed(app(), "3 MiB")
    (line,) = [one.value for one in at.markdown if one.value.startswith(":small[:red[")]
    assert "least that can be reached is 34" in line.replace("\\", "")
    assert not graph_data(at)["on"]


def test_a_preset_of_segments_may_reach_what_no_plan_does(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen = plans.presets_foreseen

    def lower(*asked: Any) -> dict[str, Any]:
        policy, one = foreseen(*asked)["sqrt"]
        return {"sqrt": (policy, msgspec.structs.replace(one, step_peak_bytes=MIB))}

    at = app()
    monkeypatch.setattr(plans, "presets_foreseen", lower)
    line = texts(typed(at, "3 MiB")).replace("\\", "")
    assert "least that can be reached is 34" in line and "But the preset √n segments does, predicted." in line


def test_the_line_watches_the_budget_while_blocks_are_clicked(app: App) -> None:
    at = typed(app(), "60 MiB")
    at = say(at, on=[])
    assert "44.5 MiB over 60.0 MiB" in texts(at)
    at = say(at, on=ALL)
    assert "34.5 MiB predicted: within 60.0 MiB" in texts(at)
    at = settle(at.button(key="run").click().run())
    assert "34.5 MiB measured: within 60.0 MiB" in texts(at)


def test_a_drag_is_one_step_of_undo(app: App) -> None:
    at = say(app(), on=["head"])
    assert len(slider(at)) > 3
    for step in (2, 1, 0):
        at = slide(at, step)
    assert peak_bytes(at) <= 35 * MIB
    at = settle(at.button(key="undo").click().run())
    assert graph_data(at)["on"] == ["head"]


def test_an_undo_that_arrives_with_the_last_move_takes_that_back(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    at = say(app(), on=["head"])
    state, graph = at.session_state["explore"], graphs.gpt(6)
    front = budget.points(state, shown(state), graph, plans.look(shown(state), graph))
    monkeypatch.setattr(blocks, "catch_up", lambda key: budget._slide(state, graph, front, 0))
    at = settle(at.button(key="undo").click().run())
    assert graph_data(at)["on"] == ["head"]


def test_a_policy_that_a_plan_beats_is_told_so(app: App) -> None:
    at = say(app(), on=["norm", "head", "blocks.5"])
    assert "A plan with" in texts(at) and "instead of" in texts(at)


def test_the_front_is_found_once_for_all_visitors(app: App, worker: FakeWorker) -> None:
    app()
    settle(say(app(), on=ALL))
    assert len(worker.of(FindPlans)) == 1


def test_the_front_gives_way_to_a_run_and_is_found_behind_it(app: App, worker: FakeWorker) -> None:
    worker.slow_plans = True
    at = app()
    (first,) = worker.of(FindPlans)
    assert not first.finished and len(slider(at)) == 1
    at = settle(say(at, on=ALL).button(key="run").click().run())
    assert first.cancelled and worker.of(Compare)[0].finished
    worker.slow_plans = False
    at.run()
    assert len(worker.of(FindPlans)) == 2
    worker.answer(worker.of(FindPlans)[1])
    assert len(slider(settle(at.run()))) > 1


def test_a_front_that_cannot_be_found_says_why(app: App, worker: FakeWorker) -> None:
    worker.slow_plans = True
    at = app()
    worker.of(FindPlans)[0].finish(failure=Failure(kind="bad input", sentence="This run is none."))
    assert "This run is none" in texts(settle(at.run()))


def on_budget(at: AppTest) -> AppTest:
    at.session_state["tabs"] = "Budget"
    return settle(at.run())


def test_marks_are_plans_presets_runs_and_what_is_drawn(app: App) -> None:
    at = on_budget(settle(say(app(), on=ALL).button(key="run").click().run()))
    state, graph = at.session_state["explore"], graphs.gpt(6)
    seen: list[front.Mark] = []

    def collect() -> None:
        seen.extend(front.marks_of(state, shown(state), graph))

    _in_session(at, collect)
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


def _in_session(at: AppTest, do: Callable[[], None]) -> None:
    from tests.ui.explore.test_page import _in_session as in_session

    in_session(at, do)
