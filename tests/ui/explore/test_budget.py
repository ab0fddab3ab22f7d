"""A budget typed, dragged or clicked; the plans behind it, found beside everything else; and the front as a chart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare, FindPlans
from explorer.record import Comparison, Failure, ModelGraph, Policy, RunSpec
from explorer.record.measurement import Samples, Times
from explorer.record.plan import Forecast, Wish
from explorer.ui.explore import budget, front
from explorer.ui.explore.view import View, cost, planned_time, predicted, predicted_presets, view_of
from explorer.ui.session.repository import KeyedRun
from explorer.view.drawing.units import mib
from explorer.view.text import plan as words
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import (
    ALL,
    GRAPH,
    App,
    component_data,
    figures,
    graph_data,
    open_tab,
    press,
    say,
    settle,
    slide,
    slider,
    take,
    texts,
    widget,
)

MIB = 2**20


@pytest.mark.parametrize("times", [Times(clock="process CPU time"), None])
def test_costs_in_time_and_in_flops_never_stand_on_one_axis(times: Times | None) -> None:
    """A policy whose operators were not timed has no cost beside policies that have."""
    start = KeyedRun(
        "baseline", msgspec.structs.replace(graphs.measured(GRAPH, RunSpec(model=GRAPH.model)), times=times)
    )
    view = View(comparison=None, baseline=None, baseline_key=None, stale=False, keep_all=start)
    assert cost(view, Forecast(flop_ratio=1.0)) == (None if times else 1.0)
    assert cost(view, Forecast(flop_ratio=1.0, time_ratio=1.5)) == (1.5 if times else 1.0)


@pytest.mark.parametrize("n_layers", [1, 2, 6])
def test_no_two_presets_of_the_menu_choose_the_same_blocks(n_layers: int) -> None:
    view = View(comparison=None, baseline=None, baseline_key=None, stale=False, graph=graphs.gpt(n_layers))
    offered = [policy for policy, _ in predicted_presets(view, Policy(early_stop=False)).values()]
    assert offered[0] == Policy(early_stop=False) and len(set(offered)) == len(offered) > n_layers > 0


def typed(at: AppTest, text: str) -> AppTest:
    """The field after Enter, and the page once the worker has answered."""
    widget(at, "text_input", "budget").set_value(text).run()
    return settle(at.run())


def peak_bytes(at: AppTest) -> float:
    return float(figures(at)["Step peak"].replace("≈", "").split()[-2]) * MIB


def refusals(at: AppTest) -> list[str]:
    """Sentences on a budget without a plan."""
    return [one.value.replace("\\", "") for one in at.markdown if one.value.startswith(":small[:red[")]


def test_a_typed_budget_is_drawn_and_undone(app: App) -> None:
    at = say(app(), on=["head"])
    for text, most in (("50 %", 52.25 * MIB), ("1 GiB", 1024 * MIB)):
        at = typed(at, text)
        assert peak_bytes(at) <= most and f"within {mib(most)}" in texts(at)
        assert bool(graph_data(at)["on"]) == (most < 104 * MIB)
        at = press(at, "undo")
        assert not widget(at, "text_input", "budget").value
        assert graph_data(at)["on"] == ["head"]
    at = typed(at, "+30 % time")
    assert time_ratio(at) <= 1.3
    (line,) = [one for one in at.markdown if words.BEST in one.value]
    assert "Proven" in line.help and "roven" not in texts(at), "the certificate is behind its help"


def time_ratio(at: AppTest) -> float:
    return float(figures(at)["Step time"].split("×")[1].split()[0])


@pytest.mark.parametrize("slower", [None, 0.9, 2.0])
def test_a_limit_of_time_is_kept(app: App, monkeypatch: pytest.MonkeyPatch, slower: float | None) -> None:
    """A run of another policy calibrates the predicted time of every policy: of the headline and of the search."""
    compared = graphs.compared

    def timed(graph: ModelGraph, spec: RunSpec) -> Comparison:
        run = compared(graph, spec)
        assert run.candidate.times is not None
        ms = tuple((slower or 1.0) * ms for ms in run.candidate.times.step.ms)
        times = msgspec.structs.replace(run.candidate.times, step=Samples(ms=ms))
        return msgspec.structs.replace(run, candidate=msgspec.structs.replace(run.candidate, times=times))

    monkeypatch.setattr(graphs, "compared", timed)
    at = app()
    if slower is not None:
        at = press(say(at, on=list(ALL)), "run")
    scale = planned_time(view_of(at.session_state["explore"]), 0.1)[1]
    assert scale == 1 if slower is None else (scale > 1.1) == (slower > 1), "the run says another time"
    for percent in (5, 10, 20, 30):
        at = typed(at, f"+{percent} % time")
        assert time_ratio(at) <= 1 + percent / 100 and f"within +{percent} %" in texts(at)
    at = typed(at, "+10 % time")
    at = say(at, on=list(ALL))
    assert "% over +10 %" in texts(at) and time_ratio(at) > 1.1


def test_the_line_says_how_a_budget_was_read_and_holds_both_limits(app: App) -> None:
    at = typed(app(), "60mb, +90 % time")
    assert "Read as at most 60.0 MiB, taking 1 mb for 1 MiB, and at most 90 % more time." in texts(at)
    assert "within 60.0 MiB" in texts(at) and "within +90 %" in texts(at) and peak_bytes(at) <= 60 * MIB
    at = typed(at, "40 MiB, +1 % time")
    assert "within 40.0 MiB the cheapest takes" in refusals(at)[0]
    at = typed(at, "half")
    assert "Read as 50 % of the peak with everything kept." in texts(at) and peak_bytes(at) <= 52.25 * MIB
    at = typed(at, "1000000")
    assert "1000000 bytes?" in refusals(at)[0]


def test_a_budget_for_all_or_none(app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    at = say(app(), on=["head"])
    for text in ("abc", "60"):
        at = typed(at, text)
        assert refusals(at) and graph_data(at)["on"] == ["head"], "what is no budget changes nothing"
    assert all(job.request.wish == Wish() for job in worker.of(FindPlans))
    at = say(typed(at, ""), on=[])
    assert not refusals(at)
    search = budget.search_of(view_of(at.session_state["explore"]))
    for text in ("+0 % time", "200 %"):
        at = typed(at, text)
        assert not graph_data(at)["on"] and words.KEEP_ALL in texts(at)
        assert words.START not in texts(at)
    at = typed(at, "3 MiB")
    (line,) = refusals(at)
    assert "least that can be reached is 34" in line and not graph_data(at)["on"]
    asked = next(job.request for job in reversed(worker.of(FindPlans)) if job.request.wish != Wish())
    assert {plan.policy for plan in search.plans} <= set(asked.wish.suggested)
    (help,) = [one.help for one in at.markdown if "least that" in one.value]
    assert "has since reached" not in line and "no policy" in line.lower() and "That is held" in help
    assert "keeps its inputs, and" in help, "and why recomputing a kind of submodule gains nothing"
    at.session_state["explore"].budget.plan = search.plans[0]
    lowest = min(plan.step_peak_bytes for plan in search.plans)
    assert f"The front has since reached {mib(lowest)}" in refusals(at.run())[0]
    presets = budget.predicted_presets

    def lower(*arguments: Any) -> dict[str, Any]:
        policy, forecast = presets(*arguments)["sqrt"]
        return {"sqrt": (policy, msgspec.structs.replace(forecast, step_peak_bytes=MIB))}

    monkeypatch.setattr(budget, "predicted_presets", lower)
    assert "But the preset Segments of √n blocks does, predicted." in refusals(typed(at, "2 MiB"))[0], (
        "plans hold no segments"
    )


def test_slider_headline_and_line_say_the_same(app: App) -> None:
    at = typed(app(), "60 MiB")
    for done in (at, press(at, "run"), say(at, on=["head"])):
        (data,) = [data for data in component_data(done) if "at" in data]
        peak, ratio = data["labels"][data["at"]].split(", ")
        strip = figures(done)
        assert f"{peak_bytes(done) / MIB:.1f} MiB" == peak and strip["Step time"].removeprefix("≈ ").startswith(ratio)
    at = say(at, on=[])
    assert "44.5 MiB over 60.0 MiB" in texts(at)
    at = say(at, on=list(ALL))
    assert "34.5 MiB predicted: within 60.0 MiB" in texts(at)
    assert "34.5 MiB measured: within 60.0 MiB" in texts(press(at, "run"))


def test_a_policy_is_held_against_the_plans_that_are_found(app: App) -> None:
    at = say(app(), on=["norm", "head", "blocks.5"])
    assert "A plan with" in texts(at) and "instead of" in texts(at)
    state = at.session_state["explore"]
    view = view_of(state)
    forecast = predicted(view, state.draft.spec.policy)
    points = budget.points(state, view, budget.search_of(view))
    assert points and budget.standing(state, view, points, forecast)[0]
    assert budget.standing(state, view, (), forecast) == ("", None)


def test_the_least_peak_is_one_figure_in_sentence_slider_and_front(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the front stops early; a budget that is refused finds a lower peak."""
    real = budget.search_of

    def cut_short(*arguments: Any, **more: Any) -> budget.Search:
        search = real(*arguments, **more)
        return replace(search, plans=tuple(plan for plan in search.plans if plan.step_peak_bytes > 50 * MIB))

    monkeypatch.setattr(budget, "search_of", cut_short)
    at = app()
    assert float(slider(at)[0].split(" MiB")[0]) > 50
    at = typed(at, "3 MiB")
    least = slider(at)[0].partition(",")[0]
    assert least.startswith("34") and f"least that can be reached is {least}" in refusals(at)[0]


