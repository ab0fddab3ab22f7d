"""A slider as a component of the page. The page follows while a person drags the slider, not only at its release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

HERE = Path(__file__).parent


def live_slider(name: str, labels: Sequence[str], at: int, take: Callable[[int], object], *, key: str) -> None:
    """Draws a slider with a place per label; `take` gets each new place. Fewer than two places cannot move."""
    drawn: _Drawn = st.session_state.setdefault(f"{key}, drawn", _Drawn())
    drawn.take, drawn.n_places = take, len(labels)
    data = {"name": name, "labels": list(labels), "at": at}
    _component()(key=key, data=data, on_at_change=lambda: catch_up(key), height="content")


def catch_up(key: str) -> None:
    """Takes over a move of the slider, once. A button that overrules the slider calls this function first: if both
    arrive in one rerun, Streamlit may call the button first."""
    drawn: _Drawn | None = st.session_state.get(f"{key}, drawn")
    move = (st.session_state.get(key) or {}).get("at")
    if drawn is None or move is None or move["n"] <= drawn.heard:
        return
    drawn.heard = move["n"]
    if 0 <= move["place"] < drawn.n_places:
        drawn.take(move["place"])


@dataclass(slots=True)
class _Drawn:
    """A slider as last drawn, and the last move taken over."""

    take: Callable[[int], object] = int
    n_places: int = 0
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
