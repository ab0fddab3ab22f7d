"""Lines, bars and stacks as SVG: as high and as long as their numbers."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from explorer.plan.memory.series import held
from explorer.record import Comparison
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.units import byte_axis
from explorer.view.report.svg import svg
from tests.view.report.read import NAMES


def test_the_highest_point_of_the_line_is_the_peak(pair: Comparison, charts: dict[str, Chart]) -> None:
    """Read back from the path: pixels to bytes by the axis's own range."""
    tree = ET.fromstring(svg(charts["memory-timeline"]))
    plot = next(part for part in tree.iter(f"{NAMES}svg") if part.get("class") == "plot")
    height = float(str(plot.get("height")))
    lines = [path for path in plot.iter(f"{NAMES}path") if path.get("fill") == "none"]
    unit, _ = byte_axis(pair.baseline.held_peak_bytes or 0)
    top = charts["memory-timeline"].figure.layout.yaxis.range[1] * unit
    for line, run in zip(lines, (pair.baseline, pair.candidate)):
        ups = [float(up) for up in re.findall(r"[,V](-?[\d.]+)", str(line.get("d")))]
        assert run.allocations is not None
        assert (1 - min(ups) / height) * top == pytest.approx(int(held(run.allocations).max()), rel=0.002)


def test_bars_are_as_long_as_their_numbers(pair: Comparison, charts: dict[str, Chart]) -> None:
    tree = ET.fromstring(svg(charts["saved-bytes-by-block"]))
    widths = [
        float(str(bar.get("width"))) for bar in tree.iter(f"{NAMES}rect") if bar.find(f"{NAMES}title") is not None
    ]
    figure = charts["saved-bytes-by-block"].figure
    values = [float(value) for trace in figure.data for value in trace.x]
    assert len(widths) == len(values)
    scale = max(widths) / max(values)
    assert all(math.isclose(width, value * scale, abs_tol=0.1) for width, value in zip(widths, values))


def test_stacked_bars_of_the_ledger_add_up(charts: dict[str, Chart]) -> None:
    tree = ET.fromstring(svg(charts["candidate-at-the-peak"]))
    ends: dict[str, float] = {}
    for bar in tree.iter(f"{NAMES}rect"):
        if bar.find(f"{NAMES}title") is not None and float(str(bar.get("width"))):
            row, start = str(bar.get("y")), float(str(bar.get("x")))
            assert start == pytest.approx(ends.get(row, 0.0), abs=0.11)
            ends[row] = start + float(str(bar.get("width")))
    assert ends
