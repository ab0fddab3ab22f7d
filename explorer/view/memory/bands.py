"""The strip of phases above a timeline: forward, recompute, backward, optimizer, each with its length and its name.

Below the strip stand the collectives of a rank, one mark a call.

The strip has four filled traces instead of a shape per span: two hundred recomputed blocks are still four objects, and
the legend explains them. Recompute is hatched, so the strip is readable without colour.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import Bytes, array_of
from explorer.record.allocations import PHASES, Collective, CollectiveKind, Phase
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import MAX_POINTS, Positions, minmax
from explorer.view.drawing.colours import (
    ALLOCATOR,
    PHASE_COLOURS,
    PHASE_PATTERNS,
    ROLE_COLOURS,
    RUN_COLOURS,
    STAGE_COLOURS,
    translucent,
)
from explorer.view.drawing.figure import bold
from explorer.view.drawing.units import mib

STRIP_TOP, STRIP_BOTTOM = 1.0, 0.98
"""Shares of the plot's height, in y2 units."""
LEAST_NAMED = 0.12
"""Share of the plot's width from which a stretch has room for its name."""
COLLECTIVES_AT = 0.91
"""Height of the marks of collectives: below the names of the phases, above the peak."""
MOST_MARKS = 2000
"""Collectives that are drawn, the largest first."""
SYMBOLS: dict[CollectiveKind, tuple[str, str]] = {
    "all-gather": ("triangle-up", ROLE_COLOURS["gathered parameter"]),
    "reduce-scatter": ("triangle-down", ROLE_COLOURS["reduce-scatter buffer"]),
    "all-reduce": ("diamond", ROLE_COLOURS["gradient bucket"]),
    "broadcast": ("star", STAGE_COLOURS[0]),
    "all-to-all": ("x", STAGE_COLOURS[1]),
    "point to point": ("circle", STAGE_COLOURS[5]),
}
"""Mark and colour of each kind of collective; a kind wears the colour of the buffer that it fills."""
Outline = list[float | None]
"""Corners of rectangles on one axis; None ends a rectangle."""
MAX_SPANS = 500
"""Rectangles of one phase; neighbours that are thinner than a pixel are merged beyond that."""


def add_bands(fig: go.Figure, run: Measurement, x: Positions, *, pale: bool = True) -> None:
    """Adds the strip of `run` on a separate axis y2; tick t stands at x[t]. `pale`: also adds pale bands below.

    The legend names the phases that are too short for a word in the strip.
    """
    fig.update_layout(
        yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True, "side": "right"}
    )
    labelled = _label(fig, run, x)
    for phase in PHASES:
        spans = _merged(_edges(run, phase, x), x[-1] / MAX_SPANS)
        if spans:
            colour = PHASE_COLOURS[phase]
            hatched = {"shape": PHASE_PATTERNS[phase], "fgcolor": "white", "bgcolor": colour, "size": 6}
            look = {"name": phase, "showlegend": phase not in labelled, "fillcolor": colour, "fillpattern": hatched}
            fig.add_trace(_boxes(phase, spans, STRIP_BOTTOM, STRIP_TOP, **look))
            if pale and phase != "backward":
                ground = translucent(colour, 0.10)
                fig.add_trace(_boxes(phase, spans, 0, STRIP_BOTTOM, showlegend=False, fillcolor=ground))
    for kind in SYMBOLS:
        if calls := [call for call in run.collectives if call.kind == kind and call.tick < len(x)]:
            fig.add_trace(_marks(kind, calls, x))


