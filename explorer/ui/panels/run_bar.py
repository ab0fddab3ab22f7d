"""Run, progress, cancel: what is happening, how far it is, how long it has taken."""

from __future__ import annotations

import streamlit as st

from explorer.jobs.client import Job
from explorer.record.graph import ModelGraph
from explorer.ui import glossary, work
from explorer.ui import state as states
from explorer.ui.state import State

DOING = {
    "Describe": "Reading the model",
    "Measure": "Measuring the baseline",
    "Compare": "Running baseline and candidate",
    "DrawAutograd": "Drawing the autograd graph",
    "DeriveMatrix": "Taking derivatives of every kind",
}
LOOK_EVERY_S = 0.2
RUN_WIDTH = 140


def run_bar(state: State, graph: ModelGraph | None) -> None:
    """Looks at the job five times a second while there is one; the rest of the page stays usable."""
    busy = state["job"] is not None
    st.fragment(_bar, run_every=LOOK_EVERY_S if busy else None)(state, graph, shown_busy=busy)


def _bar(state: State, graph: ModelGraph | None, *, shown_busy: bool) -> None:
    job = work.running(state)
    if work.settle(state) or (job is None and shown_busy):
        st.rerun()
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="run_row"):
        _row(state, graph, job)


def _row(state: State, graph: ModelGraph | None, job: Job | None) -> None:
    if st.button(
        "Run",
        type="primary",
        icon=":material/play_arrow:",
        key="run",
        width=RUN_WIDTH,
        disabled=job is not None or graph is None,
        help=glossary.RUN,
    ):
        if graph is not None:
            states.absorb(state, graph)
        work.compare(state)
        st.rerun()
    if job is None:
        with st.container(width="stretch"):
            st.caption(_said(state))
        return
    progress = job.progress
    share = progress.done / progress.total if progress and progress.total else 0.0
    what = f"{progress.what} ({progress.done} of {progress.total})" if progress else "starting"
    doing = DOING[state["job"]["what"]]
    with st.container(width="stretch"):
        st.progress(min(share, 1.0), text=f"{doing}: {what}, {job.elapsed_s:.0f} s")
    st.button("Cancel", icon=":material/cancel:", key="cancel", on_click=work.cancel, args=(state,))


def _said(state: State) -> str:
    if state["failure"]:
        return "The last run has no result; the reason is shown above."
    if state["shown"]:
        return "Measured. Change the policy and run again to compare anew."
    return "Choose blocks to recompute, then run both: the baseline, and your policy."
