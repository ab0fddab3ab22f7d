"""A slider as a component of the page. The page follows while a person drags the slider, not only at its release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

HERE = Path(__file__).parent
REMEMBERED = 8
"""Number of versions of the labels whose moves may still arrive."""


def live_slider(name: str, labels: Sequence[str], at: int, take: Callable[[int], object], *, key: str) -> None:
    """Draws a slider with a place per label; `take` gets each new place. Fewer than two places cannot move."""
    drawn: _Drawn = st.session_state.setdefault(f"{key}, drawn", _Drawn())
    if drawn.labels != list(labels):
        drawn.labels, drawn.version = list(labels), drawn.version + 1
    drawn.takes[drawn.version] = len(labels), take
    drawn.takes.pop(drawn.version - REMEMBERED, None)
    data = {"name": name, "labels": drawn.labels, "at": at, "version": drawn.version}
    _component()(key=key, data=data, on_at_change=lambda: catch_up(key), height="content")


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


@cache
def _component() -> Any:
    # Inline text, read from disk: no build step. It has line breaks, so it is not taken for a path.
    return st.components.v2.component(
        "checkpoint_explorer_live_slider",
        html='<div class="slide">\n<div class="head"><span class="name"></span><output></output></div>\n'
        '<input type="range" min="0" step="1"></div>\n',
        css=(HERE / "live_slider.css").read_text(encoding="utf-8"),
        js=(HERE / "live_slider.js").read_text(encoding="utf-8"),
    )
