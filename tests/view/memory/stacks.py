"""What a stacked chart draws, read back from its figure."""

from __future__ import annotations

import numpy as np

from explorer.view.drawing.axis import MAX_POINTS
from explorer.view.drawing.figure import Chart
from tests.view.builders import MIB


def stack_of(chart: Chart) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Heights of the bands in bytes, those of the total line, and the bands' names."""
    fig = chart.figure
    bands = [trace for trace in fig.data if trace.stackgroup]
    total = next(trace for trace in fig.data if trace.name == "total")
    unit = {"KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[fig.layout.yaxis.title.text[-4:-1]]
    assert all(list(band.x) == list(total.x) for band in bands) and len(total.x) <= MAX_POINTS
    return np.array([band.y for band in bands]) * unit, np.array(total.y) * unit, [band.name for band in bands]


def assert_adds_up(chart: Chart, peak_bytes: int | None) -> None:
    """At every drawn point to the byte, and the peak is among those."""
    bands, total, _ = stack_of(chart)
    assert np.rint(bands).sum(axis=0).tolist() == np.rint(total).tolist()
    assert np.rint(total).max() == peak_bytes
