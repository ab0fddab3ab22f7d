"""The fixed strip at the top: a few figures side by side, each with its meaning and origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import streamlit as st

from explorer.ui.session import window

SIDE_BY_SIDE = 3
"""Figures per row in a narrow window."""
EMPTY_LINE = "\N{NO-BREAK SPACE}"
"""Placeholder as high as a word, so that nothing moves when a word appears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A figure as shown on the page."""

    label: str
    value: str
    delta: str = ""
    """Text beside the value, most often a change."""
    colour: Literal["green", "red", "gray", "off"] = "off"
    help: str
    """Markdown, as is `below`."""
    below: str = ""
    """Origin of the figure."""


def strip(cells: tuple[Cell, ...]) -> None:
    """Draws `cells` in one row, or in two rows in a narrow window."""
    n = SIDE_BY_SIDE if window.narrow() else len(cells)
    for start in range(0, len(cells), n):
        with st.container(horizontal=True, gap="small"):
            for cell in cells[start : start + n]:
                with st.container(gap=None):
                    _cell(cell)


def _cell(cell: Cell) -> None:
    st.metric(
        cell.label,
        cell.value,
        cell.delta or None,
        delta_color=cell.colour,
        delta_arrow="off",
        help=cell.help,
    )
    st.caption(cell.below or EMPTY_LINE)
