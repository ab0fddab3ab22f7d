"""Panel on the peak: its moment, the bytes alive there, and the reason why the policy helped or did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from explorer.plan.memory.ledger import ledger
from explorer.plan.why.caveats import beside_peak
from explorer.plan.why.peak import explain, explain_one
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.ui.explore import state as states
from explorer.ui.explore.forecast import foretold_line
from explorer.ui.explore.shown import Picked, Shown
from explorer.ui.explore.state import ExploreState
from explorer.ui.session import backend
from explorer.ui.session.bound import bound
from explorer.ui.session.plain import plain
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.charts import draw
from explorer.ui.shared.fold import fold
from explorer.view.drawing.axis import Axis, has_times
from explorer.view.drawing.figure import Chart
from explorer.view.drawing.rows import ROOT_LABEL
from explorer.view.drawing.units import mib
from explorer.view.memory.ledger import ledger_chart, place
from explorer.view.memory.stacked import by_block, roles
from explorer.view.memory.timeline import add_predicted, timeline
from explorer.view.text import explore as glossary

TWO, OF_BASELINE, OF_CANDIDATE = "Both runs", "Baseline by role", "Candidate by role"


def memory_panel(state: ExploreState, view: Shown, graph: ModelGraph | None, *, block: str) -> None:
    """Draws the timelines, the ledger at the picked point (the peak by default) and the reasons.

    The panel is empty without a measured baseline.
    """
    at, baseline = state.tick, view.charted
    if baseline is None:
        return
    candidate = view.comparison.candidate if view.comparison else None
    views = [TWO, OF_BASELINE, OF_CANDIDATE] if candidate else [OF_BASELINE]
    left, right = st.columns([4, 2], vertical_alignment="center")
    with left:
        choice = _view_picker(state, views)
    with right:
        timed = st.toggle(
            "Axis in time",
            key="memory_time",
            help="Milliseconds, phase by phase as in steps without recording.",
            disabled=not has_times(baseline, candidate),
        )
        stacked = _by_block() if choice != TWO else False
    axis: Axis = "time" if timed else "tick"
    reasons = _reasons(view, baseline, graph)
    _answer(state, baseline, candidate, at)
    if choice == TWO and candidate:
        chart = timeline(baseline, candidate, axis=axis, cursor=at, why=reasons[0] if reasons else "")
    else:
        name = "candidate" if choice == OF_CANDIDATE and candidate else "baseline"
        run = candidate if name == "candidate" and candidate else baseline
        cursor = at[1] if at and at[0] == name else None
        if stacked:
            chart = by_block(run, axis=axis, cursor=cursor)
        else:
            chart = roles(run, block=block or None, axis=axis, cursor=cursor)

    if choice != OF_CANDIDATE:
        _foretell(state, view, chart, over=candidate if choice == TWO else None, axis=axis)

    def pick(custom: list[Any]) -> None:
        of_candidate = choice == OF_CANDIDATE or custom[0] == "candidate"
        state.tick = ("candidate" if of_candidate else "baseline", int(custom[1]))

    height, kind = (None, "_blocks") if stacked else (340, "")  # a block's band needs its line in the legend
    draw(chart, key=f"memory_{views.index(choice or views[0])}_{axis}{kind}", height=height, act=pick)
    _why(reasons[1:] if choice == TWO else reasons)
    _alive(baseline, candidate, at, lambda fqns: _select(state, graph, fqns))


def _reasons(view: Shown, baseline: Measurement, graph: ModelGraph | None) -> tuple[str, ...]:
    if view.comparison is not None:
        return explain(view.comparison, graph) if graph else ()
    described = graph.fingerprint if graph else ""
    key = f"why {view.baseline_key} {described}"  # a toggle does not change measured results
    reasons: tuple[str, ...] | None = backend.records().get(key)
    if reasons is None:
        reasons = explain_one(baseline, graph)
        backend.records().keep(key, reasons)
    return reasons


def _foretell(state: ExploreState, view: Shown, chart: Chart, *, over: Measurement | None, axis: Axis) -> None:
    """Draws the unmeasured policy as a dashed line; from then on each toggle redraws the chart."""
    policy, baseline = state.draft.spec.policy, view.charted
    state.charted = policy
    if baseline is None or view.candidate is not None or view.kept is None or view.kept.spec != baseline.spec:
        return
    line = foretold_line(view.kept, drafts.graph_of(state.draft), policy, key=view.kept_key)
    if line is not None:
        add_predicted(chart, line, baseline, over=over, axis=axis)


def _by_block() -> bool:
    """Whether one run is stacked by block instead of by role."""
    return bool(
        st.toggle(
            "Stacked by block",
            key="memory_by_block",
            help="One band a block, piling up in forward and draining in backward; what runs again lies on top.",
        )
    )


def _answer(state: ExploreState, baseline: Measurement, candidate: Measurement | None, at: Picked) -> None:
    """Writes the bytes held at the picked moment above the chart, with a button back to the peak."""
    run = candidate if at and at[0] == "candidate" else baseline
    if at is None or run is None or run.allocations is None or at[1] > run.allocations.n_ticks:
        return
    alive = ledger(run, at[1])
    largest = ", ".join(f"{fqn or ROOT_LABEL} {mib(size)}" for fqn, size in list(alive.by_block.items())[:3])
    with st.container(horizontal=True, vertical_alignment="center", key="moment"):
        st.text(f"Event {at[1]:,} of the {at[0]}, {place(alive)}: {mib(alive.total_bytes)} held, most by {largest}.")
        st.button(
            "Back to the peak",
            icon=":material/vertical_align_top:",
            key="to_peak",
            on_click=lambda: setattr(state, "tick", None),
        )


def _view_picker(state: ExploreState, views: list[str]) -> str:
    asked = views[-1] if state.view == states.BY_ROLE else state.view
    shown = bound("memory_view", asked if asked in views else views[0], lambda view: setattr(state, "view", view))
    st.segmented_control(
        "View",
        views,
        default=shown.value,
        required=True,
        label_visibility="collapsed",
        **shown.wired,
    )
    return str(shown.value)


def _select(state: ExploreState, graph: ModelGraph | None, fqns: list[str]) -> None:
    """The first block of a row is selected and scrolled to, as if it were clicked in the graph."""
    fqn = next((fqn for fqn in fqns if graph is not None and fqn in graph.by_fqn and fqn), None)
    if graph is not None and fqn is not None:
        states.select(state, graph, fqn)


def _alive(
    baseline: Measurement, candidate: Measurement | None, picked: Picked, select: Callable[[list[str]], None]
) -> None:
    run = candidate if candidate and (picked is None or picked[0] == "candidate") else baseline
    if run.allocations is None:
        return
    name = "candidate" if run is candidate else "baseline"
    at = ledger(run, picked[1] if picked and picked[0] == name and picked[1] <= run.allocations.n_ticks else None)
    where = "at the peak" if at.is_peak else f"at event {at.tick}"
    st.markdown(f"**Alive {where} of the {name}: {mib(at.total_bytes)}**", help=glossary.STEP_PEAK)
    st.caption("Click the line above to see another moment, a bar to find its block; ◎ on a block shows its share.")
    for caveat in beside_peak(run):
        st.caption(plain(caveat))
    names = [cost.fqn for cost in run.blocks]
    draw(ledger_chart(at, names), key="ledger", act=lambda custom: select(custom[0].split(" ")))


def _why(reasons: tuple[str, ...]) -> None:
    """Draws further reasons; the chart of both runs has the first reason under its title."""
    if reasons:
        with fold("Why", icon=":material/help:", key="why"):
            for reason in reasons:
                st.text(reason)