def test_a_drag_is_one_step_of_undo(app: App) -> None:
    at = say(app(), on=["head"])
    assert len(slider(at)) > 3
    for position in (2, 1, 0):
        at = slide(at, position)
    assert peak_bytes(at) <= 35 * MIB
    at = press(at, "undo")
    assert graph_data(at)["on"] == ["head"]
    version = next(data["version"] for data in component_data(at) if "version" in data)
    at = take(at, {"kind": "place", "place": 0, "version": version}, {"kind": "undo"})
    assert graph_data(at)["on"] == ["head"], "an undo that arrives with the last move takes that back"


def test_the_front_is_found_once_gives_way_to_a_run_and_is_found_behind_it(app: App, worker: FakeWorker) -> None:
    worker.slow_plans = True
    at = app()
    app()
    (first,) = worker.of(FindPlans)
    assert not first.finished and not slider(at), "one search for all visitors"
    assert words.SLIDER_FOLLOWS in texts(at)
    whole = FakeJob("whole", first.request)
    worker.answer(whole)
    first.progress = msgspec.structs.replace(first.progress, plans=whole.result.plans[:4])
    at.run()
    assert len(slider(at)) > 1 and words.SLIDER_FOLLOWS not in texts(at), "over the plans found so far"
    at = press(say(at, on=list(ALL)), "run")
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


