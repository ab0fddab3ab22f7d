"""A cap for every rank, and the button that chooses cuts, microbatches and policy together below it."""

from __future__ import annotations

import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.planners.joint import joint_plan
from explorer.plan.sizes import parse_bytes
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.plan import JointPlan
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline.plan_panel import plan_of
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.session import page_job
from explorer.ui.session.bound import bound
from explorer.ui.session.plain import plain
from explorer.ui.shared import draft as drafts
from explorer.view.words import pipeline as words

CAP_WIDTH = 170


def cap_panel(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """The field and its button, and what came of the last press."""
    typed = bound("pipeline_cap", split.cap, lambda text: setattr(split, "cap", text))
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="pipeline_cap_row"):
        st.text_input(
            "Cap a rank",
            typed.value,
            key=typed.key,
            on_change=typed.on_change,
            placeholder="200MiB",
            help=words.CAP,
            width=CAP_WIDTH,
        )
        st.button(
            "Plan below the cap",
            icon=":material/auto_awesome:",
            key="pipeline_plan_button",
            help=words.CAP,
            disabled=profile is None,
            on_click=_plan,
            args=(split, graph, profile),
        )
    if split.planned is not None and _is_drawn(split, graph, split.planned):
        st.caption(plain(words.planned(split.planned)))


def _plan(split: PipelineState, graph: ModelGraph, profile: PipelineProfile | None) -> None:
    """Takes over what was planned: the cut and the policy are a step of undo each."""
    if profile is None:
        return
    pipeline_state.absorb(split, graph, until_press=True)
    asked = plan_of(split, pipeline_state.stages_of(split, graph))
    split.planned, split.job.failure = None, None
    try:
        found = joint_plan(profile, graph, asked, parse_bytes(split.cap))
    except ExplorerError as error:
        page_job.fail(split.job, error)
        return
    _adopt(split, graph, found)


def _adopt(split: PipelineState, graph: ModelGraph, found: JointPlan) -> None:
    pipeline_state.choose(split, "n_microbatches", found.plan.n_microbatches)
    pipeline_state.cut_at(split, graph, found.plan.stages)
    pipeline_state.recompute(split, graph, drafts.with_units(split.draft.spec.policy, found.policy.units))
    split.planned = found


def _is_drawn(split: PipelineState, graph: ModelGraph, found: JointPlan) -> bool:
    """Whether nothing was chosen since."""
    drawn = plan_of(split, pipeline_state.stages_of(split, graph))
    return drawn == found.plan and set(split.draft.spec.policy.blocks) == set(found.policy.blocks)
