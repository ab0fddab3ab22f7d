"""Components of the page: block graph, its tools, headline figures, first sketch, film of a step, slider, keys.

explorer/view/graph/graph.js states the rules that lose no step at any speed; `new_steps` is their Python half. The page
follows the slider while a person drags it, not only at its release.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import streamlit as st

from explorer.record.base import Record, from_plain
from explorer.view.graph import browser
from explorer.view.graph.browser import Paint, painted
from explorer.view.graph.geometry import Layout
from explorer.view.memory.film import Film
from explorer.view.text.explore import ABOUT, PRESETS, REDO, SEARCH, SEGMENT, UNDO


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


GRAPH = f"""<div class="graph" role="tree" aria-label="Block graph" aria-multiselectable="true"></div>
<button type="button" class="tool segment" title="{SEGMENT}" hidden><i>join</i><span></span></button>
"""
TOOLS = f"""<div class="tools">
<button type="button" class="tool presets" title="{PRESETS}" aria-haspopup="menu" popovertarget="presets">
<i>auto_awesome</i>Presets<i>expand_more</i></button>
<div id="presets" class="menu" role="menu" aria-label="Presets" popover></div>
<button type="button" class="tool undo" title="{UNDO}" hidden><i>undo</i>Undo</button>
<button type="button" class="tool redo" title="{REDO}" hidden><i>redo</i>Redo</button>
<label class="search" title="{SEARCH}"><i>search</i>
<input type="search" list="names" placeholder="Search, or blocks.*.mlp" aria-label="Search blocks"></label>
<datalist id="names"></datalist></div>
"""
STRIP = '<div class="box"><div class="strip"></div></div>\n'
NEWS = '<div class="news" hidden></div>\n'
SKETCH = '<div class="sketch" aria-hidden="true"></div>\n'


def preview() -> str:
    """HTML for the document: first words, and a script that draws an earlier run with the page's own components."""
    sources = {
        "strip": (STRIP, _text("figure_strip.css"), _text("figure_strip.js")),
        "tools": (TOOLS, _text("tools.css"), _text("tools.js")),
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


class BrowserStep(Record):
    """Something that a person did in the graph, at the slider or with the tools above the graph."""

    n: int
    """Grows from step to step."""
    kind: Literal["on", "cuts", "open", "select", "jump", "preset", "match", "join", "place", "undo", "redo"]
    """`on`, `cuts` and `open` flip the marks of `ids`; `place` moves the slider."""
    ids: tuple[str, ...] = ()
    """Blocks, cuts, or rows of the graph; the name of a preset, or a pattern."""
    place: int = 0
    version: int = 0
    """Of the slider's plans."""


@dataclass(slots=True, kw_only=True)
class GraphMarks:
    """Marks of a graph beside its policy. The page changes the marks in place."""

    cuts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """Containers and runs that are unfolded."""
    selected: str = ""
    last_step: int = 0
    """Number of the last step that the page has taken over."""


def new_steps(state: GraphMarks, message: Mapping[str, Any] | None, *, until_press: bool = False) -> list[BrowserStep]:
    """The steps in a message of the browser that are new, in their order. They count as taken over from now on.

    With `until_press`, steps after the last press outside the graph wait for the next call (rule 4 of graph.js).
    """
    steps = (message or {}).get("steps")
    if steps is None:
        return []
    new = []
    for step in from_plain(steps["list"], tuple[BrowserStep, ...]):
        if until_press and step.n > steps["press"]:
            break
        if step.n > state.last_step:
            state.last_step = step.n
            new.append(step)
    return new


def look(state: GraphMarks, step: BrowserStep) -> None:
    """Folds, unfolds, cuts or selects what `step` says; other steps change nothing here."""
    if step.kind == "open":
        state.open = flipped(state.open, step.ids)
    elif step.kind == "cuts":
        state.cuts = flipped(state.cuts, step.ids)
    elif step.kind == "select":
        state.selected = "".join(step.ids)


def flipped(marks: Iterable[str], flips: Collection[str]) -> list[str]:
    """`marks` with every id in `flips` switched over, order kept."""
    others = [id for id in marks if id not in flips]
    return others + [id for id in flips if id not in set(marks)]


def block_graph(drawing: Layout, state: GraphMarks, paint: Paint, more: dict[str, object], *, key: str) -> None:
    """Draws the graph, with `more["on"]` as the recomputed blocks.

    A person's steps arrive in `st.session_state[key]["steps"]` for `new_steps`.

    The page takes over the steps when it is drawn: a callback cannot tell which events came first in the same rerun.

    If `paint.window` is a guess or differs much from the browser's window, the latter arrives as "window". If `more`
    has what desk.js has to know of this drawing, steps are answered over the route first.
    """
    component = _component("block_graph", GRAPH, browser.style() + _text("tools.css"), browser.script())
    # A state without a callback has no key.
    data = [payload(drawing, state, paint) | more]
    component(key=key, data=data, on_steps_change=lambda: None, on_window_change=lambda: None)


def payload(drawing: Layout, state: GraphMarks, paint: Paint) -> dict[str, object]:
    """Data for the browser: the painted drawing, and the marks."""
    return painted(drawing, paint) | {
        "cuts": sorted(state.cuts),
        "open": list(state.open),
        "selected": state.selected,
        "taken": state.last_step,
    }


def graph_tools(data: dict[str, object]) -> None:
    """Draws presets, undo, redo and search; what is pressed is a step of the graph."""
    component = _component("graph_tools", TOOLS, _text("tools.css"), _text("tools.js"))
    component(key="graph_tools", data=[data], height="content")


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
    `about`: the graph and the last step that they are drawn with (desk.js); None without a graph.

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


SLIDER = """<div class="slide">
<div class="head"><span class="name"></span><output></output></div>
<input type="range" min="0" step="1"></div>
"""


def live_slider(data: dict[str, object]) -> None:
    """Draws a slider with a place per label; each move is a step of the graph. Fewer than two places cannot move."""
    component = _component("live_slider", SLIDER, _text("live_slider.css"), _text("live_slider.js"))
    component(key="front_slider", data=[data], height="content")
