"""Held bytes of a run as stacked areas, by role and by block. The areas add up to the total at every point.

The chart by block is the picture that teachers draw:

░░ recomputed ░░        runs again for backward
▒▒ blocks.1 ▒▒          saved activations and temporaries of a block
▓▓ blocks.0 ▓▓
── everything else ──   parameters, gradients, optimizer state, inputs: no policy frees them
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.lib.stride_tricks import sliding_window_view

from explorer.plan.memory.ledger import Bytes, array_of, belongs, held, held_by_role, ints
from explorer.record.allocations import FIXED_ROLES, ROLES, Allocations, Role
from explorer.record.base import Record
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import (
    MAX_POINTS,
    Axis,
    Indices,
    Positions,
    axis_layout,
    has_times,
    minmax,
    positions,
    with_points,
)
from explorer.view.drawing.colours import ROLE_COLOURS, ROLE_PATTERNS, stage_colour, stage_pattern, translucent
from explorer.view.drawing.figure import HOVER_ALONG_X, ON_AREA, PICKABLE, Chart, bold, empty, figure, mark_cursor
from explorer.view.drawing.rows import ROOT_LABEL, block_names, rows_of
from explorer.view.drawing.units import byte_axis, mib, percent_whole
from explorer.view.memory.bands import add_bands, add_counters, counters
from explorer.view.memory.timeline import NO_TIMELINE, add_ghost, hover_fields, peak_place
from explorer.view.text.runs import peak_and_end

FILL, PALE = 0.5, 0.22
"""Opacity of areas: words of the page's own colour read on either, in both themes."""
LETTER, LINE = 1 / 84, 0.055
"""Room for a name on an area: shares of the plot's width for a letter, and of its height for a line."""
HEADROOM = 1.15
"""End of the axis over the highest point."""
N_PLACES = 240
"""Places along the axis at which a name is tried."""
REST, AGAIN = "parameters and state", "recomputed"
"""The first: with gradients, optimizer state and inputs, all that no policy frees."""
LEAST_NAMED = 0.01
"""Share of the peak: thinner bands have no line in the legend, only in the hover and the table."""
MOST_BANDS = 20
"""Ten colours, each with two patterns, tell them apart."""


class Layer(Record):
    """An area of the stack."""

    name: str
    line: Bytes
    """Bytes at each tick."""
    colour: str
    pattern: str
    pale: bool = False
    """True for an area outside the requested block: the area has no pattern and no line in the legend."""


def add_areas(fig: go.Figure, layers: Sequence[Layer], x: Positions, heights: Positions, *, least: float = 0.0) -> None:
    """Draws the layers, whose names stand on the areas, else in the legend. A layer below `least` has no name.

    `heights`: bytes in units of the axis at each drawn place of `x`, a row a layer. The legend shows patterns: a colour
    alone does not name a layer.
    """
    written = add_names(fig, layers, x, heights)
    for layer, height in zip(layers, heights, strict=True):
        in_legend = layer.name not in written and not layer.pale and bool(height.max() >= least)
        fill = translucent(layer.colour, PALE if layer.pale else FILL)
        pen = {"shape": "hv", "width": 0.5, "color": translucent(layer.colour, PALE if layer.pale else 1)}
        fig.add_scatter(
            x=x, y=height, name=layer.name, showlegend=in_legend, stackgroup="held", mode="lines", hoverinfo="skip",
            line=pen, fillcolor=fill,
            fillpattern={"shape": layer.pattern if in_legend else "", "fgcolor": "rgba(255,255,255,0.55)",
                         "bgcolor": fill, "size": 7, "solidity": 0.2},
        )  # fmt: skip


