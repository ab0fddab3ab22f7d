"""Components of the page: block graph, headline figures, first sketch, film of a step, slider over plans, keys.

explorer/view/graph/graph.js states the rule that loses no click at any speed. `adopt_marks` and `replace_marks` are the
Python half of the rule. The page follows the slider while a person drags it, not only at its release.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import streamlit as st

from explorer.view.graph import browser
from explorer.view.graph.browser import Paint, painted
from explorer.view.graph.geometry import Layout
from explorer.view.memory.film import Film
from explorer.view.text.explore import ABOUT


@cache
def _component(name: str, html: str, css: str, js: str, *, isolate_styles: bool = True) -> Any:
    """Registers a component behind desk.js. Texts with line breaks are not taken for paths: there is no build step.

    Data is handed over in a list: Streamlit imports pandas to tell whether a value in a dictionary is a table.
    """
    name, js = f"checkpoint_explorer_{name}", f"{{\n{_text('desk.js')}}}\n{js}"
    return st.components.v2.component(name, html=html, css=css, js=js, isolate_styles=isolate_styles)


@cache
def _text(file: str) -> str:
    return (Path(__file__).parent / file).read_text(encoding="utf-8")


GRAPH = '<div class="graph" role="tree" aria-label="Block graph" aria-multiselectable="true"></div>\n'
STRIP = '<div class="box"><div class="strip"></div></div>\n'
NEWS = '<div class="news" hidden></div>\n'
SKETCH = '<div class="sketch" aria-hidden="true"></div>\n'


def preview() -> str:
    """HTML for the document: first words, and a script that draws an earlier run with the page's own components."""
    sources = {
        "strip": (STRIP, _text("figure_strip.css"), _text("figure_strip.js")),
        "slider": (SLIDER, _text("live_slider.css"), _text("live_slider.js")),
        "graph": (GRAPH, browser.style(), browser.script()),
        "chart": (SKETCH, _text("sketch.css"), _text("sketch.js")),
    }
    parts = (
        f"{part}: {{ html: {json.dumps(f'<style>{css}</style>{html}')}, draw: {browser.as_function(js)} }}"
        for part, (html, css, js) in sources.items()
    )
    script = f"{{ {_text('desk.js')} }}\nconst parts = {{ {', '.join(parts)} }}\n{_text('preview.js')}"
    first = ABOUT.split("**")[1]
    return (
        f'<style>{_text("preview.css")}</style><div id="preview">'
        f'<p id="first-words"><span><b>{first}</b> <mark></mark> <i></i></span></p></div>'
        f"<script>{{ {script} }}</script>"
    )


REMEMBERED_REVISIONS = 32
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


def adopt_marks(state: GraphMarks, message: Mapping[str, Any] | None, *, until_press: bool = False) -> bool:
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


def replace_marks(state: GraphMarks, on: Iterable[str], cuts: Iterable[str] | None = None) -> None:
    """A preset, an undo or an import: the marks are these from now on. Call `adopt_marks(until_press=True)` first."""
    state.was[state.revision] = list(state.on), list(state.cuts)
    for old in list(state.was)[:-REMEMBERED_REVISIONS]:
        del state.was[old]
    state.on = list(on)
    if cuts is not None:
        state.cuts = list(cuts)
    state.revision += 1


def flipped(marks: Iterable[str], flips: Collection[str]) -> list[str]:
    """`marks` with every id in `flips` switched over, order kept."""
    others = [id for id in marks if id not in flips]
    return others + [id for id in flips if id not in set(marks)]


def block_graph(
    drawing: Layout, state: GraphMarks, paint: Paint, *, key: str, desk: dict[str, object] | None = None
) -> None:
    """Draws the graph; a person's marks arrive in `st.session_state[key]["marks"]` for `adopt_marks`.

    The page adopts the marks when it is drawn: a callback cannot tell which events came first in the same rerun.

    If `paint.window` is a guess or differs much from the browser's window, the latter arrives as "window". With
    `desk`, what desk.js has to know of this drawing, clicks are answered over the route first.
    """
    component = _component("block_graph", GRAPH, browser.style(), browser.script())
    # A state without a callback has no key.
    data = [payload(drawing, state, paint) | (desk or {})]
    component(key=key, data=data, on_marks_change=lambda: None, on_window_change=lambda: None)


