"""Where to split the model, which schedule drives the stages, and does the gradient survive it?

strip: step, bubble, highest peak, gradients        predicted at once with every change, measured after Run
model, plan, graph with cuts  |  schedule, memory, gradients, calls, hazards, files
run bar
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.hazards.known import hazards
from explorer.plan.pipeline.stage_costs import left_out, predict
from explorer.record.base import from_plain
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.pipeline_plan import PipelinePlan
from explorer.record.pipeline_run import PlayedSchedule
from explorer.record.run import RunSpec
from explorer.ui.explore import state as states
from explorer.ui.explore.run_bar import RUN_WIDTH
from explorer.ui.explore.state import State
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline import work as pipeline_work
from explorer.ui.pipeline.cut_graph import cut_graph
from explorer.ui.pipeline.plan_panel import engine_picker, plan_panel, strip
from explorer.ui.pipeline.results import Results, result_tabs
from explorer.ui.session import backend, window
from explorer.ui.session.plain import plain
from explorer.ui.shared.failure import failure_panel
from explorer.ui.shared.model import arguments_panel, changed_line, model_panel, options_panel
from explorer.ui.shared.progress import watch
from explorer.view.drawing.units import count
from explorer.view.pipeline.headline import figures
from explorer.view.words import pipeline as words

RIGHT_HEIGHT = 520
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
    pipeline_work.attach(split)
    pipeline_work.settle(split)
    pipeline_work.prepare(split, states.spec_of(state))
    graph = backend.graph_of(states.spec_of(state).model)
    if graph is not None:
        pipeline_state.absorb(split, state, graph)

    slot = st.container()
    if window.narrow():
        left, right, height = st.container(), st.container(), None
    else:
        left, right = st.columns([6, 8], gap="medium")
        height = RIGHT_HEIGHT + window.extra_height()
    found = None
    with left:
        _choices(split, state, samples)
        if graph is not None:
            found = _plan(split, state, graph)
        elif split["job"]:
            st.skeleton(height=400)
    pipeline_state.to_address(split, state, graph)
    run = found.own_run if found else None
    with slot:
        strip(
            figures(
                run,
                found.forecast if found else None,
                found.plan if found else None,
                before=found.run if found and not run else None,
            )
        )
    with right, st.container(height=height or "content", border=False, key="pipeline_results"):
        _trouble(split, state, found)
        if found is not None and not window.is_known():
            st.skeleton(height=320)
        elif found is not None:
            result_tabs(found, split)
    with st.bottom:
        st.fragment(_bar)(split, state, found.spec if found is not None and not found.fault else None)


def _choices(split: State, state: State, samples: tuple[Any, ...]) -> None:
    """Model and options, the same as on Explore; a change takes effect at once."""
    spec = states.spec_of(state)
    graph = backend.graph_of(spec.model)
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_options"):
        model_panel(spec.model, samples, partial(_choose_model, split, state))
        arguments_panel(spec.model, samples, partial(_choose_model, split, state))
        options_panel(spec, graph, partial(states.set_option, state, graph))
    changed_line(spec)


def _choose_model(split: State, state: State, model: ModelRef) -> None:
    states.choose_model(state, model)
    pipeline_state.forget(split)


def _plan(split: State, state: State, graph: ModelGraph) -> Results:
    """The controls and the graph, and everything that is known about the plan they say."""
    plan = plan_panel(split, state, graph, pipeline_work.profile_of(states.spec_of(state)))
    spec = states.spec_of(state)
    profile = pipeline_work.profile_of(spec)
    n_blocks = len(spec.policy.blocks)
    st.caption(f"{count(n_blocks, 'block')} recomputed, as on the Explore page." if n_blocks else words.KEEPS_ALL)
    if profile is not None and (missing := left_out(plan, spec.policy)):
        st.caption(plain(missing))
    cut_graph(split, state, graph, plan, profile)
    full = msgspec.structs.replace(spec, plan=plan)
    run = pipeline_work.shown(split, full)
    forecast, fault = _forecast(profile, plan, spec)
    return Results(
        spec=full,
        plan=plan,
        run=run,
        fresh=run is not None and run.spec == full,
        forecast=forecast,
        fault=fault,
        hazards=hazards(graph, spec.policy, plan, full),
    )


def _forecast(profile: PipelineProfile | None, plan: PipelinePlan, spec: RunSpec) -> tuple[PlayedSchedule | None, str]:
    """What the profile says about this plan, or why the plan cannot run."""
    if profile is None:
        return None, ""
    try:
        return predict(profile, plan, spec.policy), ""
    except ExplorerError as error:
        return None, str(error)


def _trouble(split: State, state: State, found: Results | None) -> None:
    """Links that cannot be read, runs without a result, plans that cannot run."""
    for holder in (state, split):
        if holder["message"]:
            st.warning(plain(holder["message"]), icon=":material/link_off:")
    if split["failure"] and failure_panel(from_plain(split["failure"], Failure), key="pipeline"):
        split["failure"] = None
        st.rerun()
    if found is not None and found.fault:
        st.error(plain(found.fault), icon=":material/error:")
    elif found is not None and found.plan.n_ranks == 1 and len(found.plan.stages) > 1:
        st.info(words.ONE_RANK, icon=":material/info:")


def _bar(split: State, state: State, spec: RunSpec | None) -> None:
    """Run, engine, progress, cancel. `spec` holds the plan; None: it cannot run."""
    if split["asked"]:
        _start(split, state, spec)
    busy = split["job"] is not None
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="pipeline_bar"):
        st.button(
            "Run",
            type="primary",
            icon=":material/play_arrow:",
            key="pipeline_run",
            width=RUN_WIDTH,
            disabled=busy or spec is None,
            help=words.RUN,
            on_click=lambda: split.update(asked=True),
        )
        with st.container(width="stretch"):
            if busy:
                watch(lambda: pipeline_work.under_way(split), DOING[split["job"]["what"]], key="pipeline_cancel")
            else:
                engine_picker(split)


def _start(split: State, state: State, spec: RunSpec | None) -> None:
    """Starts what was asked for. An old failure leaves the page, a new one comes onto it: that draws the whole page."""
    split["asked"] = False
    failed = split["failure"] is not None
    if spec is not None:
        pipeline_work.run(split, spec)
        pipeline_state.to_address(split, state, backend.graph_of(spec.model))
    if failed or split["failure"] is not None:
        st.rerun()
