"""A chart is a value: its figure, a sentence for a screen reader, and the same numbers as a table.

Plotly reads tags in every text of a figure, and a block may be named `<b>`. Charts therefore write no tags: a line ends
with `\\n`, and bold text comes from `bold`. `Chart.plotted` escapes all texts and writes the tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any

import numpy as np
import plotly.graph_objects as go

Rows = Sequence[dict[str, Any]]
_LITERAL = "literal"
"""Mark of a figure whose texts are escaped already."""
_TAGS = {"\n": "<br>", "\x02": "<b>", "\x03": "</b>"}
"""By the character that stands for a tag in the texts of a chart."""
_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"} | _TAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What every chart function of this ring returns."""

    name: str
    """What its table and its files are called: `memory timeline`."""
    figure: go.Figure
    alt: str
    """The picture in a sentence. No two charts share one: a screen reader tells them apart by it."""
    rows: Callable[[], Rows]
    """The numbers of the figure, computed when a reader opens the table."""

    def plotted(self) -> go.Figure:
        """The figure with every text as Plotly has to be given it. Pages and reports draw nothing else."""
        figure = self.figure
        if figure.layout.meta == _LITERAL:
            return figure
        layout = figure.layout
        axes = [*figure.select_xaxes(), *figure.select_yaxes()]
        titles = [layout.title, layout.title.subtitle, *(axis.title for axis in axes), *layout.annotations]
        for part, names in (
            *((title, ("text",)) for title in titles),
            *((axis, ("ticktext", "categoryarray")) for axis in axes),
            *((trace, ("name", "x", "y", "text", "customdata", "hovertemplate")) for trace in figure.data),
        ):
            for name in names:
                if (value := part[name]) is not None and (text := _each_text(value)) is not value:
                    part[name] = text
        for trace in figure.data:
            if trace.hovertemplate:
                trace.hovertemplate += "<extra></extra>"  # no box with the name of the trace
        figure.layout.meta = _LITERAL
        return figure


def bold(text: str) -> str:
    """`text` in bold letters, for any text of a figure."""
    return f"\x02{text}\x03"


def literal(text: str) -> str:
    """`text` as Plotly has to be given it: no name in it is read as a tag."""
    return text.translate(_ESCAPED)


def written(text: str) -> str:
    """The text that `literal` was given: what a click returns."""
    for sign, tag in _TAGS.items():
        text = text.replace(tag, sign)
    return unescape(text)


def _each_text(value: Any) -> Any:
    """`value` with each text in it as Plotly has to be given it; numbers alone are returned as they are."""
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, np.ndarray):
        return np.array(_each_text(value.tolist()), dtype=object) if value.dtype.kind in "OU" else value
    if isinstance(value, (list, tuple)) and any(isinstance(entry, (str, list, tuple)) for entry in value):
        return [_each_text(entry) for entry in value]
    return value
