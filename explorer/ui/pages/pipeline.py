"""Where to split the model, which schedule drives the stages, and does the gradient survive it?

strip: step, bubble, highest peak, gradients        predicted at once with every change, measured after Run
model, plan, graph with cuts  |  schedule, memory, gradients, calls, files
run bar
"""

from __future__ import annotations

from typing import Any

import msgspec
import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs.protocol import Describe, ProfileStages, RunPipeline
from explorer.plan.cuts import atoms
from explorer.plan.hazards import hazards
from explorer.plan.stages import predict
from explorer.record.base import from_plain, to_json
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Failure
from explorer.record.pipeline import Forecast, PipelineProfile, PipelineRun
from explorer.record.plan import PipelinePlan
from explorer.record.run import RunSpec
from explorer.ui import backend, pipeline_state, work
from explorer.ui import state as states
from explorer.ui.panels.failure import failure_panel
from explorer.ui.panels.gradients import hazards_panel
from explorer.ui.panels.model import model_panel, options_panel
from explorer.ui.panels.pipeline import cut_graph, engine_picker, plan_panel, strip
from explorer.ui.panels.pipeline_results import result_tabs
from explorer.ui.state import State
from explorer.view.units import count

LOOK_EVERY_S = 0.5
DOING = {
    "Describe": "Reading the model",
    "ProfileStages": "Measuring what each block costs",
    "RunPipeline": "Running the pipelined step and the unsplit ones",
}


def page() -> None:
    """The whole page, top to bottom. Model, policy and options are those of the Explore page."""
    samples = backend.samples()
    first = samples[0]
    state = states.current(ModelRef(target=first.target, size=next(iter(first.sizes), None)), samples)
    split = pipeline_state.current()
    _settle(split)
    spec = states.spec_of(state)
    graph = backend.graph_of(spec.model)
    profile = _profile(spec)
    _prepare(split, spec, graph, profile)

    slot = st.container()
    left, right = st.columns([6, 8], gap="medium")
    with left:
        _choices(state, samples)
        plan = None
        if graph is not None:
            plan = plan_panel(split, graph, spec, profile)
            cut_graph(split, graph, spec.policy)
        elif split["job"]:
            st.skeleton(height=400)
    run = _shown(split)
    fresh = run is not None and plan is not None and run.spec == msgspec.structs.replace(spec, plan=plan)
    forecast, fault = _forecast(profile, plan, spec)
    with slot:
        strip(run if fresh else None, forecast, plan, before=run if not fresh else None)
    with right:
        if split["failure"] and failure_panel(from_plain(split["failure"], Failure), key="pipeline"):
            split["failure"] = None
            st.rerun()
        if fault:
            st.error(fault, icon=":material/error:")
        _hazards(graph, spec, plan)
        result_tabs(run, forecast, spec=spec, plan=plan, fresh=fresh)
    with st.bottom:
        busy = split["job"] is not None
        ready = plan is not None and fault == ""
        st.fragment(_bar, run_every=LOOK_EVERY_S if busy else None)(split, spec, plan if ready else None, busy=busy)


def _choices(state: State, samples: tuple[Any, ...]) -> None:
    spec = states.spec_of(state)
    graph = backend.graph_of(spec.model)
    wide, narrow = st.columns([8, 2], vertical_alignment="bottom", gap="small")
    with wide:
        model = model_panel(spec, samples)
    with narrow:
        chosen = options_panel(spec, graph)
    if model != spec.model:
        states.choose_model(state, model)
        pipeline_state.forget()
        st.rerun()
    if chosen != spec:
        states.choose(state, chosen)
        st.rerun()
    n_blocks = len(spec.policy.blocks)
    st.caption(f"Policy from the Explore page: {count(n_blocks, 'block')} recomputed." if n_blocks else KEEPS_ALL)


KEEPS_ALL = "Policy from the Explore page: everything is kept. Choose blocks to recompute there."


def _profile(spec: RunSpec) -> PipelineProfile | None:
    found = backend.records().get(_profile_key(spec))
    return found if isinstance(found, PipelineProfile) else None


