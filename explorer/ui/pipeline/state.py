"""What one visitor has decided on the Pipeline page: plain values, so a reload of the code harms nothing.

The recompute marks of the graph are the policy of the Explore page. `absorb` keeps the two the same: what changed
elsewhere is laid under the clicks first, then the clicks become the policy.
"""

from __future__ import annotations

from typing import Any

import msgspec
import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.policy import marks as decision
from explorer.record.base import from_plain, to_plain
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from explorer.ui import block_graph
from explorer.ui.explore import state as states
from explorer.ui.explore.state import KEPT_STEPS, State
from explorer.ui.pipeline import address as plan_link
from explorer.ui.session import address as link
from explorer.ui.session import window
from explorer.view.graph.nesting import ancestors, default_open

WIDGET = "pipeline_graph"


def current() -> State:
    """This visitor's state; on the first visit what the address bar says."""
    if "pipeline" not in st.session_state:
        fresh: State = {
            **plan_link.USUAL,
            "marks": None,
            "model": "",
            "places": None,
            "uncut": True,
            "undo": [],
            "redo": [],
            "jump": None,
            "engine": "inproc",
            "asked": False,
            "job": None,
            "failure": None,
            "shown": None,
            "message": "",
        }
        try:
            fresh |= plan_link.from_query(st.query_params.to_dict())
        except ExplorerError as error:
            fresh["message"] = str(error)
        st.session_state["pipeline"] = fresh
    found: State = st.session_state["pipeline"]
    return found


def forget(split: State) -> None:
    """Another model: its cuts and results are not this one's; schedule and microbatches stay."""
    split.update(marks=None, failure=None, shown=None, undo=[], redo=[], jump=None, places=None)


def marks_of(split: State, graph: ModelGraph) -> State:
    """The state of the drawn graph, made anew for every model: the spine in view, cut where the link says."""
    if split["marks"] is None or split["model"] != graph.fingerprint:
        if split["marks"] is not None:
            forget(split)
        opened = [*default_open(graph), *(id for fqn in graph.spine for id in ancestors(graph, fqn))]
        split["marks"], split["model"] = block_graph.fresh(dict.fromkeys(opened)), graph.fingerprint
        split["uncut"] = split["places"] is None
        try:
            split["marks"]["cuts"] = plan_link.cuts_at(split["places"] or [], graph)
        except ExplorerError as error:
            split["message"], split["uncut"] = str(error), True
        split["places"] = None
    found: State = split["marks"]
    return found


def absorb(split: State, state: State, graph: ModelGraph, *, until_press: bool = False) -> None:
    """Takes over what was clicked since the last look: cuts, and blocks to recompute, each an undo step.

    With `until_press` only what was clicked before the button whose callback calls this.
    """
    marks = marks_of(split, graph)
    policy = states.spec_of(state).policy
    if set(marks["on"]) != set(policy.blocks):
        block_graph.replace(marks, policy.blocks)
    cuts, said = list(marks["cuts"]), st.session_state.get(WIDGET)
    window.take(said)
    if not block_graph.adopt(marks, said, until_press=until_press):
        return
    if set(marks["cuts"]) != set(cuts):
        _remember(split, cuts=cuts)
    if set(marks["on"]) != set(policy.blocks):
        _remember(split, policy=to_plain(policy))
        states.set_policy(state, decision.policy_after(policy, marks["on"], graph), graph)


def stages_of(split: State, graph: ModelGraph) -> tuple[tuple[str, ...], ...]:
    """The spine, cut at the marked places."""
    cuts = set(marks_of(split, graph)["cuts"])
    stages: list[list[str]] = [[]]
    for place, fqn in enumerate(graph.spine):
        if place and f"{graph.spine[place - 1]}>{fqn}" in cuts:
            stages.append([])
        stages[-1].append(fqn)
    return tuple(tuple(stage) for stage in stages)


def cut_at(split: State, state: State, graph: ModelGraph, stages: tuple[tuple[str, ...], ...]) -> None:
    """Marks the cuts of `stages`, one undo step; what was clicked meanwhile is adopted first."""
    absorb(split, state, graph, until_press=True)
    marks = marks_of(split, graph)
    cuts = [f"{before[-1]}>{after[0]}" for before, after in zip(stages, stages[1:])]
    if set(cuts) != set(marks["cuts"]):
        _remember(split, cuts=list(marks["cuts"]))
        block_graph.replace(marks, marks["on"], cuts)


def undo(split: State, state: State, graph: ModelGraph, *, forward: bool = False) -> None:
    """One cut or toggle back, or forward again."""
    absorb(split, state, graph, until_press=True)
    source, other = ("redo", "undo") if forward else ("undo", "redo")
    if not split[source]:
        return
    change = split[source].pop()
    marks = marks_of(split, graph)
    policy = states.spec_of(state).policy
    if "cuts" in change:
        split[other].append({"cuts": list(marks["cuts"])})
        block_graph.replace(marks, marks["on"], change["cuts"])
    else:
        split[other].append({"policy": to_plain(policy)})
        states.set_policy(state, from_plain(change["policy"], Policy), graph)


def _remember(split: State, **change: Any) -> None:
    split["uncut"] &= "cuts" not in change
    split["undo"] = [*split["undo"], change][-KEPT_STEPS:]
    split["redo"] = []


def to_address(split: State, state: State, graph: ModelGraph | None) -> None:
    """Writes model, policy, plan and the job under way into the address bar."""
    query = link.to_query(states.spec_of(state))
    if graph is not None:
        query |= plan_link.to_query(split, stages_of(split, graph))
    elif split["places"] is not None:
        query["cuts"] = ".".join(map(str, split["places"])) or plan_link.UNCUT
    if split["job"]:
        query["job"] = split["job"]["id"]
    if st.query_params.to_dict() != query:
        st.query_params.from_dict(query)


def options_only(policy: Policy) -> Policy:
    """The policy without its units."""
    return msgspec.structs.replace(policy, units=())


def fail(split: State, error: Failure | ExplorerError) -> None:
    """What went wrong is a result too: it stays on the page until the next run."""
    if isinstance(error, ExplorerError):
        error = Failure(kind="bad input", sentence=error.sentence, hint=error.hint)
    split["failure"] = to_plain(error)
