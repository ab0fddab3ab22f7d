"""The held bytes of one run stacked by role; at every drawn point the bands add up to the total, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.series import Bytes, Mask, belongs, held, held_by_role
from explorer.record.allocations import ROLES, Allocations, Role
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import Axis, axis_layout, has_times, positions
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import ROLE_COLOURS, ROLE_PATTERNS, translucent
from explorer.view.drawing.figure import HOVER_ALONG_X, PICKABLE, empty, figure, mark_cursor
from explorer.view.drawing.thin import MAX_POINTS, Indices, minmax, with_points
from explorer.view.drawing.units import byte_axis, mib
from explorer.view.memory.bands import add_bands
from explorer.view.memory.counters import add_counters
from explorer.view.memory.timeline import NO_TIMELINE, hover_fields, peak_place
from explorer.view.words.cut_short import peak_and_end

PALE = 0.22


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
    stack = _bands(log, mine)
    ticks = _drawn(total, stack, log)
    x = positions(measurement, log, measurement, axis=axis)
    unit, unit_name = byte_axis(int(total.max()))
    fig = figure(question, _answer(measurement, block, held(log, mine) if mine is not None else None), height=480)
    add_bands(fig, measurement, x, pale=False)
    for band in stack:
        fig.add_trace(_area(band, x[ticks], band.line[ticks] / unit))
    fig.add_trace(_total(measurement, ticks, x[ticks], total, unit))
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
    peak = int(held(log).argmax())
    ends = {span.phase: min(span.end_tick - 1, log.n_ticks) for span in measurement.phases}
    rows = [
        {"role": role, "at the peak (bytes)": int(line[peak]), "most (bytes)": int(line.max())}
        | {f"at the end of {phase} (bytes)": int(line[tick]) for phase, tick in ends.items()}
        for role, line in zip(ROLES, lines)
    ]
    whole = lines.sum(axis=0)
    last = {"role": "total", "at the peak (bytes)": int(whole[peak]), "most (bytes)": int(whole.max())}
    return [*rows, last | {f"at the end of {phase} (bytes)": int(whole[tick]) for phase, tick in ends.items()}]


def _alt(measurement: Measurement, block: str | None) -> str:
    if measurement.allocations is None:
        return NO_TIMELINE
    held_at_peak = {row["role"]: row["at the peak (bytes)"] for row in _rows(measurement, block)}
    parts = [f"{role} {mib(size)}" for role, size in held_at_peak.items() if size and role != "total"]
    of_block = f" of {block or 'the model itself'}" if block is not None else ""
    where = f"At the peak, {peak_place(measurement)}"
    return f"Stacked area chart of bytes{of_block} by role. {where}: {', '.join(parts) or 'nothing'}."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """One area of the stack."""

    role: Role
    line: Bytes
    pale: bool


def _bands(log: Allocations, mine: Mask | None) -> list[_Band]:
    """Bottom first, in the order of ROLES; a chosen block's bands lie under all others."""
    if mine is None:
        bands = [_Band(role=role, line=line, pale=False) for role, line in zip(ROLES, held_by_role(log))]
    else:
        inside, outside = held_by_role(log, mine), held_by_role(log, ~mine)
        bands = [_Band(role=role, line=line, pale=False) for role, line in zip(ROLES, inside)]
        bands += [_Band(role=role, line=line, pale=True) for role, line in zip(ROLES, outside)]
    return [band for band in bands if band.line.any()]


def _drawn(total: Bytes, stack: list[_Band], log: Allocations) -> Indices:
    """One set of ticks for all bands, so that they add up: extremes of the total, and each band's highest point."""
    tops = [int(band.line.argmax()) for band in stack]
    return with_points(minmax(total, MAX_POINTS - len(tops)), tops, log.n_ticks + 1)


def _area(band: _Band, x: Any, y: Any) -> go.Scatter:
    colour = ROLE_COLOURS[band.role]
    fill = translucent(colour, PALE if band.pale else 0.85)
    return go.Scatter(
        x=x, y=y, name=band.role, showlegend=not band.pale, stackgroup="held", mode="lines", hoverinfo="skip",
        line={"shape": "hv", "width": 0.5, "color": translucent(colour, PALE if band.pale else 1)}, fillcolor=fill,
        fillpattern={
            "shape": "" if band.pale else ROLE_PATTERNS[band.role],
            "fgcolor": "rgba(255,255,255,0.55)", "bgcolor": fill, "size": 7, "solidity": 0.2,
        },
    )  # fmt: skip


def _total(run: Measurement, ticks: Indices, x: Any, total: Bytes, unit: int) -> go.Scatter:
    log = run.allocations
    assert log is not None, "its bands are drawn"
    words = hover_fields(run, log, ticks)
    by_role = held_by_role(log)[:, ticks].T.tolist()
    custom = [
        ["run", tick, mib(size), *fields, _split(row)]
        for tick, size, fields, row in zip(ticks.tolist(), total[ticks].tolist(), words, by_role)
    ]
    return go.Scatter(
        x=x, y=total[ticks] / unit, name="total", mode="lines+markers", showlegend=False,
        customdata=np.array(custom, dtype=object),
        line={"shape": "hv", "width": 1, "color": "rgba(128,128,128,0.9)"}, **PICKABLE,
        hovertemplate="<b>%{customdata[2]}</b> held<br>%{customdata[5]}<br>%{customdata[3]}, event %{customdata[1]}"
        "<br>%{customdata[4]}<extra></extra>",
    )  # fmt: skip


def _split(sizes: list[int]) -> str:
    """The roles that hold something, largest first, three lines at most of text in a hover box."""
    present = sorted(((size, role) for size, role in zip(sizes, ROLES) if size), reverse=True)
    return "<br>".join(f"{mib(size)} {role}" for size, role in present)


def _answer(run: Measurement, block: str | None, line: Bytes | None) -> str:
    if block is None or line is None:
        return f"peak {peak_and_end(run)}, {peak_place(run)}"
    assert run.allocations is not None
    at_peak = int(line[int(held(run.allocations).argmax())])
    share = at_peak / (run.held_peak_bytes or 1)
    return f"{block or 'the model'}: {mib(int(np.max(line)))} at most, {mib(at_peak)} ({share:.0%}) of the peak"
