"""The block graph as a component of the page: its data, its messages, and the ownership of the marks.

explorer/view/graph/graph.js states the rule that loses no click at any speed. `adopt` and `replace` are the Python
half of the rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import streamlit as st

from explorer.view.graph import browser
from explorer.view.graph.browser import Paint, painted
from explorer.view.graph.geometry import Layout

REMEMBERED = 32
"""Number of revisions whose clicks may still arrive. Older clicks are dropped, with a notice to the browser."""


@dataclass(slots=True, kw_only=True)
class GraphMarks:
    """Marks of a graph. The page and the browser change the marks in place, by turns."""

    on: list[str] = field(default_factory=list)
    """Blocks to recompute."""
    cuts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """Containers and runs that are unfolded."""
    selected: str = ""
    seq: int = 0
    """Number of the browser's last click taken over."""
    revision: int = 0
    """Number of times that the page has replaced the marks."""
    was: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    """`on` and `cuts` of earlier revisions, as clicks on earlier revisions may still arrive."""


def adopt(state: GraphMarks, message: Mapping[str, Any] | None, *, until_press: bool = False) -> bool:
    """Takes over a new message of the browser. Returns whether the message was new.

    Clicks on an older revision flip the same marks in the current revision. With `until_press`, clicks after the
    last press outside the graph wait for the next call (rule 4 of graph.js).
    """
    news = (message or {}).get("marks")
    if news and until_press:
        news = news["press"]
    if not news or news["seq"] <= state.seq:
        return False
    state.seq, state.open, state.selected = news["seq"], list(news["open"]), news["selected"]
    if news["base"] == state.revision:
        state.on, state.cuts = list(news["on"]), list(news["cuts"])
        return True
    was = state.was.get(news["base"])
    if was is None:
        return True
    on, cuts = set(was[0]) ^ set(news["on"]), set(was[1]) ^ set(news["cuts"])
    # The browser flips unanswered clicks on every revision that arrives; all later revisions flip them here too.
    for revision, (kept_on, kept_cuts) in state.was.items():
        if revision >= news["base"]:
            state.was[revision] = flipped(kept_on, on), flipped(kept_cuts, cuts)
    state.on, state.cuts = flipped(state.on, on), flipped(state.cuts, cuts)
    return True


def replace(state: GraphMarks, on: Iterable[str], cuts: Iterable[str] | None = None) -> None:
    """A preset, an undo or an import: the marks are these from now on. Call `adopt(until_press=True)` first."""
    _remember(state)
    state.on = list(on)
    if cuts is not None:
        state.cuts = list(cuts)
    state.revision += 1


def _remember(state: GraphMarks) -> None:
    """Keeps the marks of the last few revisions, as clicks on these revisions may still arrive."""
    state.was[state.revision] = list(state.on), list(state.cuts)
    for old in list(state.was)[:-REMEMBERED]:
        del state.was[old]


def flipped(marks: Iterable[str], flips: Collection[str]) -> list[str]:
    """`marks` with every id in `flips` switched over, order kept."""
    others = [id for id in marks if id not in flips]
    return others + [id for id in flips if id not in set(marks)]


def block_graph(drawing: Layout, state: GraphMarks, paint: Paint, *, key: str) -> None:
    """Draws the graph; a person's marks arrive in `st.session_state[key]["marks"]` for `adopt`.

    The page adopts the marks when it is drawn: a callback cannot tell which events came first in the same rerun.

    If `paint.window` is a guess or differs much from the browser's window, the latter arrives as "window".
    """
    _component()(
        key=key,
        data=payload(drawing, state, paint),
        # A state without a callback has no key.
        on_marks_change=_nothing,
        on_window_change=_nothing,
    )


def _nothing() -> None:
    pass


def payload(drawing: Layout, state: GraphMarks, paint: Paint) -> dict[str, Any]:
    """Data for the browser: the painted drawing, and the marks."""
    return painted(drawing, paint) | {
        "on": sorted(state.on),
        "cuts": sorted(state.cuts),
        "open": list(state.open),
        "selected": state.selected,
        "seq": state.seq,
        "revision": state.revision,
    }


@cache
def _component() -> Any:
    # Inline text, read from disk: no build step. It has line breaks, so it is not taken for a path.
    return st.components.v2.component(
        "checkpoint_explorer_block_graph",
        html='<div class="graph" role="tree" aria-label="Block graph" aria-multiselectable="true"></div>\n',
        css=browser.style(),
        js=browser.script(),
    )
