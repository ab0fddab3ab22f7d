"""The Python half of the components: no click in the graph is lost, a move of the slider is taken over once."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest

from explorer.ui import components as bg
from explorer.view.graph import browser
from explorer.view.graph.geometry import layout
from explorer.view.graph.labels import Label
from explorer.view.graph.nesting import default_open, nest
from tests import graphs

IDS = ("a", "b", "c", "d")


def marks(seq: int, base: int, on: set[str], cuts: set[str] = frozenset(), **fields: Any) -> dict[str, Any]:  # type: ignore[assignment]
    return {
        "marks": {
            "seq": seq,
            "base": base,
            "on": sorted(on),
            "cuts": sorted(cuts),
            "open": [],
            "selected": "",
            "press": None,
            **fields,
        }
    }


class Browser:
    """What graph.js does with marks, in a few lines: the rule under test needs its other half."""

    def __init__(self) -> None:
        self.on: set[str] = set()
        self.seq, self.revision = 0, 0
        self.pending: list[tuple[int, str]] = []
        self.press: dict[str, Any] | None = None
        self.wire: list[dict[str, Any]] = []
        """To the server: messages, and presses on a button that replaces the marks."""

    def message(self) -> dict[str, Any]:
        told: dict[str, Any] = marks(self.seq, self.revision, self.on)["marks"]
        return told

    def click(self, id: str) -> None:
        self.on ^= {id}
        self.seq += 1
        self.pending.append((self.seq, id))
        self.wire.append({"marks": {**self.message(), "press": self.press}})

    def press_button(self, ids: list[str]) -> None:
        if self.pending and (self.press is None or self.press["seq"] < self.seq):
            self.press = self.message()
            self.wire.append({"marks": {**self.press, "press": self.press}})
        self.wire.append({"replace": ids})

    def hear(self, state: bg.GraphMarks) -> None:
        self.on, self.revision = set(state.on), state.revision
        self.pending = [(seq, id) for seq, id in self.pending if seq > state.seq]
        if self.press and self.press["seq"] <= state.seq:
            self.press = None
        for _, id in self.pending:
            self.on ^= {id}


class Server:
    """Reruns of the page: each takes what has come in, callbacks first; one may be interrupted before it draws."""

    def __init__(self) -> None:
        self.state = bg.GraphMarks()
        self.told: dict[str, Any] | None = None
        self.answers: list[bg.GraphMarks] = []

    def rerun(self, came: list[dict[str, Any]], *, interrupted: bool = False) -> None:
        for item in came:
            self.told = item if "marks" in item else self.told
        for item in came:
            if "replace" in item:
                bg.adopt_marks(self.state, self.told, until_press=True)
                bg.replace_marks(self.state, item["replace"])
        if not interrupted:
            bg.adopt_marks(self.state, self.told)
            self.answers.append(dataclasses.replace(self.state, on=list(self.state.on)))


REPLACED = {"preset": ["a", "c"], "other preset": ["b"]}


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(IDS),
            st.sampled_from(tuple(REPLACED)),
            st.just("answer"),
            st.tuples(st.sampled_from(["rerun", "interrupted"]), st.integers(1, 4)),
        ),
        max_size=30,
    )
)
def test_no_click_and_no_preset_is_lost_in_any_interleaving(events: list[Any]) -> None:
    """The truth: each click flips its block, each preset replaces all, in the order in which a person did them."""
    browser, server = Browser(), Server()
    expected: set[str] = set()
    for event in events:
        if event in REPLACED:
            browser.press_button(REPLACED[event])
            expected = set(REPLACED[event])
        elif event in IDS:
            browser.click(event)
            expected ^= {event}
        elif event == "answer":
            if server.answers:
                browser.hear(server.answers.pop(0))
        elif browser.wire:
            kind, n = event
            server.rerun(browser.wire[:n], interrupted=kind == "interrupted")
            del browser.wire[:n]
    server.rerun(browser.wire)
    assert set(server.state.on) == expected
    for answer in server.answers:
        browser.hear(answer)
    assert browser.on == expected


def test_an_old_message_changes_nothing_and_cuts_keep_the_rule_too() -> None:
    state = bg.GraphMarks()
    assert bg.adopt_marks(state, marks(5, 0, {"a"}))
    assert not any(bg.adopt_marks(state, message) for message in (marks(5, 0, {"b"}), marks(4, 0, {"b"}), None))
    assert state.on == ["a"]
    for _ in range(bg.REMEMBERED_REVISIONS + 1):
        bg.replace_marks(state, ["a"])
    assert bg.adopt_marks(state, marks(6, 0, {"b"})), "the browser is told that its click was dropped"
    assert (state.on, state.seq) == (["a"], 6)
    state = bg.GraphMarks()
    bg.adopt_marks(state, marks(1, 0, set(), {"a>b"}))
    bg.replace_marks(state, [], ["b>c"])
    bg.adopt_marks(state, marks(2, 0, set(), {"a>b", "c>d"}))  # clicked c>d before the preset arrived
    assert sorted(state.cuts) == ["b>c", "c>d"]


def test_a_join_has_a_leader_to_the_right_only_where_an_arrow_attaches_there() -> None:
    drawing = layout(graphs.gpt(2), ["blocks", "blocks.0"])
    sent = bg.payload(drawing, bg.GraphMarks(), bg.Paint(labels={}))["geometry"]["joins"]
    assert [join[-1] for join in sent] == [True, True]
    alone = [link for link in drawing.links if link.kind == "next"]
    drawing = msgspec.structs.replace(drawing, links=tuple(alone))
    sent = bg.payload(drawing, bg.GraphMarks(), bg.Paint(labels={}))["geometry"]["joins"]
    assert [join[-1] for join in sent] == [False, False]


def slider_page() -> None:
    import streamlit as st

    from explorer.ui import components

    moved = st.session_state.setdefault("moved", [])
    st.session_state.setdefault("slider, drawn", components._Drawn(takes={7: (3, moved.append), 6: (9, int)}))
    st.session_state["slider"] = {"at": st.session_state.get("sent")}
    components.catch_up("slider")
    components.catch_up("nowhere")


def test_a_move_is_taken_over_once() -> None:
    at = AppTest.from_function(slider_page).run()
    assert not at.exception and at.session_state["moved"] == []
    moves_of = ((2, 10, [2]), (2, 10, [2]), (0, 11, [2, 0]), (1, 10, [2, 0]), (3, 12, [2, 0]))
    of_other_labels = ((6, 1, 13, [2, 0]), (5, 1, 14, [2, 0]))
    for version, place, n, moves in (*((7, *move) for move in moves_of), *of_other_labels):
        at.session_state["sent"] = {"place": place, "version": version, "n": n}
        at.run()
        assert at.session_state["moved"] == moves


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
