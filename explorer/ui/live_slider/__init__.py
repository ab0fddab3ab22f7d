"""A slider as a component of the page: what it moves follows while it is dragged, not only when it is let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

HERE = Path(__file__).parent


def live_slider(name: str, labels: Sequence[str], at: int, take: Callable[[int], object], *, key: str) -> None:
    """One place a label; `take` gets each place that a person moves it to. Of fewer than two it cannot be moved."""

    def moved() -> None:
        said = (st.session_state.get(key) or {}).get("at")
        if said is not None and 0 <= said["place"] < len(labels):
            take(said["place"])

    _component()(key=key, data={"name": name, "labels": list(labels), "at": at}, on_at_change=moved, height="content")


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
