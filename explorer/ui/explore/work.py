"""The worker's tasks for the Explore page: describe, measure, compare, draw; and the keys of the results."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from explorer.jobs.client import Job
from explorer.jobs.protocol import Compare, Describe, DrawAutograd, Measure
from explorer.record.comparison import Comparison
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec
from explorer.ui.explore.state import ExploreState
from explorer.ui.session import backend, known, page_job, pins
from explorer.ui.shared import draft as drafts

ASKED = (Describe, Measure, Compare, DrawAutograd)
FIRST_WORD_S = 0.05
"""Time within which a warm worker reports its work, so that the first drawing already shows the report."""


def take(state: ExploreState, job: Job) -> None:
    """The result of a finished job."""
    key = job.run_id or job.id
    if not isinstance(job.request, Describe | DrawAutograd):
        state.warning = job.warning
    backend.records().keep(key, job.result)
    match job.request:
        case Describe(model=model, device=device, without_data=without_data):
            backend.records().keep(backend.graph_key(model, device, without_data=without_data), job.result)
        case Measure(spec=spec, without_data=True):
            backend.records().keep(backend.foreseen_key(spec), job.result)
            if not spec.policy.units:
                state.baseline = backend.foreseen_key(spec)
        case Measure():
            state.baseline = key
            known.note(key, job.result)
        case Compare(candidate=spec):
            known.note(key, job.result)
            for_the_front = spec.policy in state.to_measure
            state.to_measure = [policy for policy in state.to_measure if policy != spec.policy]
            if spec == state.draft.spec or not for_the_front:
                state.shown, state.tick, state.doubt = key, None, ""
        case DrawAutograd():
            state.pictures = key


def prepare(state: ExploreState) -> None:
    """On the first visit, describes the model and measures its baseline without a press. One attempt each."""
    spec, baseline = state.draft.spec, wanted(state)
    if spec.model.is_recorded:  # its model is not here: nothing can be described or measured
        state.baseline = state.baseline or backend.recorded_run(spec.model)
        return
    if state.draft.predict:
        _foresee(state, baseline)
        return
    if (run := known.measured(baseline) or known.fitted(baseline)) is not None:
        state.baseline = run[0]
    if state.job.id is not None or state.job.run_failed:
        return
    if backend.graph_of(spec) is None:
        page_job.start(state.job, Describe(model=spec.model, seed=spec.seed, device=spec.device))
    elif state.baseline is None and state.shown is None:
        page_job.start(state.job, Measure(spec=baseline, until_it_fits=True))


def _foresee(state: ExploreState, baseline: RunSpec) -> None:
    """Describes the model and predicts its baseline without data, and predicts again after each change of an option."""
    key, spec = backend.foreseen_key(baseline), state.draft.spec
    if backend.records().get(key) is not None:
        state.baseline = key
    if state.job.id is not None or state.job.run_failed:
        return
    if drafts.graph_of(state.draft) is None:
        page_job.start(state.job, Describe(model=spec.model, seed=spec.seed, without_data=True))
    elif state.baseline != key:
        page_job.start(state.job, Measure(spec=baseline, without_data=True))


def wanted(state: ExploreState) -> RunSpec:
    """The baseline of the draft; if the draft is only predicted, the run that keeps everything."""
    spec = state.draft.spec
    return msgspec.structs.replace(spec, policy=KEEP_ALL) if state.draft.predict else pins.baseline_of(spec)


def baseline_of(candidate: RunSpec) -> RunSpec:
    """Baseline of `candidate`: as requested, or the run that fitted if the request was out of memory."""
    asked = pins.baseline_of(candidate)
    instead = None if known.measured(asked) else known.fitted(asked)
    return asked if instead is None else instead[1].spec


def recall(state: ExploreState) -> bool:
    """Shows the earlier result of a policy that ran or was predicted. Returns whether the shown result changed."""
    spec = state.draft.spec
    key = _foreseen_pair(state) if state.draft.predict else known.compared(baseline_of(spec), spec)
    if key is None or key == state.shown:
        return False
    state.shown, state.tick = key, None
    return True


def _foreseen_pair(state: ExploreState) -> str | None:
    """Key of the predicted comparison of the drawn policy; None if a run of the pair is not predicted yet."""
    spec, records = state.draft.spec, backend.records()
    baseline, candidate = (records.get(backend.foreseen_key(one)) for one in (wanted(state), spec))
    if not spec.policy.units or baseline is None or candidate is None:
        return None
    key = f"pair {backend.foreseen_key(spec)}"
    if records.get(key) is None:
        records.keep(key, Comparison(baseline=baseline, candidate=candidate))
    return key


def compare(state: ExploreState) -> None:
    """Starts the run that a person requested: baseline and candidate, both measured now. In prediction mode only the
    candidate is predicted, as the baseline is predicted already."""
    spec = state.draft.spec
    if state.draft.predict:
        page_job.start(state.job, Measure(spec=spec, without_data=True))
    else:
        page_job.start(state.job, Compare(baseline=baseline_of(spec), candidate=spec))
    job, deadline = page_job.running(state.job), time.monotonic() + FIRST_WORD_S
    while job is not None and not job.began and time.monotonic() < deadline:
        time.sleep(0.002)


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
    candidate = msgspec.structs.replace(spec, policy=state.to_measure[0])
    page_job.start(state.job, Compare(baseline=baseline_of(spec), candidate=candidate))


def result(state: ExploreState, name: Literal["baseline", "shown", "pictures"]) -> Any:
    """The record that `name` points to; None without a record. An unreadable record becomes the failure."""
    record = page_job.record(state.job, getattr(state, name))
    if record is None:
        setattr(state, name, None)
    return record
