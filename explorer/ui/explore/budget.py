"""The budget above the graph: a field, a slider over the cheapest plans, and one line that says how the policy does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import streamlit as st

from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast, Plan
from explorer.ui.explore import plans
from explorer.ui.explore.plans import Found
from explorer.ui.explore.shown import Shown, cost, cost_word, predicted
from explorer.ui.explore.state import ExploreState
from explorer.ui.live_slider import live_slider
from explorer.ui.session.bound import bound
from explorer.ui.session.plain import plain
from explorer.ui.shared.draft import with_units
from explorer.ui.shared.readable import small
from explorer.view.drawing.units import mib
from explorer.view.text import plan as words

FIELD_WIDTH = 190
SLIDER_KEY = "front_slider"
LOOK_EVERY_S = 0.5
WORTH_SAYING = 0.01
"""Smallest share of the step that the front must save before the page calls it better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan as the page predicts it: against the page's baseline, under the drawn options."""

    plan: Plan
    peak_bytes: int
    cost: float
    spread: float | None = None
    """Half the width of the interval of a predicted time."""


def points(state: ExploreState, known: Shown, graph: ModelGraph, search: Found) -> tuple[Point, ...]:
    """Plans that no other plan beats in peak and cost, the least peak first. The plan for the budget takes part."""
    wished, options = state.budget.plan, state.draft.spec.policy
    every = search.plans if wished is None else (*search.plans, wished)
    foretold = [(plan, predicted(known, graph, with_units(options, plan.policy.units))) for plan in every]
    placed = [
        Point(plan=plan, peak_bytes=one.step_peak_bytes, cost=ratio, spread=one.time_ratio_spread)
        for plan, one in foretold
        if one.step_peak_bytes is not None and (ratio := cost(one)) is not None
    ]
    unbeaten: list[Point] = []
    for point in sorted(placed, key=lambda point: (point.peak_bytes, point.cost)):
        if not unbeaten or point.cost < unbeaten[-1].cost:
            unbeaten.append(point)
    return tuple(unbeaten)


def budget_row(state: ExploreState, known: Shown, graph: ModelGraph, foreseen: Forecast) -> None:
    """Field, slider, line."""
    search = plans.look(known, graph)
    front = points(state, known, graph, search)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom", key="budget_row"):
        field = bound("budget", state.budget.text, partial(plans.ask, state, known, graph))
        st.text_input(
            "Budget",
            field.value,
            placeholder="60 MiB, 50 %, +10 % time",
            help=words.BUDGET,
            width=FIELD_WIDTH,
            **field.wired,
        )
        with st.container(width="stretch"):
            _slider(state, graph, _drawn(known, foreseen), () if search.running else front)
    waits = search.running or state.budget.job is not None
    look = st.fragment(_wait, run_every=LOOK_EVERY_S) if waits else _line
    look(state, known, graph, foreseen)


def _drawn(known: Shown, foreseen: Forecast) -> tuple[int | None, float | None]:
    """Peak and cost of the drawn policy, as the headline has them: measured if the policy ran, else predicted."""
    if known.candidate is not None and known.comparison is not None:
        figures = known.comparison.headlines()
        counted = cost_word(known) == "FLOPs"
        return known.candidate.step_peak_bytes, figures["flop_ratio" if counted else "time_ratio"]
    return foreseen.step_peak_bytes, cost(foreseen)


def _slider(
    state: ExploreState, graph: ModelGraph, drawn: tuple[int | None, float | None], front: tuple[Point, ...]
) -> None:
    """Draws the slider, one position per plan. The drawn policy stands at its plan, or at the plan of the nearest peak.
    The label of the position has the figures of the drawn policy."""
    units, (peak, ratio) = state.draft.spec.policy.units, drawn
    usual = peak or (front[-1].peak_bytes if front else 0)
    near = min(range(len(front)), key=lambda i: abs(front[i].peak_bytes - usual), default=0)
    at = next((i for i, point in enumerate(front) if point.plan.policy.units == units), near)
    labels = [_label(point.peak_bytes, point.cost) for point in front] or [words.NO_FRONT]
    if front and peak is not None and ratio is not None:
        labels[at] = _label(peak, ratio)
    live_slider(words.SLIDER, labels, at, partial(_slide, state, graph, front), key=SLIDER_KEY)


def _label(peak_bytes: int, ratio: float) -> str:
    return f"{mib(peak_bytes)}, ×{ratio:.2f}"


def _slide(state: ExploreState, graph: ModelGraph, front: tuple[Point, ...], at: int) -> None:
    draft = state.draft
    before = draft.spec.policy
    plans.take(state, graph, front[at].plan)
    if state.slid == before and draft.spec.policy != before and len(draft.history.past) > 1:
        draft.history.past.pop()
    state.slid = draft.spec.policy


def _wait(state: ExploreState, known: Shown, graph: ModelGraph, foreseen: Forecast) -> None:
    """Looks at the worker's plans; when the search ends, the page is drawn again."""
    job = plans.asked(state)
    if (job is None or job.finished) and (state.budget.job is not None or not plans.look(known, graph).running):
        st.rerun()
    _line(state, known, graph, foreseen)


def _line(state: ExploreState, known: Shown, graph: ModelGraph, foreseen: Forecast) -> None:
    """Writes a line on the planner's work, or on the drawn policy."""
    search, mine = plans.look(known, graph), state.budget
    if mine.none_because:
        small(f":red[{plain(mine.none_because)}]")
    elif mine.job is not None:
        small(f":material/hourglass_top: {plain(words.search_text(mine.text))}")
    else:
        sentence, meaning = stands(state, known, points(state, known, graph, search), foreseen)
        looks = f" {words.search_progress(len(search.plans), search.n_expected)}" if search.running else ""
        small(f"{sentence}{looks}" if sentence or looks else plain(search.none_because or words.EMPTY), help=meaning)


def stands(state: ExploreState, known: Shown, front: tuple[Point, ...], foreseen: Forecast) -> tuple[str, str | None]:
    """A sentence on the drawn policy against the budget and the best plan, and the meaning of the sentence."""
    policy = state.draft.spec.policy
    ran = known.candidate.step_peak_bytes if known.candidate is not None else None
    peak = ran if ran is not None else foreseen.step_peak_bytes
    wish = state.budget.wish
    kept = ""
    if wish is not None and wish.budget_bytes is not None and peak is not None:
        kept = words.against_budget(peak, wish.budget_bytes, measured=ran is not None and not known.foreseen)
    drawn = (point.plan for point in front if point.plan.policy.units == policy.units)
    plan = next(drawn, None)
    if plan is not None and policy.units:
        proven, meaning = words.certificate(plan)
        return f"{kept} {words.BEST}".strip(), f"{proven} {meaning}"
    if not policy.units and (len(front) == 1 or (state.budget.plan is not None and not state.budget.plan.policy.units)):
        return f"{kept} {words.NOTHING_SAVES if len(front) == 1 else words.KEEP_ALL}".strip(), None
    own, peak = cost(foreseen), foreseen.step_peak_bytes
    if not front or not policy.units or own is None or peak is None:
        return kept or (words.START if front else ""), None
    best = min((point for point in front if point.peak_bytes <= peak), key=lambda point: point.cost, default=None)
    if best is not None and best.cost < own - WORTH_SAYING:
        return f"{kept} {words.better(mib(best.peak_bytes), best.cost, own, cost_word(known))}".strip(), None
    return kept or words.AS_GOOD, None
