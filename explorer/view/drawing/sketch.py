"""A stacked figure as plain HTML and SVG, which a browser draws at once: the page's first picture.

Plotly's part in the browser takes over a second to run. Until then the sketch stands in the chart's place: the same
areas, strip of phases, axes, names and legend, read off the figure that replaces it. Margins are those that Plotly
gives this figure. The width is the browser's: the picture is stretched, words keep their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log10
from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.view.drawing.axis import minmax
from explorer.view.drawing.colours import FULL_TEXT, GRID, QUIET_TEXT
from explorer.view.drawing.figure import ON_AREA, Chart, literal

TOP, RIGHT, BOTTOM = 8, 12, 80
LEFT, DIGIT = 28, 6
"""Pixels of a margin at the left without the tick labels, and of a digit."""
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


def sketch(chart: Chart, height: int, *, dark: bool) -> str:
    """HTML of a chart of stacked areas; empty if the chart has none."""
    figure, html = chart.figure, str if chart.is_plotted else literal
    stack, axes = [trace for trace in figure.data if trace.stackgroup], figure.layout
    if not stack or axes.xaxis.tickvals is None:
        return ""
    plot, top = height - TOP - BOTTOM, float(axes.yaxis.range[1])
    ticks = list(_ticks(top, plot))
    left = LEFT + DIGIT * max(len(label) for _, label in ticks)
    tops = np.cumsum([trace.y for trace in stack], axis=0)
    shown = minmax(tops[-1], N_POINTS)
    first, last = float(stack[0].x[0]), float(stack[0].x[-1])

    def share(x: Any) -> Any:
        """Place on the plot's width, from 0 to 1."""
        return PADDING + (1 - 2 * PADDING) * (np.asarray(x, dtype=float) - first) / ((last - first) or 1)

    x = np.round(share(stack[0].x[shown]) * WIDTH, 1)
    ys = [np.full(len(x), float(plot)), *np.round((1 - tops[:, shown] / top) * plot, 1)]
    drawing = [f'<path d="M0 {(1 - tick / top) * plot:.1f}H{WIDTH}" stroke="{GRID}" />' for tick, _ in ticks]
    for trace, low, high in zip(stack, ys, ys[1:]):
        outline = f"M{_steps(x, high)}L{_steps(x[::-1], low[::-1], back=True)}Z"
        drawing += _filled(f'<path d="{outline}" stroke="{trace.line.color}" stroke-width=".5"', trace)
    drawing.append(f'<path d="M{_steps(x, ys[-1])}" fill="none" stroke="rgba(128,128,128,.9)" />')
    for trace in figure.data:
        if trace.fill == "toself":
            for i in range(0, len(trace.x), 6):
                a, b = share(trace.x[i]) * WIDTH, share(trace.x[i + 1]) * WIDTH
                y, h = (1 - trace.y[i + 2]) * plot, (trace.y[i + 2] - trace.y[i]) * plot
                drawing += _filled(f'<rect x="{a:.1f}" y="{y:.1f}" width="{b - a:.1f}" height="{h:.1f}"', trace)
    theme = "dark" if dark else "light"

    def words(text: str, x: float, y: float, *, shift: str = "-50%,-50%", full: bool = False) -> str:
        colour = (FULL_TEXT if full else QUIET_TEXT)[theme]
        place = f"left:calc({left}px + {x:.4f} * (100% - {left + RIGHT}px));top:{y:.1f}px"
        return f'<span style="{place};transform:translate({shift});color:{colour}">{html(text)}</span>'

    texts = [words(label, 0, TOP + (1 - tick / top) * plot, shift="calc(-100% - 8px),-50%") for tick, label in ticks]
    for place, label in zip(axes.xaxis.tickvals, axes.xaxis.ticktext, strict=True):
        texts.append(words(label, float(share(place)), TOP + plot + 15))
    texts.append(words(axes.xaxis.title.text, 0.5, TOP + plot + 32))
    quiet = f"color:{QUIET_TEXT[theme]}"
    texts.append(f'<span class="turned" style="top:{TOP + plot / 2}px;{quiet}">{html(axes.yaxis.title.text)}</span>')
    for note in axes.annotations:
        y = (1 - (note.y if note.yref == "y2" else note.y / top)) * plot
        texts.append(words(note.text, float(share(note.x)), TOP + y + (9 if note.yref == "y2" else 0),
                           full=note.name == ON_AREA))  # fmt: skip
    legend = "".join(
        f'<b><svg width="30">{"".join(_filled("<rect width=30 height=7", trace))}</svg>{html(trace.name)}</b>'
        for trace in stack if trace.showlegend
    )  # fmt: skip
    patterns = "".join(
        f'<pattern id="sketch-{ord(shape)}" width="7" height="7" patternUnits="userSpaceOnUse"><path d="{line}" '
        f'stroke="rgba(255,255,255,.55)" stroke-width="1.4" /></pattern>'
        for shape, line in LINES.items()
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {plot}" preserveAspectRatio="none" style="left:{left}px;top:{TOP}px;'
        f'width:calc(100% - {left + RIGHT}px);height:{plot}px"><defs>{patterns}</defs>{"".join(drawing)}</svg>'
        f'{"".join(texts)}<p style="left:{left}px;top:{TOP + plot + 48}px;{quiet}">{legend}</p>'
    )  # fmt: skip


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
    """`shape` in the colour of `trace`, and once more in its pattern."""
    pattern = trace.fillpattern.shape
    filled = [f'{shape} fill="{trace.fillcolor}" />']
    return [*filled, f'{shape} fill="url(#sketch-{ord(pattern)})" />'] if pattern else filled
