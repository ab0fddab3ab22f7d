"""The budget above the graph: a field, a slider over the cheapest plans, and one line that says how the policy does.

The idle worker finds the plans:

    a baseline exists  ──▶ the worker finds the front, plan by plan ──▶ every visitor of the step shares the front
    a run is requested ──▶ the search for the front stops, and starts again when the worker is idle
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import streamlit as st
from msgspec.structs import replace

from explorer.errors import ExplorerError
from explorer.jobs.client import Job
from explorer.jobs.protocol import FindPlans
from explorer.plan.budget_text import parse_budget
from explorer.plan.catalogue import recorded_sample
from explorer.plan.policy.presets import preset_titles
from explorer.record.graph import ModelGraph
from explorer.record.plan import Forecast, Front, Plan, Wish
from explorer.ui.components import live_slider
from explorer.ui.explore import work
from explorer.ui.explore.view import (
    View,
    cost,
    cost_word,
    planned_time,
    predicted,
    predicted_on_card,
    predicted_presets,
    view_of,
)
from explorer.ui.explore.work import Budget, ExploreState
from explorer.ui.session import backend
from explorer.ui.session.repository import request_key, runs
from explorer.ui.session.values import bound
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import with_units
from explorer.ui.shared.elements import escape, horizontal, small_text
from explorer.view.drawing.units import mib
from explorer.view.text import plan as words

FIELD_WIDTH = 250
LOOK_EVERY_S = 0.5
SMALLEST_GAIN = 0.01
"""Smallest share of the step that the front must save before the page calls it better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The part of the front that is found."""

    plans: tuple[Plan, ...] = ()
    n_expected: int = 0
    running: bool = False
    none_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A plan as the page predicts it: against the page's baseline, under the drawn options."""

    plan: Plan
    peak_bytes: int
    cost: float
    spread: float | None = None
    """Half the width of the interval of a predicted time."""


def search_of(view: View, *, start: bool = False) -> Search:
    """The search for the front. `start`: an idle worker begins a search that has not begun or was cut off."""
    graph, run = view.graph, view.start
    if graph is None or run is None or not run.complete or run.allocations is None:
        return Search()
    if view.stand_in is not None or view.being_timed:
        return Search(plans=view.plans, n_expected=len(view.plans))
    # A second measurement has the same timeline; a predicted step has another origin and no times.
    key = f"{graph.fingerprint} {run.origin} {run.step_peak_bytes} {request_key(run.spec)}"
    job: Job | None = runs().of("search").get(key)
    if start and (job is None or _was_cut_off(job)) and not backend.worker().open_jobs():
        job = backend.worker().submit(FindPlans(run=run, graph=graph), keep=False)
        runs().of("search").add(key, job)
    if job is None:
        return Search()
    if job.finished and job.failure is not None and not _was_cut_off(job):
        return Search(none_because=job.failure.sentence)
    plans = job.result.plans if isinstance(job.result, Front) else job.progress.plans
    return Search(plans=plans, n_expected=job.progress.total, running=not job.finished)


def _was_cut_off(job: Job) -> bool:
    return job.failure is not None and job.failure.kind == "cancelled"


def request_plan(state: ExploreState, view: View, graph: ModelGraph, text: str) -> None:
    """Takes over the typed budget and submits the search for its plan. An unusable text gets a sentence."""
    work.absorb(state, graph, until_press=True)
    before, state.budget = state.budget, Budget(text=text.strip())
    budget, run = state.budget, view.start
    if before.job is not None and (job := backend.worker().job(before.job)) is not None:
        job.cancel()
    if not budget.text:
        return
    if run is None or run.step_peak_bytes is None:
        budget.none_because = "The baseline is not measured yet; a budget is planned from its timeline."
        return
    try:
        budget.wish = parse_budget(budget.text, run.step_peak_bytes, run)
    except ExplorerError as error:
        budget.none_because = str(error)
        return
    if view.stand_in is not None or view.being_timed:
        _take_recorded_plan(state, view, graph)
        return
    recorded = recorded_sample(graph.model)
    plans = (*search_of(view).plans, *(recorded.front.plans if recorded is not None else ()))
    wish = replace(_planned(view, budget.wish), suggested=tuple(dict.fromkeys(plan.policy for plan in plans)))
    backend.free_worker()
    budget.job = backend.worker().submit(FindPlans(run=run, graph=graph, wish=wish), keep=False).id


