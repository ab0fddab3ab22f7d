"""What the server cannot see of the visitor's browser: the size of its window, and whether it can draw charts.

first visit   the document notes the window in a cookie ──▶ a page for this window ──▶ the graph reports "window"
              ──▶ the first run is measured; the sketch of the first chart reports "plotly" ──▶ charts
later         the window is known; a very different size arrives the same way
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer.view.graph.geometry import Window

USUAL_HEIGHT = 800
"""Pixels of a laptop's window: the page fits it without scrolling."""
LARGEST_HEIGHT = 1600
KEY, PLOTLY = "window", "plotly"


def take(message: Mapping[str, Any] | None) -> bool:
    """Takes over the window size that a graph reports. Returns whether the size was new."""
    size = (message or {}).get("window")
    if size is None or size == st.session_state.get(KEY):
        return False
    st.session_state[KEY] = dict(size)
    return True


def is_known() -> bool:
    """Whether a graph has reported its window."""
    return KEY in st.session_state


def can_draw_charts() -> bool:
    """Whether the browser has run Plotly's file, which holds it for a second."""
    return PLOTLY in st.session_state


def note_plotly() -> None:
    """Notes that the browser has run Plotly's file."""
    st.session_state[PLOTLY] = True


def laid_out_for() -> Window:
    """The window that the page is laid out for now: as a graph reported it, else as the document noted it."""
    if not is_known():
        return of_cookie(st.context.cookies)
    size = st.session_state[KEY]
    return Window(height=_in_steps(size["height"]), narrow=bool(size["narrow"]), known=True)


def of_cookie(cookies: Mapping[str, str]) -> Window:
    """The window that components/preview.js notes; a usual window without a readable cookie."""
    cookie = re.fullmatch(r"(\d{1,5})\.([01])", str(cookies.get(KEY)))
    height, narrow = (int(cookie[1]), cookie[2] == "1") if cookie else (USUAL_HEIGHT, False)
    return Window(height=_in_steps(height), narrow=narrow, known=False)


def _in_steps(height: int) -> int:
    return USUAL_HEIGHT + max(0, min(height, LARGEST_HEIGHT) - USUAL_HEIGHT) // 20 * 20


def narrow() -> bool:
    """Whether this visitor's window has no room for two columns."""
    return laid_out_for().narrow
