"""Figures and axes: bars, thinned points, and texts."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec.structs import replace

from explorer.record import Measurement, Samples, Times
from explorer.record.base import column
from explorer.view.drawing.axis import (
    OPTIMIZER_SHARE,
    axis_layout,
    event_ticks,
    has_times,
    minmax,
    positions,
)
from explorer.view.drawing.colours import QUIET_TEXT
from explorer.view.drawing.figure import BarSeries, add_bars, bold, empty, figure, mark_cursor, readable
from tests.view.builders import Chain, measured


def test_an_empty_one_says_why_and_has_no_axes() -> None:
    fig = empty("How much?", "Not measured.")
    assert [one.text for one in fig.layout.annotations] == ["Not measured."] and not fig.data
    assert fig.layout.xaxis.visible is fig.layout.yaxis.visible is False


@pytest.mark.parametrize("dark", [False, True])
def test_words_that_stand_on_the_page_read_there_and_others_keep_their_colour(dark: bool) -> None:
    fig = figure("How much?")
    fig.add_trace(go.Bar(x=[1], y=["a"]))
    fig.add_annotation(text="on the page")
    fig.add_annotation(text="on a bar", font={"color": "white"})
    readable(fig, dark=dark)
    grey = QUIET_TEXT["dark" if dark else "light"]
    on_the_page = (fig.layout.xaxis.tickfont, fig.layout.yaxis.title.font, fig.data[0].outsidetextfont)
    assert {font.color for font in on_the_page} == {grey}
    assert [one.font.color for one in fig.layout.annotations] == [grey, "white"]


@pytest.mark.parametrize(("tick", "n_lines"), [(0, 1), (2, 1), (3, 0)])
def test_a_picked_event_that_is_not_there_is_no_line(tick: int, n_lines: int) -> None:
    fig = figure("How much?")
    mark_cursor(fig, tick, [0.0, 1.5, 2.0])
    assert len(fig.layout.shapes) == n_lines


TIMED = Times(
    step=Samples(ms=(9.0, 10.0, 11.0)), forward=Samples(ms=(3.0,)), backward=Samples(ms=(6.0,)),
    optimizer=Samples(ms=(1.0,)), clock="wall",
)  # fmt: skip


def run(*, recompute: list[int] | None = None) -> Measurement:
    return measured(Chain(n_blocks=4), recompute=recompute or [])


def places(one: Measurement, drawn: Measurement, axis: str = "tick") -> np.ndarray:
    assert one.allocations is not None
    return positions(one, one.allocations, drawn, axis=axis)  # type: ignore[arg-type]


def borders(one: Measurement) -> dict[str, int]:
    return {span.phase: span.end_tick - 1 for span in one.phases if span.phase != "recompute"}


def test_every_event_keeps_its_order_and_the_optimizer_its_share() -> None:
    one = run()
    x = places(one, one)
    assert (np.diff(x) > 0).all() and x[0] == 0
    before, last = borders(one)["backward"], len(x) - 1
    events = last - before
    wide = before * OPTIMIZER_SHARE / (1 - OPTIMIZER_SHARE)
    assert x[-1] - x[before] == pytest.approx(min(events, wide)) and (x[before] == before)
    long = replace(one, phases=(*one.phases[:-1], replace(one.phases[-1], first_tick=10)))
    narrowed = places(long, long)
    assert (narrowed[-1] - narrowed[9]) / narrowed[-1] == pytest.approx(OPTIMIZER_SHARE)


def test_another_run_ends_forward_where_the_drawn_one_does() -> None:
    one, drawn = run(), run(recompute=[0, 1, 2, 3])
    own, onto = borders(one)["forward"], borders(drawn)["forward"]
    assert places(one, drawn)[own] == places(drawn, drawn)[onto]
    assert own != onto, "else nothing was stretched"


def test_in_time_the_step_lasts_as_long_as_the_median_step() -> None:
    one = replace(run(), times=TIMED)
    x = places(one, one, "time")
    assert x[-1] == 10.0 and (np.diff(x) >= 0).all()
    assert axis_layout("time", one)["title"]["text"] == "time (ms)"
    untimed = replace(one, times=None)
    assert "recording included" in axis_layout("time", untimed)["title"]["text"]


def test_there_is_no_time_where_a_run_has_none_or_was_only_played() -> None:
    one = run()
    assert one.allocations is not None and has_times(one) and has_times(one, None)
    bare = replace(one, allocations=replace(one.allocations, time_ns=column()))
    assert not has_times(bare) and not has_times(one, bare) and not has_times(None)
    assert not has_times(replace(one, origin="predicted")), "the clock was that of the player"


def test_labels_are_round_and_the_last_event_is_named() -> None:
    one = run()
    assert one.allocations is not None
    at, labels = event_ticks(one)
    assert at == sorted(at) and labels[0] == "0" and labels[-1] == f"{one.allocations.n_ticks:,}"


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


def series(**changed: object) -> BarSeries:
    usual = {"name": "gradient", "lengths": [1.0, None], "figures": ["1.0 MiB", "not measured"], "colour": "#1E9E62"}
    return BarSeries(**{**usual, **changed})  # type: ignore[arg-type]


def test_a_bar_says_its_row_its_series_and_its_figure() -> None:
    fig = figure("What?")
    add_bars(fig, ["rank 0", "rank 1"], series(), showlegend=False)
    (trace,) = fig.data
    assert (trace.orientation, trace.name, trace.y, trace.x) == ("h", "gradient", ("rank 0", "rank 1"), (1.0, None))
    assert trace.hovertemplate == bold("%{y}") + "\ngradient: %{customdata[1]}"
    assert [list(custom) for custom in trace.customdata] == [["", "1.0 MiB"], ["", "not measured"]]
    assert trace.showlegend is False and trace.marker.line.width is None


def test_a_click_finds_what_the_bar_stands_for_and_colour_is_not_all() -> None:
    fig = figure("What?")
    add_bars(fig, ["a", "b"], series(picks=["a.0 a.1", "b"], pattern="/", edge="#000000"))
    assert [custom[0] for custom in fig.data[0].customdata] == ["a.0 a.1", "b"]
    assert (fig.data[0].marker.pattern.shape, fig.data[0].marker.line.color) == ("/", "#000000")