def _planned(view: View, wish: Wish) -> Wish:
    """The wish as the planner counts time, so that the headline of its plan keeps the limit."""
    if wish.more_time is None or cost_word(view) != "time":
        return wish
    more_time, scale = planned_time(view, wish.more_time)
    return replace(wish, more_time=more_time, time_scale=scale)


def _take_recorded_plan(state: ExploreState, view: View, graph: ModelGraph) -> None:
    """Draws the cheapest of the stand-in's plans within the budget: the worker is measuring and cannot plan."""
    budget = state.budget
    wish, front = budget.wish or Wish(), points(state, view, search_of(view))
    most_bytes = math.inf if wish.budget_bytes is None else wish.budget_bytes
    most_cost = math.inf if wish.more_time is None else 1 + wish.more_time
    within = [point for point in front if point.peak_bytes <= most_bytes and point.cost <= most_cost]
    if within:
        # The front runs from the least peak to the least cost.
        budget.plan = within[0 if wish.budget_bytes is None else -1].plan
        draw_plan(state, graph, budget.plan)
    else:
        budget.none_because = words.NO_RECORDED_PLAN


def settle(state: ExploreState, graph: ModelGraph) -> None:
    """Draws a plan that was found for a person's budget, as one step of undo."""
    budget = state.budget
    if budget.job is None:
        return
    job = backend.worker().job(budget.job)
    if job is not None and not job.finished:
        return
    budget.job = None
    if job is None or job.failure is not None:
        failure = job.failure if job is not None else None
        lost = "The app was restarted; ask again."
        budget.none_because = f"{failure.sentence} {failure.hint}".strip() if failure else lost
        return
    assert isinstance(job.result, Front), "what FindPlans gives"
    (budget.plan,) = job.result.plans
    if (step := job.result.step) is not None:
        runs().add_prediction(step.spec, step)
    if job.result.refusal:
        first, _, budget.details = job.result.refusal.partition(". ")
        budget.none_because = f"{first.rstrip('.')}.{_presets_within(state)}"
    else:
        draw_plan(state, graph, budget.plan)


def draw_plan(state: ExploreState, graph: ModelGraph, plan: Plan) -> None:
    """Draws the policy of `plan`; the options stay as they are."""
    drafts.set_policy(state.draft, with_units(state.draft.spec.policy, plan.policy.units), graph)


def _presets_within(state: ExploreState) -> str:
    """A sentence on presets that meet the budget when no plan does: plans contain no long segments, presets may."""
    wish = state.budget.wish
    if wish is None or wish.budget_bytes is None:
        return ""
    presets = predicted_presets(view_of(state), state.draft.spec.policy)
    peaks = {name: forecast.step_peak_bytes for name, (_, forecast) in presets.items()}
    within = [name for name, peak in peaks.items() if peak is not None and peak <= wish.budget_bytes]
    return f" But the preset {preset_titles()[within[0]]} does, predicted." if within else ""


def points(state: ExploreState, view: View, search: Search) -> tuple[PlanPoint, ...]:
    """Plans that no other plan beats in peak and cost, the least peak first. The plan for the budget takes part."""
    planned, options = state.budget.plan, state.draft.spec.policy
    plans = search.plans if planned is None else (*search.plans, planned)
    forecasts = [(plan, predicted(view, with_units(options, plan.policy.units))) for plan in plans]
    every = [
        PlanPoint(plan=plan, peak_bytes=forecast.step_peak_bytes, cost=ratio, spread=forecast.time_ratio_spread)
        for plan, forecast in forecasts
        if forecast.step_peak_bytes is not None and (ratio := cost(view, forecast)) is not None
    ]
    unbeaten: list[PlanPoint] = []
    for point in sorted(every, key=lambda point: (point.peak_bytes, point.cost)):
        if not unbeaten or point.cost < unbeaten[-1].cost:
            unbeaten.append(point)
    return tuple(unbeaten)


