"""Run at the bottom of the Explore page, and beside it what is under way."""

from __future__ import annotations

import streamlit as st

from explorer.record.graph import ModelGraph
from explorer.ui.explore import state as states
from explorer.ui.explore import work
from explorer.ui.explore.shown import shown
from explorer.ui.explore.state import State
from explorer.ui.session.plain import plain
from explorer.ui.shared.progress import watch
from explorer.view.words import explore as glossary
from explorer.view.words.cut_short import what_failed

DOING = {
    "Describe": "Reading the model",
    "Measure": "Measuring the baseline",
    "Compare": "Running baseline and candidate",
    "DrawAutograd": "Drawing the autograd graph",
    "DeriveMatrix": "Taking derivatives of every kind",
}
RUN_WIDTH = 140


def run_bar(state: State, graph: ModelGraph | None) -> None:
    """A press on Run draws this bar again and nothing else; the rest of the page stays usable."""
    st.fragment(_bar)(state, graph)


def _bar(state: State, graph: ModelGraph | None) -> None:
    if state["asked"]:
        _start(state, graph)
    busy = state["job"] is not None
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="run_row"):
        st.button(
            "Run",
            type="primary",
            icon=":material/play_arrow:",
            key="run",
            width=RUN_WIDTH,
            disabled=busy or graph is None,
            help=glossary.RUN,
            on_click=lambda: state.update(asked=True),
        )
        with st.container(width="stretch"):
            if busy:
                watch(lambda: work.under_way(state), DOING[state["job"]["what"]], key="cancel")
            else:
                st.caption(plain(_said(state)))


def _start(state: State, graph: ModelGraph | None) -> None:
    """Starts what was asked for. An old failure leaves the page, a new one comes onto it: that draws the whole page."""
    state["asked"] = False
    if graph is not None:
        states.absorb(state, graph)
    failed = state["failure"] is not None
    work.compare(state)
    if failed or state["failure"] is not None:
        st.rerun()


def _said(state: State) -> str:
    if state["failure"]:
        return "The last run has no result; the reason is shown above."
    known = shown(state)
    if known.freshness == "fresh":
        return "Measured. Change the policy and run again to compare anew."
    if known.freshness == "failed" and known.comparison is not None:
        return f"The {what_failed(known.comparison)}; nothing was measured whole."
    if states.spec_of(state).policy.units:
        return "Not measured yet: Run takes real steps of the baseline and of this policy."
    return "Choose blocks to recompute, then run both: the baseline, and your policy."
