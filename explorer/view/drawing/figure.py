"""What every figure shares: a title that states its question, transparent grounds, a legend under the plot, one margin.

No font or text colour is set anywhere: the page's theme gives them, so a figure follows light and dark by itself.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from explorer.view.drawing.colours import CURSOR, GRID, QUIET_TEXT

CONFIG: dict[str, Any] = {"displaylogo": False, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}
"""For `st.plotly_chart(config=...)`: the picture button stays, what does nothing here goes."""

PICKABLE: dict[str, Any] = {
    "marker": {"size": 7, "opacity": 0},
    "selected": {"marker": {"opacity": 1}},
    "unselected": {"marker": {"opacity": 0}},
}
"""A line whose points answer a click: Plotly selects markers only, so they are there and show once selected."""


HOVER_ALONG_X: dict[str, Any] = {"hovermode": "x unified", "hoverdistance": -1}
"""The nearest moment answers wherever the pointer is over the plot."""
Cursor = tuple[str, int] | None
"""Run and event that a person picked."""


def readable(fig: go.Figure, *, dark: bool) -> None:
    """All words that stand on the page in a grey that reads there: Streamlit's own is 3.7:1, 10 px."""
    font = {"color": QUIET_TEXT["dark" if dark else "light"], "size": 12}
    fig.update_xaxes(tickfont=font, title_font=font)
    fig.update_yaxes(tickfont=font, title_font=font)
    fig.update_layout(title_subtitle_font=font, legend_font_size=12, hoverlabel_font=font)
    fig.update_traces(outsidetextfont_color=font["color"], selector={"type": "bar"})
    for words in fig.layout.annotations:
        words.font.color = words.font.color or font["color"]  # those on a coloured ground have their own


def mark_cursor(fig: go.Figure, tick: int, x: Any) -> None:
    """A line through the picked event; `x` are the places of all events."""
    if tick < len(x):
        fig.add_vline(x=float(x[tick]), line={"width": 2, "color": CURSOR})


def hatch(shape: str | list[str]) -> dict[str, Any]:
    """A bar's pattern, drawn over its colour whatever the page's theme says: Plotly's own default drops the colour."""
    return {"shape": shape, "size": 6, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.6)", "fgopacity": 1}


def figure(question: str, answer: str = "", *, height: int = 420) -> go.Figure:
    """An empty figure titled with its question, the answer in figures below it."""
    title: dict[str, Any] = {"text": question, "x": 0, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top"}
    title["pad"] = {"t": 8, "l": 4}
    if answer:
        title["subtitle"] = {"text": answer}
    fig = go.Figure()
    fig.update_layout(
        title=title,
        height=height,
        margin={"l": 8, "r": 12, "t": 78 if answer else 56, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={
            "orientation": "h",
            "yanchor": "top",
            "y": -56 / max(height - 190, 80),  # a share of the plot, which three rows of legend leave so low
            "xanchor": "left",
            "x": 0,
            "title": {"text": ""},
        },
        hoverlabel={"align": "left", "namelength": -1},
        dragmode="zoom",
        modebar={"bgcolor": "rgba(0,0,0,0)"},
    )
    fig.update_xaxes(automargin=True, gridcolor=GRID, zeroline=False, title_standoff=8)
    fig.update_yaxes(automargin=True, gridcolor=GRID, zeroline=False, title_standoff=8)
    return fig


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
    fig.update_xaxes(title={"text": x_title}, rangemode="tozero")
    return fig
