"""Peaks of a segmented step."""

from __future__ import annotations

import pytest

from explorer.lab.segment_memory import PEAK
from tests.lab.running import run, value


def test_segments_save_memory_and_a_list_of_stores_costs_it() -> None:
    large, small = (
        run("segment-memory", length="16", batch="large"),
        run("segment-memory", length="16", batch="small"),
    )
    assert value(large, "one store", PEAK) < value(large, "plain", PEAK)
    lines = {series.name: series.y for series in small.chart.series}
    assert lines["list of stores"][-1] > 2 * lines["one store"][-1]
    for name in ("one store", "torch's checkpoint"):
        assert lines[name] == pytest.approx(lines["one store"], rel=0.02)
