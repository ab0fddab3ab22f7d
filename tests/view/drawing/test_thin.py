"""Thinning keeps the peak, whatever the line looks like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from explorer.view.drawing.axis import MAX_POINTS, minmax, with_points

lines = arrays(np.int64, st.integers(1, 3000), elements=st.integers(-(10**12), 10**12))


@given(lines, st.integers(4, 300))
def test_extremes_and_ends_survive_exactly(line: np.ndarray, n_points: int) -> None:
    kept = minmax(line, n_points)
    assert len(kept) <= max(n_points, 0)
    assert kept[0] == 0 and kept[-1] == len(line) - 1
    assert (np.diff(kept) > 0).all()
    assert line[kept].max() == line.max()
    assert line[kept].min() == line.min()


@given(lines, st.integers(4, 300))
def test_the_first_of_equal_peaks_is_drawn(line: np.ndarray, n_points: int) -> None:
    assert int(line.argmax()) in set(minmax(line, n_points).tolist())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999_999), st.integers(5, 2000))
def test_one_tick_among_a_million_is_found(place: int, n_points: int) -> None:
    line = np.zeros(1_000_000, dtype=np.int64)
    line[place] = 1
    kept = minmax(line, n_points)
    assert place in kept
    assert len(kept) <= n_points


def test_short_lines_are_left_alone() -> None:
    assert minmax(np.arange(MAX_POINTS)).tolist() == list(range(MAX_POINTS))


def test_fewer_than_four_points_are_refused() -> None:
    with pytest.raises(ValueError, match="4 points or more, got 3"):
        minmax(np.arange(10), 3)


def test_points_outside_the_line_are_not_added() -> None:
    assert with_points(np.array([0, 5]), [3, -1, 6, 5], 6).tolist() == [0, 3, 5]
