"""State of the Explore page for one visitor, and what the worker does for it: describe, measure, compare, draw.

At the end: runs that the page shows until this machine has measured a model, of an older file, of another machine, or
bundled. Such a stand-in has its origin and its age. It answers no request, so the model is measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, cast

from msgspec.structs import replace

from explorer.errors import BadInput, ExplorerError
from explorer.jobs import run_file
from explorer.jobs.client import Job
from explorer.jobs.on_card import CountOnCard
from explorer.jobs.protocol import Compare, Describe, DrawAutograd, FindFit, Measure, MeasureRanks, Request, run_for
from explorer.plan.catalogue import recorded_sample
from explorer.record.comparison import Comparison
from explorer.record.files import Reading
from explorer.record.fit import Fit
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Plan, Wish
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import Device, RunSpec
from explorer.ui.session import backend, page_job, window
from explorer.ui.session.page_job import PageJob
from explorer.ui.session.repository import MOST_READ, OpenedRun, opened_run, ran_here, request_key, runs
from explorer.ui.session.values import session_value
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from explorer.view.drawing.axis import Axis
from explorer.view.text.explore import stand_in_text


@dataclass(slots=True, kw_only=True)
class Budget:
    """Text typed into the budget field, and its outcome."""

    text: str = ""
    wish: Wish | None = None
    """None: nothing was typed, or nothing that can be read."""
    none_because: str = ""
    """Reason why the budget has no plan."""
    details: str = ""
    """More on the reason: what holds the bytes, and where the planner looked."""
    job: str | None = None
    """Which job looks for the plan."""
    plan: Plan | None = None


@dataclass(slots=True, kw_only=True)
class ExploreState:
    """The state of one visitor. Fields hold keys of records: the run's id if the store has the run."""

    draft: Draft
    """The draft that every page shares."""
    model: str = ""
    """The draft's graph widget when this was new: another widget means another model."""
    job: PageJob = field(default_factory=PageJob)
    baseline: str | None = None
    """Key of the measured baseline."""
    shown: str | None = None
    """Key of the last comparison."""
    pictures: str | None = None
    """Key of the autograd graphs."""
    fit: str | None = None
    """Key of the levers that were played last."""
    card_count: str | None = None
    """Key of what torch's own code counted last on an imaginary card."""
    tick: tuple[str, int] | None = None
    """Run and event picked in the timeline; None: the peak."""
    budget: Budget = field(default_factory=Budget)
    charted: Policy | None = None
    """The policy that a chart is about which follows the graph; None: no such chart is open."""
    timeline: tuple[str, Axis] | None = None
    """Run and axis of the timeline that is drawn; None: the page shows none."""
    to_measure: list[Policy] = field(default_factory=list)
    """Policies waiting to run, in order."""
    view: str | None = None
    """Which run a person chose for the memory chart; None: the usual one."""
    warning: str = ""
    """Reason why the store could not keep the last run."""
    doubt: str = ""
    """Warning from the evidence in an imported policy file."""
    imported: Reading | None = None
    """An imported policy with notes to show, until a person dismisses the notes."""


def current() -> ExploreState:
    """This visitor's state. Another model resets the state; an opened run of the store sets the state."""
    draft = drafts.current()
    state = session_value("explore", ExploreState, lambda: ExploreState(draft=draft, model=draft.widget))
    state.draft = draft
    if (run := opened_run("explore")) is not None:
        _show(state, run)
    if state.model != draft.widget:
        page_job.forget(state.job)
        _forget(state, PageJob())
    return state


def _forget(state: ExploreState, job: PageJob) -> None:
    fresh = ExploreState(draft=state.draft, model=state.draft.widget, job=job)
    for field_ in fields(ExploreState):
        setattr(state, field_.name, getattr(fresh, field_.name))


def _show(state: ExploreState, run: OpenedRun) -> None:
    """Shows model, policy, options and figures of a stored run; a job under way goes on."""
    record = run.record
    assert isinstance(record, Comparison | Measurement | RecordedRanks), "no other kind is shown here"
    candidate = record.candidate if isinstance(record, Comparison) else record.as_run
    predicted = candidate.origin == "predicted"
    drafts.restart(state.draft, candidate.spec, predict=predicted)
    if predicted:
        runs().add_prediction(candidate.spec, candidate if isinstance(record, Comparison) else record)
    _forget(state, state.job)
    if isinstance(record, Comparison):
        state.shown = run.run_id
    else:
        state.baseline = run.run_id


