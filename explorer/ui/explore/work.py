"""What the worker does for this page: start, look, take the result, cancel; a refresh finds its job by `?job=`."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs.client import Job
from explorer.jobs.protocol import Compare, DeriveMatrix, Describe, DrawAutograd, Measure, Request
from explorer.record.base import to_plain
from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.measurement import Measurement
from explorer.ui.explore import state as states
from explorer.ui.explore.state import State
from explorer.ui.session import backend, known

FIRST_WORD_S = 0.05
"""A warm worker says within this what it does: then the first drawing shows it, and not only the second."""


def start(state: State, request: Request) -> None:
    """Hands `request` to the worker, unless something is under way. What goes wrong stays in `state` as a failure."""
    if state["job"] is not None:  # a button that was drawn before that started
        return
    state["failure"] = None
    try:
        states.check_offered(states.spec_of(state).model, backend.samples())
        job = backend.worker().submit(request)
    except ExplorerError as error:
        states.fail(state, error)
        return
    state["job"] = {"id": job.id, "what": type(request).__name__}
    states.to_address(state)


def attach(state: State) -> None:
    """After a refresh: the job that the address bar names becomes this page's again, and pinned runs baselines."""
    if "pinned" not in st.session_state:
        read_pins(st.session_state)
    id = st.query_params.get("job")
    if id and state["job"] is None and (job := backend.worker().job(id)) is not None:
        state["job"] = {"id": id, "what": type(job.request).__name__}


def read_pins(session: MutableMapping[Any, Any]) -> None:
    """Which policies this visitor's runs are compared with: of every model that of its pinned run."""
    session["pinned"] = []
    try:
        pinned = [run for run in backend.store().list() if run.pinned]
        records = [backend.record(run.run_id) for run in pinned]
    except ExplorerError:  # the Runs page says why the store cannot be read
        return
    runs = [record.candidate if isinstance(record, Comparison) else record for record in records]
    session["pinned"] = [to_plain(run.spec) for run in runs if isinstance(run, Measurement)]


def running(state: State) -> Job | None:
    """The job under way; None when there is none. A finished one counts until `settle` took its result."""
    if state["job"] is None:
        return None
    job = backend.worker().job(state["job"]["id"])
    if job is None:
        state["job"] = None
        states.fail(
            state, Failure(kind="crash", sentence="The app was restarted while this ran.", hint="Run it again.")
        )
    return job


def settle(state: State) -> bool:
    """Takes the result of a job that has finished. Returns whether there was one."""
    job = running(state)
    if job is None or not job.finished:
        return False
    state["job"] = None
    states.to_address(state)
    if job.failure is not None:
        state["failure"] = to_plain(job.failure)
        return True
    key = job.run_id or job.id
    if not isinstance(job.request, Describe | DrawAutograd):
        state["warning"] = job.warning
    backend.records().keep(key, job.result)
    match job.request:
        case Describe(model=model):
            backend.records().keep(backend.graph_key(model), job.result)
        case Measure():
            state["baseline"] = key
            known.note(key, job.result)
        case Compare():
            state["shown"], state["tick"], state["doubt"] = key, None, ""
            known.note(key, job.result)
        case DrawAutograd():
            state["pictures"] = key
        case DeriveMatrix():
            state["matrix"] = key
    return True


def under_way(state: State) -> Job | None:
    """The job under way, after the result of a finished one was taken."""
    return None if settle(state) else running(state)


def prepare(state: State) -> None:
    """First visit: the model is described and its baseline measured without being asked. One attempt each."""
    spec = states.spec_of(state)
    if (found := known.measured(states.baseline_of(state))) is not None:
        state["baseline"] = found[0]
    if state["job"] is not None or state["failure"] is not None:
        return
    if backend.graph_of(spec.model) is None:
        start(state, Describe(model=spec.model, seed=spec.seed))
    elif state["baseline"] is None and state["shown"] is None:
        start(state, Measure(spec=states.baseline_of(state)))


def recall(state: State) -> bool:
    """A policy that ran before shows its result again. Returns whether that changed what is shown."""
    key = known.compared(states.baseline_of(state), states.spec_of(state))
    if key is None or key == state["shown"]:
        return False
    state["shown"], state["tick"] = key, None
    return True


def compare(state: State) -> None:
    """The run that a person asked for: baseline and candidate, both measured now."""
    start(state, Compare(baseline=states.baseline_of(state), candidate=states.spec_of(state)))
    job, deadline = running(state), time.monotonic() + FIRST_WORD_S
    while job is not None and not job.began and time.monotonic() < deadline:
        time.sleep(0.002)


def result(state: State, name: str) -> Any:
    """The record that `state[name]` points to; None where there is none. What cannot be read becomes a failure."""
    try:
        return backend.record(state[name])
    except ExplorerError as error:
        states.fail(state, error)
        state[name] = None
        return None
