"""A budget as a person uses it: typed, dragged or clicked; the graph follows, undo brings the old policy back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import FindPlans
from explorer.record.plan import Wish
from explorer.ui.explore import blocks, budget, plans
from explorer.ui.explore.shown import predicted, shown
from explorer.view.drawing.units import mib
from explorer.view.text import plan as words
from tests import graphs
from tests.ui.explore.sliding import slide, slider
from tests.ui.explore.visits import ALL, App
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import component_data, figures, graph_data, say, settle, texts, widget

MIB = 2**20


def typed(at: AppTest, text: str) -> AppTest:
    """The field after Enter, and the page once the worker has answered."""
    widget(at, "text_input", "budget").set_value(text).run()
    at.run()
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
    assert graph_data(at)["on"]
    (line,) = [one for one in at.markdown if words.BEST in one.value]
    assert "Proven" in line.help and "roven" not in texts(at), "the certificate is behind its help"


@pytest.mark.parametrize("text", ["+0 %", "+0 % time", "200 %"])
def test_a_budget_that_keeping_everything_meets_is_answered(app: App, text: str) -> None:
    at = typed(app(), text)
    assert not graph_data(at)["on"] and words.KEEP_ALL in texts(at)
    assert words.START not in texts(at)


def test_the_slider_says_what_the_headline_says(app: App) -> None:
    at = typed(app(), "60 MiB")
    for done in (at, settle(at.button(key="run").click().run()), say(at, on=["head"])):
        (data,) = [data for data in component_data(done) if "at" in data]
        peak, ratio = data["labels"][data["at"]].split(", ")
        strip = figures(done)
        assert strip["Step peak"].endswith(peak) and strip["Step time"].removeprefix("≈ ").startswith(ratio)


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


def test_the_least_peak_is_one_figure_in_sentence_slider_and_front(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the front stops early; a budget that is refused finds a lower peak."""
    real = plans.look

    def cut_short(*args: Any, **more: Any) -> plans.Found:
        found = real(*args, **more)
        return replace(found, plans=tuple(plan for plan in found.plans if plan.step_peak_bytes > 50 * MIB))

    monkeypatch.setattr(plans, "look", cut_short)
    at = app()
    assert float(slider(at)[0].split(" MiB")[0]) > 50
    at = typed(at, "3 MiB")
    (line,) = [one.value for one in at.markdown if one.value.startswith(":small[:red[")]
    least = slider(at)[0].partition(",")[0]
    assert least.startswith("34") and f"least that can be reached is {least}" in line.replace("\\", "")
    assert not graph_data(at)["on"]


def test_a_preset_of_segments_may_reach_what_no_plan_does(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen = plans.predicted_presets

    def lower(*asked: Any) -> dict[str, Any]:
        policy, one = foreseen(*asked)["sqrt"]
        return {"sqrt": (policy, msgspec.structs.replace(one, step_peak_bytes=MIB))}

    at = app()
    monkeypatch.setattr(plans, "predicted_presets", lower)
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