def take(state: ExploreState, job: Job) -> None:
    """The result of a finished job."""
    key, result = job.run_id or job.id, cast(Any, job.result)
    if not isinstance(job.request, Describe | DrawAutograd | FindFit | CountOnCard):
        state.warning = job.warning
    match job.request:
        case Describe(model=model, device=device, without_data=without_data):
            runs().add_graph(model, device, result, without_data=without_data)
        case Measure(spec=spec, without_data=True) | MeasureRanks(spec=spec):
            prediction = runs().add_prediction(spec, result)
            if not spec.policy.units:
                state.baseline = prediction.key
        case Measure(spec=spec):
            if result.graph is not None:
                runs().add_graph(spec.model, spec.device, result.graph)
            runs().add(key, result)
            state.baseline = key
        case Compare(candidate=spec):
            runs().add(key, result)
            for_the_front = spec.policy in state.to_measure
            state.to_measure = [policy for policy in state.to_measure if policy != spec.policy]
            if spec == state.draft.spec or not for_the_front:
                state.shown, state.tick, state.doubt = key, None, ""
        case DrawAutograd():
            runs().add(key, result)
            state.pictures = key
        case FindFit():
            runs().add(key, result)
            state.fit = key
        case CountOnCard():
            runs().add(key, result)
            state.card_count = key


def take_part(state: ExploreState, job: Job) -> None:
    """The graph, recorded steps, judged gradients, or levers of a job that goes on; times are not there yet."""
    part = job.part
    if isinstance(part, Fit):
        state.fit = part_key(job.id)
        runs().of("record").add(state.fit, part)
    if isinstance(part, Comparison) and part.comparable and part.candidate.spec == state.draft.spec:
        state.shown, state.tick = part_key(job.id), None
        runs().of("record").add(state.shown, part)
    if not isinstance(job.request, Measure) or not isinstance(part, Measurement) or part.failure is not None:
        return
    spec = job.request.spec
    if part.graph is not None:
        runs().add_graph(spec.model, spec.device, part.graph)
    if part.allocations is not None:
        state.baseline = part_key(job.id)
        runs().of("record").add(state.baseline, part)


PART = "part of "


def part_key(job_id: str | None) -> str:
    """Key of the part of a run that goes on, or that was cut short after this part."""
    return f"{PART}{job_id}"


def prepare(state: ExploreState) -> None:
    """On the first visit, describes the model and measures its baseline in one job, without a press. One attempt.

    On a GPU the description is a job of its own: it also runs where the device is missing.

    If the draft is only predicted, both happen without data, and each change of an option predicts again.
    """
    if not window.is_known() and stand_in(state, None) is not None:
        return  # the first picture comes first: a graph reports its window once it is drawn
    if (request := _first_request(state)) is not None:
        page_job.start(state.job, request)


def first_state(query: Mapping[str, str]) -> tuple[ExploreState, Request | None]:
    """What a visit to the address with `query` finds on its page, and the request that it would start with."""
    state = ExploreState(draft=drafts.first_draft(query))
    return state, _first_request(state)


def begin(query: Mapping[str, str]) -> None:
    """Submits the first request of a visit while its window is still being made. The window's equal request joins.

    A visit that an earlier run answers waits for its window: the measurement would delay the first picture.
    """
    if backend.worker().job(query.get("job", "")) is not None:  # a refresh finds its job again
        return
    with suppress(ExplorerError):  # the page says why
        state, request = first_state(query)
        if request is not None and stand_in(state, None) is None:
            page_job.submit_early(request)


def _first_request(state: ExploreState) -> Request | None:
    """Takes over the baseline if it is known; returns what `prepare` starts, else None."""
    spec, baseline = state.draft.spec, baseline_spec(state)
    if spec.model.is_recorded:  # its model is not here: nothing can be described or measured
        state.baseline = state.baseline or runs().recorded_run(spec.model)
        if drafts.graph_of(state.draft) is None and state.job.failure is None:
            page_job.refuse(state.job, _no_record(spec.model))
        return None
    predict = state.draft.predict
    run = runs().prediction(baseline) if predict else runs().measured(baseline) or runs().fitted(baseline)
    if run is not None:
        state.baseline = run.key
    if state.job.id is not None or state.job.run_failed:
        return None
    graph, measures = drafts.graph_of(state.draft), state.baseline is None and state.shown is None
    if measures and not predict and (graph is not None or spec.device == "cpu"):
        return Measure(spec=baseline, until_it_fits=True, with_graph=graph is None)
    if graph is None:
        device: Device = "cpu" if predict else spec.device
        return Describe(
            model=spec.model, seed=spec.seed, device=device, without_data=predict, conditions=spec.conditions
        )
    return prediction_of(baseline) if predict and run is None else None


def _no_record(model: ModelRef) -> BadInput:
    return BadInput(
        f"{model.target} is a step that was recorded in a script, and the store has no run of it with a graph.",
        hint="Open its run file on the Runs page, or record the step again.",
    )


def prediction_of(spec: RunSpec) -> Measure | MeasureRanks:
    """The request that predicts the step of `spec`, on one process or on its ranks."""
    return (MeasureRanks if spec.ranks is not None else Measure)(spec=spec, without_data=True)


