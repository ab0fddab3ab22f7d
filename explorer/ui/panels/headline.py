"""The strip at the top that never moves: six figures, each with its unit, its origin and what it means."""

from __future__ import annotations

from typing import Literal

import streamlit as st

from explorer.ui import glossary
from explorer.ui import state as states
from explorer.ui.figures import Cell

NARROW_WIDTH = 205
"""Pixels of a cell where three stand side by side."""
COLOURS: dict[str, Literal["green", "red", "gray"]] = {"good": "green", "bad": "red", "neutral": "gray"}


def headline_strip(cells: tuple[Cell, ...]) -> None:
    """Draws `cells` side by side, in two rows where the window is narrow; a figure of an earlier policy is dimmed."""
    with st.container(horizontal=True, gap="small", key="strip"):
        for cell in cells:
            with st.container(gap=None, width=NARROW_WIDTH if states.narrow() else "stretch"):
                _cell(cell)


def _cell(cell: Cell) -> None:
    headline = cell.headline
    origins = " ".join(glossary.ORIGIN[origin] for origin in headline.origin)
    origin = ", ".join(headline.origin) or "not measured"
    st.metric(
        headline.label,
        headline.value,
        f"{headline.delta} · {origin}" if cell.was else headline.delta or None,
        delta_color=COLOURS[headline.tone],
        delta_arrow="off",
        help=f"{headline.tooltip} {origins}",
    )
    # Dimmed: it is about a policy that is no longer drawn.
    st.caption(f":gray[before: {cell.was}]" if cell.was else origin)
