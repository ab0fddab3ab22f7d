"""A visitor's decisions on the Pipeline page: cuts, schedule, executor; and how they stand in the address bar.

Model, policy and options are in the draft that every page shares. Clicks in the graph change the draft's policy, and
the cuts that are here.

`?cuts=3.6&microbatches=8&schedule=1F1B` puts the first three blocks of the chain on stage 0 and the next three on
stage 1. Default values are left out. An unreadable part gives a sentence, never half a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import get_args

import streamlit as st
from msgspec.structs import replace

from explorer.errors import ExplorerError, UnreadableFile, nearest
from explorer.pipeline.plan.schedules import SCHEDULES, USUAL, default_ranks
from explorer.pipeline.record.step import JointPlan, PipelineRun
from explorer.record.base import Record, limits
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import CheckpointMode, PipelinePlan
from explorer.ui import components
from explorer.ui.components import GraphMarks
from explorer.ui.session import address, window
from explorer.ui.session.page_job import PageJob
from explorer.ui.session.repository import opened_run
from explorer.ui.session.values import session_value
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft, History
from explorer.view.graph.nesting import ancestors, default_open

WIDGET = "pipeline_graph"
MOST_MICROBATCHES: int = limits(PipelinePlan, "n_microbatches")[1]
MOST_RANKS: int = limits(PipelinePlan, "n_ranks")[1]
UNCUT = "0"
"""`cuts=` of a plan with a single stage."""
WORDS: dict[str, tuple[str, ...]] = {"schedule": tuple(SCHEDULES), "checkpoint": get_args(CheckpointMode)}
NUMBERS = {"n_microbatches": ("microbatches", MOST_MICROBATCHES), "n_ranks": ("ranks", MOST_RANKS)}
SWITCHES = {"keyed_rng": "keyed", "deferred_batch_norm": "deferred"}


class Before(Record):
    """Cuts or policy that one step of undo restores."""

    cuts: tuple[str, ...] | None = None
    policy: Policy | None = None


@dataclass(slots=True, kw_only=True)
class PipelineState:
    """Changed in place: parts of the page hold it from one drawing to the next."""

    draft: Draft
    """The draft that every page shares."""
    choices: PipelinePlan = USUAL
    """Microbatches, schedule and switches of the plan, without its stages; no number of ranks: the schedule's."""
    marks: GraphMarks | None = None
    """State of the drawn graph, as the page knows it, with the cuts; None until the graph is drawn."""
    model: str = ""
    """Fingerprint of the graph that `marks` are of."""
    places: list[int] | None = None
    """Behind how many blocks an address or a stored run cuts, until the graph is known that has these blocks."""
    uncut: bool = True
    """True until a person cuts the model; the page cuts it in two."""
    history: History[Before] = field(default_factory=History)
    job: PageJob = field(default_factory=PageJob)
    shown: str | None = None
    """Key of the last run."""
    message: str = ""
    """Reason why the plan in the address could not be read."""
    cap: str = ""
    """Typed limit on the bytes of every rank."""
    planned: JointPlan | None = None
    """The last plan below a cap."""


def current() -> PipelineState:
    """This visitor's state; on the first visit the state of the address bar. An opened run sets the state."""
    draft = drafts.current()
    if (run := opened_run("pipeline")) is not None:
        assert isinstance(run.record, PipelineRun), "no other kind is shown here"
        drafts.restart(draft, run.record.spec)
        st.session_state["pipeline"] = _of_a_run(draft, run.record, run.run_id)
    split = session_value("pipeline", PipelineState, lambda: _first(draft))
    split.draft = draft
    return split


def _first(draft: Draft) -> PipelineState:
    try:
        choices, places = plan_from_query(st.query_params.to_dict())
    except ExplorerError as error:
        return PipelineState(draft=draft, message=str(error))
    return PipelineState(draft=draft, choices=choices, places=places)