def budget_row(
    state: ExploreState, view: View, graph: ModelGraph, forecast: Forecast, about: dict[str, object]
) -> None:
    """Field, slider over the plans found so far, line; `forecast` is about the drawn policy, `about` as of `strip`."""
    search = search_of(view)
    front = points(state, view, search)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom", key="budget_row"):
        field = bound("budget", state.budget.text, partial(request_plan, state, view, graph))
        st.text_input(
            "Budget",
            field.value,
            placeholder=f"Budget: {words.EXAMPLES if state.draft.spec.card is None else words.EXAMPLES_ON_CARD}",
            label_visibility="collapsed",
            width=FIELD_WIDTH,
            **field.wired,
        )
        if len(front) > 1:
            with st.container(width="stretch"):
                live_slider(slider(state, view, front, forecast) | {"about": about})
        elif search.running:
            small_text(words.SLIDER_FOLLOWS)
    if search.running or state.budget.job is not None:
        st.fragment(_wait, run_every=LOOK_EVERY_S)(state, view, forecast, slides=len(front) > 1)
    else:
        _line(state, view, forecast)


def _drawn_figures(view: View, forecast: Forecast) -> tuple[int | None, float | None]:
    """Peak and cost of the drawn policy, as the headline has them: measured if the policy ran, else predicted."""
    if view.candidate is not None and view.comparison is not None:
        figures = view.comparison.headlines()
        counted = cost_word(view) == "FLOPs"
        return view.candidate.step_peak_bytes, figures["flop_ratio" if counted else "time_ratio"]
    return forecast.step_peak_bytes, cost(view, forecast)


def slider(state: ExploreState, view: View, front: tuple[PlanPoint, ...], forecast: Forecast) -> dict[str, object]:
    """Data of the slider: the label of each place, one per plan, and the drawn policy's place: its plan, or the plan of
    the nearest peak. The label at that place has the figures of the drawn policy."""
    units, (peak, ratio) = state.draft.spec.policy.units, _drawn_figures(view, forecast)
    usual = peak or front[-1].peak_bytes
    near = min(range(len(front)), key=lambda i: abs(front[i].peak_bytes - usual))
    plans = tuple(point.plan.policy.units for point in front)
    place = near
    if units in plans:
        place = plans.index(units)
    labels = [_label(point.peak_bytes, point.cost) for point in front]
    if peak is not None and ratio is not None:
        labels[place] = _label(peak, ratio)
    return {"name": words.SLIDER, "labels": labels, "at": place, "version": drafts.offer_plans(state.draft, plans)}


def _label(peak_bytes: int, ratio: float) -> str:
    return f"{mib(peak_bytes)}, ×{ratio:.2f}"


def _wait(state: ExploreState, view: View, forecast: Forecast, *, slides: bool) -> None:
    """Looks at the worker's plans. When there are plans for the slider (`slides`: it stands) and when the search ends,
    the page is drawn again."""
    if not slides and len(points(state, view, search_of(view))) > 1:
        st.rerun()
    job = backend.worker().job(state.budget.job) if state.budget.job is not None else None
    if (job is None or job.finished) and (state.budget.job is not None or not search_of(view).running):
        st.rerun()
    _line(state, view, forecast)


def _line(state: ExploreState, view: View, forecast: Forecast) -> None:
    """Writes a line on the planner's work, or on the drawn policy."""
    search, budget = search_of(view), state.budget
    front = points(state, view, search)
    if budget.none_because:
        refused = budget.plan
        lower = front[0] if refused is not None and front and front[0].plan.policy != refused.policy else None
        later = words.REACHED_LATER.format(mib(lower.peak_bytes)) if lower is not None else ""
        small_text(f":red[{escape(budget.none_because + later)}]", help=escape(budget.details) or None)
    elif budget.job is not None:
        small_text(f":material/hourglass_top: {escape(words.SEARCHING.format(budget.text))}")
    else:
        text, meaning = _policy_line(state, view, front, forecast)
        with horizontal("budget_line"):
            small_text(text, help=meaning)
            best = better_point(state, view, front, forecast)
            if best is not None and view.graph is not None and not search.running:
                take = partial(draw_plan, state, view.graph, best.plan)
                st.button("Take it", key="take_better", type="tertiary", icon=":material/check:", on_click=take)


