"""What a caching allocator took for the bytes that tensors asked for: its own curves and peaks beside the held bytes.

    reserved    ┄┄┄┄┄┄┄┄┄┄┄┄   segments taken from the driver, cached blocks included: measured
    allocated   ┄┄┄┄┄┄┄┄┄┄     blocks handed out: derived, requests rounded up (see record.AllocatorPeaks)
    held        ──────────     requested by tensors: the line that every headline comes from

Drawn for a single run: the dots of two runs would be four lines that nobody can tell apart.
"""

from __future__ import annotations

import plotly.graph_objects as go

from explorer.plan.memory.ledger import Bytes, array_of
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import Positions
from explorer.view.drawing.chart import bold
from explorer.view.drawing.colours import STAGE_COLOURS
from explorer.view.drawing.thin import MAX_POINTS, minmax
from explorer.view.drawing.units import mib

ALLOCATED, RESERVED = "allocated (derived)", "reserved"
_COLOURS = {ALLOCATED: STAGE_COLOURS[9], RESERVED: STAGE_COLOURS[8]}


def counters(run: Measurement) -> dict[str, Bytes]:
    """The curves that `run` has, one value a tick; empty on a device without a caching allocator."""
    if run.allocations is None:
        return {}
    n_values = run.allocations.n_ticks + 1
    curves = {ALLOCATED: run.peaks.allocated, RESERVED: run.peaks.reserved}
    return {name: array_of(curve) for name, curve in curves.items() if curve is not None and len(curve) == n_values}


def add_counters(fig: go.Figure, run: Measurement, x: Positions, unit: int) -> float:
    """Draws the curves, dotted; `x` of each tick, `unit` in bytes. Returns how high they reach, 0 where there are none.

    customdata starts with ["baseline", tick], as that of the single run's own line does.
    """
    highest = 0.0
    for name, curve in counters(run).items():
        ticks = minmax(curve, MAX_POINTS)
        custom = [["baseline", tick, mib(size)] for tick, size in zip(ticks.tolist(), curve[ticks].tolist())]
        highest = max(highest, float(curve.max()) / unit)
        fig.add_trace(
            go.Scatter(
                x=x[ticks], y=curve[ticks] / unit, name=name, mode="lines", customdata=custom, showlegend=True,
                line={"shape": "hv", "width": 1.5, "dash": "dot", "color": _COLOURS[name]},
                hovertemplate=bold("%{customdata[2]}") + f" {name}, event %{{customdata[1]}}",
            )
        )  # fmt: skip
    return highest
