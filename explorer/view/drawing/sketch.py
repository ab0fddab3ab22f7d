"""A stacked figure as plain HTML and SVG, which a browser draws at once: the page's first picture.

Plotly's part in the browser takes over a second to run. Until then the sketch stands in the chart's place: the same
areas, strip of phases, axes, names and legend, read off the figure that replaces it. Margins are those that Plotly
gives this figure. The width is the browser's: the picture is stretched, words keep their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import floor, log10
from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.record.base import Record
from explorer.view.drawing.axis import minmax
from explorer.view.drawing.colours import FULL_TEXT, GRID, QUIET_TEXT
from explorer.view.drawing.figure import ON_AREA, Chart, literal

TOP, RIGHT = 8, 16
"""Pixels above the plot and at its right."""
WIDTH = 680
"""Units of the drawing along the stretched axis, about as many as pixels."""
PADDING = 0.0565
"""Share of the plot's width that Plotly leaves free beside points with markers."""
N_POINTS = 1400
LINES = {
    "/": "M0 7L7 0", "\\": "M0 0L7 7", "|": "M3.5 0V7", "-": "M0 3.5H7", "x": "M0 7L7 0M0 0L7 7",
    "+": "M3.5 0V7M0 3.5H7", ".": "M3 3.5H4",
}  # fmt: skip
"""Plotly's patterns in a square of seven pixels."""


class Plot(Record):
    """The ground that areas are drawn on: its pixels, and what its axes reach."""

    left: int
    """Pixels at its left."""
    height: int
    """Pixels from top to bottom."""
    top: float
    """Upper end of the vertical axis, which begins at 0."""
    first: float
    last: float

    def share(self, x: Any) -> Any:
        """Place on the plot's width, from 0 to 1."""
        places = (np.asarray(x, dtype=float) - self.first) / ((self.last - self.first) or 1)
        return PADDING + (1 - 2 * PADDING) * places

    def down(self, y: Any) -> Any:
        """Pixels below the upper end of the axis."""
        return (1 - y / self.top) * self.height


def sketch(chart: Chart, height: int, *, dark: bool) -> str:
    """HTML of a chart of stacked areas in `height` pixels; empty if the chart has none."""
    figure, stack = chart.figure, [trace for trace in chart.figure.data if trace.stackgroup]
    if not stack or figure.layout.xaxis.tickvals is None:
        return ""
    left, below = round(figure.layout.margin.l), round(figure.layout.margin.b)
    top, pixels = float(figure.layout.yaxis.range[1]), height - TOP - below
    ticks = list(_ticks(top, pixels))
    plot = Plot(left=left, height=pixels, top=top, first=float(stack[0].x[0]), last=float(stack[0].x[-1]))
    quiet = QUIET_TEXT["dark" if dark else "light"]
    patterns = "".join(
        f'<pattern id="sketch-{ord(shape)}" width="7" height="7" patternUnits="userSpaceOnUse"><path d="{line}" '
        f'stroke="rgba(255,255,255,.55)" stroke-width="1.4" /></pattern>'
        for shape, line in LINES.items()
    )
    grid = [f'<path d="M0 {plot.down(tick):.1f}H{WIDTH}" stroke="{GRID}" />' for tick, _ in ticks]
    drawing = "".join([*grid, *_areas(stack, plot), *_strip(figure, plot)])
    html = str if chart.is_plotted else literal
    title = html(figure.layout.yaxis.title.text)
    legend = "".join(
        f'<b><svg width="30">{"".join(_filled("<rect width=30 height=7", trace))}</svg>{html(trace.name)}</b>'
        for trace in stack if trace.showlegend
    )  # fmt: skip
    return (
        f'<svg viewBox="0 0 {WIDTH} {pixels}" preserveAspectRatio="none" style="left:{left}px;top:{TOP}px;'
        f'width:calc(100% - {left + RIGHT}px);height:{pixels}px"><defs>{patterns}</defs>{drawing}</svg>'
        f'{"".join(_words(figure, plot, ticks, html, dark=dark))}'
        f'<span class="turned" style="top:{TOP + pixels / 2}px;color:{quiet}">{title}</span>'
        f'<p style="left:{left}px;top:{TOP + pixels + 48}px;color:{quiet}">{legend}</p>'
    )  # fmt: skip


