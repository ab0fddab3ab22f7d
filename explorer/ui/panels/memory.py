"""Where the peak is, what is alive there, and why the policy helped or did not."""

from __future__ import annotations

import streamlit as st

from explorer.plan.explain import explain
from explorer.plan.ledger import ledger
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.ledger import Ledger
from explorer.record.measurement import Measurement
from explorer.ui import glossary
from explorer.ui.bound import show
from explorer.ui.panels.charts import chart, pickable_chart, twin
from explorer.view.axis import Axis
from explorer.view.ledger import ledger_alt, ledger_chart, ledger_table
from explorer.view.roles import roles, roles_alt, roles_table
from explorer.view.timeline import timeline, timeline_alt, timeline_table
from explorer.view.units import mib

TWO, OF_BASELINE, OF_CANDIDATE = "Both runs", "Baseline by role", "Candidate by role"
Picked = tuple[str, int] | None
"""Run and tick of a point in the timeline."""


def memory_panel(
    baseline: Measurement, comparison: Comparison | None, graph: ModelGraph | None, *, block: str, picked: Picked
) -> Picked:
    """The timelines, the ledger at the picked point (the peak unless one was picked), the reasons. Returns the pick."""
    candidate = comparison.candidate if comparison else None
    views = [TWO, OF_BASELINE, OF_CANDIDATE] if candidate else [OF_BASELINE]
    left, right = st.columns([4, 2], vertical_alignment="center")
    with left:
        view = st.segmented_control(
            "View", views, key=show("memory_view", views[0]), required=True, label_visibility="collapsed"
        )
    with right:
        timed = st.toggle(
            "Axis in time", key="memory_time", help="Milliseconds, recording included, instead of events."
        )
    axis: Axis = "time" if timed else "tick"
    if view == TWO and candidate:
        figure, alt, table = (
            timeline(baseline, candidate, axis=axis),
            timeline_alt(baseline, candidate),
            timeline_table(baseline, candidate),
        )
    else:
        run = candidate if view == OF_CANDIDATE and candidate else baseline
        figure, alt, table = (
            roles(run, block=block or None, axis=axis),
            roles_alt(run),
            roles_table(run, block=block or None),
        )
    custom = pickable_chart(figure, key=f"memory_{views.index(view or views[0])}_{axis}", alt=alt, height=340)
    if custom:
        name = "candidate" if view == OF_CANDIDATE or custom[0] == "candidate" else "baseline"
        picked = (name, int(custom[1]))
    if comparison and graph:
        _why(comparison, graph)
    _alive(baseline, candidate, picked)
    twin(table, key="timeline", what="the memory timeline")
    return picked


def ledger_of(baseline: Measurement | None, candidate: Measurement | None, picked: Picked) -> Ledger | None:
    """What is alive at the picked point; None where nothing is picked or that run has no timeline."""
    if picked is None:
        return None
    run = candidate if picked[0] == "candidate" else baseline
    if run is None or run.allocations is None or picked[1] > run.allocations.n_ticks:
        return None
    return ledger(run, picked[1])


def _alive(baseline: Measurement, candidate: Measurement | None, picked: Picked) -> None:
    run = candidate if candidate and (picked is None or picked[0] == "candidate") else baseline
    if run.allocations is None:
        return
    name = "candidate" if run is candidate else "baseline"
    at = ledger(run, picked[1] if picked and picked[0] == name and picked[1] <= run.allocations.n_ticks else None)
    where = "at the peak" if at.is_peak else f"at event {at.tick}"
    st.markdown(f"**Alive {where} of the {name}: {mib(at.total_bytes)}**", help=glossary.STEP_PEAK)
    st.caption("Click the line above to see another moment; ◎ on a block shows its share.")
    chart(ledger_chart(at), key="ledger", alt=ledger_alt(at))
    twin(ledger_table(at), key="ledger", what="what is alive")


def _why(comparison: Comparison, graph: ModelGraph) -> None:
    reasons = explain(comparison, graph)
    if reasons:
        with st.container(border=True, gap="xsmall", key="why"):
            st.markdown("**Why**")
            for reason in reasons:
                st.text(reason)
