"""A cap for every rank, and the button that has cuts, microbatches and policy chosen together below it."""

from __future__ import annotations

import streamlit as st

from explorer.errors import InvalidPlan
from explorer.jobs.protocol import FindJointPlan
from explorer.plan.sizes import parse_bytes
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.pipeline_run import PipelineRun
from explorer.record.plan import CapWish, JointPlan
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline.plan_panel import plan_of
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.session import backend, page_job
from explorer.ui.session.bound import bound
from explorer.ui.session.plain import plain
from explorer.ui.shared import draft as drafts
from explorer.view.text import pipeline as words

CAP_WIDTH = 170


def cap_panel(
    split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None, run: PipelineRun | None
) -> None:
    """Draws the field and its button, the outcome of the last press, and whether `run` kept the cap."""
    typed = bound("pipeline_cap", split.cap, lambda text: setattr(split, "cap", text))
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_cap_row"):
        st.text_input(
            "Cap a rank",
            typed.value,
            placeholder="200MiB",
            help=words.CAP,
            width=CAP_WIDTH,
            **typed.wired,
        )
        st.button(
            "Plan below the cap",
            icon=":material/auto_awesome:",
            key="pipeline_plan_button",
            help=words.CAP,
            disabled=profile is None or split.job.id is not None,
            on_click=_plan,
            args=(split, graph, profile),
        )
    if split.planned is not None and _is_drawn(split, graph, split.planned):
        st.caption(plain(words.plan_sentence(split.planned)))
        if run is not None and (outcome := words.cap_outcome(run, split.planned)):
            colour = "green" if words.within_cap(run, split.planned) else "red"
            st.caption(f":{colour}[**{plain(outcome.replace('cap', 'Cap', 1))}.**]")


def _plan(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Submits the search for a plan below the cap to the worker, as many cuts are simulated."""
    if profile is None:
        return
    pipeline_state.absorb(split, graph, until_press=True)
    split.planned, split.job.failure = None, None
    with page_job.refusing(split.job):
        wish = CapWish(asked=plan_of(split, pipeline_state.stages_of(split, graph)), cap_bytes=parse_bytes(split.cap))
        page_job.start(split.job, FindJointPlan(profile=profile, graph=graph, wish=wish))


def take_plan(split: PipelineState, request: FindJointPlan, joint: JointPlan) -> None:
    """Takes over the joint plan, unless the drawn plan changed meanwhile. Cut and policy are one step of undo each."""
    graph, drawn = request.graph, backend.graph_of(split.draft.spec)
    if drawn != graph or plan_of(split, pipeline_state.stages_of(split, graph)) != request.wish.asked:
        page_job.refuse(
            split.job, InvalidPlan("The plan was changed while another was sought.", hint="Plan once more.")
        )
        return
    pipeline_state.choose(split, "n_microbatches", joint.plan.n_microbatches)
    pipeline_state.cut_at(split, graph, joint.plan.stages)
    pipeline_state.recompute(split, graph, drafts.with_units(split.draft.spec.policy, joint.policy.units))
    split.planned = joint


def _is_drawn(split: PipelineState, graph: ModelGraph, joint: JointPlan) -> bool:
    """Whether nothing was chosen since."""
    drawn = plan_of(split, pipeline_state.stages_of(split, graph))
    return drawn == joint.plan and set(split.draft.spec.policy.blocks) == set(joint.policy.blocks)
