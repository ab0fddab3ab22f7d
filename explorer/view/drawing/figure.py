"""A chart, and the shared parts of every figure: title, margins, legend, bars, and escaped texts.

Plotly reads tags in every text of a figure, and a block may be named `<b>`. Charts therefore write no tags: a line ends
with `\\n`, and bold text comes from `bold`. `Chart.plotted` escapes all texts and writes the tags.
The theme of the page gives fonts and text colours, so that a figure follows light and dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import unescape
from math import ceil
from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.record.base import Record
from explorer.view.drawing.colours import CURSOR, FULL_TEXT, GRID, QUIET_TEXT
from explorer.view.drawing.units import mib

CONFIG: dict[str, object] = {"displaylogo": False, "modeBarButtons": [["toImage", "resetScale2d"]]}
"""Argument of `st.plotly_chart(config=...)`. A wider toolbar would lie over the plot; a drag zooms without a button."""

PICKABLE: dict[str, object] = {
    "marker": {"size": 7, "opacity": 0, "maxdisplayed": 1},
    "unselected": {"marker": {"opacity": 0}},
}
"""Style of a line whose points answer clicks. Plotly selects only markers, and draws each of them: a third of the time
of a timeline. All but one are therefore left out; the cursor shows which point was clicked."""


HOVER_ALONG_X: dict[str, object] = {"hovermode": "x unified", "hoverdistance": -1}
"""The nearest moment answers wherever the pointer is over the plot."""
Cursor = tuple[str, int] | None
"""Run and event that a person picked."""


ON_AREA = "on an area"
"""Name of an annotation that stands on a filled area."""


def readable(fig: go.Figure, *, dark: bool) -> None:
    """Sets all words on the page in a readable grey: Streamlit's grey has a contrast of 3.7:1 at 10 px."""
    font = {"color": QUIET_TEXT["dark" if dark else "light"], "size": 12}
    fig.update_xaxes(tickfont=font, title_font=font)
    fig.update_yaxes(tickfont=font, title_font=font)
    fig.update_layout(title_subtitle_font=font, legend_font_size=12, hoverlabel_font=font)
    fig.update_traces(outsidetextfont_color=font["color"], selector={"type": "bar"})
    for words in fig.layout.annotations:
        if words.name == ON_AREA:
            words.font.color = FULL_TEXT["dark" if dark else "light"]
        words.font.color = words.font.color or font["color"]  # texts on a coloured ground have their own colour


def mark_cursor(fig: go.Figure, tick: int, x: Any) -> None:
    """A line through the picked event; `x` are the places of all events."""
    if tick < len(x):
        fig.add_vline(x=float(x[tick]), line={"width": 2, "color": CURSOR})


def hatch(shape: str | list[str]) -> dict[str, object]:
    """A bar's pattern, drawn over its colour whatever the page's theme says: Plotly's own default drops the colour."""
    return {"shape": shape, "size": 6, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.6)", "fgopacity": 1}


