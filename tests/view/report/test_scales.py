"""One axis of a drawing: round ticks inside the ends, names in order, and gaps that stay gaps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.view.report.scales import N_TICKS, Scale, rounds, scale_of


def axis(**given: Any) -> SimpleNamespace:
    """Plotly's axis, as far as it is read."""
    usual = dict.fromkeys(("type", "categoryarray", "rangemode", "range", "tickvals", "ticktext", "ticksuffix"))
    return SimpleNamespace(**usual | given)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_inside_the_ends_and_about_as_many_as_wanted(low: float, length: float) -> None:
    ticks = rounds(low, low + length)
    slack = 1e-6 * (abs(low) + length)
    assert all(low - slack <= tick <= low + length + slack for tick in ticks)
    assert N_TICKS / 3 <= len(ticks) <= N_TICKS + 1
    step = ticks[1] - ticks[0]
    leading = step / 10 ** math.floor(math.log10(step * (1 + 1e-6)))
    assert min(abs(leading - factor) for factor in (1, 2, 5)) < 1e-2


def test_an_axis_of_one_value_has_one_tick() -> None:
    assert rounds(3.0, 3.0) == [3.0]


def test_pixels_run_from_end_to_end_also_downwards() -> None:
    scale = Scale(low=10, high=20).between(300, 100)
    assert [scale.pixels(value) for value in (10, 15, 20)] == [300, 200, 100]


def test_bars_start_at_zero_and_lines_where_they_are() -> None:
    assert scale_of(axis(), [5.0, 9.0]).low == 5.0
    assert scale_of(axis(), [5.0, 9.0], bars=True).low == 0.0
    assert scale_of(axis(rangemode="tozero"), [-5.0, -1.0]).high == pytest.approx(0.2)
    assert scale_of(axis(range=(1, 2)), [5.0]).high == 2.0


def test_names_stand_in_their_order_and_only_those_that_are_drawn() -> None:
    scale = scale_of(axis(categoryarray=("c", "a", "missing")), ["a", "b", "c", "a"])
    assert scale.names == ("c", "a", "b")
    assert [scale.value(name) for name in ("c", "a", "b")] == [0.0, 1.0, 2.0]
    assert [text for _, text in scale.ticks()] == ["c", "a", "b"]


def test_a_gap_is_no_number() -> None:
    scale = scale_of(axis(ticksuffix=" ms"), [1.0, None, 3.0])
    assert scale.value(None) is None and scale.value(float("nan")) is None and scale.value(2) == 2.0
    assert scale.ticks()[0][1] == "1 ms"
