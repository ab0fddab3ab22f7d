"""The timeline draws the series that the headline is computed from."""

from __future__ import annotations

import msgspec
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings

from explorer.record import Measurement, Samples, Times
from explorer.record.base import column
from explorer.view.drawing.axis import MAX_POINTS, positions
from explorer.view.drawing.colours import CURSOR
from explorer.view.drawing.figure import bold
from explorer.view.memory.timeline import NO_TIMELINE, timeline
from tests.view.builders import MIB, Chain, compared, measured, runs
from tests.view.memory.made_up import cut


def line_of(fig: go.Figure, name: str) -> go.Scatter:
    return next(trace for trace in fig.data if trace.name == name and trace.mode == "lines+markers")


@settings(max_examples=12, deadline=None)
@given(runs(), runs())
def test_the_drawn_peak_is_the_headline_to_the_byte(baseline: Measurement, candidate: Measurement) -> None:
    fig = timeline(baseline, candidate).figure
    for name, run in (("baseline", baseline), ("candidate", candidate)):
        trace = line_of(fig, name)
        assert len(trace.x) <= MAX_POINTS
        peaks = [point for point, y in zip(trace.customdata, trace.y) if y == max(trace.y)]
        assert run.allocations is not None
        assert run.allocations.peak_tick in [point[1] for point in peaks]
        assert run.allocations.held_bytes[peaks[0][1]] == run.step_peak_bytes


def test_every_drawn_height_is_the_held_bytes_of_its_tick() -> None:
    run = measured(Chain(n_blocks=200, n_parts=4), range(0, 200, 3))
    trace = line_of(timeline(run).figure, "baseline")
    assert len(trace.x) > 1000
    for (_, tick, *_rest), y in zip(trace.customdata, trace.y):
        assert y * MIB == pytest.approx(run.allocations.held_bytes[tick], rel=1e-12)


def test_hover_names_block_phase_operator_and_bytes() -> None:
    run = measured(recompute=[3])
    words = {point[1]: point[3:] for point in line_of(timeline(run).figure, "baseline").customdata.tolist()}
    span = next(span for span in run.phases if span.phase == "recompute")
    assert words[span.first_tick] == [
        "recompute of layers.3", "allocated 4.0 MiB (recomputed) in layers.3 by aten::softmax"
    ]  # fmt: skip
    assert words[0] == ["before the step", "held before the step"]
    assert any(expected[1].startswith("freed 7.0 MiB (recomputed) in layers.3.inner") for expected in words.values())


def test_the_baseline_is_stretched_phase_onto_phase() -> None:
    """Forward of both runs ends at one x, though the candidate had more events."""
    pair = compared(recompute=range(6))
    x = positions(pair.baseline, pair.baseline.allocations, pair.candidate, axis="tick")
    assert pair.baseline.forward_end_tick != pair.candidate.forward_end_tick
    assert x[pair.baseline.forward_end_tick] == pair.candidate.forward_end_tick
    assert x[0] == 0 and x[-1] == pair.candidate.allocations.n_ticks
    assert (x[1:] > x[:-1]).all()


def test_a_run_cut_short_keeps_what_it_had() -> None:
    pair = compared()
    stop = pair.candidate.forward_end_tick + 5
    fig = timeline(pair.baseline, cut(pair.candidate, stop)).figure
    assert max(line_of(fig, "candidate").x) == stop
    assert max(line_of(fig, "baseline").x) > stop


def test_both_peaks_are_marked_with_their_values() -> None:
    pair = compared(recompute=range(6))
    texts = [note.text for note in timeline(pair.baseline, pair.candidate).figure.layout.annotations]
    assert bold("149.0 MiB") + "\nbaseline" in texts
    assert bold("90.0 MiB") + "\ncandidate" in texts


def test_title_asks_and_subtitle_answers() -> None:
    pair = compared(recompute=range(6))
    title = timeline(pair.baseline, pair.candidate).figure.layout.title
    assert title.text.endswith("?")
    assert title.subtitle.text == "149.0 MiB to 90.0 MiB (\N{MINUS SIGN}40 %), now in recompute of layers.0"
    assert title.subtitle.text in timeline(pair.baseline, pair.candidate).alt