def _of_a_run(draft: Draft, run: PipelineRun, run_id: str) -> PipelineState:
    plan = run.spec.plan
    fresh = PipelineState(draft=draft, shown=run_id)
    if plan is not None:
        fresh.choices = replace(plan, stages=())
        if plan.schedule not in SCHEDULES:
            choose(fresh, "schedule", USUAL.schedule)
            fresh.message = f"This run's schedule {plan.schedule[:40]} is not known here; {USUAL.schedule} is drawn."
        if plan.actions or plan.n_ranks == default_ranks(plan.schedule, len(plan.stages)):
            choose(fresh, "n_ranks", None)
        fresh.places = list(accumulate(len(stage) for stage in plan.stages[:-1]))
    return fresh


def choose(split: PipelineState, name: str, value: object) -> None:
    """Sets one of the plan's choices by name."""
    split.choices = replace(split.choices, **{name: value})


def forget(split: PipelineState) -> None:
    """Drops cuts and results of the old model; schedule and microbatches stay."""
    split.marks, split.shown, split.places = None, None, None
    split.history, split.job.failure, split.planned = History(), None, None


def marks_of(split: PipelineState, graph: ModelGraph) -> GraphMarks:
    """The marks of the drawn graph, new for every model: the chain is in view, with the link's cuts."""
    if split.marks is None or split.model != graph.fingerprint:
        if split.marks is not None:
            forget(split)
        around = [*default_open(graph), *(id for fqn in graph.chain for id in ancestors(graph, fqn))]
        split.marks, split.model = GraphMarks(open=list(dict.fromkeys(around))), graph.fingerprint
        # Steps in the graph of another model, which has the same widget, are not for this one.
        components.new_steps(split.marks, st.session_state.get(WIDGET))
        split.uncut = split.places is None
        try:
            split.marks.cuts = cuts_at(split.places or [], graph)
        except ExplorerError as error:
            split.message, split.uncut = str(error), True
        split.places = None
    return split.marks


def absorb(split: PipelineState, graph: ModelGraph, *, until_press: bool = False) -> None:
    """Takes over new steps of the browser: cuts, and blocks to recompute, each an undo step.

    With `until_press`, takes over only the steps before the button whose callback calls this function.
    """
    marks, message = marks_of(split, graph), st.session_state.get(WIDGET)
    window.take(message)
    for step in components.new_steps(marks, message, until_press=until_press):
        if step.kind == "cuts":
            _record(split, Before(cuts=tuple(marks.cuts)))
        elif step.kind == "on":
            _record(split, Before(policy=split.draft.spec.policy))
            drafts.take_step(split.draft, graph, step)
        components.look(marks, step)


def stages_of(split: PipelineState, graph: ModelGraph) -> tuple[tuple[str, ...], ...]:
    """The chain, cut at the marked places."""
    cuts = set(marks_of(split, graph).cuts)
    stages: list[list[str]] = [[]]
    for place, fqn in enumerate(graph.chain):
        if place and f"{graph.chain[place - 1]}>{fqn}" in cuts:
            stages.append([])
        stages[-1].append(fqn)
    return tuple(tuple(stage) for stage in stages)


def cut_at(split: PipelineState, graph: ModelGraph, stages: tuple[tuple[str, ...], ...]) -> None:
    """Marks the cuts of `stages`, one undo step; clicks made meanwhile are adopted first."""
    absorb(split, graph, until_press=True)
    marks = marks_of(split, graph)
    cuts = [f"{before[-1]}>{after[0]}" for before, after in zip(stages, stages[1:])]
    if set(cuts) != set(marks.cuts):
        _record(split, Before(cuts=tuple(marks.cuts)))
        marks.cuts = cuts


def recompute(split: PipelineState, graph: ModelGraph, policy: Policy) -> None:
    """Sets another policy for the draft, one undo step."""
    if policy != split.draft.spec.policy:
        _record(split, Before(policy=split.draft.spec.policy))
        drafts.set_policy(split.draft, policy, graph)


