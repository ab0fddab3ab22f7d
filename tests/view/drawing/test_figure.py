"""What all figures share: the question on top, grounds that let the page through, and text that reads on either."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from explorer.view.drawing.colours import QUIET_TEXT
from explorer.view.drawing.figure import bars, empty, figure, mark_cursor, readable


def test_the_title_asks_and_the_subtitle_answers_where_there_is_an_answer() -> None:
    asked, answered = figure("How much?"), figure("How much?", "3 MiB")
    assert asked.layout.title.text == answered.layout.title.text == "How much?"
    assert asked.layout.title.subtitle.text is None and answered.layout.title.subtitle.text == "3 MiB"
    assert answered.layout.paper_bgcolor == answered.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert answered.layout.font.color is None, "the page's theme gives it"


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


def test_bars_lie_with_the_first_row_on_top() -> None:
    fig = bars(figure("How much?"), "MiB", mode="group")
    assert fig.layout.yaxis.autorange == "reversed" and fig.layout.xaxis.title.text == "MiB"
    assert fig.layout.barmode == "group" and fig.layout.xaxis.rangemode == "tozero"
