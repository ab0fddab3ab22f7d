"""What the server cannot see of the visitor's browser: the size of its window, and whether it can draw charts.

first visit   a page for USUAL_HEIGHT ──▶ the graph reports "window" ──▶ the page again, laid out for the window
              ──▶ the sketch of the first chart reports "plotly" ──▶ the page again, with charts
later         the window is known; a very different size arrives the same way
"""

from __future__ import annotations

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


def extra_height() -> int:
    """Pixels by which this visitor's window is higher than USUAL_HEIGHT, in steps of 20."""
    height: int = st.session_state[KEY]["height"] if is_known() else USUAL_HEIGHT
    return max(0, min(height, LARGEST_HEIGHT) - USUAL_HEIGHT) // 20 * 20


def narrow() -> bool:
    """Whether this visitor's window has no room for two columns."""
    return is_known() and bool(st.session_state[KEY]["narrow"])


def laid_out_for() -> Window:
    """The window that the page is laid out for now."""
    return Window(height=USUAL_HEIGHT + extra_height(), narrow=narrow(), known=is_known())
