"""The picture that teachers draw: one band a block, piling up in forward and draining in backward, recompute on top.

░░ recomputed ░░        runs again for backward
▒▒ blocks.1 ▒▒          saved activations and temporaries of a block
▓▓ blocks.0 ▓▓
── everything else ──   parameters, gradients, optimizer state, inputs: no policy frees them
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import array_of, held
from explorer.record.allocations import FIXED_ROLES, ROLES, Allocations
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import Axis, axis_layout, has_times, positions
from explorer.view.drawing.block_rows import block_names
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import ROLE_COLOURS, ROLE_PATTERNS, stage_colour, stage_pattern
from explorer.view.drawing.figure import HOVER_ALONG_X, empty, figure, mark_cursor
from explorer.view.drawing.rows import ROOT_LABEL, rows_of
from explorer.view.drawing.units import byte_axis, mib
from explorer.view.memory.bands import add_bands
from explorer.view.memory.stack import Layer, area, drawn_ticks, parts_at, rows_of_stack, total_line
from explorer.view.memory.timeline import NO_TIMELINE, peak_place
from explorer.view.words.cut_short import peak_and_end

QUESTION = "Which blocks are the bytes held for?"
REST, AGAIN = "parameters and state", "recomputed"
"""The first: with gradients, optimizer state and inputs, all that no policy frees."""
LEAST_NAMED = 0.01
"""Share of the peak: thinner bands have no line in the legend, only in the hover and the table."""
MOST_BANDS = 20
"""Ten colours, each with two patterns, tell them apart."""


def by_block(measurement: Measurement, *, axis: Axis = "tick", cursor: int | None = None) -> Chart:
    """What one run held, block by block; the bands add up to the total at every drawn point."""
    return Chart(
        name="bytes by block",
        figure=_picture(measurement, axis=axis, cursor=cursor),
        alt=_alt(measurement),
        rows=lambda: _rows(measurement),
    )


def _picture(run: Measurement, *, axis: Axis, cursor: int | None) -> go.Figure:
    """The trace "total" carries customdata ["run", tick] for clicks."""
    log = run.allocations
    if log is None:
        return empty(QUESTION, NO_TIMELINE)
    if axis == "time" and not has_times(run):
        axis = "tick"
    total, stack = held(log), _layers(run, log)
    ticks = drawn_ticks(log, stack)
    x = positions(run, log, run, axis=axis)
    unit, unit_name = byte_axis(int(total.max()))
    fig = figure(QUESTION, f"peak {peak_and_end(run)}, {peak_place(run)}", height=480)
    add_bands(fig, run, x, pale=False)
    for layer in stack:
        named = bool(layer.line.max() >= LEAST_NAMED * total.max())
        fig.add_trace(area(layer, x[ticks], layer.line[ticks] / unit, named=named))
    parts = parts_at(ticks, [(layer.name, layer.line) for layer in stack], most=5)
    fig.add_trace(total_line(run, ticks, x[ticks], unit, parts))
    fig.update_layout(
        yaxis={"title": {"text": f"bytes held ({unit_name})"}, "range": [0, 1.15 * float(total.max()) / unit]},
        xaxis=axis_layout(axis, run, alone=True),
        legend={"traceorder": "normal"},
        **HOVER_ALONG_X,
    )
    if cursor is not None:
        mark_cursor(fig, cursor, x)
    return fig


def _layers(run: Measurement, log: Allocations) -> list[Layer]:
    """Bottom first: what stays, each block, what runs again. Each allocation is in one of them."""
    role, block = array_of(log.role), array_of(log.block)
    fixed = np.isin(role, [ROLES.index(name) for name in FIXED_ROLES])
    again = role == ROLES.index("recomputed")
    names = block_names(run) or [fqn for fqn in log.blocks if fqn]
    rows = rows_of(names, MOST_BANDS)
    row_of = np.array([rows.index(fqn) for fqn in log.blocks] or [-1], dtype=np.int64)[block]
    own = ~fixed & ~again
    layers = [Layer(name=REST, line=held(log, fixed), colour=ROLE_COLOURS["parameter"], pattern="")]
    layers += [Layer(name=ROOT_LABEL, line=held(log, own & (row_of < 0)), colour=ROLE_COLOURS["unattributed"],
                      pattern=".")]  # fmt: skip
    layers += [
        Layer(name=row.label, line=held(log, own & (row_of == i)), colour=stage_colour(i), pattern=stage_pattern(i))
        for i, row in enumerate(rows.rows)
    ]
    layers.append(Layer(
        name=AGAIN, line=held(log, again), colour=ROLE_COLOURS["recomputed"], pattern=ROLE_PATTERNS["recomputed"]
    ))  # fmt: skip
    return [layer for layer in layers if layer.line.any()]


def _rows(run: Measurement) -> list[dict[str, Any]]:
    """Bytes of each band at the peak, at most, and when each phase ends."""
    log = run.allocations
    if log is None:
        return [{"band": NO_TIMELINE}]
    return rows_of_stack(run, [(layer.name, layer.line) for layer in _layers(run, log)], "band")


def _alt(run: Measurement) -> str:
    log = run.allocations
    if log is None:
        return NO_TIMELINE
    peak = int(held(log).argmax())
    largest = sorted(((int(layer.line[peak]), layer.name) for layer in _layers(run, log)), reverse=True)[:4]
    parts = ", ".join(f"{name} {mib(size)}" for size, name in largest)
    return f"Stacked area chart of bytes by block, recompute on top. At the peak, {peak_place(run)}: {parts}."
