"""The front as a chart: plans, presets, runs and the drawn policy as points of peak and time; a click takes one."""

from __future__ import annotations

import streamlit as st
from msgspec.structs import replace

from explorer.plan.policy.presets import preset_titles
from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast
from explorer.record.policy import KEEP_ALL, Policy
from explorer.ui.explore import work
from explorer.ui.explore.budget import points, search_of
from explorer.ui.explore.view import View, cost, cost_word, predicted, predicted_presets, view_of
from explorer.ui.explore.work import ExploreState
from explorer.ui.session.repository import runs
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.charts import draw
from explorer.ui.shared.draft import with_units
from explorer.ui.shared.elements import horizontal
from explorer.view.compare.front import Kind, Mark, front_chart
from explorer.view.drawing.units import count
from explorer.view.text import explore as glossary
from explorer.view.text import plan as words

LOOK_EVERY_S = 0.7
MOST_MEASURED = 4


def front_panel(state: ExploreState, view: View, graph: ModelGraph) -> None:
    """Draws a hint on clicks, the button that measures, and below them chart and table, redrawn as plans arrive."""
    state.charted = state.draft.spec.policy
    search = search_of(view)
    if search.plans and not search.running and not any(mark.policy.units for mark in marks_of(state, view)):
        st.caption(words.nothing_saves(graph) if len(graph.blocks) > 1 else glossary.NO_BLOCKS)
        return
    hint = words.FRONT if cost_word(view) == "time" else words.FRONT_OF_FLOPS
    with horizontal("front_row"):
        with st.container(width="stretch"):
            st.caption(words.MEASURING.format(count(len(state.to_measure), "run")) if state.to_measure else hint)
        if not drafts.why_not_run(state.draft):
            _measure_button(state, view)
    st.fragment(_chart, run_every=LOOK_EVERY_S if search.running else None)(state, graph)


def _chart(state: ExploreState, graph: ModelGraph) -> None:
    if state.charted != state.draft.spec.policy:  # a point was taken: the graph is drawn with it
        st.rerun()
    view = view_of(state)
    marks = marks_of(state, view)
    wish, search = state.budget.wish, search_of(view)
    chart = front_chart(marks, budget_bytes=wish.budget_bytes if wish is not None else None)

    def take(custom: list[str]) -> None:
        mark = next((mark for mark in marks if mark.id == custom[0]), None)  # None: a better plan took its place
        if mark is not None:
            drafts.set_policy(state.draft, with_units(state.draft.spec.policy, mark.policy.units), graph)

    draw(chart, key="front", act=take)
    if search.none_because:
        st.caption(search.none_because)
    elif search.running:
        st.caption(words.search_progress(len(search.plans), search.n_expected))


def marks_of(state: ExploreState, view: View) -> tuple[Mark, ...]:
    """All marks on the plane, in the order of the table. A measured policy has no predicted mark."""
    policy = state.draft.spec.policy
    marks = [
        _mark(view, "plan", with_units(policy, point.plan.policy.units), (point.peak_bytes, point.cost, point.spread))
        for point in points(state, view, search_of(view))
    ]
    titles = preset_titles()
    for name, (chosen, forecast) in predicted_presets(view, policy).items():
        if chosen.units and (mark := _predicted_mark(view, chosen, forecast, titles[name])) is not None:
            marks.append(mark)
    measured = _measured_marks(state, view)
    marks += measured
    drawn = next((mark for mark in measured if mark.policy == policy), None)
    drawn = drawn or _predicted_mark(view, policy, predicted(view, policy), "")
    if drawn is not None:
        marks.append(replace(drawn, kind="drawn", name="this policy"))
    return tuple(marks)


def _predicted_mark(view: View, policy: Policy, forecast: Forecast, name: str) -> Mark | None:
    peak, ratio = forecast.step_peak_bytes, cost(view, forecast)
    if peak is None or ratio is None:
        return None
    return _mark(view, "preset", policy, (peak, ratio, forecast.time_ratio_spread), name)


def _mark(view: View, kind: Kind, policy: Policy, at: tuple[int, float, float | None], name: str = "") -> Mark:
    """A predicted mark; `at`: its peak, its cost, and half the interval of the cost."""
    peak, ratio, spread = at
    return Mark(
        kind=kind, policy=policy, peak_bytes=peak, time_ratio=ratio, spread=spread, name=name, counts=cost_word(view)
    )


def _measured_marks(state: ExploreState, view: View) -> list[Mark]:
    """Runs that were compared with everything kept under the options of today, and the run that kept everything."""
    if view.predicted:
        return []
    marks = [
        Mark(
            kind="run",
            policy=point.policy,
            peak_bytes=point.step_peak_bytes,
            time_ratio=point.time_ratio,
            spread=point.time_spread,
            measured=True,
        )
        for point in runs().points(work.baseline_spec(state))
    ]
    run = view.start
    if run is not None and run.origin == "measured" and run.step_peak_bytes is not None:
        peak = run.step_peak_bytes
        marks.append(
            Mark(kind="run", policy=KEEP_ALL, peak_bytes=peak, time_ratio=1.0, measured=True, name="everything kept")
        )
    return marks


def worth_measuring(marks: tuple[Mark, ...]) -> list[Policy]:
    """Unmeasured policies worth a run: the drawn one, the least peak, the sharpest bend, half the way."""
    front = [mark for mark in marks if mark.kind == "plan"]
    picked = [mark for mark in marks if mark.kind == "drawn"]
    if len(front) > 1:
        least, most = front[0], front[-1]
        width, height = most.peak_bytes - least.peak_bytes, least.time_ratio - most.time_ratio
        bend = min(front, key=lambda mark: mark.peak_bytes / (width or 1) + mark.time_ratio / (height or 1))
        half = min(front, key=lambda mark: abs(mark.peak_bytes - (least.peak_bytes + most.peak_bytes) / 2))
        picked += [least, bend, half]
    measured = {mark.policy for mark in marks if mark.measured}
    policies = dict.fromkeys(mark.policy for mark in picked if mark.policy.units)
    return [policy for policy in policies if policy not in measured][:MOST_MEASURED]


def _measure_button(state: ExploreState, view: View) -> None:
    policies = worth_measuring(marks_of(state, view))
    st.button(
        f"Measure {count(len(policies), 'point')}" if policies else "Measure points",
        icon=":material/straighten:",
        key="measure_points",
        help=words.MEASURE,
        disabled=not policies or state.job.id is not None or bool(state.to_measure),
        on_click=lambda: work.measure(state, policies),
    )
