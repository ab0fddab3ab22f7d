"""The timeline of held bytes: lines, counters, predicted line, operators, sketch and ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from explorer.plan.card.step_on_card import memory_on
from explorer.plan.memory.ledger import Bytes
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.why.peak import explain
from explorer.record import Comparison, Failure, Measurement, Policy, Samples, Times
from explorer.record.base import from_msgpack
from explorer.record.card import Card
from explorer.record.measurement import RecordedRanks
from explorer.view.compare.headline import headlines
from explorer.view.drawing.axis import MAX_POINTS, positions
from explorer.view.drawing.figure import Chart, bold
from explorer.view.drawing.units import byte_axis
from explorer.view.memory.bands import ALLOCATED, RESERVED
from explorer.view.memory.blocks import MOST, NOTHING, REST, operators_chart
from explorer.view.memory.card import add_card, card_chart
from explorer.view.memory.ranks import MOST_LINES, rank_rows, ranks_at_peak, ranks_over_time, spread_of_ranks
from explorer.view.memory.stacked import Ghost, by_block, roles
from explorer.view.memory.timeline import NO_TIMELINE, PredictedLine, line_places, timeline
from tests.view.builders import MIB, Chain, compared, cut, measured, on_cuda, runs
from tests.view.reports import of_rank, ranks


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


@pytest.mark.parametrize("draw", [by_block, roles])
@settings(max_examples=12, deadline=None)
@given(one=runs(), other=runs())
def test_the_other_run_is_an_outline_on_the_same_axes(
    draw: Callable[..., Chart], one: Measurement, other: Measurement
) -> None:
    fig = draw(one, ghost=Ghost(name="baseline", run=other, of="candidate")).figure
    (outline,) = [trace for trace in fig.data if trace.name == "baseline"]
    (total,) = [trace for trace in fig.data if trace.name == "total"]
    unit, unit_name = byte_axis(max(one.step_peak_bytes, other.step_peak_bytes))
    assert unit_name in fig.layout.yaxis.title.text
    assert max(outline.y) * unit == pytest.approx(other.step_peak_bytes)
    assert max(total.y) * unit == pytest.approx(one.step_peak_bytes)
    swapped = draw(other, ghost=Ghost(name="candidate", run=one, of="baseline")).figure
    assert swapped.layout.yaxis.range == pytest.approx(fig.layout.yaxis.range), "flipping moves no axis"
    cached = draw(one, ghost=Ghost(name="baseline", run=on_cuda(other), of="candidate")).figure
    swapped = draw(on_cuda(other), ghost=Ghost(name="candidate", run=one, of="baseline")).figure
    assert swapped.layout.yaxis.range == pytest.approx(cached.layout.yaxis.range), "nor do the allocator's curves"
    marked = {note.text.split("\n")[-1] for note in fig.layout.annotations}
    assert {"baseline", "candidate"} <= marked


def test_a_run_that_was_cut_short_lies_on_the_events_of_the_whole_one() -> None:
    whole, short = measured(), cut(measured(), 20)
    short = replace(short, failure=Failure(kind="model raised", sentence="It raised."))
    fig = by_block(short, ghost=Ghost(name="baseline", run=whole, of="candidate")).figure
    (outline,) = [trace for trace in fig.data if trace.name == "baseline"]
    (total,) = [trace for trace in fig.data if trace.name == "total"]
    alone = by_block(whole).figure
    assert max(outline.x) == max(alone.data[-1].x) > max(total.x)


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


def test_title_asks_and_subtitle_answers() -> None:
    pair = compared(recompute=range(6))
    title = timeline(pair.baseline, pair.candidate).figure.layout.title
    assert title.text.endswith("?")
    assert title.subtitle.text == "149.0 to 90.0 MiB (\N{MINUS SIGN}40 %), now in recompute of layers.0"
    chart = timeline(pair.baseline, pair.candidate)
    assert title.subtitle.text in chart.alt
    small = compared(Chain(parameters=3 << 10, saved=14 << 10, output=1 << 10, scratch=4 << 10), range(6))
    assert timeline(small.baseline, small.candidate).alt.count(" 150.0 to 91.0 KiB (") == 1
    assert explain(small)[0].startswith("The policy lowered the peak from 150.0 to 91.0 KiB (")
    assert headlines(small)[0].value == "150.0 → 91.0 KiB"
    marked = {bold("149.0 MiB") + "\nbaseline", bold("90.0 MiB") + "\ncandidate"}
    assert marked <= {note.text for note in chart.figure.layout.annotations}
    for name, run in (("baseline", pair.baseline), ("candidate", pair.candidate)):
        rows = [row for row in chart.rows() if row["run"] == name]
        assert max(row["peak (bytes)"] for row in rows) == run.step_peak_bytes
        assert sum(row["events"] for row in rows) == run.allocations.n_ticks


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


def test_not_measured_is_said_and_not_drawn_as_zero() -> None:
    blind = msgspec.structs.replace(measured(), allocations=None)
    assert timeline(blind).figure.layout.annotations[0].text == NO_TIMELINE
    half = timeline(blind, measured()).figure
    assert [trace.name for trace in half.data if trace.mode == "lines+markers"] == ["candidate"]
    assert "not measured" in half.layout.title.subtitle.text
    assert timeline(blind).rows() == [{"run": "baseline", "phase": NO_TIMELINE}]


def places_of(line: Bytes, base: Measurement, over: Measurement | None) -> PredictedLine:
    places = line_places(line, base, over=over, axis="tick")
    assert places is not None
    return places


def test_a_predicted_line_has_the_units_of_a_chart_of_one_run_and_of_two() -> None:
    base, older = measured(), measured(recompute=(0,))
    line = Forecaster(base).line(Policy.recompute(["layers.1"]))
    assert line is not None
    for chart, over in ((roles(base), None), (timeline(base, older), older)):
        drawn = places_of(line, base, over)
        assert max(drawn.heights) == drawn.peak[1] == pytest.approx(int(line.max()) / MIB, abs=0.001)
        assert drawn.x == sorted(drawn.x) and drawn.peak[0] in drawn.x
        assert max(drawn.x) == max(max(trace.x) for trace in chart.figure.data if None not in trace.x)
    short = replace(cut(older, 20), failure=Failure(kind="model raised", sentence="It raised."))
    chart = timeline(base, short)
    end = max(max(trace.x) for trace in chart.figure.data)
    assert max(places_of(line, base, short).x) == end, "events are counted as in the picture, in the run that is whole"
    assert line_places(line[:-1], base, over=None, axis="tick") is None, "a line of another run is not drawn"


def test_a_caching_allocators_curves_stand_above_the_line_and_inside_the_picture() -> None:
    run = on_cuda(measured())
    fig = timeline(run).figure
    drawn = {trace.name: trace for trace in fig.data if trace.name in (ALLOCATED, RESERVED)}
    assert set(drawn) == {"allocated", "reserved"}
    for name, curve in ((ALLOCATED, run.peaks.allocated), (RESERVED, run.peaks.reserved)):
        assert drawn[name].line.dash == "dot" and drawn[name].showlegend
        assert [y * MIB for y in drawn[name].y] == [curve[point[1]] for point in drawn[name].customdata]
    assert fig.layout.yaxis.range[1] * MIB > run.peaks.reserved_peak_bytes
    assert {trace.name for trace in roles(run).figure.data} >= {ALLOCATED, RESERVED}
    bare, short = timeline(measured()).figure, timeline(cut(run, run.forward_end_tick)).figure
    assert not {ALLOCATED, RESERVED} & {trace.name for fig in (bare, short) for trace in fig.data}
    assert "allocator's" not in bare.layout.title.subtitle.text + headlines(measured())[0].tooltip


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cpu.msgpack"


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)


@pytest.mark.parametrize("block", ["", "blocks.1", "blocks.1.mlp"])
def test_the_operators_of_a_block_add_up_to_what_it_saves(pair: Comparison, block: str) -> None:
    rows = operators_chart(pair.baseline, block).rows()
    assert sum(row["saved (bytes)"] for row in rows) == pair.baseline.by_fqn[block].saved_after_forward_bytes
    sizes = [row["saved (bytes)"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_the_five_largest_are_named_and_the_rest_is_one_bar(pair: Comparison) -> None:
    chart = operators_chart(pair, "blocks.0")
    for trace, run in zip(chart.figure.data, (pair.baseline, pair.candidate)):
        assert list(trace.y)[-1] == REST and len(trace.y) == MOST + 1
        saved = run.by_fqn["blocks.0"].saved_after_forward_bytes
        unit = {"MiB": 2**20, "KiB": 2**10}[chart.figure.layout.xaxis.title.text[-4:-1]]
        assert sum(trace.x) * unit == pytest.approx(saved)
    assert "aten" not in " ".join(chart.figure.data[0].y)
    assert "of blocks.0 keeps for backward" in chart.alt
    for run, block in ((pair, "no.such"), (replace(pair.baseline, allocations=None), "")):
        assert operators_chart(run, block).figure.layout.annotations[0].text == NOTHING


def several(*saved_mib: int, n_ranks: int | None = None) -> RecordedRanks:
    runs = tuple(of_rank(i, Chain(saved=size * MIB), len(saved_mib)) for i, size in enumerate(saved_mib))
    return RecordedRanks(ranks=runs, n_ranks=n_ranks or len(runs), recorded_in="train.py, step 2")


def unrecorded(of: RecordedRanks, rank: int) -> RecordedRanks:
    runs = [replace(run, allocations=None) if run.rank == rank else run for run in of.ranks]
    return replace(of, ranks=tuple(runs))


def test_the_fullest_is_held_against_the_emptiest() -> None:
    assert spread_of_ranks(several(10, 20)).startswith("Rank 1 holds most: ")
    assert "% over rank 0" in spread_of_ranks(several(10, 20))
    assert spread_of_ranks(several(10, 10)).endswith(", and so do all others.")
    assert spread_of_ranks(several(10, 10, n_ranks=4)).endswith("No file of ranks 2, 3.")
    many = several(*range(1, MOST_LINES + 3))
    lines = [trace.name for trace in ranks_over_time(many).figure.data]
    assert lines == [f"rank {i}" for i in range(2, MOST_LINES + 2)], "the fullest ranks are lines"
    assert len(rank_rows(many)) == MOST_LINES + 2, "all ranks are rows"


def test_what_no_rank_recorded_is_not_said_to_be_equal() -> None:
    assert spread_of_ranks(unrecorded(several(10, 10, 10), 0)).endswith(", as all others that recorded it.")
    assert spread_of_ranks(unrecorded(several(10, 20), 0)).endswith(" MiB.")
    nobody = unrecorded(unrecorded(several(10, 20), 0), 1)
    assert spread_of_ranks(nobody) == "No rank recorded what it held."
    assert "No rank has a memory timeline" in ranks_at_peak(nobody).figure.layout.annotations[0].text
    assert [row["where"] for row in rank_rows(nobody)] == ["not recorded"] * 2


def test_the_roles_of_a_bar_add_up_to_the_peak() -> None:
    fig = ranks_at_peak(ranks()).figure
    unit = {"MiB": MIB, "GiB": 1024 * MIB}[fig.layout.xaxis.title.text[-4:-1]]
    held = [sum(trace.x[i] for trace in fig.data) * unit for i in range(2)]
    assert [round(size) for size in held] == [run.held_peak_bytes for run in ranks().ranks]


def on_card(run: Measurement, total_bytes: int) -> Measurement:
    return replace(run, card=memory_on(Card(name="small", total_bytes=total_bytes, taken_bytes=0), run))


def test_the_bar_of_a_card_adds_up_to_the_card_and_a_refused_segment_passes_its_end() -> None:
    run = compared().baseline
    whole = on_card(run, 1 << 30).card
    assert whole is not None and whole.refused is None and whole.stranded_bytes
    small = on_card(run, whole.reserved_bytes - 1).card
    assert small is not None and small.refused is not None
    for memory, passes in ((whole, False), (small, True)):
        fig = card_chart({"baseline": memory}).figure
        unit = byte_axis(memory.card.total_bytes)[0]
        widths = {trace.name: trace.x[0] * unit for trace in fig.data if trace.x[0]}
        assert (sum(widths.values()) > memory.card.total_bytes) == passes == ("refused segment" in widths)
        if not passes:
            assert sum(widths.values()) == memory.card.total_bytes
            assert widths["allocated"] == memory.allocated_bytes and widths["stranded"] == memory.stranded_bytes
        assert fig.layout.shapes[0].x0 * unit == memory.card.total_bytes


def test_a_timeline_shows_the_limit_of_the_card_and_the_moment_of_the_refusal() -> None:
    pair = compared()
    reserved = on_card(pair.baseline, 1 << 30).card
    assert reserved is not None
    baseline, candidate = (on_card(run, reserved.reserved_bytes - 1) for run in (pair.baseline, pair.candidate))
    chart = add_card(timeline(baseline, candidate), {"baseline": baseline, "candidate": candidate})
    assert baseline.card is not None and baseline.card.refused is not None and baseline.allocations is not None
    texts = [note.text for note in chart.figure.layout.annotations]
    assert any("can be reserved" in text for text in texts)
    assert sum("of the baseline" in text and "refused" in text for text in texts) == 1
    moment = positions(baseline, baseline.allocations, candidate, axis="tick")[baseline.card.refused.tick]
    assert moment in [shape.x0 for shape in chart.figure.layout.shapes]
    assert add_card(timeline(pair.baseline), {"baseline": pair.baseline}).figure == timeline(pair.baseline).figure
    far = add_card(timeline(on_card(pair.baseline, 1 << 40)), {"baseline": on_card(pair.baseline, 1 << 40)})
    assert "above this picture" in far.figure.layout.annotations[-1].text