def add_names(fig: go.Figure, layers: Sequence[Layer], x: Positions, heights: Positions) -> set[str]:
    """Writes the name of each layer where its area has the most room for it; returns the written names."""
    grid = np.linspace(x[0], x[-1], N_PLACES)
    sample = heights[:, np.searchsorted(x, grid, side="right") - 1]
    tops = np.cumsum(sample, axis=0)
    line = LINE * HEADROOM * float(heights.sum(axis=0).max())
    written = set()
    for layer, high, low in zip(layers, tops, tops - sample, strict=True):
        width = max(1, int(np.ceil(len(layer.name) * LETTER * N_PLACES)))
        if width > N_PLACES:  # the name of a stranger's role or block may be longer than the chart
            continue
        floor, roof = sliding_window_view(low, width).max(axis=1), sliding_window_view(high, width).min(axis=1)
        room = roof - floor
        if layer.pale or room.max() < line:
            continue
        roomy = np.flatnonzero(room >= 0.9 * room.max())
        place = int(roomy[len(roomy) // 2])
        fig.add_annotation(
            text=layer.name, x=float(grid[place + width // 2]), y=float(roof[place] + floor[place]) / 2,
            showarrow=False, font={"size": 12}, name=ON_AREA,
        )  # fmt: skip
        written.add(layer.name)
    return written


def total_line(run: Measurement, ticks: Indices, x: object, unit: int, parts: Sequence[str]) -> go.Scatter:
    """The trace "total" with customdata ["run", tick] for clicks; `parts`: the parts of each tick in words."""
    log = run.allocations
    assert log is not None, "its layers are drawn"
    heights = held(log)[ticks]
    custom = [
        ["run", tick, mib(size), *fields, part]
        for tick, size, fields, part in zip(ticks.tolist(), heights.tolist(), hover_fields(run, log, ticks), parts)
    ]
    return go.Scatter(
        x=x, y=heights / unit, name="total", mode="lines+markers", showlegend=False,
        customdata=np.array(custom, dtype=object),
        line={"shape": "hv", "width": 1, "color": "rgba(128,128,128,0.9)"}, **PICKABLE,
        hovertemplate=bold("%{customdata[2]}") + " held\n%{customdata[5]}\n%{customdata[3]}, event %{customdata[1]}"
        "\n%{customdata[4]}",
    )  # fmt: skip


def parts_at(ticks: Indices, lines: Sequence[tuple[str, Bytes]], most: int | None = None) -> list[str]:
    """Names that hold bytes at each tick, largest first, at most `most` names."""
    names = [name for name, _ in lines]
    sizes_by_tick = np.stack([line[ticks] for _, line in lines]).T.tolist()
    parts = []
    for sizes in sizes_by_tick:
        present = sorted(((size, name) for size, name in zip(sizes, names) if size), reverse=True)
        parts.append("\n".join(f"{mib(size)} {name}" for size, name in present[:most]))
    return parts


def _rows(run: Measurement, lines: Sequence[tuple[str, Bytes]], heading: str) -> list[dict[str, object]]:
    """Bytes of each line at the peak, at most, and when each phase ends."""
    log = run.allocations
    assert log is not None, "it has lines"
    peak = int(held(log).argmax())
    ends = {span.phase: min(span.end_tick - 1, log.n_ticks) for span in run.phases}
    return [
        {heading: name, "at the peak (bytes)": int(line[peak]), "most (bytes)": int(line.max())}
        | {f"at the end of {phase} (bytes)": int(line[tick]) for phase, tick in ends.items()}
        for name, line in lines
    ]


class Stack(Record):
    """A stack of layers, and the words around it."""

    name: str
    question: str
    answer: str
    layers: Sequence[Layer]
    lines: Sequence[tuple[str, Bytes]]
    """Names and bytes of the parts that the hover lists."""
    most_listed: int | None = None
    least_named: float = 0.0
    """Share of the peak from which a layer has a line in the legend."""
    counters: bool = False
    """Whether the curves of the allocator are drawn above."""
    ghost: Ghost | None = None


class Ghost(Record):
    """The other run of a pair, drawn as an outline on the same axes."""

    name: str
    run: Measurement
    of: str
    """Name of the run that is drawn in colour."""


def roles(
    measurement: Measurement,
    *,
    block: str | None = None,
    axis: Axis = "tick",
    cursor: int | None = None,
    ghost: Ghost | None = None,
) -> Chart:
    """Chart of the held bytes of a run by role; roles that hold nothing in the whole step are left out.

    With `block`, its own bytes lie at the bottom in full colour, and all others pale above.
    """
    name, question, log = "bytes by role", "What are the bytes held for?", measurement.allocations
    if log is None:
        return _no_chart(name, question, "role")
    inside = None if block is None else belongs(log, block)
    lines, by_role = held_by_role(log, inside), list(zip(ROLES, held_by_role(log)))
    total, peak = lines.sum(axis=0), int(held(log).argmax())
    answer, of_block = f"peak {peak_and_end(measurement)}, {peak_place(measurement)}", ""
    if block is not None:
        share = percent_whole(int(total[peak]) / (measurement.held_peak_bytes or 1))
        answer = (
            f"{block or 'the model'}: {mib(int(total.max()))} at most, {mib(int(total[peak]))} ({share}) of the peak"
        )
        of_block = f" of {block or 'the model itself'}"
    layers = [_layer(role, line) for role, line in zip(ROLES, lines)]
    if inside is not None:
        layers += [_layer(role, line, pale=True) for role, line in zip(ROLES, held_by_role(log, ~inside))]
    stack = Stack(
        name=name, question=question, answer=answer, layers=_filled(layers), lines=by_role, counters=block is None,
        ghost=ghost,
    )  # fmt: skip
    parts = ", ".join(f"{role} {mib(int(line[peak]))}" for role, line in zip(ROLES, lines) if line[peak])
    return Chart(
        name=name,
        figure=_picture(measurement, stack, axis, cursor),
        alt=f"Stacked area chart of bytes{of_block} by role. At the peak, {peak_place(measurement)}: "
        f"{parts or 'nothing'}.",
        rows=lambda: _rows(measurement, [*zip(ROLES, lines), ("total", total)], "role"),
    )


def by_block(
    measurement: Measurement, *, axis: Axis = "tick", cursor: int | None = None, ghost: Ghost | None = None
) -> Chart:
    """Chart of the held bytes of a run by block; the bands add up to the total at every drawn point."""
    name, question, log = "bytes by block", "Which blocks are the bytes held for?", measurement.allocations
    if log is None:
        return _no_chart(name, question, "band")
    layers = _block_layers(measurement, log)
    lines = [(layer.name, layer.line) for layer in layers]
    peak, place = int(held(log).argmax()), peak_place(measurement)
    stack = Stack(
        name=name, question=question, answer=f"peak {peak_and_end(measurement)}, {place}", layers=layers, lines=lines,
        most_listed=5, least_named=LEAST_NAMED, ghost=ghost,
    )  # fmt: skip
    largest = sorted(((int(line[peak]), name) for name, line in lines), reverse=True)[:4]
    parts = ", ".join(f"{name} {mib(size)}" for size, name in largest)
    return Chart(
        name=name,
        figure=_picture(measurement, stack, axis, cursor),
        alt=f"Stacked area chart of bytes by block, recompute on top. At the peak, {place}: {parts}.",
        rows=lambda: _rows(measurement, lines, "band"),
    )


def _no_chart(name: str, question: str, heading: str) -> Chart:
    """The chart of a run without a timeline."""
    return Chart(name=name, figure=empty(question, NO_TIMELINE), alt=NO_TIMELINE, rows=lambda: [{heading: NO_TIMELINE}])


def _picture(run: Measurement, stack: Stack, axis: Axis, cursor: int | None) -> go.Figure:
    """The layers at every event. The trace "total" has customdata ["run", tick] for clicks."""
    log, ghost = run.allocations, stack.ghost
    assert log is not None, "its layers are drawn"
    pair = [run] if ghost is None else [run, ghost.run]
    axis = "tick" if not has_times(*pair) else axis
    counted = next((each for each in pair if each.complete), run)
    total = held(log)
    # Ticks shared by all layers, so that the layers add up: extremes of the total, and each layer's highest point.
    tops = [int(layer.line.argmax()) for layer in stack.layers]
    ticks = with_points(minmax(total, MAX_POINTS - len(tops)), tops, log.n_ticks + 1)
    x = positions(run, log, counted, axis=axis)
    highest = max(each.held_peak_bytes or 0 for each in pair)
    unit, unit_name = byte_axis(highest)
    fig = figure(stack.question, stack.answer, height=480)
    add_bands(fig, run, x, pale=False)
    curves = [curve for each in pair for curve in counters(each).values()] if stack.counters else []
    top = HEADROOM * max([highest, *(int(curve.max()) for curve in curves)]) / unit
    heights = np.stack([layer.line[ticks] for layer in stack.layers]) / unit
    add_areas(fig, stack.layers, x[ticks], heights, least=stack.least_named * top)
    fig.add_trace(total_line(run, ticks, x[ticks], unit, parts_at(ticks, stack.lines, stack.most_listed)))
    if ghost is not None:
        add_ghost(fig, {ghost.of: run, ghost.name: ghost.run}, counted, axis=axis)
    if stack.counters:
        add_counters(fig, run, x, unit)
    fig.update_layout(
        yaxis={"title_text": f"bytes held ({unit_name})", "range": [0, top]},
        xaxis=axis_layout(axis, counted),
        legend={"traceorder": "normal"},
        **HOVER_ALONG_X,
    )
    if cursor is not None:
        mark_cursor(fig, cursor, x)
    return fig


def _block_layers(run: Measurement, log: Allocations) -> list[Layer]:
    """Layers from the bottom: fixed bytes, each block, recomputed bytes. Each allocation is in one layer."""
    role, block = array_of(log.role), array_of(log.block)
    fixed = np.isin(role, [ROLES.index(name) for name in FIXED_ROLES])
    again = role == ROLES.index("recomputed")
    names = block_names(run) or [fqn for fqn in log.blocks if fqn]
    rows = rows_of(names, MOST_BANDS)
    row_of = ints([rows.index(fqn) for fqn in log.blocks] or [-1])[block]
    freeable = ~fixed & ~again
    layers = [Layer(name=REST, line=held(log, fixed), colour=ROLE_COLOURS["parameter"], pattern="")]
    layers += [Layer(name=ROOT_LABEL, line=held(log, freeable & (row_of < 0)), colour=ROLE_COLOURS["unattributed"],
                      pattern=".")]  # fmt: skip
    layers += [
        Layer(
            name=row.label, line=held(log, freeable & (row_of == i)), colour=stage_colour(i), pattern=stage_pattern(i)
        )
        for i, row in enumerate(rows.rows)
    ]
    layers.append(Layer(
        name=AGAIN, line=held(log, again), colour=ROLE_COLOURS["recomputed"], pattern=ROLE_PATTERNS["recomputed"]
    ))  # fmt: skip
    return _filled(layers)


def _layer(role: Role, line: Bytes, *, pale: bool = False) -> Layer:
    return Layer(name=role, line=line, colour=ROLE_COLOURS[role], pattern=ROLE_PATTERNS[role], pale=pale)


def _filled(layers: Sequence[Layer]) -> list[Layer]:
    """The layers that hold something at some moment."""
    return [layer for layer in layers if layer.line.any()]
