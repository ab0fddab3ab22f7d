"""Readings of a clock: the median, and half the distance between the quartiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.record.measurement import Samples, ratio_with_spread


def test_too_few_readings_have_no_figure() -> None:
    assert (Samples().median_ms, Samples().spread_ms, Samples(ms=(3.0,)).spread_ms) == (None, None, None)
    assert Samples(ms=(3.0,)).median_ms == 3.0
    assert ratio_with_spread(Samples(ms=(1.0,)), Samples(ms=(1.0,))) is None


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    assert Samples(ms=(1.0, 2.0, 3.0, 4.0, 5.0)).spread_ms == Samples(ms=(1.0, 2.0, 3.0, 4.0, 500.0)).spread_ms == 1.0


def test_a_ratio_is_of_pairs_so_that_what_slows_both_cancels() -> None:
    assert ratio_with_spread(Samples(ms=(2.0, 20.0, 4.0)), Samples(ms=(1.0, 10.0, 2.0))) == (2.0, 0.0)
    assert ratio_with_spread(Samples(ms=(2.0, 3.0, 4.0)), Samples(ms=(1.0, 0.0, 2.0))) == (2.0, 0.0), "no division by 0"


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=12), st.floats(0.1, 10))
def test_a_scaled_clock_gives_that_ratio_without_spread(ms: list[float], scale: float) -> None:
    pair = ratio_with_spread(Samples(ms=tuple(scale * one for one in ms)), Samples(ms=tuple(ms)))
    assert pair is not None and pair == (pytest.approx(scale), pytest.approx(0, abs=1e-6 * scale))