def test_on_the_time_axis_a_run_is_as_long_as_its_median_step() -> None:
    """Recorded, the candidate is slower than timed: the picture agrees with the headline, not with the recording."""
    pair = compared(recompute=range(6))
    fig = timeline(
        pair.baseline, timed(pair.candidate, forward=30.0, backward=60.0, optimizer=10.0), axis="time"
    ).figure
    line = line_of(fig, "candidate")
    assert max(line.x) == pytest.approx(150.0), "the median step, which is longer than the three medians"
    first_backward = next(span.first_tick for span in pair.candidate.phases if span.phase != "forward")
    at = {point[1]: x for point, x in zip(line.customdata.tolist(), line.x)}
    assert at[first_backward - 1] == pytest.approx(45.0)
    assert list(line.x) == sorted(line.x)


def timed(run: Measurement, *, forward: float, backward: float, optimizer: float) -> Measurement:
    """`run` with these medians, in a step of 150 ms."""
    of = {"step": 150.0, "forward": forward, "backward": backward, "optimizer": optimizer}
    times = Times(clock="process CPU time", **{name: Samples(ms=(ms, ms, ms)) for name, ms in of.items()})
    return msgspec.structs.replace(run, times=times)


def test_a_picked_moment_is_a_line_through_the_plot() -> None:
    pair = compared(recompute=range(6))
    fig = timeline(pair.baseline, pair.candidate, cursor=("candidate", 7)).figure
    assert [shape.x0 for shape in fig.layout.shapes if shape.line.color == CURSOR] == [7.0]
    assert fig.layout.hovermode == "x unified"


def test_time_axis_and_its_absence() -> None:
    pair = compared()
    fig = timeline(pair.baseline, pair.candidate, axis="time").figure
    assert max(line_of(fig, "baseline").x) == pytest.approx(pair.baseline.allocations.n_ticks * 1e-3)
    assert "ms" in fig.layout.xaxis.title.text
    blind = msgspec.structs.replace(
        pair.candidate, allocations=msgspec.structs.replace(pair.candidate.allocations, time_ns=column())
    )
    assert (
        timeline(pair.baseline, blind, axis="time").figure.layout.xaxis.title.text == "allocator event of the candidate"
    )


def test_not_measured_is_said_and_not_drawn_as_zero() -> None:
    blind = msgspec.structs.replace(measured(), allocations=None)
    assert timeline(blind).figure.layout.annotations[0].text == NO_TIMELINE
    half = timeline(blind, measured()).figure
    assert [trace.name for trace in half.data if trace.mode == "lines+markers"] == ["candidate"]
    assert "not measured" in half.layout.title.subtitle.text
    assert timeline(blind).rows() == [{"run": "baseline", "phase": NO_TIMELINE}]


def test_table_twin_holds_the_peak() -> None:
    pair = compared()
    table = timeline(pair.baseline, pair.candidate).rows()
    for name, run in (("baseline", pair.baseline), ("candidate", pair.candidate)):
        assert max(row["peak (bytes)"] for row in table if row["run"] == name) == run.step_peak_bytes
        assert sum(row["events"] for row in table if row["run"] == name) == run.allocations.n_ticks


def test_no_text_colour_is_set_except_on_marks() -> None:
    """The theme's font colour makes the figure readable on the light and on the dark page."""
    layout = timeline(measured()).figure.layout
    assert layout.font.color is None and layout.title.font.color is None and layout.xaxis.color is None
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"


def test_an_optimizer_of_many_events_is_narrowed_and_says_so() -> None:
    """Adam without foreach has most of the events of a step and one sixth of the picture."""
    run = measured(Chain(n_blocks=3), [1])
    last = run.phases[-1]
    many = 10 * run.allocations.n_ticks
    log = run.allocations
    stretched = msgspec.structs.replace(
        log,
        n_ticks=many,
        died=column(many + 1 if died == log.n_ticks + 1 else died for died in log.died),
        time_ns=column(),
    )
    phases = (*run.phases[:-1], msgspec.structs.replace(last, end_tick=many + 1))
    fig = timeline(msgspec.structs.replace(run, allocations=stretched, phases=phases)).figure
    x = max(line_of(fig, "baseline").x)
    before = last.first_tick - 1
    assert (x - before) / x == pytest.approx(1 / 6)
    assert fig.layout.xaxis.title.text == "allocator event, optimizer narrowed"
    assert fig.layout.xaxis.ticktext[-1] == f"{many:,}"
    assert all(float(text.replace(",", "")) == place for text, place in
               zip(fig.layout.xaxis.ticktext[:-1], fig.layout.xaxis.tickvals[:-1]))  # fmt: skip
