"""The Python half of the sync rule: no click is lost, whatever a preset, an undo or an import does meanwhile."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.ui import block_graph as bg
from explorer.view.geometry import layout
from explorer.view.nesting import default_open, nest
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
            **fields,
        }
    }


class Browser:
    """What graph.js does with marks, in a few lines: the rule under test needs its other half."""

    def __init__(self) -> None:
        self.on: set[str] = set()
        self.seq, self.revision = 0, 0
        self.pending: list[tuple[int, str]] = []
        self.wire: list[dict[str, Any]] = []

    def click(self, id: str) -> None:
        self.on ^= {id}
        self.seq += 1
        self.pending.append((self.seq, id))
        self.wire.append(marks(self.seq, self.revision, self.on))

    def hear(self, state: dict[str, Any]) -> None:
        self.on, self.revision = set(state["on"]), state["revision"]
        self.pending = [(seq, id) for seq, id in self.pending if seq > state["seq"]]
        for _, id in self.pending:
            self.on ^= {id}


@settings(max_examples=500)
@given(
    st.lists(st.one_of(st.sampled_from(IDS), st.just("deliver"), st.just("answer"), st.just("replace")), max_size=30)
)
def test_no_click_and_no_preset_is_lost_in_any_interleaving(events: list[str]) -> None:
    """The truth: each click flips its block, each preset replaces all; the last message wins on the wire."""
    browser, state = Browser(), bg.fresh()
    answers: list[dict[str, Any]] = []
    expected: set[str] = set()
    clicked_since_replace: list[str] = []
    for event in events:
        if event == "deliver" and browser.wire:
            bg.adopt(state, browser.wire[-1])
            answers.append({**state, "on": list(state["on"])})
        elif event == "answer" and answers:
            browser.hear(answers.pop(0))
        elif event == "replace":
            bg.adopt(state, browser.wire[-1] if browser.wire else None)
            bg.replace(state, ["a", "c"])
            expected, clicked_since_replace = {"a", "c"}, []
            answers.append({**state, "on": list(state["on"])})
        elif event in IDS:
            browser.click(event)
            expected ^= {event}
            clicked_since_replace.append(event)
    if browser.wire:
        bg.adopt(state, browser.wire[-1])
    assert set(state["on"]) == expected
    for answer in answers:
        browser.hear(answer)
    browser.hear(state)
    assert browser.on == expected


def test_an_old_message_changes_nothing() -> None:
    state = bg.fresh()
    assert bg.adopt(state, marks(5, 0, {"a"}))
    assert not bg.adopt(state, marks(5, 0, {"b"}))
    assert not bg.adopt(state, marks(4, 0, {"b"}))
    assert not bg.adopt(state, None)
    assert state["on"] == ["a"]


def test_cuts_keep_the_rule_too() -> None:
    state = bg.fresh()
    bg.adopt(state, marks(1, 0, set(), {"a>b"}))
    bg.replace(state, [], ["b>c"])
    bg.adopt(state, marks(2, 0, set(), {"a>b", "c>d"}))  # clicked c>d before the preset arrived
    assert sorted(state["cuts"]) == ["b>c", "c>d"]


def test_a_click_on_a_revision_long_gone_is_dropped_and_the_browser_told() -> None:
    state = bg.fresh()
    for _ in range(bg.REMEMBERED + 1):
        bg.replace(state, ["a"])
    assert bg.adopt(state, marks(1, 0, {"b"}))
    assert state["on"] == ["a"]
    assert state["seq"] == 1


def test_what_travels_is_small_even_for_a_thousand_blocks() -> None:
    graph = graphs.gpt(125, n_inner=5)
    labels = {block.fqn: bg.Label(bytes="15.0 → 0.5 MiB", note="ran 2×", title=block.fqn) for block in graph.blocks}
    paint = bg.Paint(labels=labels, recompute_colour="#000000")
    folded = bg.payload(layout(graph, default_open(graph)), bg.fresh(), paint)
    assert len(json.dumps(folded)) < 10_000
    unfolded = bg.payload(layout(graph, list(nest(graph))), bg.fresh(), paint)
    assert len(unfolded["geometry"]["rows"]) > 1000
    assert len(json.dumps(unfolded)) < 350_000


def test_names_reach_the_page_as_data_only() -> None:
    text = (bg.HERE / "graph.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text
