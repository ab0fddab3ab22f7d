"""The strip of headline figures as a component of the page: help stands on each label, not on a button beside it.

Streamlit's metric has a question mark for its help: six controls that answer no click.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import streamlit as st

HERE = Path(__file__).parent


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


def strip(cells: tuple[Cell, ...]) -> None:
    """Draws `cells` in one row, or in rows of three where the page is narrow. Origins that lack room take a line."""
    _component()(key="strip", data={"cells": [asdict(cell) for cell in cells]}, height="content")


@cache
def _component() -> Any:
    # Inline text, read from disk: no build step. It has line breaks, so it is not taken for a path.
    return st.components.v2.component(
        "checkpoint_explorer_figure_strip",
        html='<div class="box"><div class="strip"></div></div>\n',
        css=(HERE / "figure_strip.css").read_text(encoding="utf-8"),
        js=(HERE / "figure_strip.js").read_text(encoding="utf-8"),
    )
