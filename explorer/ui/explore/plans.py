"""Plans that the idle worker finds: the front of a measured step, and the plan for a person's budget.

a baseline exists  ──▶ the worker finds the front, plan by plan ──▶ every visitor of the step shares the front
a run is requested ──▶ the search for the front stops, and starts again when the worker is idle
"""

from __future__ import annotations

from dataclasses import dataclass

from explorer.errors import ExplorerError
from explorer.jobs.client import Job
from explorer.jobs.protocol import FindPlans
from explorer.plan.planners.wish import parse_wish
from explorer.plan.policy.presets import preset_titles
from explorer.record.base import to_json
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Front, Plan
from explorer.ui.explore.shown import Shown, predicted_presets, shown
from explorer.ui.explore.state import Budget, ExploreState
from explorer.ui.session import backend
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import with_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The known part of the front."""

    plans: tuple[Plan, ...] = ()
    n_expected: int = 0
    running: bool = False
    none_because: str = ""


def look(known: Shown, graph: ModelGraph | None, *, start: bool = False) -> Found:
    """The plans found so far. `start`: an idle worker begins a search that has not begun or was cut off."""
    kept = known.kept
    if graph is None or kept is None or not kept.complete or kept.allocations is None:
        return Found()
    key = _key(kept, graph)
    job: Job | None = backend.fronts().get(key)
    if start and (job is None or _was_cut_off(job)) and not backend.worker().open_jobs():
        job = backend.worker().submit(FindPlans(run=kept, graph=graph), keep=False)
        backend.fronts().keep(key, job)
    if job is None:
        return Found()
    if job.finished and job.failure is not None and not _was_cut_off(job):
        return Found(none_because=job.failure.sentence)
    plans = job.result.plans if isinstance(job.result, Front) else job.progress.plans
    return Found(plans=plans, n_expected=job.progress.total, running=not job.finished)


def _was_cut_off(job: Job) -> bool:
    return job.failure is not None and job.failure.kind == "cancelled"


def _key(kept: Measurement, graph: ModelGraph) -> str:
    """Key of a step. A second measurement has the same timeline; a predicted step has another origin and no times."""
    return f"{graph.fingerprint} {kept.origin} {kept.step_peak_bytes} {to_json(kept.spec).decode()}"


def ask(state: ExploreState, known: Shown, graph: ModelGraph, text: str) -> None:
    """Takes over the typed budget and submits the search for its plan. An unusable text gets a sentence."""
    before, state.budget = state.budget, Budget(text=text.strip())
    mine = state.budget
    if before.job is not None and (job := backend.worker().job(before.job)) is not None:
        job.cancel()
    if not mine.text:
        return
    if known.kept is None or known.kept.step_peak_bytes is None:
        mine.none_because = "The baseline is not measured yet; a budget is planned from its timeline."
        return
    try:
        mine.wish = parse_wish(mine.text, known.kept.step_peak_bytes)
    except ExplorerError as error:
        mine.none_because = _sentence(error.sentence, error.hint)
        return
    backend.give_way()
    request = FindPlans(run=known.kept, graph=graph, wish=mine.wish)
    mine.job = backend.worker().submit(request, keep=False).id


def asked(state: ExploreState) -> Job | None:
    """The job that searches the plan for a person's budget."""
    return backend.worker().job(state.budget.job) if state.budget.job is not None else None


def settle(state: ExploreState, graph: ModelGraph) -> None:
    """Draws a found plan as one step of undo."""
    mine = state.budget
    if mine.job is None:
        return
    job = backend.worker().job(mine.job)
    if job is not None and not job.finished:
        return
    mine.job = None
    if job is None or job.failure is not None:
        failure = job.failure if job is not None else None
        why = _sentence(failure.sentence, failure.hint) if failure else "The app was restarted; ask again."
        mine.none_because = why
        return
    assert isinstance(job.result, Front), "what FindPlans gives"
    (mine.plan,) = job.result.plans
    if job.result.refusal:
        mine.none_because = job.result.refusal + _segments_reach(state, graph)
    else:
        take(state, graph, mine.plan)


def take(state: ExploreState, graph: ModelGraph, plan: Plan) -> None:
    """Draws the policy of `plan`; the options stay as they are."""
    drafts.set_policy(state.draft, with_units(state.draft.spec.policy, plan.policy.units), graph)


def _segments_reach(state: ExploreState, graph: ModelGraph) -> str:
    """A sentence on presets that meet the budget when no plan does: plans contain no long segments, presets may."""
    wish = state.budget.wish
    if wish is None or wish.budget_bytes is None:
        return ""
    known, policy = shown(state), state.draft.spec.policy
    peaks = {name: one.step_peak_bytes for name, (_, one) in predicted_presets(known, graph, policy).items()}
    fits = [name for name, peak in peaks.items() if peak is not None and peak <= wish.budget_bytes]
    return f" But the preset {preset_titles()[fits[0]]} does, predicted." if fits else ""


def _sentence(sentence: str, hint: str) -> str:
    return f"{sentence} {hint}".strip()
