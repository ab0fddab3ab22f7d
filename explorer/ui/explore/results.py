"""The tabs beside the graph: memory, budget, cost, gradients, blocks, autograd. Hidden tabs are not computed."""

from __future__ import annotations

import streamlit as st

from explorer.jobs.protocol import DrawAutograd
from explorer.plan.hazards.hazards import hazards
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.ui.explore import work
from explorer.ui.explore.front import front_panel
from explorer.ui.explore.memory import memory_panel
from explorer.ui.explore.panels import autograd_panel, cost_panel, gradients_panel, table_panel
from explorer.ui.explore.shown import Freshness, Shown
from explorer.ui.explore.state import ExploreState
from explorer.ui.session import page_job
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.failure import failure_panel
from explorer.ui.shared.fold import fold
from explorer.ui.shared.hazards import hazards_panel
from explorer.ui.shared.readable import small
from explorer.view.compare.headline import errors
from explorer.view.drawing.units import count
from explorer.view.graph.nesting import RUN
from explorer.view.text import explore as glossary
from explorer.view.text.runs import what_failed

TABS = ["Memory", "Budget", "Cost", "Gradients", "Blocks", "Autograd"]


def results(state: ExploreState, view: Shown) -> None:
    """Draws the measured results of the last comparison, else of the baseline alone."""
    graph = drafts.graph_of(state.draft)
    comparison, baseline = view.comparison, view.charted
    tabs = st.tabs(TABS, key="tabs", on_change="rerun")
    if baseline is None:
        with tabs[0]:
            _waiting(state)
        return
    block = drafts.marks_of(state.draft, graph).selected.removeprefix(RUN) if graph is not None else ""
    why_not = drafts.why_not_run(state.draft)
    memory, budget, cost, gradients, blocks, autograd = tabs
    if memory.open:
        with memory:
            _memory(state, view, graph, block)
    if budget.open and graph is not None:
        with budget:
            front_panel(state, view, graph)
    if cost.open:
        with cost:
            _cost(comparison, glossary.NOT_PLAYED if state.draft.predict else why_not or glossary.EMPTY)
    if gradients.open:
        with gradients:
            _gradients(state, graph, comparison)
    if blocks.open:
        with blocks:
            table_panel(comparison if comparison is not None and comparison.comparable else baseline, block=block)
    if autograd.open and graph is not None:
        with autograd:
            if why_not:
                st.caption(why_not)
                return
            asked = autograd_panel(graph, work.result(state, "pictures"), block=block, busy=state.job.id is not None)
            if asked is not None:
                _start(state, DrawAutograd(spec=state.draft.spec, block=asked))


def _start(state: ExploreState, request: DrawAutograd) -> None:
    page_job.start(state.job, request)
    st.rerun()


def _waiting(state: ExploreState) -> None:
    if state.job.id is not None:
        done = "played" if state.draft.predict else "measured"
        st.caption(f"The model is read and its baseline {done}; the charts follow in a few seconds.")
        st.skeleton(height=320)
    else:
        st.caption(
            glossary.NOT_PLAYED if state.draft.predict else "Nothing was measured yet. Press **Run** at the bottom."
        )


def _memory(state: ExploreState, view: Shown, graph: ModelGraph | None, block: str) -> None:
    candidate = view.comparison.candidate if view.comparison is not None else None
    for name, run in (("baseline", view.charted), ("candidate", candidate)):
        if run is not None and run.failure is not None:
            failure_panel(run.failure, key=name)
    memory_panel(state, view, graph, block=block)


def _cost(comparison: Comparison | None, why_empty: str) -> None:
    if comparison is None:
        st.caption(why_empty)
    elif comparison.comparable:
        cost_panel(comparison)
    else:
        st.text(f"The {what_failed(comparison)}: what a whole step costs is not known.")


def _gradients(state: ExploreState, graph: ModelGraph | None, comparison: Comparison | None) -> None:
    spec = state.draft.spec
    if graph is not None:
        known = hazards(graph, spec.policy, spec.plan, spec)
        with fold(
            f"Known before any run: {count(len(known), 'hazard')}",
            icon=":material/warning:",
            key="hazards_with_errors" if errors(known) else "hazards",
            expanded=bool(errors(known)),
        ):
            hazards_panel(known)
    if comparison is None or comparison.is_predicted:
        st.caption(drafts.why_not_run(state.draft) or glossary.EMPTY)
        return
    if comparison.candidate.spec != spec:
        small(glossary.FRESHNESS[Freshness.STALE])
    if comparison.failure is not None:
        failure_panel(comparison.failure, key="comparison")
    gradients_panel(comparison)