def test_marks_are_plans_presets_runs_and_what_is_drawn(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    at = open_tab(press(say(app(), on=list(ALL)), "run"), "Budget")
    state = at.session_state["explore"]
    marks = front.marks_of(state, view_of(state))
    kinds = {kind: [mark for mark in marks if mark.kind == kind] for kind in ("plan", "preset", "run", "drawn")}
    assert len(kinds["plan"]) > 3 and len(kinds["drawn"]) == 1
    assert {mark.name for mark in kinds["preset"]} >= {"Recompute all", "Every second"}
    assert {mark.policy for mark in kinds["run"]} == {Policy(), Policy.recompute(ALL)}
    assert kinds["drawn"][0].measured and kinds["drawn"][0].policy == Policy.recompute(ALL)
    assert not any(mark.measured for mark in (*kinds["plan"], *kinds["preset"]))
    assert "Peak against time as a table" in [one.label for one in at.expander]
    every = front.marks_of
    monkeypatch.setattr(front, "marks_of", lambda *at: tuple(mark for mark in every(*at) if not mark.policy.units))
    assert words.nothing_saves(None) in texts(at.run()) and not at.get("plotly_chart"), "no policy saves"


def test_one_button_measures_what_matters_until_it_is_cancelled(app: App, worker: FakeWorker) -> None:
    at = open_tab(app(), "Budget")
    worker.slow = True
    at = at.button(key="measure_points").click().run()
    assert at.session_state["explore"].to_measure
    at = press(at, "cancel")
    assert not at.session_state["explore"].to_measure and len(worker.of(Compare)) == 1
    worker.slow = False
    button = at.button(key="measure_points")
    n = int(button.label.split()[1])
    assert 2 <= n <= 4
    at = button.click().run()
    for _ in range(n + 1):
        at = settle(at)
        at.run()
    jobs = worker.of(Compare)[1:]
    assert len(jobs) == n == len({job.request.candidate.policy for job in jobs})
    assert not at.session_state["explore"].to_measure
    assert not graph_data(at)["on"], "what is drawn stays"
    assert at.button(key="measure_points").disabled, "all that matters is measured"
    at = slide(at, 0)
    assert "≈" not in figures(at)["Step peak"], "a measured point shows what was measured"