def undo(split: PipelineState, graph: ModelGraph, *, forward: bool = False) -> None:
    """Undoes one cut or toggle; `forward` redoes it."""
    absorb(split, graph, until_press=True)
    marks, policy = marks_of(split, graph), split.draft.spec.policy

    def opposite(before: Before) -> Before:
        return Before(policy=policy) if before.cuts is None else Before(cuts=tuple(marks.cuts))

    before = split.history.step(opposite, forward=forward)
    if before is None:
        return
    if before.cuts is not None:
        marks.cuts = list(before.cuts)
    elif before.policy is not None:
        drafts.set_policy(split.draft, before.policy, graph)


def _record(split: PipelineState, before: Before) -> None:
    split.uncut &= before.cuts is None
    split.history.record(before)


def to_address(split: PipelineState, graph: ModelGraph | None) -> None:
    """Writes model, policy and plan into the address bar."""
    query = drafts.to_query(split.draft)
    if graph is not None:
        query |= plan_to_query(split.choices, stages_of(split, graph))
    elif split.places is not None:
        query["cuts"] = ".".join(map(str, split.places)) or UNCUT
    address.show(query)


def plan_to_query(choices: PipelinePlan, stages: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """The address of a plan with these stages. No address holds the rows of an own schedule."""
    query = {"cuts": ".".join(map(str, accumulate(len(stage) for stage in stages[:-1]))) or UNCUT}
    names = (*NUMBERS, *WORDS, *SWITCHES)
    changed = {name: getattr(choices, name) for name in names if getattr(choices, name) != getattr(USUAL, name)}
    query |= {word: str(changed[name]) for name, (word, _) in NUMBERS.items() if name in changed}
    query |= {name: changed[name] for name in WORDS if name in changed}
    return query | {word: str(int(changed[name])) for name, word in SWITCHES.items() if name in changed}


def plan_from_query(query: Mapping[str, str]) -> tuple[PipelinePlan, list[int] | None]:
    """The choices of an address, and behind how many blocks it cuts. Raises UnreadableFile with all faults."""
    chosen: dict[str, object] = {}
    places: list[int] | None = None
    faults = []
    for name, (word, most) in NUMBERS.items():
        if (text := query.get(word)) is not None:
            chosen[name] = number = _number(text)
            if number is None or number > most:
                faults.append(f"{word}={text} is no number from 1 to {most}")
    for name, allowed in WORDS.items():
        if (text := query.get(name)) is not None:
            chosen[name] = text
            if text not in allowed:
                faults.append(f"{name}={text} is not known. {nearest(text, allowed) or ''}".rstrip())
    for name, word in SWITCHES.items():
        if (text := query.get(word)) is not None:
            chosen[name] = text == "1"
            if text not in ("0", "1"):
                faults.append(f"{word}={text} is neither 0 nor 1")
    if (text := query.get("cuts")) is not None:
        numbers = [] if text == UNCUT else [_number(part) for part in text.split(".")]
        places = [number for number in numbers if number is not None]
        if len(places) < len(numbers) or any(b <= a for a, b in pairwise(places)):
            faults.append(f"cuts={text} are no ascending numbers of blocks")
    if faults:
        raise UnreadableFile(f"The link's plan cannot be read: {'; '.join(faults)}.", hint="Copy the address again.")
    return replace(USUAL, **chosen), places


def cuts_at(places: list[int], graph: ModelGraph) -> list[str]:
    """Ids of the cuts behind the first `places` blocks. Raises UnreadableFile if the model has no such cut."""
    legal = {(cut.after, cut.before): cut.refusal for cut in graph.cuts}
    faults, cuts = [], []
    for place in places:
        pair = (graph.chain[place - 1], graph.chain[place]) if place < len(graph.chain) else None
        if pair is None or pair not in legal:
            faults.append(f"there is no place behind block {place} of {len(graph.chain)}")
        elif legal[pair]:
            faults.append(f"no cut behind {pair[0]}: {legal[pair]}")
        else:
            cuts.append(f"{pair[0]}>{pair[1]}")
    if faults:
        raise UnreadableFile(f"The link's cuts do not fit this model: {'; '.join(faults)}.", hint="Choose other cuts.")
    return cuts


def _number(text: str) -> int | None:
    """A whole number from 1; None for any other text."""
    return (int(text) or None) if text.isascii() and text.isdigit() and len(text) < 7 else None