def payload(drawing: Layout, state: GraphMarks, paint: Paint) -> dict[str, object]:
    """Data for the browser: the painted drawing, and the marks."""
    return painted(drawing, paint) | {
        "on": sorted(state.on),
        "cuts": sorted(state.cuts),
        "open": list(state.open),
        "selected": state.selected,
        "seq": state.seq,
        "revision": state.revision,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A figure of the strip, in plain text."""

    label: str
    value: str
    delta: str = ""
    """Text under the value, most often a change."""
    colour: Literal["green", "red", "gray", "off"] = "off"
    help: str
    """Meaning of the figure, shown while the label is pointed at or has the focus."""
    below: str = ""
    """Origin of the figure."""


def strip(cells: tuple[Cell, ...], about: dict[str, object] | None = None) -> None:
    """Draws `cells` in one row, or in rows of three where the page is narrow. Origins that lack room take a line.
    `about`: the clicks and the move that they are drawn with (desk.js); None without a graph.

    Help stands on each label: the question mark of Streamlit's metric is a control that answers no click.
    """
    component = _component("figure_strip", STRIP, _text("figure_strip.css"), _text("figure_strip.js"))
    component(key="strip", data=[{"cells": [asdict(cell) for cell in cells], "about": about}], height="content")


def first_picture(drawing: str, *, loaded: bool, take_loaded: Callable[[], None]) -> None:
    """Draws the HTML of view/drawing/sketch.py over the next chart in its container, until Plotly has drawn that.

    If Plotly's file is not `loaded`, the browser runs the file then and `take_loaded` is called.
    """
    component = _component("sketch", SKETCH, _text("sketch.css"), _text("sketch.js"), isolate_styles=False)
    data = [{"drawing": drawing, "loaded": loaded}]
    component(key="sketch", data=data, on_plotly_change=take_loaded, height="content")


def job_news(job_id: str, n_news: int, *, key: str) -> None:
    """Reruns the fragment around it when the job has more news than `n_news`."""
    component = _component("news", NEWS, "", _text("news.js"))
    component(key=key, data=[{"job": job_id, "n": n_news}], on_news_change=lambda: None, height="content")


FILM = """<div class="film">
<button type="button" class="back" title="One block back" aria-label="One block back" hidden>‹</button>
<button type="button" class="on" title="One block on" aria-label="One block on" hidden>›</button>
<button type="button" class="close" title="End the film" aria-label="End the film" hidden>✕</button>
<button type="button" class="play" title="Forward fills the blocks, backward drains them">▶ Play</button>
<div class="over" hidden><output class="words"></output>
<div class="track" role="slider" tabindex="0" aria-label="Moment of the step" aria-valuemin="0"></div></div>
</div>
"""


def step_film(film: Film) -> None:
    """Draws a button that plays `film` over the chart of the container "first" and in the graph."""
    component = _component("film", FILM, _text("film.css"), _text("film.js"))
    component(key="film", data=[asdict(film)], width="content", height="content")


KEYS = {
    "On every page": {"Ctrl Enter": "Run", "Ctrl Z": "Undo", "Ctrl Y": "Redo", "?": "This list"},
    "In the block graph": {
        "↑ ↓ Home End": "Go to another row",
        "→ ←": "Unfold or fold a group, or go into it and out of it",
        "Space": "Recompute the block, or keep it",
        "I": "Show the block's bytes in the chart",
    },
    "In a played step": {"← → Home End": "Go to another block", "Esc": "End the film"},
}
"""What each key does, by place."""


def key_sheet() -> None:
    """Listens for the keys of every page; "?" shows their list. Cmd takes the place of Ctrl on a Mac."""
    groups = "".join(
        f"<h3>{place}</h3><dl>{''.join(map(_key_row, keys, keys.values()))}</dl>" for place, keys in KEYS.items()
    )
    title = (
        '<header><h2 id="keys">Keys</h2><button aria-label="Close the list of keys" autofocus>Close</button></header>'
    )
    html = f'<dialog aria-labelledby="keys"><div>{title}{groups}</div></dialog>\n'
    component = _component("keys", html, _text("keys.css"), _text("keys.js"))
    component(key="keys", data=[{}], height="content")


def _key_row(keys: str, what: str) -> str:
    names = " ".join(f"<kbd>{key}</kbd>" for key in keys.split())
    return f"<dt>{names}</dt><dd>{what}</dd>"


REMEMBERED_LABELS = 8
"""Number of versions of the labels whose moves may still arrive."""
SLIDER = """<div class="slide">
<div class="head"><span class="name"></span><output></output></div>
<input type="range" min="0" step="1"></div>
"""


def live_slider(name: str, labels: Sequence[str], at: int, take: Callable[[int], object], *, key: str) -> int:
    """Draws a slider with a place per label; `take` gets each new place. Fewer than two places cannot move.

    Returns the version of the labels.
    """
    drawn: _Drawn = st.session_state.setdefault(f"{key}, drawn", _Drawn())
    if drawn.labels != list(labels):
        drawn.labels, drawn.version = list(labels), drawn.version + 1
    drawn.takes[drawn.version] = len(labels), take
    drawn.takes.pop(drawn.version - REMEMBERED_LABELS, None)
    data = [{"name": name, "labels": drawn.labels, "at": at, "version": drawn.version, "heard": drawn.heard}]
    component = _component("live_slider", SLIDER, _text("live_slider.css"), _text("live_slider.js"))
    component(key=key, data=data, on_at_change=lambda: catch_up(key), height="content")
    return drawn.version


def last_move(key: str) -> int:
    """Number of the last move of the slider `key` that was taken over; 0 before the first."""
    drawn: _Drawn | None = st.session_state.get(f"{key}, drawn")
    return drawn.heard if drawn is not None else 0


def catch_up(key: str) -> None:
    """Takes over a move of the slider, once. A button that overrules the slider calls this function first: if both
    arrive in one rerun, Streamlit may call the button first."""
    drawn: _Drawn | None = st.session_state.get(f"{key}, drawn")
    move = (st.session_state.get(key) or {}).get("at")
    if drawn is None or move is None or move["n"] <= drawn.heard:
        return
    drawn.heard = move["n"]
    n_places, take = drawn.takes.get(move["version"], (0, int))
    if 0 <= move["place"] < n_places:
        take(move["place"])


@dataclass(slots=True)
class _Drawn:
    """A slider as last drawn, and the last move taken over. A move is about the labels that the person saw."""

    labels: list[str] = field(default_factory=list)
    version: int = 0
    """Number of times that the labels have changed."""
    takes: dict[int, tuple[int, Callable[[int], object]]] = field(default_factory=dict)
    """Number of places and what a move does, by version of the labels."""
    heard: int = 0
