"""The strip at the top that never moves: six figures, each with its unit, its origin and what it means."""

from __future__ import annotations

from typing import Literal, TypeVar

import streamlit as st

from explorer.ui.explore.strip import Cell
from explorer.ui.session import window
from explorer.view.words import explore as glossary

SIDE_BY_SIDE = 3
"""Figures in one row where the window is narrow."""
EMPTY_LINE = "\N{NO-BREAK SPACE}"
"""As high as a word: nothing moves when one comes."""
T = TypeVar("T")
COLOURS: dict[str, Literal["green", "red", "gray"]] = {"good": "green", "bad": "red", "neutral": "gray"}


def headline_strip(cells: tuple[Cell, ...]) -> None:
    """Draws `cells` side by side, in two rows where the window is narrow; a figure of an earlier policy is dimmed."""
    for row in rows_of_figures(cells):
        with st.container(horizontal=True, gap="small"):
            for cell in row:
                with st.container(gap=None):
                    _cell(cell)


def rows_of_figures(figures: tuple[T, ...]) -> list[tuple[T, ...]]:
    """All in one row, or a few in each where the window is narrow."""
    n = SIDE_BY_SIDE if window.narrow() else len(figures)
    return [figures[start : start + n] for start in range(0, len(figures), n)]


def _cell(cell: Cell) -> None:
    headline = cell.headline
    origins = " ".join(glossary.ORIGIN[origin] for origin in headline.origin)
    origin = ", ".join(headline.origin) + (f", against the {cell.against}" if cell.against else "")
    st.metric(
        headline.label,
        headline.value,
        " · ".join(filter(None, [headline.delta, cell.was and origin])) or None,
        delta_color=COLOURS[headline.tone],
        delta_arrow="off",
        help=f"{headline.tooltip} {origins}",
    )
    # Dimmed: it is about a policy that is no longer drawn.
    st.caption(f":gray[before: {cell.was}]" if cell.was else origin or EMPTY_LINE)
