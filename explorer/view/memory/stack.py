"""Areas on top of each other that add up to the total at every drawn point, and the total line that a hover reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import Bytes, held
from explorer.record.allocations import Allocations
from explorer.record.measurement import Measurement
from explorer.view.drawing.chart import bold
from explorer.view.drawing.colours import translucent
from explorer.view.drawing.figure import PICKABLE
from explorer.view.drawing.thin import MAX_POINTS, Indices, minmax, with_points
from explorer.view.drawing.units import mib
from explorer.view.memory.timeline import hover_fields

PALE = 0.22


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One area of the stack."""

    name: str
    line: Bytes
    """Bytes at each tick."""
    colour: str
    pattern: str
    pale: bool = False
    """Beside what was asked for: without a pattern and without a line in the legend."""


def drawn_ticks(log: Allocations, stack: Sequence[Layer]) -> Indices:
    """One set of ticks for all layers, so that they add up: extremes of the total, and each layer's highest point."""
    tops = [int(layer.line.argmax()) for layer in stack]
    return with_points(minmax(held(log), MAX_POINTS - len(tops)), tops, log.n_ticks + 1)


def area(layer: Layer, x: Any, y: Any, *, named: bool = True) -> go.Scatter:
    """One layer of the stack; `x` and `y` are drawn points, `y` in units of the axis. `named`: in the legend."""
    fill = translucent(layer.colour, PALE if layer.pale else 0.85)
    return go.Scatter(
        x=x, y=y, name=layer.name, showlegend=named and not layer.pale, stackgroup="held", mode="lines",
        hoverinfo="skip",
        line={"shape": "hv", "width": 0.5, "color": translucent(layer.colour, PALE if layer.pale else 1)},
        fillcolor=fill,
        fillpattern={"shape": "" if layer.pale else layer.pattern, "fgcolor": "rgba(255,255,255,0.55)",
                     "bgcolor": fill, "size": 7, "solidity": 0.2},
    )  # fmt: skip


def total_line(run: Measurement, ticks: Indices, x: Any, unit: int, parts: Sequence[str]) -> go.Scatter:
    """The trace "total" with customdata ["run", tick] for clicks; `parts` says of each tick what it is made of."""
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
    """For each tick the names that hold something there, largest first, at most `most` of them."""
    if not lines:
        return [""] * len(ticks)
    names = [name for name, _ in lines]
    sizes_by_tick = np.stack([line[ticks] for _, line in lines]).T.tolist()
    present = (sorted(((size, name) for size, name in zip(sizes, names) if size), reverse=True)
               for sizes in sizes_by_tick)  # fmt: skip
    return ["\n".join(f"{mib(size)} {name}" for size, name in here[:most]) for here in present]


def rows_of_stack(run: Measurement, lines: Sequence[tuple[str, Bytes]], heading: str) -> list[dict[str, Any]]:
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
