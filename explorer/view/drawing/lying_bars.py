"""Lying bars, series by series: each its colour and pattern, and one form of words under the pointer for all charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from explorer.view.drawing.chart import bold
from explorer.view.drawing.figure import hatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSeries:
    """One bar in every row."""

    name: str
    lengths: Sequence[float | None]
    """In units of the axis; None: no bar."""
    figures: Sequence[str]
    """What each bar says of itself under the pointer, with its unit."""
    colour: str
    pattern: str = ""
    """Plotly's: `/`, `x`."""
    edge: str = ""
    """Colour of a line around it."""
    picks: Sequence[str] = ()
    """What a click on each bar stands for; empty: a click does nothing."""


def add_bars(fig: go.Figure, rows: Sequence[str], series: BarSeries, **more: Any) -> None:
    """Draws `series` as one trace; customdata of each bar: [its pick, its figure]. `more` is Plotly's, of the trace."""
    picks = series.picks or [""] * len(rows)
    marker: dict[str, Any] = {"color": series.colour, "pattern": hatch(series.pattern)}
    fig.add_trace(
        go.Bar(
            orientation="h",
            name=series.name,
            y=list(rows),
            x=list(series.lengths),
            customdata=[list(both) for both in zip(picks, series.figures, strict=True)],
            marker=marker | ({"line": {"color": series.edge, "width": 1}} if series.edge else {}),
            hovertemplate=bold("%{y}") + f"\n{series.name}: %{{customdata[1]}}",
            **more,
        )
    )
