"""The block graph as a component of the page: its data, its messages, and the ownership of the marks.

graph.js states the rule that loses no click at any speed; `adopt` and `replace` are the Python half of the rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

from explorer.record.base import Record, to_plain
from explorer.view.drawing.colours import RECOMPUTE, STAGE_COLOURS
from explorer.view.drawing.units import mib
from explorer.view.graph.geometry import BlockRow, Layout, Link, Window
from explorer.view.graph.labels import Label
from explorer.view.graph.nesting import RUN

HERE = Path(__file__).parent
MOST_LINES = 3
"""Largest number of lines side by side, a line per tensor between two boxes."""
MANY = 9
"""Number of tensors from which one line is drawn: the tensors of a loop, not the skips of a model."""
REMEMBERED = 32
"""Number of revisions whose clicks may still arrive. Older clicks are dropped, with a notice to the browser."""


class Paint(Record):
    """Parts of the drawing that change without moving a box."""

    labels: Mapping[str, Label]
    segments: tuple[tuple[str, ...], ...] = ()
    """Blocks that are recomputed together."""
    actions: Mapping[str, str] = {}
    """The word on a block whose action is not plain recompute."""
    height: int = 520
    """Pixels from which the graph scrolls."""
    window: Window | None = None
    """The window that the page is laid out for; None: it does not matter."""
    jump: tuple[str, int] | None = None
    """Node to scroll to, and how many jumps there were: a new number scrolls."""


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
    """Data for the browser: short rows, and labels of the rows in view."""
    in_view = {row.id for row in drawing.rows}
    return {
        "geometry": _geometry(drawing),
        "shape": drawing.shape,
        "on": sorted(state.on),
        "cuts": sorted(state.cuts),
        "open": list(state.open),
        "selected": state.selected,
        "seq": state.seq,
        "revision": state.revision,
        "labels": {id: _short(label) for id, label in paint.labels.items() if id in in_view},
        "colours": {"recompute": RECOMPUTE, "stages": list(STAGE_COLOURS)},
        "segments": [list(segment) for segment in paint.segments],
        "actions": dict(paint.actions),
        "jump": {"id": paint.jump[0], "n": paint.jump[1]} if paint.jump else None,
        "height": paint.height,
        "window": to_plain(paint.window) if paint.window else None,
    }


def _geometry(drawing: Layout) -> dict[str, Any]:
    groups = {row.id for row in drawing.rows if row.foldable and not row.open}
    beside = {end for link in drawing.links if link.kind != "next" for end in (link.source, link.target)}
    return {
        "height": drawing.height,
        "rows": [_row(row) for row in drawing.rows],
        "joins": [
            [mark.id, mark.sign, mark.top, mark.height, mark.left, mark.right, mark.id in beside]
            for mark in drawing.joins
        ],
        "links": [
            [link.kind, link.start, link.end, link.lane, link.source_right, link.target_right,
             _n_lines(link, groups), _flows(link)]
            for link in drawing.links
        ],
        "cuts": [
            [cut.id, cut.top, cut.left, cut.right,
             cut.refusal or cut.note or f"cut: {mib(cut.n_bytes)} would cross", bool(cut.refusal)]
            for cut in drawing.cuts
        ],
    }  # fmt: skip


def _row(row: BlockRow) -> list[Any]:
    flags = row.toggles | row.foldable << 1 | row.open << 2
    place = [row.depth, row.top, row.height, row.left, row.right]
    return [row.id, row.name, row.kind, *place, flags, list(row.members), row.n_calls, row.n_inside]


def _short(label: Label) -> list[Any]:
    badges = [[badge.sign, badge.severity, badge.text] for badge in label.badges]
    return [label.bytes, label.note, badges, label.title, round(label.heat, 3), label.stage, label.bar]


def _n_lines(link: Link, groups: Collection[str]) -> int:
    """Several from one folded group to another, where they are tensors of the model and not of a loop."""
    between_groups = link.source in groups and link.target in groups
    return min(link.n_tensors, MOST_LINES) if between_groups and link.n_tensors < MANY else 1


def _flows(link: Link) -> str:
    tensors = f"{link.n_tensors} tensors, " if link.n_tensors > 1 else ""
    again = ", for the next call" if link.kind == "back" else ""
    return f"{tensors}{mib(link.n_bytes)} {_said(link.source)} → {_said(link.target)}{again}"


def _said(id: str) -> str:
    """A box by its path, a join by its block and operator."""
    return id.lstrip(RUN).removeprefix(":")


@cache
def _component() -> Any:
    # Inline text, read from disk: no build step. It has line breaks, so it is not taken for a path.
    return st.components.v2.component(
        "checkpoint_explorer_block_graph",
        html='<div class="graph" role="tree" aria-label="Block graph" aria-multiselectable="true"></div>\n',
        css=(HERE / "graph.css").read_text(encoding="utf-8"),
        js=(HERE / "graph.js").read_text(encoding="utf-8"),
    )
