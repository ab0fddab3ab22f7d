"""A series of bars: its words under the pointer, what a click stands for, and pattern and edge beside its colour."""

from __future__ import annotations

import pytest

from explorer.view.drawing.figure import BarSeries, add_bars, bold, figure


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


def test_a_bar_without_a_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        add_bars(figure("What?"), ["a", "b"], series(figures=["1.0 MiB"]))