def baseline_spec(state: ExploreState) -> RunSpec:
    """The baseline of the draft: the run that keeps everything."""
    return replace(state.draft.spec, policy=KEEP_ALL)


def absorb(state: ExploreState, graph: ModelGraph, *, until_press: bool = False) -> None:
    """Takes over new steps of the browser (`draft.absorb`)."""
    drafts.absorb(state.draft, graph, until_press=until_press)
    forget_budget(state)


def forget_budget(state: ExploreState) -> None:
    """Clears the typed budget if a decision was undone: the text was about the policy that was taken back."""
    if state.draft.undone:
        state.budget, state.draft.undone = Budget(), False


def recall(state: ExploreState) -> bool:
    """Shows the earlier result of a policy that ran or was predicted. Returns whether the shown result changed."""
    spec = state.draft.spec
    if not state.draft.predict:
        key = runs().compared(runs().baseline(spec), spec)
    else:
        key = runs().predicted_pair(baseline_spec(state), spec) if spec.policy.units else None
    if key is None or key == state.shown:
        return False
    state.shown, state.tick = key, None
    return True


def compare(state: ExploreState) -> None:
    """Starts the run that a person requested: baseline and candidate, both measured now. In prediction mode only the
    candidate is predicted, as the baseline is predicted already."""
    spec = state.draft.spec
    if state.draft.predict:
        page_job.start(state.job, prediction_of(spec))
    else:
        page_job.start(state.job, Compare(baseline=runs().baseline(spec), candidate=spec))


def measure(state: ExploreState, policies: list[Policy]) -> None:
    """Compares each of `policies` with everything kept, one after another."""
    state.to_measure = list(policies)
    state.job.failure = None
    measure_next(state)


def measure_next(state: ExploreState) -> None:
    """Goes on with the policies that are left; a run without a result, cancelled too, ends it."""
    if state.job.run_failed:
        state.to_measure = []
    if not state.to_measure or state.job.id is not None:
        return
    spec = state.draft.spec
    candidate = replace(spec, policy=state.to_measure[0])
    page_job.start(state.job, Compare(baseline=runs().baseline(spec), candidate=candidate))


def result(state: ExploreState, name: Literal["baseline", "shown", "pictures", "fit", "card_count"]) -> Any:
    """The record that `name` points to; None without a record. An unreadable record becomes the failure."""
    record = page_job.record(state.job, getattr(state, name))
    if record is None:
        setattr(state, name, None)
    return record


class EarlierRun(NamedTuple):
    """A run with everything kept that the page shows until this machine has measured the model."""

    key: str
    run: Measurement
    """With the model's graph."""
    created: float | None = None
    """Seconds since 1970 of a run of the store; None: bundled with the sample models."""
    here: bool = False
    """Whether this machine ran it."""
    plans: tuple[Plan, ...] = ()

    @property
    def in_words(self) -> str:
        """Where the run was measured, and when if the store has it."""
        age_s = None if self.created is None else time.time() - self.created
        return stand_in_text(age_s, here=self.here)


def stand_in(state: ExploreState, graph: ModelGraph | None) -> EarlierRun | None:
    """The stand-in of the drawn run; None if the model has another structure by now (`graph`, once described)."""
    if state.draft.predict or state.draft.spec.model.is_recorded:
        return None
    spec = baseline_spec(state)
    key = f"{backend.store().state()} {request_key(spec)}"
    earlier = runs().once("earlier run", key, lambda: _stored(spec) or _bundled(spec))
    there = earlier.run.graph if earlier is not None else None
    return None if there is None or (graph is not None and graph.fingerprint != there.fingerprint) else earlier


def _stored(spec: RunSpec) -> EarlierRun | None:
    """The newest whole run of the store with the specification `spec` and a graph; its code may have changed since."""
    try:
        stored = [run for run in backend.store().list() if run.model == spec.model.target and run.spec is not None]
        for row in sorted(stored, key=lambda row: -row.created)[:MOST_READ]:
            # A run that differs in its policy and split at most.
            alike = row.spec is not None and replace(row.spec, policy=spec.policy, plan=spec.plan) == spec
            record = runs().record(row.run_id) if alike else None
            run = run_for(Measure(spec=spec), record) if record is not None else None
            graph = run_file.graph_of(record) if record is not None else None
            if run is not None and graph is not None:
                return EarlierRun(
                    row.run_id, replace(run, graph=graph), row.created, ran_here(run) and not row.imported
                )
    except ExplorerError:  # the Runs page says why the store cannot be read
        pass
    return None


def _bundled(spec: RunSpec) -> EarlierRun | None:
    recorded = recorded_sample(spec.model)
    if recorded is None or recorded.run.spec != spec:
        return None
    return EarlierRun(f"bundled {request_key(spec)}", recorded.run, plans=recorded.front.plans)
