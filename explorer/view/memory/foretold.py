"""What the drawn policy should hold, dashed over what was measured."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import Bytes
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import Axis, has_times, positions
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import RUN_COLOURS
from explorer.view.drawing.thin import MAX_POINTS, minmax
from explorer.view.drawing.units import byte_axis, mib

NAME, GROUND = "drawn policy, predicted", "ground of the drawn policy"
COLOUR = RUN_COLOURS["candidate"]
HALO = "rgba(255, 255, 255, 0.85)"
"""Under the dashes, which cross every colour of the chart."""


def add_foretold(chart: Chart, line: Bytes, baseline: Measurement, *, over: Measurement | None, axis: Axis) -> None:
    """Draws `line`, bytes at every event of `baseline`, into a chart of that run, or of it and `over`."""
    log, drawn = baseline.allocations, over or baseline
    if log is None or drawn.allocations is None or len(line) != log.n_ticks + 1:
        return
    if axis == "time" and not has_times(baseline, over):
        axis = "tick"
    x = positions(baseline, log, drawn, axis=axis)
    unit, _ = byte_axis(max(run.held_peak_bytes or 0 for run in (baseline, drawn)))
    ticks = minmax(line, MAX_POINTS)
    for name, pen in ((GROUND, {"width": 5, "color": HALO}), (NAME, {"width": 2, "dash": "dash", "color": COLOUR})):
        chart.figure.add_trace(
            go.Scatter(
                x=x[ticks], y=line[ticks] / unit, name=name, mode="lines", hoverinfo="skip", showlegend=name == NAME,
                line={"shape": "hv", **pen},
            )
        )  # fmt: skip
    top = int(np.argmax(line))
    chart.figure.add_annotation(
        x=float(x[top]), y=float(line[top]) / unit, text=f"≈ {mib(int(line[top]))}", showarrow=False, yshift=14,
        font={"size": 12, "color": COLOUR}, bgcolor="#FFFFFF",
    )  # fmt: skip
