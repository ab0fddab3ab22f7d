"""State of the Explore page for one visitor: keys of measured results, and choices of views."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from explorer.record.comparison import Comparison
from explorer.record.files import Reading
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Plan, Wish
from explorer.record.policy import Policy
from explorer.ui.session import page_job
from explorer.ui.session.page_job import PageJob
from explorer.ui.session.repository import OpenedRun, opened_run, runs
from explorer.ui.session.values import session_value
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft

BY_ROLE = "by role"
"""The view of the memory chart that shows a selected block; None: both runs."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """Text typed into the budget field, and its outcome."""

    text: str = ""
    wish: Wish | None = None
    """None: nothing was typed, or nothing that can be read."""
    none_because: str = ""
    """Reason why the budget has no plan."""
    details: str = ""
    """More on the reason: what holds the bytes, and where the planner looked."""
    job: str | None = None
    """Which job looks for the plan."""
    plan: Plan | None = None


@dataclass(slots=True, kw_only=True)
class ExploreState:
    """The state of one visitor. Fields hold keys of records: the run's id if the store has the run."""

    draft: Draft
    """The draft that every page shares."""
    model: str = ""
    """The draft's graph widget when this was new: another widget means another model."""
    job: PageJob = field(default_factory=PageJob)
    baseline: str | None = None
    """Key of the measured baseline."""
    shown: str | None = None
    """Key of the last comparison."""
    pictures: str | None = None
    """Key of the autograd graphs."""
    tick: tuple[str, int] | None = None
    """Run and event picked in the timeline; None: the peak."""
    budget: Budget = field(default_factory=Budget)
    slid: Policy | None = None
    """Policy that the slider drew last: a drag is one step of undo."""
    charted: Policy | None = None
    """The policy that a chart is about which follows the graph; None: no such chart is open."""
    to_measure: list[Policy] = field(default_factory=list)
    """Policies waiting to run, in order."""
    view: str | None = None
    """Which memory chart a person chose, or BY_ROLE; None: the usual one."""
    looked_at: str = ""
    """The selected block that `view` was last set for."""
    warning: str = ""
    """Reason why the store could not keep the last run."""
    doubt: str = ""
    """Warning from the evidence in an imported policy file."""
    imported: Reading | None = None
    """An imported policy with notes to show, until a person dismisses the notes."""


def current() -> ExploreState:
    """This visitor's state. Another model resets the state; an opened run of the store sets the state."""
    draft = drafts.current()
    state = session_value("explore", ExploreState, lambda: ExploreState(draft=draft, model=draft.widget))
    state.draft = draft
    if (run := opened_run("explore")) is not None:
        _show(state, run)
    if state.model != draft.widget:
        page_job.forget(state.job)
        _forget(state, PageJob())
    return state


def _forget(state: ExploreState, job: PageJob) -> None:
    fresh = ExploreState(draft=state.draft, model=state.draft.widget, job=job)
    for field_ in fields(ExploreState):
        setattr(state, field_.name, getattr(fresh, field_.name))


def _show(state: ExploreState, run: OpenedRun) -> None:
    """Shows model, policy, options and figures of a stored run; a job under way goes on."""
    record = run.record
    assert isinstance(record, Comparison | Measurement | RecordedRanks), "no other kind is shown here"
    candidate = record.candidate if isinstance(record, Comparison) else record.as_run
    predicted = candidate.origin == "predicted"
    drafts.restart(state.draft, candidate.spec, predict=predicted)
    if predicted:
        runs().add_prediction(candidate.spec, candidate if isinstance(record, Comparison) else record)
    _forget(state, state.job)
    if isinstance(record, Comparison):
        state.shown = run.run_id
    else:
        state.baseline = run.run_id


def follow_selection(state: ExploreState, graph: ModelGraph) -> None:
    """Shows the block selected in the graph in the memory chart by role; without a selection, both runs."""
    selected: str = drafts.marks_of(state.draft, graph).selected
    if selected != state.looked_at:
        state.looked_at, state.view = selected, BY_ROLE if selected else None
