"""The Pipeline page: choose cuts and a schedule, then check step time, memory and gradients.

strip: step, bubble, highest peak, gradients        predicted at once with every change, measured after Run
model, plan, graph with cuts  |  schedule, memory, gradients, calls, hazards, files
run bar
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import streamlit as st
from msgspec.structs import replace

from explorer.errors import ExplorerError
from explorer.jobs.client import Job
from explorer.jobs.protocol import Describe
from explorer.pipeline.jobs import FindJointPlan, ProfileStages, RunPipeline
from explorer.pipeline.plan.cuts import atoms, left_out
from explorer.pipeline.plan.schedules import rows_of, splits_backward
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import JointPlan, PipelineProfile, PipelineRun, PlayedSchedule
from explorer.pipeline.ui import state as pipeline_state
from explorer.pipeline.ui.results import Results, result_tabs
from explorer.pipeline.ui.split_panel import cap_panel, cell, cut_graph, split_panel, take_plan, take_stages
from explorer.pipeline.ui.state import PipelineState
from explorer.pipeline.view import text as words
from explorer.pipeline.view.headline import figures
from explorer.plan.hazards.hazards import hazards
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.run import PipelinePlan, RunSpec
from explorer.ui.components import strip
from explorer.ui.session import page_job, window
from explorer.ui.session.repository import request_key, runs
from explorer.ui.session.values import whole
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.elements import escape, last_failure, two_columns
from explorer.ui.shared.model import model_row
from explorer.ui.shared.run_bar import RunBar, run_bar
from explorer.ui.shared.tour import OnPage, tour_panel
from explorer.view.compare.headline import danger
from explorer.view.drawing.units import count
from explorer.view.text.explore import Headline

TITLE, ICON, PLACE = "Pipeline", ":material/view_timeline:", 1


def page() -> None:
    """The whole page, top to bottom. The Explore page shares model, policy and options."""
    with whole():
        split = pipeline_state.current()
        page_job.attach(split.job, "pipeline")
        page_job.settle(split.job, partial(take, split))
        prepare(split)
        graph = None if split.draft.predict else drafts.graph_of(split.draft)  # stages are priced by real steps
        if graph is not None:
            pipeline_state.absorb(split, graph)

    slot = st.container()
    left, right = two_columns("pipeline_results")
    results = None
    with left:
        model_row(split.draft, partial(_choose_model, split), key="pipeline_options")
        if graph is not None:
            results = _split(split, graph)
        elif split.job.id is not None:
            st.skeleton(height=400)
    pipeline_state.to_address(split, graph)
    with slot:
        strip(tuple(cell(figure) for figure in _figures(results)))
    with right:
        has_split = results is not None and results.own_run is not None
        on_page = OnPage(model=split.draft.spec.model, is_pipeline=True, has_split=has_split)
        tour_panel(on_page, split.draft, partial(_choose_model, split))
        _trouble(split, results, graph)
        if results is not None and not window.is_known():
            st.skeleton(height=320)
        elif results is not None:
            result_tabs(results, split)
    with st.bottom:
        if results is not None and (warning := danger(results.hazards, "Hazards")):
            st.error(escape(warning), icon=":material/gpp_bad:")
        _bar(split, results.spec if results is not None and not results.fault else None)


def _figures(results: Results | None) -> tuple[Headline, ...]:
    if results is None:
        return figures(None, None, None, before=None)
    run = results.own_run
    return figures(run, results.forecast, results.plan, before=None if run is not None else results.run)


def _choose_model(split: PipelineState, model: ModelRef) -> None:
    drafts.choose_model(split.draft, model)
    pipeline_state.forget(split)


def _split(split: PipelineState, graph: ModelGraph) -> Results:
    """Draws the controls and the graph; returns the known results of the plan."""
    plan = split_panel(split, graph, profile_of(split.draft.spec))
    spec = split.draft.spec
    profile = profile_of(spec)
    full = replace(spec, plan=plan)
    run = last_run(split, full)
    fresh = run is not None and run.spec == full
    cap_panel(split, graph, profile, run if fresh else None)
    n_blocks = len(spec.policy.blocks)
    st.caption(f"{count(n_blocks, 'block')} recomputed, as on the Explore page." if n_blocks else words.KEEPS_ALL)
    if profile is not None and (missing := left_out(plan, spec.policy)):
        st.caption(escape(missing))
    cut_graph(split, graph, plan, profile)
    forecast, fault = _forecast(profile, plan, spec)
    return Results(
        spec=full,
        plan=plan,
        graph=graph,
        profile=profile,
        run=run,
        fresh=fresh,
        forecast=forecast,
        fault=fault,
        hazards=hazards(graph, spec.policy, plan, full),
    )


def _forecast(profile: PipelineProfile | None, plan: PipelinePlan, spec: RunSpec) -> tuple[PlayedSchedule | None, str]:
    """The plan simulated from the profile, or the reason why the plan cannot run. A split backward has no forecast."""
    if profile is None:
        return None, ""
    try:
        rows_of(plan)
        return None if splits_backward(plan) else predict(profile, plan, spec.policy), ""
    except ExplorerError as error:
        return None, str(error)


def _trouble(split: PipelineState, results: Results | None, graph: ModelGraph | None) -> None:
    """Links that cannot be read, runs without a result, plans that cannot run."""
    for message in filter(None, (split.draft.message, split.message)):
        st.warning(escape(message), icon=":material/link_off:")
    if split.draft.predict:
        st.info(words.NEEDS_REAL_STEPS, icon=":material/visibility:")
    last_failure(split.job, key="pipeline")
    if results is not None and results.fault:
        st.error(escape(results.fault), icon=":material/error:")
    elif results is not None and results.plan.n_ranks == 1 and len(results.plan.stages) > 1:
        st.info(words.ONE_RANK, icon=":material/info:")
        if graph is not None and len(atoms(graph)) >= 4:
            st.button(
                "Use 4 stages", icon=":material/splitscreen:", key="pipeline_four",
                on_click=take_stages, args=(split, graph, profile_of(split.draft.spec), 4),
            )  # fmt: skip


def _bar(split: PipelineState, spec: RunSpec | None) -> None:
    """Run, progress, cancel. `spec` holds the plan; None: it cannot run."""

    def start() -> None:
        if spec is not None:
            page_job.start(split.job, RunPipeline(spec=spec, profile=profile_of(spec)))

    run_bar(
        split.job,
        RunBar(
            key="pipeline_",
            help=words.RUN,
            ready=spec is not None,
            start=start,
            take=partial(take, split),
            idle=lambda: st.caption(words.IN_TURNS),
        ),
    )


def prepare(split: PipelineState) -> None:
    """On the first visit, describes the model and prices its blocks without a press. One attempt each."""
    if split.job.id is not None or split.job.run_failed or split.draft.predict:
        return
    spec = split.draft.spec
    graph = runs().graph(spec)
    if graph is None:
        page_job.start(
            split.job, Describe(model=spec.model, seed=spec.seed, device=spec.device, conditions=spec.conditions)
        )
    elif profile_of(spec) is None:
        page_job.start(split.job, ProfileStages(spec=_unsplit(spec), groups=atoms(graph)))


def take(split: PipelineState, job: Job) -> None:
    """The result of a finished job."""
    result = cast(Any, job.result)
    match job.request:
        case Describe(model=model, device=device):
            runs().add_graph(model, device, result)
        case ProfileStages(spec=spec):
            runs().of("profile").add(request_key(_unsplit(spec)), result)
        case FindJointPlan() as request:
            assert isinstance(result, JointPlan), "what FindJointPlan gives"
            take_plan(split, request, result)
        case RunPipeline(spec=spec):
            key = job.run_id or job.id
            runs().add(key, result)
            split.shown = key
            if isinstance(result, PipelineRun) and result.failure is None:
                runs().add_answer(key, "split", spec)


def profile_of(spec: RunSpec) -> PipelineProfile | None:
    """Prices of the blocks of `spec`'s model, if measured lately."""
    profile: PipelineProfile | None = runs().of("profile").get(request_key(_unsplit(spec)))
    return profile


def last_run(split: PipelineState, spec: RunSpec) -> PipelineRun | None:
    """The last run of exactly `spec`, else the last run of this page; None before the first."""
    last = _last(split)
    if last is None or last.spec != spec:
        split.shown = runs().answer("split", spec) or split.shown
        last = _last(split)
    return last if last is not None and last.spec.model == spec.model else None


def _last(split: PipelineState) -> PipelineRun | None:
    run = page_job.record(split.job, split.shown)
    if isinstance(run, PipelineRun):
        return run
    split.shown = None
    return None


def _unsplit(spec: RunSpec) -> RunSpec:
    """The specification without plan and recompute. A profile prices each block kept and recomputed, so one profile
    serves every plan and policy; units that save operators or offload stay in the specification."""
    special = tuple(unit for unit in spec.policy.units if unit.action != "recompute")
    return replace(spec, policy=replace(spec.policy, units=special), plan=None)
