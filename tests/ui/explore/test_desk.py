"""A click answered by the route is what a rerun draws, in every state of the figures and for many policies."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from explorer.errors import ExplorerError
from explorer.jobs import run_file
from explorer.jobs.protocol import Compare, Measure
from explorer.plan.catalogue import recorded_sample
from explorer.plan.policy.presets import preset, preset_titles
from explorer.record import KEEP_ALL, Failure, Measurement, ModelGraph, ModelRef
from explorer.record.base import from_plain
from explorer.record.run import Ranks
from explorer.ui.explore import desk
from explorer.ui.explore.desk import AnswerRequest, answer_to
from explorer.ui.explore.view import View, view_of
from explorer.ui.explore.work import EarlierRun
from explorer.ui.session import repository
from explorer.view.text.explore import ANSWERS, PageAnswer
from tests import graphs
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import (
    ALL,
    GRAPH,
    SPEC,
    App,
    component_data,
    figures,
    graph_data,
    message,
    press,
    say,
    settle,
    slide,
    slider,
    spec,
    start_only,
    strip_cells,
    take,
    texts,
    tools,
    upload,
    widget,
)

RAN, OTHER = ALL[:2], ALL[:3]
FAILURE = Failure(kind="model raised", sentence="It raised.")
RUN = graphs.measured(GRAPH, replace(SPEC, policy=KEEP_ALL))
RECORDED = replace(RUN, spec=replace(RUN.spec, ranks=Ranks(n_ranks=2)))


def policies(graph: ModelGraph) -> dict[str, tuple[str, ...]]:
    """Marks that a person may draw: nothing, what ran, blocks in blocks, each preset, all that can be clicked."""
    called = tuple(block.fqn for block in graph.blocks if block.fqn and block.n_calls)
    marks = {"nothing": (), "ran": RAN, "other": OTHER, "nested": (*called[:4], *called[-2:]), "everything": called}
    for name in preset_titles():
        try:
            marks[name] = preset(name, graph).blocks
        except ExplorerError:  # this model has no block for it
            continue
    return marks


def ask(at: AppTest, on: tuple[str, ...], **of: Any) -> dict[str, Any] | None:
    """What the route answers to a click after which `on` is recomputed, as the browser reads it."""
    return ask_after(at, *message(at, on=list(on))["steps"]["list"], **of)


def ask_after(at: AppTest, *chosen: dict[str, Any], **of: Any) -> dict[str, Any] | None:
    """What the route answers after these steps, as the browser reads it."""
    listed = [{"n": graph_data(at)["taken"] + i, **step} for i, step in enumerate(chosen, 1)]
    question = {"graph": at.session_state["draft"].widget, "steps": listed} | of
    answered: dict[str, Any] | None = json.loads(json.dumps(answer_to(from_plain(question, AnswerRequest))))
    return answered


def check(at: AppTest, answered: dict[str, Any] | None) -> None:
    """The page as it is drawn now has what was answered before."""
    assert answered is not None
    data = graph_data(at)
    assert answered["cells"] == strip_cells(at)
    assert sorted(answered["on"]) == sorted(data["on"])
    for name in ("labels", "segments", "actions", "line", "join"):
        assert answered[name] == data[name], name
    assert answered["tools"] == {name: tools(at)[name] for name in answered["tools"]}
    assert f":small[{answered['sentence']}]" in [element.value for element in at.markdown]
    assert answered["budget"] is None or f":small[{answered['budget']}]" in [element.value for element in at.markdown]
    dangers = [element.value for element in at.error]
    assert dangers in ([], [answered["danger"], f"This policy is not safe. {answered['danger']}"])
    assert bool(dangers) == bool(answered["danger"])


def without(kind: type, worker: FakeWorker, finish: Callable[[FakeJob], None]) -> None:
    """The worker ends jobs of `kind` as `finish` does."""
    answer = worker.answer
    worker.answer = lambda job: finish(job) if isinstance(job.request, kind) else answer(job)  # type: ignore[method-assign]


def nothing(app: App, worker: FakeWorker) -> AppTest:
    without(Measure, worker, lambda job: job.finish(failure=FAILURE))
    repository.runs().add_graph(SPEC.model, "cpu", GRAPH)
    return app()


def ran(app: App, worker: FakeWorker) -> AppTest:
    return press(say(app(), on=list(RAN)), "run")


def ran_twice(app: App, worker: FakeWorker) -> AppTest:
    return press(say(ran(app, worker), on=["head"]), "run")


def cut_short(app: App, worker: FakeWorker) -> AppTest:
    answer = worker.answer

    def cut(job: FakeJob) -> None:
        answer(job)
        if isinstance(job.request, Compare):
            worker.store.delete(job.run_id)
            candidate = replace(job.result.candidate, failure=FAILURE)
            job.result, job.run_id = replace(job.result, candidate=candidate, failure=FAILURE), None

    worker.answer = cut  # type: ignore[method-assign]
    return ran(app, worker)


def goes_on(app: App, worker: FakeWorker) -> AppTest:
    worker.slow = True
    at = say(app(), on=list(RAN))
    at.button(key="run").click().run()
    (job,) = worker.of(Compare)
    whole = graphs.compared(GRAPH, spec(at))
    job.part = replace(whole, candidate=replace(whole.candidate, times=None), gradients=())
    return at.run()


def cancelled(app: App, worker: FakeWorker) -> AppTest:
    at = goes_on(app, worker)
    worker.of(Compare)[0].cancel()
    return settle(at)


def predicted(app: App, worker: FakeWorker) -> AppTest:
    return app(predict="1")


def played(app: App, worker: FakeWorker) -> AppTest:
    return press(say(predicted(app, worker), on=list(RAN)), "run")


def other_options(app: App, worker: FakeWorker) -> AppTest:
    at = app()
    return settle(widget(at, "selectbox", "option_dtype").set_value("float64").run())


def predicted_before(app: App, worker: FakeWorker) -> AppTest:
    at = predicted(app, worker)
    without(Measure, worker, lambda job: None)
    return widget(at, "selectbox", "option_dtype").set_value("float64").run()


def opened(run: Measurement, app: App, worker: FakeWorker) -> AppTest:
    """A run of the store is opened before the baseline is measured."""
    at = nothing(app, worker)
    at.session_state[repository.OPENED] = ["explore", worker.store.save(run_file.with_graph(run, GRAPH))]
    return at.run()


def then(state: Callable[[App, FakeWorker], AppTest], app: App, worker: FakeWorker) -> AppTest:
    """Another policy is drawn than the one that `state` is about."""
    return say(state(app, worker), on=list(OTHER))


BOTH, PART = "both runs", "part of both runs"
STATES: dict[str, tuple[PageAnswer, Callable[[App, FakeWorker], AppTest]]] = {
    "nothing ran": (PageAnswer("none"), nothing),
    "baseline": (PageAnswer("measured"), lambda app, worker: app()),
    "opened baseline": (PageAnswer("measured", "opened run"), partial(opened, graphs.measured(GRAPH, SPEC))),
    "failed baseline": (PageAnswer("measured", failed=True), partial(opened, replace(RUN, failure=FAILURE))),
    "recorded": (PageAnswer("recorded"), partial(opened, RECORDED)),
    "measured": (PageAnswer("measured", BOTH), ran),
    "measured, then another": (PageAnswer("measured", BOTH), ran_twice),
    "measured, stale": (PageAnswer("measured", BOTH, is_current=False), partial(then, ran)),
    "failed": (PageAnswer("measured", BOTH, failed=True), cut_short),
    "failed, stale": (PageAnswer("measured", BOTH, is_current=False), partial(then, cut_short)),
    "goes on": (PageAnswer("measured", PART), goes_on),
    "goes on, stale": (PageAnswer("measured", BOTH, is_current=False), partial(then, goes_on)),
    "cancelled": (PageAnswer("measured", PART, failed=True), cancelled),
    "predicted": (PageAnswer("predicted"), predicted),
    "predicted, other options": (PageAnswer("predicted", is_current=False), predicted_before),
    "predicted policy": (PageAnswer("predicted", BOTH), played),
    "predicted, stale": (PageAnswer("predicted", BOTH, is_current=False), partial(then, played)),
    "other options": (PageAnswer("measured", is_current=False), other_options),
}
OF_A_VISIT = {
    PageAnswer("another machine"): None,
    PageAnswer("measured", "part of the baseline"): RUN,
}  # the part there is


def test_every_answer_that_there_is_has_its_sentence_and_a_page_that_draws_it() -> None:
    """Every combination of the facts that `View.answer` reads."""
    whole, runs = graphs.compared(GRAPH, SPEC), [RUN, RECORDED, replace(RUN, times=None), graphs.measured(GRAPH, SPEC)]
    facts: dict[str, tuple[Any, ...]] = {
        "comparison": (None, whole, replace(whole, failure=FAILURE)),
        "baseline": (None, *runs, *(replace(run, failure=FAILURE) for run in runs)),
        "stand_in": (None, EarlierRun("", RUN)),
    }
    facts |= dict.fromkeys(
        ("stale", "is_running", "being_timed", "is_part", "predicted", "other_options"), (False, True)
    )
    views = (View(baseline_key=None, **dict(zip(facts, values))) for values in product(*facts.values()))
    assert {view.answer for view in views} == set(ANSWERS) == {answer for answer, _ in STATES.values()} | {*OF_A_VISIT}


@pytest.mark.parametrize("state", STATES)
def test_an_answer_is_what_a_rerun_draws(app: App, worker: FakeWorker, state: str) -> None:
    answer, start = STATES[state]
    at = start(app, worker)
    assert view_of(at.session_state["explore"]).answer == answer
    assert any(all(part in texts(at) for part in re.split(r"{\w+}", text)) for text in ANSWERS[answer])
    for on in policies(GRAPH).values():
        answered = ask(at, on)
        check(say(at, on=list(on)), answered)


def test_a_run_of_another_machine_answers_and_so_does_a_part_of_the_own(app: App, worker: FakeWorker) -> None:
    recorded = recorded_sample(ModelRef(target="sample_models/gpt.py", size="small"))
    assert recorded is not None and recorded.run.graph is not None
    worker.graph = recorded.run.graph
    without(Measure, worker, lambda job: None)
    at = start_only()
    for answer, part in OF_A_VISIT.items():
        worker.of(Measure)[0].part = part and replace(recorded.run, times=None)
        assert view_of(at.run().session_state["explore"]).answer == answer
        for on in policies(worker.graph).values():
            answered = ask(at, on)
            check(say(at, on=list(on)), answered)


def test_a_run_shows_its_bytes_then_its_gradients_then_its_times(app: App, worker: FakeWorker) -> None:
    at = goes_on(app, worker)
    (job,), shown = worker.of(Compare), figures(at)
    assert [*shown.values()][3:5] == ["being timed", "being compared"] and "≈" not in "".join(shown.values())
    job.part = replace(job.part, gradients=graphs.compared(GRAPH, spec(at)).gradients)
    shown = figures(at.run())
    assert [*shown.values()][3:5] == ["being timed", "bitwise equal"]
    job.cancel()
    assert figures(settle(at)) == shown | {"Step time": "not measured"}


def test_hazards_segments_actions_and_a_picked_moment_are_answered(app: App, worker: FakeWorker) -> None:
    units = "[[blocks.0, blocks.1], {blocks: [blocks.2], action: save_ops, save_ops: [aten.mm.default]}, blocks.4]"
    at = upload(ran(app, worker), f"version: 1\npolicy: {{units: {units}, preserve_rng_state: false}}\n")
    at.session_state["explore"].tick = ("baseline", 5)
    at.run()
    data = graph_data(at)
    assert at.error and data["segments"] and data["actions"] and any(label[4] for label in data["labels"].values())
    blocks = spec(at).policy.blocks
    for on in ((*blocks, "head"), blocks[1:], blocks[2:], (*blocks[2:], "blocks.0"), ()):
        answered = ask(at, on)
        check(say(at, on=list(on)), answered)


def test_each_place_of_the_slider_is_answered_with_the_clicks_behind_it(app: App) -> None:
    at = say(app(), on=["head"])
    version = next(data["version"] for data in component_data(at) if "at" in data)
    places = [{"kind": "place", "place": place, "version": version} for place in range(len(slider(at)))]
    assert len(places) > 2
    answers = [ask_after(at, place) for place in places]
    clicked = ask_after(at, places[0], {"kind": "on", "ids": ["norm"]})
    for other in ({"place": len(places)}, {"place": -1}, {"version": version + 1}):
        answered = ask_after(at, places[0] | other)
        assert answered is not None and answered["on"] == ["head"], "no such place, or other plans"
    for place, answered in enumerate(answers):
        check(slide(at, place), answered)
    on = graph_data(slide(at, 0))["on"]
    check(say(at, on=sorted({*on} ^ {"norm"})), clicked)


STEPS: dict[str, list[dict[str, Any]]] = {
    **{name: [{"kind": "preset", "ids": [name]}] for name in preset_titles()},
    "a preset of no name": [{"kind": "preset", "ids": ["none"]}],
    "a pattern": [{"kind": "match", "ids": ["blocks.*.mlp"]}],
    "a pattern that matches nothing": [{"kind": "match", "ids": ["*.nothing"]}],
    "undo": [{"kind": "undo"}],
    "undo and redo": [{"kind": "undo"}, {"kind": "undo"}, {"kind": "redo"}],
    "a segment": [{"kind": "join", "ids": ["blocks.0", "blocks.1"]}],
    "no segment": [{"kind": "join", "ids": ["blocks.0"]}],
    "a selection": [{"kind": "select", "ids": ["blocks.0"]}],
    "a block of no model": [{"kind": "on", "ids": ["nothing"]}],
}


@pytest.mark.parametrize("name", STEPS)
def test_each_press_is_answered_as_a_rerun_draws_it(app: App, name: str) -> None:
    at = say(say(app(), on=["blocks.0", "blocks.1"], open=["blocks"]), on=["blocks.0", "blocks.1", "head"])
    before = graph_data(at)["on"]
    answered = ask_after(at, *STEPS[name])
    assert graph_data(at.run())["on"] == before, "a question changes nothing"
    check(take(at, *STEPS[name]), answered)


def test_only_the_words_of_rows_in_view_travel(app: App) -> None:
    at = app()
    rows = tuple(graph_data(at)["labels"])[2:4]
    answered, in_view = ask(at, ALL[:1]), ask(at, ALL[:1], rows=[*rows, "no row"])
    assert answered is not None and in_view == answered | {"labels": {id: answered["labels"][id] for id in rows}}


def test_steps_that_the_page_has_taken_over_count_once(app: App) -> None:
    at = say(app(), on=["head"])
    clicked = message(at, on=["head", "norm"])["steps"]["list"]
    answered = ask_after(at, *clicked)
    assert answered is not None and answered["on"] == ["norm", "head"]
    check(take(at, {"kind": "on", "ids": ["norm"]}), ask_after(at, *clicked))
    assert ask_after(at, graph="block_graph_of_no_page") is None
    keys = desk._keys.get(at.session_state["draft"].widget)
    assert keys is not None
    other = dataclasses.replace(keys, graph=replace(GRAPH, blocks=GRAPH.blocks[:-1]))
    assert desk.answer(other, ()) is None, "the model was read again, and is another"
