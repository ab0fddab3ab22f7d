"""What the worker does for the Pipeline page: read the model, price its blocks, run the plan.

A result is found again by what was asked, so a plan that ran already shows its figures as soon as it is drawn again.
"""

from __future__ import annotations

import msgspec
import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs.client import Job
from explorer.jobs.protocol import Describe, ProfileStages, RunPipeline
from explorer.plan.pipeline.cuts import atoms
from explorer.record.base import to_json
from explorer.record.failure import Failure
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.pipeline_run import PipelineRun
from explorer.record.run import RunSpec
from explorer.ui.explore import state as states
from explorer.ui.explore import work
from explorer.ui.explore.state import State
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.session import backend

ASKED = (Describe, ProfileStages, RunPipeline)


def attach(split: State) -> None:
    """After a refresh: the job that the address bar names becomes this page's again."""
    id = st.query_params.get("job")
    if id and split["job"] is None and (job := backend.worker().job(id)) and isinstance(job.request, ASKED):
        split["job"] = {"id": id, "what": type(job.request).__name__}


def start(split: State, request: Describe | ProfileStages | RunPipeline) -> None:
    """Hands `request` to the worker, unless something is under way. What goes wrong stays in `split` as a failure."""
    if split["job"] is not None:  # a button that was drawn before that started
        return
    split["failure"] = None
    try:
        model = request.model if isinstance(request, Describe) else request.spec.model
        states.check_offered(model, backend.samples())
        split["job"] = {"id": backend.worker().submit(request).id, "what": type(request).__name__}
    except ExplorerError as error:
        pipeline_state.fail(split, error)


def prepare(split: State, spec: RunSpec) -> None:
    """First visit: the model is described and its blocks are priced, without being asked. One attempt each."""
    if split["job"] is not None or split["failure"] is not None:
        return
    graph = backend.graph_of(spec.model)
    if graph is None:
        start(split, Describe(model=spec.model, seed=spec.seed))
    elif profile_of(spec) is None:
        start(split, ProfileStages(spec=_unsplit(spec), groups=atoms(graph)))


def run(split: State, spec: RunSpec) -> None:
    """The run that a person asked for."""
    start(split, RunPipeline(spec=spec, engine=split["engine"], profile=profile_of(spec)))


def running(split: State) -> Job | None:
    """The job under way; None when there is none. A finished one counts until `settle` took its result."""
    if split["job"] is None:
        return None
    job = backend.worker().job(split["job"]["id"])
    if job is None:
        split["job"] = None
        lost = Failure(kind="crash", sentence="The app was restarted while this ran.", hint="Run it again.")
        pipeline_state.fail(split, lost)
    return job


def settle(split: State) -> bool:
    """Takes the result of a job that has finished. Returns whether there was one."""
    job = running(split)
    if job is None or not job.finished:
        return False
    split["job"] = None
    if job.failure is not None:
        pipeline_state.fail(split, job.failure)
        return True
    records = backend.records()
    match job.request:
        case Describe(model=model):
            records.keep(backend.graph_key(model), job.result)
        case ProfileStages(spec=spec):
            records.keep(_profile_key(spec), job.result)
        case RunPipeline(spec=spec):
            key = job.run_id or job.id
            records.keep(key, job.result)
            split["shown"] = key
            if isinstance(job.result, PipelineRun) and job.result.failure is None:
                records.keep(_run_key(spec), key)
    return True


def under_way(split: State) -> Job | None:
    """The job under way, after the result of a finished one was taken."""
    return None if settle(split) else running(split)


def profile_of(spec: RunSpec) -> PipelineProfile | None:
    """The price of every block of `spec`'s model, if it was measured lately."""
    found = backend.records().get(_profile_key(spec))
    return found if isinstance(found, PipelineProfile) else None


def shown(split: State, spec: RunSpec) -> PipelineRun | None:
    """The last run of exactly `spec`, else the last run of this page; None before the first."""
    last = work.result(split, "shown")
    if not isinstance(last, PipelineRun) or last.spec != spec:
        split["shown"] = backend.records().get(_run_key(spec)) or split["shown"]
        last = work.result(split, "shown")
    return last if isinstance(last, PipelineRun) and last.spec.model == spec.model else None


def _unsplit(spec: RunSpec) -> RunSpec:
    """A profile holds for every plan and policy, as it prices each block kept and recomputed; what saves operators
    or offloads is priced as it is."""
    special = tuple(unit for unit in spec.policy.units if unit.action != "recompute")
    return msgspec.structs.replace(spec, policy=msgspec.structs.replace(spec.policy, units=special), plan=None)


def _profile_key(spec: RunSpec) -> str:
    return f"profile {to_json(_unsplit(spec)).decode()}"


def _run_key(spec: RunSpec) -> str:
    return f"pipelined {to_json(spec).decode()}"