def figure(question: str, answer: str = "", *, height: int = 420) -> go.Figure:
    """An empty figure titled with its question, the answer in figures below it."""
    place = {"x": 0, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 8, "l": 4}}
    title = {"text": question, **place, **({"subtitle": {"text": answer}} if answer else {})}
    legend = {"orientation": "h", "yanchor": "top", "xanchor": "left", "x": 0}
    axis = {"gridcolor": GRID, "zeroline": False, "title": {"standoff": 4}}
    # Whole at once: each later update of a figure costs Plotly milliseconds.
    return go.Figure(
        layout={
            "title": title,
            "margin": {"l": 8, "r": 16, "t": 60 if answer else 44, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "legend": {**legend, "title": {"text": ""}},
            "hoverlabel": {"align": "left", "namelength": -1},
            "dragmode": "zoom",
            "modebar": {"bgcolor": "rgba(0,0,0,0)"},
            "height": height,
            "xaxis": {**axis, "automargin": "bottom"},
            "yaxis": {**axis, "automargin": "left"},
        }
    )


LETTER, LINE, NARROW = 6.5, 19, 500
"""Pixels of a letter and of a line, and of a plot in the narrowest window of two columns."""


def _leave_room(fig: go.Figure) -> None:
    """Sets margins in which labels, titles and legend fit.

    Plotly draws the whole figure again, up to three times, if a margin is too small: a second of a busy browser.
    """
    axis, layout = fig.layout.yaxis, fig.layout
    if axis.visible is False:
        return
    category = dict.fromkeys(label for trace in fig.data for label in trace.y) if axis.type == "category" else None
    lines = [line for label in axis.ticktext or category or ["1000"] for line in str(label).split("\n")]
    title_lines = axis.title.text.count("\n") + 1 if axis.title.text else 0
    names = [trace.name or "" for trace in fig.data if trace.showlegend is not False]
    is_shown = (
        layout.showlegend or (layout.showlegend is None and len(names) > 1) or any(t.showlegend for t in fig.data)
    )
    widths = [40 + LETTER * len(name) for name in names]
    n_columns = len(names) if sum(widths) <= NARROW else max(1, NARROW // max(widths))
    legend = 17 + LINE * ceil(len(names) / n_columns) if is_shown and names else 0
    layout.margin.update(l=round(18 + LETTER * max(map(len, lines)) + LINE * title_lines), b=48 + legend)
    size(fig, layout.height)


def size(fig: go.Figure, height: int) -> None:
    """Sets the height in pixels; the legend stays below the axis."""
    margin = fig.layout.margin
    fig.update_layout(height=height, legend_y=-42 / max(height - margin.t - margin.b, 60))


def empty(question: str, reason: str) -> go.Figure:
    """A figure that says why it is empty: unknown is `not measured`, never zero."""
    fig = figure(question, height=220)
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False)
    fig.add_annotation(text=reason, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    return fig


def bars(fig: go.Figure, x_title: str, *, mode: str = "stack") -> go.Figure:
    """Horizontal bars: first row on top, numbers below."""
    fig.update_layout(barmode=mode, bargap=0.25, legend={"traceorder": "normal"})
    fig.update_yaxes(autorange="reversed", showgrid=False, type="category")
    fig.update_xaxes(title_text=x_title, rangemode="tozero")
    return fig


Rows = Sequence[dict[str, Any]]
_LITERAL = "literal"
"""Mark of a figure whose texts are escaped already."""
_TAGS = {"\n": "<br>", "\x02": "<b>", "\x03": "</b>"}
"""Tags of chart texts, by the character that stands for the tag."""
_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"} | _TAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart, as every chart function of this ring returns it."""

    name: str
    """Name of the chart's table and files: `memory timeline`."""
    figure: go.Figure
    alt: str
    """The picture in a sentence. No two charts share one: a screen reader tells them apart by it."""
    rows: Callable[[], Rows]
    """The numbers of the figure, computed when a reader opens the table."""

    def __post_init__(self) -> None:
        _leave_room(self.figure)

    @property
    def is_plotted(self) -> bool:
        """Whether `plotted` has escaped the texts."""
        return bool(self.figure.layout.meta == _LITERAL)

    def copy(self) -> Chart:
        """The chart with a figure of its own."""
        return replace(self, figure=go.Figure(self.figure))

    def plotted(self) -> go.Figure:
        """The figure with every text as Plotly has to be given it. Pages and reports draw nothing else."""
        figure = self.figure
        if self.is_plotted:
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
    """The original text of a text from `literal`, which a click returns."""
    for sign, tag in _TAGS.items():
        text = text.replace(tag, sign)
    return unescape(text)


def _each_text(value: object) -> object:
    """`value` with each text in it as Plotly has to be given it; numbers alone are returned as they are."""
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, np.ndarray):
        return np.array(_each_text(value.tolist()), dtype=object) if value.dtype.kind in "OU" else value
    if isinstance(value, (list, tuple)) and any(isinstance(entry, (str, list, tuple)) for entry in value):
        return [_each_text(entry) for entry in value]
    return value


class BarSeries(Record):
    """A series of bars, one bar in every row."""

    name: str
    lengths: Sequence[float | None]
    """Lengths in units of the axis; None: no bar."""
    figures: Sequence[str]
    """Text of each bar under the pointer, with its unit."""
    colour: str
    pattern: str | list[str] = ""
    """Plotly's: `/`, `x`; a list has one a bar."""
    edge: str = ""
    """Colour of a line around it."""
    picks: Sequence[str] = ()
    """Selection made by a click on each bar; empty: a click does nothing."""


def byte_series(name: str, sizes: Sequence[int], unit: float, colour: str, pattern: str | list[str] = "") -> BarSeries:
    """A series of bytes, `unit` bytes to a unit of the axis."""
    lengths, figures = [size / unit for size in sizes], [mib(size) for size in sizes]
    return BarSeries(name=name, lengths=lengths, figures=figures, colour=colour, pattern=pattern)


def add_bars(fig: go.Figure, rows: Sequence[str], series: BarSeries, **more: object) -> None:
    """Draws `series` as one trace; customdata of each bar: [its pick, its figure]. `more` is Plotly's, of the trace."""
    picks = series.picks or [""] * len(rows)
    marker: dict[str, object] = {"color": series.colour, "pattern": hatch(series.pattern)}
    fig.add_bar(
        orientation="h",
        name=series.name,
        y=list(rows),
        x=list(series.lengths),
        customdata=[list(both) for both in zip(picks, series.figures, strict=True)],
        marker=marker | ({"line": {"color": series.edge, "width": 1}} if series.edge else {}),
        hovertemplate=bold("%{y}") + f"\n{series.name}: %{{customdata[1]}}",
        **more,
    )