def _profile_key(spec: RunSpec) -> str:
    """A profile holds for every policy and plan: it prices each block kept and recomputed."""
    bare = msgspec.structs.replace(spec, policy=pipeline_state.options_only(spec.policy), plan=None)
    return f"profile {to_json(bare).decode()}"


def _prepare(split: State, spec: RunSpec, graph: ModelGraph | None, profile: PipelineProfile | None) -> None:
    """First visit: the model is described and its blocks are priced, without being asked. One attempt each."""
    if split["job"] is not None or split["failure"] is not None:
        return
    if graph is None:
        _start(split, Describe(model=spec.model, seed=spec.seed))
    elif profile is None:
        _start(split, ProfileStages(spec=msgspec.structs.replace(spec, plan=None), groups=atoms(graph)))


def _start(split: State, request: Describe | ProfileStages | RunPipeline) -> None:
    split["failure"] = None
    try:
        split["job"] = {"id": backend.worker().submit(request).id, "what": type(request).__name__}
    except ExplorerError as error:
        split["failure"] = pipeline_state.failure_of(error)


def _settle(split: State) -> bool:
    """Takes the result of a job that has finished. Returns whether there was one."""
    if split["job"] is None:
        return False
    job = backend.worker().job(split["job"]["id"])
    if job is not None and not job.finished:
        return False
    split["job"] = None
    if job is None:
        return True
    if job.failure is not None:
        split["failure"] = pipeline_state.failure_of(job.failure)
        return True
    match job.request:
        case Describe(model=model):
            backend.records().keep(backend.graph_key(model), job.result)
        case ProfileStages(spec=spec):
            backend.records().keep(_profile_key(spec), job.result)
        case RunPipeline():
            split["shown"] = job.run_id or job.id
            backend.records().keep(split["shown"], job.result)
    return True


def _shown(split: State) -> PipelineRun | None:
    found = work.result(split, "shown")
    return found if isinstance(found, PipelineRun) else None


def _forecast(profile: PipelineProfile | None, plan: PipelinePlan | None, spec: RunSpec) -> tuple[Forecast | None, str]:
    """What the profile says about this plan, or why the plan cannot run."""
    if profile is None or plan is None:
        return None, ""
    try:
        return predict(profile, plan, spec.policy), ""
    except ExplorerError as error:
        return None, str(error)


def _hazards(graph: ModelGraph | None, spec: RunSpec, plan: PipelinePlan | None) -> None:
    if graph is None or plan is None:
        return
    found = hazards(graph, spec.policy, plan, msgspec.structs.replace(spec, plan=plan))
    with st.expander(
        f"Known before any run: {count(len(found), 'hazard')}", icon=":material/warning:", key="pipeline_hazards"
    ):
        hazards_panel(found)


def _bar(split: State, spec: RunSpec, plan: PipelinePlan | None, *, busy: bool) -> None:
    """Run, engine, progress, cancel."""
    if _settle(split) or (split["job"] is None and busy):
        st.rerun()
    job = backend.worker().job(split["job"]["id"]) if split["job"] else None
    button, middle, end = st.columns([2, 6, 2], vertical_alignment="center")
    with button:
        if st.button(
            "Run",
            type="primary",
            icon=":material/play_arrow:",
            key="pipeline_run",
            width="stretch",
            disabled=job is not None or plan is None,
            help="Runs the pipelined step for real, and the unsplit model beside it, and compares every gradient.",
        ):
            full = msgspec.structs.replace(spec, plan=plan)
            _start(split, RunPipeline(spec=full, engine=split["engine"], profile=_profile(spec)))
            st.rerun()
    if job is None:
        with middle:
            engine_picker(split)
        return
    progress = job.progress
    share = progress.done / progress.total if progress and progress.total else 0.0
    what = f"{progress.what} ({progress.done} of {progress.total})" if progress else "starting"
    middle.progress(min(share, 1.0), text=f"{DOING[split['job']['what']]}: {what}, {job.elapsed_s:.0f} s")
    with end:
        st.button("Cancel", icon=":material/cancel:", key="pipeline_cancel", width="stretch", on_click=job.cancel)