def policy_line(state: ExploreState, view: View, forecast: Forecast) -> str | None:
    """The line below the slider as Markdown; None if the line is about the planner's work."""
    if state.budget.none_because or state.budget.job is not None:
        return None
    return _policy_line(state, view, points(state, view, search_of(view)), forecast)[0]


def _policy_line(
    state: ExploreState, view: View, front: tuple[PlanPoint, ...], forecast: Forecast
) -> tuple[str, str | None]:
    search = search_of(view)
    sentence, meaning = standing(state, view, front, forecast)
    looks = f" {words.search_progress(len(search.plans), search.n_expected)}" if search.running else ""
    return f"{sentence}{looks}" or escape(search.none_because or words.EMPTY), meaning


def standing(
    state: ExploreState, view: View, front: tuple[PlanPoint, ...], forecast: Forecast
) -> tuple[str, str | None]:
    """A sentence on the drawn policy against the budget and the best plan, and the meaning of the sentence."""
    policy = state.draft.spec.policy
    measured_peak = view.candidate.step_peak_bytes if view.candidate is not None else None
    peak = measured_peak if measured_peak is not None else forecast.step_peak_bytes
    budget = _against_wish(state, view, forecast)
    plan = next((point.plan for point in front if point.plan.policy.units == policy.units), None)
    if plan is not None and policy.units:
        if view.plans:  # the proof is about the stand-in
            return f"{budget} {words.BEST}".strip(), None
        proven, meaning = words.certificate(plan)
        return f"{budget} {words.BEST}".strip(), f"{proven} {meaning}"
    if not policy.units and (len(front) == 1 or (state.budget.plan is not None and not state.budget.plan.policy.units)):
        return f"{budget} {words.nothing_saves(view.graph) if len(front) == 1 else words.KEEP_ALL}".strip(), None
    ratio = cost(view, forecast)
    if not front or not policy.units or ratio is None or peak is None:
        return budget or (words.START if front else ""), None
    if (best := better_point(state, view, front, forecast)) is not None:
        return f"{budget} {words.better(mib(best.peak_bytes), best.cost, ratio, cost_word(view))}".strip(), None
    return budget or words.AS_GOOD, None


def _against_wish(state: ExploreState, view: View, forecast: Forecast) -> str:
    """How the budget's text was read, and whether the drawn policy is within; empty without a budget."""
    wish, policy = state.budget.wish, state.draft.spec.policy
    if wish is None:
        return ""
    sentences = [words.understood(wish)]
    peak, ratio = _drawn_figures(view, forecast)
    measured = view.candidate is not None and not view.predicted
    if not policy.units and ratio is None:
        ratio = 1.0
    if wish.budget_bytes is not None and peak is not None:
        sentences.append(words.against_budget(peak, wish.budget_bytes, measured=measured))
    if wish.more_time is not None and ratio is not None:
        sentences.append(words.against_time(ratio, wish.more_time, cost_word(view), measured=measured))
    step = view.candidate if policy.units else view.baseline
    memory = step.card if step is not None else predicted_on_card(view, policy)
    if wish.card and memory is not None:
        sentences.append(words.against_card(memory))
    return " ".join(filter(None, sentences))


def better_point(state: ExploreState, view: View, front: tuple[PlanPoint, ...], forecast: Forecast) -> PlanPoint | None:
    """The cheapest plan with at most the drawn policy's predicted peak, if it is cheaper by more than the spread."""
    ratio, peak = cost(view, forecast), forecast.step_peak_bytes
    least = max(SMALLEST_GAIN, forecast.time_ratio_spread or 0.0)
    if ratio is None or peak is None or not state.draft.spec.policy.units:
        return None
    within = (point for point in front if point.peak_bytes <= peak and point.cost < ratio - least)
    return min(within, key=lambda point: point.cost, default=None)
