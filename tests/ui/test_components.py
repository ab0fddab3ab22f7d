"""The Python half of the components: each step counts once, in its order, and what travels is small."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import streamlit
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.plan.policy.presets import preset
from explorer.record import Policy, RunSpec
from explorer.ui import components as bg
from explorer.ui.session import address
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from explorer.view.graph import browser
from explorer.view.graph.geometry import layout
from explorer.view.graph.labels import Label
from explorer.view.graph.nesting import default_open, nest
from tests import graphs

GRAPH = graphs.gpt(3)
ACTS = st.sampled_from(
    [("preset", "all"), ("undo", ""), ("redo", ""), *(("on", id) for id in ("embedding", "norm", "head", "blocks.0"))]
)


class Truth:
    """Each decision in the order in which a person took it."""

    def __init__(self) -> None:
        self.past: list[set[str]] = []
        self.on: set[str] = set()
        self.future: list[set[str]] = []

    def decide(self, on: set[str]) -> None:
        if on != self.on:
            self.past, self.on, self.future = [*self.past, self.on], on, []

    def act(self, kind: str, id: str) -> None:
        source, other = (self.past, self.future) if kind == "undo" else (self.future, self.past)
        if kind in ("preset", "on"):
            self.decide(set(preset(id, GRAPH).blocks) if kind == "preset" else self.on ^ {id})
        elif source:
            other.append(self.on)
            self.on = source.pop()


@settings(max_examples=200)
@given(st.lists(st.one_of(ACTS, st.integers(0, 4), st.just("answer"), st.lists(ACTS, max_size=2)), max_size=30))
def test_each_step_counts_once_and_in_its_order_in_any_interleaving(events: list[Any]) -> None:
    """Undo and redo offer what the decisions in their order leave to undo and redo.

    Events are acts, reruns that have so many steps of the browser, answers that the browser hears, and presses outside
    that draw a policy, with acts behind the press.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamlit, "session_state", told := {})
        patch.setattr(address, "show", lambda query: None)
        draft, truth, steps, n = Draft(spec=RunSpec(model=GRAPH.model)), Truth(), list[dict[str, Any]](), 0
        for event in [*events, []]:
            press, acts = n, event if isinstance(event, list) else [event] * isinstance(event, tuple)
            if isinstance(event, list):
                truth.decide({"blocks.1"})
            for kind, id in acts:
                n += 1
                steps.append({"n": n, "kind": kind, "ids": [id] if id else []})
                truth.act(kind, id)
            if event == "answer":
                steps = [step for step in steps if step["n"] > drafts.marks_of(draft, GRAPH).last_step]
            elif isinstance(event, int):
                told[draft.widget] = {"steps": {"list": steps[:event], "press": 0}}
                drafts.absorb(draft, GRAPH)
            elif isinstance(event, list):
                told[draft.widget] = {"steps": {"list": list(steps), "press": press}}
                drafts.set_policy(draft, Policy.recompute(["blocks.1"]), GRAPH)
                drafts.absorb(draft, GRAPH)
        assert set(draft.spec.policy.blocks) == truth.on
        assert [set(policy.blocks) for policy in draft.history.past] == truth.past
        assert [set(policy.blocks) for policy in draft.history.future] == truth.future


def test_an_old_message_changes_nothing() -> None:
    def told(*numbers: int) -> dict[str, Any]:
        return {"steps": {"list": [{"n": n, "kind": "undo"} for n in numbers], "press": 5}}

    state = bg.GraphMarks()
    assert [step.n for step in bg.new_steps(state, told(4, 5, 6), until_press=True)] == [4, 5]
    assert [step.n for step in bg.new_steps(state, told(4, 5, 6))] == [6]
    for message in (told(4, 5, 6), told(5), told(), None, {"window": {}}):
        assert bg.new_steps(state, message) == [] and state.last_step == 6


def test_a_join_has_a_leader_to_the_right_only_where_an_arrow_attaches_there() -> None:
    drawing = layout(graphs.gpt(2), ["blocks", "blocks.0"])
    sent = bg.payload(drawing, bg.GraphMarks(), bg.Paint(labels={}))["geometry"]["joins"]
    assert [join[-1] for join in sent] == [True, True]
    alone = [link for link in drawing.links if link.kind == "next"]
    drawing = msgspec.structs.replace(drawing, links=tuple(alone))
    sent = bg.payload(drawing, bg.GraphMarks(), bg.Paint(labels={}))["geometry"]["joins"]
    assert [join[-1] for join in sent] == [False, False]


def test_what_travels_is_small_even_for_a_thousand_blocks() -> None:
    graph = graphs.gpt(125, n_inner=5)
    labels = {block.fqn: Label(bytes="15.0 → 0.5 MiB", note="ran 2×", title=block.fqn) for block in graph.blocks}
    paint = bg.Paint(labels=labels)
    folded = bg.payload(layout(graph, default_open(graph)), bg.GraphMarks(), paint)
    assert len(json.dumps(folded)) < 10_000
    unfolded = bg.payload(layout(graph, list(nest(graph))), bg.GraphMarks(), paint)
    assert len(unfolded["geometry"]["rows"]) > 1000
    assert len(json.dumps(unfolded)) < 350_000
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in browser.script(), "names reach the page as data only"