def _areas(stack: Sequence[go.Scatter], plot: Plot) -> Iterator[str]:
    """The areas from the bottom, and the line of the total."""
    tops = np.cumsum([trace.y for trace in stack], axis=0)
    shown = minmax(tops[-1], N_POINTS)
    x = np.round(plot.share(stack[0].x[shown]) * WIDTH, 1)
    ys = [np.full(len(x), float(plot.height)), *np.round(plot.down(tops[:, shown]), 1)]
    for trace, low, high in zip(stack, ys, ys[1:]):
        outline = f"M{_steps(x, high)}L{_steps(x[::-1], low[::-1], back=True)}Z"
        yield from _filled(f'<path d="{outline}" stroke="{trace.line.color}" stroke-width=".5"', trace)
    yield f'<path d="M{_steps(x, ys[-1])}" fill="none" stroke="rgba(128,128,128,.9)" />'


def _strip(figure: go.Figure, plot: Plot) -> Iterator[str]:
    """The phases above the areas. A trace has the corners of each rectangle, and a gap behind it."""
    for trace in figure.data:
        for i in range(0, len(trace.x) if trace.fill == "toself" else 0, 6):
            start, end = plot.share(trace.x[i : i + 2]) * WIDTH
            y, high = (1 - trace.y[i + 2]) * plot.height, (trace.y[i + 2] - trace.y[i]) * plot.height
            yield from _filled(
                f'<rect x="{start:.1f}" y="{y:.1f}" width="{end - start:.1f}" height="{high:.1f}"', trace
            )


def _words(
    figure: go.Figure, plot: Plot, ticks: Sequence[tuple[float, str]], html: Callable[[str], str], *, dark: bool
) -> Iterator[str]:
    """Labels and title of the axes, and the names on areas and phases."""
    axis, theme = figure.layout.xaxis, "dark" if dark else "light"

    def text(words: str, x: float, y: float, *, shift: str = "-50%", colour: str = QUIET_TEXT[theme]) -> str:
        place = f"left:calc({plot.left}px + {x:.4f} * (100% - {plot.left + RIGHT}px));top:{TOP + y:.1f}px"
        return f'<span style="{place};transform:translate({shift},-50%);color:{colour}">{html(words)}</span>'

    for tick, label in ticks:
        yield text(label, 0, plot.down(tick), shift="calc(-100% - 8px)")
    for x, label in zip(axis.tickvals, axis.ticktext, strict=True):
        yield text(label, float(plot.share(x)), plot.height + 15)
    yield text(axis.title.text, 0.5, plot.height + 32)
    for note in figure.layout.annotations:
        y = (1 - note.y) * plot.height + 9 if note.yref == "y2" else plot.down(note.y)
        on_area = note.name == ON_AREA
        yield text(note.text, float(plot.share(note.x)), y, colour=(FULL_TEXT if on_area else QUIET_TEXT)[theme])


def _ticks(top: float, pixels: float) -> Iterator[tuple[float, str]]:
    """Values and labels of the vertical axis from 0 to `top`, as Plotly chooses them."""
    rough = top / (min(max(pixels / 40, 4), 9) + 1)
    base = 10 ** floor(log10(rough))
    step = next(base * times for times in (2, 5, 10, 20) if base * times >= rough)
    for i in range(floor(top / step) + 1):
        yield i * step, f"{i * step:,g}"


def _steps(x: Any, y: Any, *, back: bool = False) -> str:
    """A path through points that holds each value until the next one; `back`: the points run from right to left."""
    turns = np.flatnonzero(np.diff(y)) + 1
    ahead = x[turns - 1] if back else x[turns]
    return f"{x[0]:g} {y[0]:g}" + "".join(f"H{a:g}V{b:g}" for a, b in zip(ahead, y[turns])) + f"H{x[-1]:g}"


def _filled(shape: str, trace: go.Scatter) -> list[str]:
    """`shape` in the colour of `trace`, and again in its pattern."""
    pattern = trace.fillpattern.shape
    filled = [f'{shape} fill="{trace.fillcolor}" />']
    return [*filled, f'{shape} fill="url(#sketch-{ord(pattern)})" />'] if pattern else filled
