"""What one visitor has decided on the Pipeline page: plain values, so a reload of the code harms nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import streamlit as st

from explorer.errors import ExplorerError
from explorer.record.base import to_plain
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Failure
from explorer.record.policy import Policy
from explorer.ui import block_graph
from explorer.ui.state import State
from explorer.view.nesting import default_open

WIDGET = "pipeline_graph"


def current() -> State:
    """This visitor's state, made on the first visit."""
    if "pipeline" not in st.session_state:
        st.session_state["pipeline"] = {
            "marks": None,
            "model": "",
            "n_microbatches": 4,
            "schedule": "1F1B",
            "checkpoint": "always",
            "keyed_rng": True,
            "deferred_batch_norm": False,
            "engine": "inproc",
            "job": None,
            "failure": None,
            "shown": None,
        }
    found: State = st.session_state["pipeline"]
    return found


def forget() -> None:
    """Another model: its cuts and results are not this one's; schedule and microbatches stay."""
    current().update(marks=None, failure=None, shown=None)


def marks_of(split: State, graph: ModelGraph) -> State:
    """The state of the drawn graph, made anew for every model."""
    if split["marks"] is None or split["model"] != graph.fingerprint:
        split["marks"], split["model"] = block_graph.fresh(default_open(graph)), graph.fingerprint
    found: State = split["marks"]
    return found


def absorb(split: State, graph: ModelGraph) -> None:
    """Takes over which cuts were clicked since the last look."""
    block_graph.adopt(marks_of(split, graph), st.session_state.get(WIDGET))


def stages_of(split: State, graph: ModelGraph) -> tuple[tuple[str, ...], ...]:
    """The spine, cut at the marked places."""
    cuts = set(marks_of(split, graph)["cuts"])
    stages: list[list[str]] = [[]]
    for place, fqn in enumerate(graph.spine):
        if place and f"{graph.spine[place - 1]}>{fqn}" in cuts:
            stages.append([])
        stages[-1].append(fqn)
    return tuple(tuple(stage) for stage in stages)


def cut_at(split: State, graph: ModelGraph, stages: tuple[tuple[str, ...], ...]) -> None:
    """Marks the cuts of `stages`; what was clicked meanwhile is adopted first."""
    absorb(split, graph)
    cuts = [f"{before[-1]}>{after[0]}" for before, after in zip(stages, stages[1:])]
    marks = marks_of(split, graph)
    block_graph.replace(marks, marks["on"], cuts)


def options_only(policy: Policy) -> Policy:
    """The policy without its units."""
    return msgspec.structs.replace(policy, units=())


def failure_of(error: Failure | ExplorerError) -> Any:
    """As the page keeps it."""
    if isinstance(error, ExplorerError):
        error = Failure(kind="bad input", sentence=error.sentence, hint=error.hint)
    return to_plain(error)