def _marks(kind: CollectiveKind, calls: Sequence[Collective], x: Positions) -> go.Scatter:
    symbol, colour = SYMBOLS[kind]
    drawn = sorted(calls, key=lambda call: -call.n_bytes)[:MOST_MARKS]
    words = [
        [mib(call.n_bytes), f"{call.phase} of {call.block or 'the model'}", mib(call.sent_bytes)] for call in drawn
    ]
    return go.Scatter(
        x=[float(x[call.tick]) for call in drawn], y=[COLLECTIVES_AT] * len(drawn), yaxis="y2", mode="markers",
        name=f"{kind} ({len(calls)})", customdata=words,
        marker={"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1, "color": "white"}},
        unselected={"marker": {"opacity": 1}},
        hovertemplate=f"nearest {kind}: " + bold("%{customdata[0]}") + "\n%{customdata[1]}, %{customdata[2]} sent",
    )  # fmt: skip


def _edges(run: Measurement, phase: Phase, x: Positions) -> list[tuple[float, float]]:
    """Start and end on the x axis of each span of `phase`."""
    last = len(x) - 1
    return [
        (float(x[max(span.first_tick - 1, 0)]), float(x[min(span.end_tick - 1, last)]))
        for span in run.phases
        if span.phase == phase
    ]


def _merged(spans: list[tuple[float, float]], least: float) -> list[tuple[float, float]]:
    """All spans if there are few; beyond MAX_SPANS, spans closer than `least` are merged."""
    if len(spans) <= MAX_SPANS:
        return spans
    merged = [spans[0]]
    for start, end in spans[1:]:
        if start - merged[-1][1] < least:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _boxes(phase: Phase, spans: list[tuple[float, float]], bottom: float, top: float, **look: object) -> go.Scatter:
    """A rectangle for each span, all in one trace."""
    xs: Outline = []
    ys: Outline = []
    for start, end in spans:
        xs += [start, end, end, start, start, None]
        ys += [bottom, bottom, top, top, bottom, None]
    return go.Scatter(
        x=xs[:-1], y=ys[:-1], yaxis="y2", mode="lines", fill="toself", hoverinfo="skip",
        line={"width": 0, "color": PHASE_COLOURS[phase]}, **look,
    )  # fmt: skip


def _label(fig: go.Figure, run: Measurement, x: Positions) -> set[Phase]:
    """Writes the names of the long stretches under the strip, on the page's ground; the phases that got one."""
    labelled: set[Phase] = set()
    whole = float(x[-1]) or 1.0
    for phase in PHASES:
        if phase == "recompute":
            continue
        edges = _edges(run, phase, x)
        if phase == "backward":
            edges = sorted(edges + _edges(run, "recompute", x))
            is_single = run.spec.n_accumulation == 1 and sum(span.phase == "forward" for span in run.phases) <= 1
            edges = [(edges[0][0], edges[-1][1])] if edges and is_single else []
        longest = max(edges, key=lambda edge: edge[1] - edge[0], default=(0.0, 0.0))
        if longest[1] - longest[0] >= LEAST_NAMED * whole:
            fig.add_annotation(
                text=phase, x=float(np.mean(longest)), y=STRIP_BOTTOM, yref="y2", yanchor="top", showarrow=False,
                font={"size": 12},
            )  # fmt: skip
            labelled.add(phase)
    return labelled


ALLOCATED, RESERVED, ON_CARD = "allocated", "reserved", "reserved on the card"
_COLOURS = {ALLOCATED: ALLOCATOR["allocated"], RESERVED: ALLOCATOR["reserved"], ON_CARD: ALLOCATOR["reserved"]}


def counters(run: Measurement) -> dict[str, Bytes]:
    """The curves that `run` has, one value a tick, up to a refused request on a card; empty without an allocator."""
    if run.allocations is None:
        return {}
    n_values = run.allocations.n_ticks + 1
    curves = {ALLOCATED: run.peaks.allocated, RESERVED: run.peaks.reserved}
    there = {name: array_of(curve) for name, curve in curves.items() if curve is not None and len(curve) == n_values}
    if run.card is not None and run.card.reserved and len(run.card.reserved) <= n_values:
        there[ON_CARD] = array_of(run.card.reserved)
    return there


def add_counters(fig: go.Figure, run: Measurement, x: Positions, unit: int, *, of: str = "") -> float:
    """Draws the curves, dotted; `x` of each tick, `unit` in bytes. Returns the highest value, 0 without curves.

    `of`: the run, of two; it gives name and colour. customdata starts with its name and the tick, as in its line.
    """
    highest = 0.0
    for curve_name, curve in counters(run).items():
        name, colour = (f"{curve_name}, {of}", RUN_COLOURS[of]) if of else (curve_name, _COLOURS[curve_name])
        ticks = minmax(curve, MAX_POINTS)
        custom = [[of or "baseline", tick, mib(size)] for tick, size in zip(ticks.tolist(), curve[ticks].tolist())]
        highest = max(highest, float(curve.max()) / unit)
        fig.add_scatter(
            x=x[ticks], y=curve[ticks] / unit, name=name, mode="lines", customdata=custom, showlegend=True,
            line={"shape": "hv", "width": 1.5, "dash": "dashdot" if of else "dot", "color": colour},
            hovertemplate=bold("%{customdata[2]}") + f" {name}, event %{{customdata[1]}}",
        )  # fmt: skip
    return highest
