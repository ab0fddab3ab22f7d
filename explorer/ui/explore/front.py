"""The front as a chart: plans, presets, runs and the drawn policy as points of peak and time; a click takes one."""

from __future__ import annotations

import msgspec
import streamlit as st

from explorer.plan.policy.presets import preset_titles
from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast
from explorer.record.policy import KEEP_ALL, Policy
from explorer.ui.explore import plans, work
from explorer.ui.explore.budget import points
from explorer.ui.explore.shown import Shown, cost, cost_word, predicted, predicted_presets, shown
from explorer.ui.explore.state import ExploreState
from explorer.ui.session import known as known_runs
from explorer.ui.session import pins
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.charts import draw
from explorer.ui.shared.draft import with_units
from explorer.view.compare.front import CostWord, Mark, front_chart
from explorer.view.drawing.units import count
from explorer.view.text import plan as words

LOOK_EVERY_S = 0.7
MOST_MEASURED = 4


def front_panel(state: ExploreState, view: Shown, graph: ModelGraph) -> None:
    """Draws a hint on clicks, the button that measures, and below them chart and table, redrawn as plans arrive."""
    state.charted = state.draft.spec.policy
    search = plans.look(view, graph)
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="front_row"):
        with st.container(width="stretch"):
            st.caption(words.measuring_text(len(state.to_measure)) if state.to_measure else words.FRONT)
        if not drafts.why_not_run(state.draft):
            _measure(state, view, graph)
    st.fragment(_chart, run_every=LOOK_EVERY_S if search.running else None)(state, graph)


def _chart(state: ExploreState, graph: ModelGraph) -> None:
    if state.charted != state.draft.spec.policy:  # a point was taken: the graph is drawn with it
        st.rerun()
    known = shown(state)
    marks = marks_of(state, known, graph)
    wish = state.budget.wish
    search = plans.look(known, graph)
    chart = front_chart(marks, budget_bytes=wish.budget_bytes if wish is not None else None)
    draw(chart, key="front", act=lambda custom: _take(state, graph, marks[int(custom[0])]))
    if search.none_because:
        st.caption(search.none_because)
    elif search.running:
        st.caption(words.search_progress(len(search.plans), search.n_expected))


def _take(state: ExploreState, graph: ModelGraph, mark: Mark) -> None:
    drafts.set_policy(state.draft, with_units(state.draft.spec.policy, mark.policy.units), graph)


def marks_of(state: ExploreState, known: Shown, graph: ModelGraph) -> tuple[Mark, ...]:
    """All marks on the plane, in the order of the table. A measured policy has no predicted mark."""
    policy = state.draft.spec.policy
    front, counts = points(state, known, graph, plans.look(known, graph)), cost_word(known)
    marks = [
        Mark(
            kind="plan",
            policy=with_units(policy, point.plan.policy.units),
            peak_bytes=point.peak_bytes,
            time_ratio=point.cost,
            spread=point.spread,
            counts=counts,
        )
        for point in front
    ]
    titles = preset_titles()
    for name, (chosen, one) in predicted_presets(known, graph, policy).items():
        if chosen.units and (mark := _foretold(chosen, one, titles[name], counts)) is not None:
            marks.append(mark)
    runs = _runs(state, known)
    marks += runs
    own = next((run for run in runs if run.policy == policy), None)
    drawn = own or _foretold(policy, predicted(known, graph, policy), "", counts)
    if drawn is not None:
        marks.append(_as_drawn(drawn))
    return tuple(marks)


def _foretold(policy: Policy, one: Forecast, name: str, counts: CostWord) -> Mark | None:
    ratio = cost(one)
    if one.step_peak_bytes is None or ratio is None:
        return None
    return Mark(
        kind="preset", policy=policy, peak_bytes=one.step_peak_bytes, time_ratio=ratio, name=name,
        spread=one.time_ratio_spread, counts=counts,
    )  # fmt: skip


def _as_drawn(mark: Mark) -> Mark:
    return Mark(
        kind="drawn", policy=mark.policy, peak_bytes=mark.peak_bytes, time_ratio=mark.time_ratio,
        name="the policy that is drawn", spread=mark.spread, measured=mark.measured, counts=mark.counts,
    )  # fmt: skip


def _runs(state: ExploreState, known: Shown) -> list[Mark]:
    """Runs that were compared with everything kept under the options of today; and that itself."""
    if known.foreseen:
        return []
    baseline = msgspec.structs.replace(pins.baseline_of(state.draft.spec), policy=KEEP_ALL)
    marks = [
        Mark(
            kind="run", policy=one.policy, peak_bytes=one.step_peak_bytes, time_ratio=one.time_ratio,
            spread=one.time_spread, measured=True,
        )
        for one in known_runs.points(baseline)
    ]  # fmt: skip
    kept = known.kept
    if kept is not None and kept.origin == "measured" and kept.step_peak_bytes is not None:
        marks.append(
            Mark(
                kind="run", policy=KEEP_ALL, peak_bytes=kept.step_peak_bytes, time_ratio=1.0, measured=True,
                name="everything kept",
            )
        )  # fmt: skip
    return marks


def matters(marks: tuple[Mark, ...]) -> list[Policy]:
    """Which policies are worth a run: the drawn one, the least peak, the sharpest bend, half the way; unmeasured."""
    front = [mark for mark in marks if mark.kind == "plan"]
    picked = [mark for mark in marks if mark.kind == "drawn"]
    if len(front) > 1:
        least, most = front[0], front[-1]
        width, height = most.peak_bytes - least.peak_bytes, least.time_ratio - most.time_ratio
        bend = min(
            front,
            key=lambda mark: mark.peak_bytes / (width or 1) + mark.time_ratio / (height or 1),
        )
        half = min(front, key=lambda mark: abs(mark.peak_bytes - (least.peak_bytes + most.peak_bytes) / 2))
        picked += [least, bend, half]
    done = {mark.policy for mark in marks if mark.measured}
    wanted = dict.fromkeys(mark.policy for mark in picked if mark.policy.units)
    return [policy for policy in wanted if policy not in done][:MOST_MEASURED]


def _measure(state: ExploreState, view: Shown, graph: ModelGraph) -> None:
    wanted = matters(marks_of(state, view, graph))
    st.button(
        f"Measure {count(len(wanted), 'point')}" if wanted else "Measure points",
        icon=":material/straighten:",
        key="measure_points",
        help=words.MEASURE,
        disabled=not wanted or state.job.id is not None or bool(state.to_measure),
        on_click=lambda: work.measure(state, wanted),
    )
