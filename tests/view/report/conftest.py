"""The golden run and its charts, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.record import Comparison
from explorer.record.base import from_msgpack
from explorer.view.drawing.chart import Chart
from explorer.view.report.report import charts_of

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cpu.msgpack"


@pytest.fixture(scope="session")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)


@pytest.fixture(scope="session")
def charts(pair: Comparison) -> dict[str, Chart]:
    return charts_of(pair)
