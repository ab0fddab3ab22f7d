"""The held bytes of one run stacked by role; at every drawn point the bands add up to the total, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import Bytes, Mask, belongs, held, held_by_role
from explorer.record.allocations import ROLES, Allocations, Role
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import Axis, axis_layout, has_times, positions
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import ROLE_COLOURS, ROLE_PATTERNS
from explorer.view.drawing.figure import HOVER_ALONG_X, empty, figure, mark_cursor
from explorer.view.drawing.units import byte_axis, mib, percent_whole
from explorer.view.memory.bands import add_bands
from explorer.view.memory.counters import add_counters
from explorer.view.memory.stack import Layer, area, drawn_ticks, parts_at, rows_of_stack, total_line
from explorer.view.memory.timeline import NO_TIMELINE, peak_place
from explorer.view.words.cut_short import peak_and_end


def roles(
    measurement: Measurement, *, block: str | None = None, axis: Axis = "tick", cursor: int | None = None
) -> Chart:
    """What one run held its bytes for; with `block`, that block's share of them."""
    return Chart(
        name="bytes by role",
        figure=_picture(measurement, block, axis=axis, cursor=cursor),
        alt=_alt(measurement, block),
        rows=lambda: _rows(measurement, block),
    )


def _picture(measurement: Measurement, block: str | None, *, axis: Axis, cursor: int | None) -> go.Figure:
    """Bytes by role at every event. With `block`, its own bytes lie at the bottom in full colour, the rest pale above.

    The trace "total" carries customdata ["run", tick] for clicks. Roles that hold nothing all step long are left out.
    """
    question = "What are the bytes held for?"
    log = measurement.allocations
    if log is None:
        return empty(question, NO_TIMELINE)
    if axis == "time" and not has_times(measurement):
        axis = "tick"
    total = held(log)
    mine = None if block is None else belongs(log, block)
    stack = _layers(log, mine)
    ticks = drawn_ticks(log, stack)
    x = positions(measurement, log, measurement, axis=axis)
    unit, unit_name = byte_axis(int(total.max()))
    fig = figure(question, _answer(measurement, block, held(log, mine) if mine is not None else None), height=480)
    add_bands(fig, measurement, x, pale=False)
    for layer in stack:
        fig.add_trace(area(layer, x[ticks], layer.line[ticks] / unit))
    parts = parts_at(ticks, list(zip(ROLES, held_by_role(log))))
    fig.add_trace(total_line(measurement, ticks, x[ticks], unit, parts))
    above = add_counters(fig, measurement, x, unit) if block is None else 0.0
    fig.update_layout(
        yaxis={
            "title": {"text": f"bytes held ({unit_name})"},
            "range": [0, 1.15 * max(above, float(total.max()) / unit)],
        },
        xaxis=axis_layout(axis, measurement, alone=True),
        legend={"traceorder": "normal"},
        **HOVER_ALONG_X,
    )
    if cursor is not None:
        mark_cursor(fig, cursor, x)
    return fig


def _rows(measurement: Measurement, block: str | None) -> list[dict[str, Any]]:
    """Bytes of each role when each phase ends and at the peak."""
    log = measurement.allocations
    if log is None:
        return [{"role": NO_TIMELINE}]
    lines = held_by_role(log, None if block is None else belongs(log, block))
    return rows_of_stack(measurement, [*zip(ROLES, lines), ("total", lines.sum(axis=0))], "role")


def _alt(measurement: Measurement, block: str | None) -> str:
    if measurement.allocations is None:
        return NO_TIMELINE
    held_at_peak = {row["role"]: row["at the peak (bytes)"] for row in _rows(measurement, block)}
    parts = [f"{role} {mib(size)}" for role, size in held_at_peak.items() if size and role != "total"]
    of_block = f" of {block or 'the model itself'}" if block is not None else ""
    where = f"At the peak, {peak_place(measurement)}"
    return f"Stacked area chart of bytes{of_block} by role. {where}: {', '.join(parts) or 'nothing'}."


def _layers(log: Allocations, mine: Mask | None) -> list[Layer]:
    """Bottom first, in the order of ROLES; a chosen block's lie under all others."""
    if mine is None:
        layers = [_layer(role, line, pale=False) for role, line in zip(ROLES, held_by_role(log))]
    else:
        inside, outside = held_by_role(log, mine), held_by_role(log, ~mine)
        layers = [_layer(role, line, pale=False) for role, line in zip(ROLES, inside)]
        layers += [_layer(role, line, pale=True) for role, line in zip(ROLES, outside)]
    return [layer for layer in layers if layer.line.any()]


def _layer(role: Role, line: Bytes, *, pale: bool) -> Layer:
    return Layer(name=role, line=line, colour=ROLE_COLOURS[role], pattern=ROLE_PATTERNS[role], pale=pale)


def _answer(run: Measurement, block: str | None, line: Bytes | None) -> str:
    if block is None or line is None:
        return f"peak {peak_and_end(run)}, {peak_place(run)}"
    assert run.allocations is not None
    at_peak = int(line[int(held(run.allocations).argmax())])
    share = at_peak / (run.held_peak_bytes or 1)
    return (
        f"{block or 'the model'}: {mib(int(np.max(line)))} at most, {mib(at_peak)} ({percent_whole(share)}) of the peak"
    )
