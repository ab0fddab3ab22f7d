"""Held bytes over one step: the peak's moment, the candidate's saving, and the roles at the peak."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import Bytes, events, held, span_at
from explorer.record.allocations import ROLES, Allocations, PhaseSpan
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import (
    MAX_POINTS,
    Axis,
    Indices,
    Positions,
    axis_layout,
    has_times,
    minmax,
    positions,
    with_points,
)
from explorer.view.drawing.colours import RUN_COLOURS, RUN_DASHES
from explorer.view.drawing.figure import HOVER_ALONG_X, PICKABLE, Chart, Cursor, bold, empty, figure, mark_cursor
from explorer.view.drawing.units import byte_axis, change, from_to, mib, percent
from explorer.view.memory.bands import add_bands, add_counters, counters
from explorer.view.text.runs import peak_and_end, peaks_in_words

LABEL_MARGIN = 86
"""Pixels at the right of the plot for the words at a peak."""
NO_TIMELINE = "The memory timeline was not measured on this device."


def timeline(
    baseline: Measurement,
    candidate: Measurement | None = None,
    *,
    axis: Axis = "tick",
    cursor: Cursor = None,
) -> Chart:
    """Chart of the bytes that one or two runs held over the step."""
    runs, question = {"baseline": baseline}, "Where is the peak?"
    if candidate is not None:
        runs["candidate"] = candidate
        question = "Where is the peak, how much lower?"
    answer = pair_answer(baseline, candidate)
    fig = empty(question, NO_TIMELINE)
    if any(run.allocations is not None for run in runs.values()):
        fig = figure(question, answer)
        _draw(fig, runs, axis, cursor)
    return Chart(
        name="memory timeline",
        figure=fig,
        alt=f"Line chart of the bytes held during one training step. {answer}.",
        rows=lambda: _rows(runs),
    )


def alone(chart: Chart) -> Chart:
    """The chart of a single run, with the word `baseline` removed from names and notes."""
    for trace in chart.figure.data:
        if trace.name == "baseline":
            hover = trace.hovertemplate or ""
            for name in (", %{customdata[0]}", ", baseline", "baseline: "):
                hover = hover.replace(name, "")
            trace.update(name="this run", hovertemplate=hover)
        elif trace.name:
            trace.name = trace.name.removesuffix(" of the baseline")
    for note in chart.figure.layout.annotations:
        note.text = note.text.removesuffix("\nbaseline")
    return replace(chart, rows=lambda: [{k: cell for k, cell in row.items() if k != "run"} for row in chart.rows()])


def _draw(fig: go.Figure, runs: dict[str, Measurement], axis: Axis, cursor: Cursor) -> None:
    """Both runs on one axis, phases of the candidate (or of the only run) above, the exact peaks marked.

    Every point's customdata starts with its run ("baseline", "candidate") and its own tick. The axis "time" falls back
    to "tick" where no times were recorded. A run without allocations is left out and named in the title. A single run
    of a caching allocator also shows the bytes that the allocator took for it.
    """
    if not has_times(*runs.values()):
        axis = "tick"
    first = _counted(runs)
    drawn = runs[first]
    unit, unit_name = _byte_axis(*runs.values())
    places = _places(runs, drawn, axis)
    single = len(places) == 1
    add_bands(fig, drawn, places[first])
    for name, x in places.items():
        fig.add_trace(_line(name, runs[name], x, unit, dash="solid" if single else RUN_DASHES[name]))
    counted = {name: x for name, x in places.items() if single or runs[name].card is not None}
    counters_end = [add_counters(fig, runs[name], x, unit, of="" if single else name) for name, x in counted.items()]
    tops = _mark_peaks(fig, runs, places, unit)
    if cursor is not None and cursor[0] in places:
        mark_cursor(fig, cursor[1], places[cursor[0]])
    fig.update_layout(
        yaxis={"title_text": f"bytes held ({unit_name})", "range": [0, 1.22 * max(*tops, *counters_end, 0.0)]},
        xaxis=axis_layout(axis, drawn, of="" if single else f" of the {first}"),
        margin={"r": LABEL_MARGIN},
        **HOVER_ALONG_X,
    )


def _places(runs: dict[str, Measurement], counted: Measurement, axis: Axis) -> dict[str, Positions]:
    """Places on the x axis of the events of each run with a timeline; `counted`: the run whose events it counts."""
    logs = {name: run.allocations for name, run in runs.items()}
    return {name: positions(runs[name], log, counted, axis=axis) for name, log in logs.items() if log is not None}


def _byte_axis(*runs: Measurement) -> tuple[int, str]:
    return byte_axis(max(run.held_peak_bytes or 0 for run in runs))


def add_ghost(fig: go.Figure, runs: dict[str, Measurement], counted: Measurement, *, axis: Axis) -> None:
    """Draws the second of two runs as an outline over the first, and marks both peaks.

    Events of the axis "tick" are counted in `counted`, one of the two.
    """
    unit, _ = _byte_axis(*runs.values())
    places, ghost = _places(runs, counted, axis), list(runs)[-1]
    if ghost in places:
        outline = _line(ghost, runs[ghost], places[ghost], unit, dash="solid")
        outline.update(mode="lines", line_width=1.5, hovertemplate=bold("%{customdata[2]}") + f" held, {ghost}")
        fig.add_trace(outline)
    _mark_peaks(fig, runs, places, unit)
    fig.update_layout(margin={"r": LABEL_MARGIN})


def _counted(runs: dict[str, Measurement]) -> str:
    """The run whose events the axis counts: the candidate, unless it was cut short and the baseline was not."""
    names = [name for name, run in runs.items() if run.allocations is not None]
    complete = [name for name in names if runs[name].complete]
    return (complete or names)[-1]


def _rows(runs: dict[str, Measurement]) -> list[dict[str, object]]:
    """Each phase of each run, its events, and the most it held."""
    table: list[dict[str, object]] = []
    for name, run in runs.items():
        if run.allocations is None:
            table.append({"run": name, "phase": NO_TIMELINE})
            continue
        line = held(run.allocations)
        for span in run.phases:
            stretch = line[span.first_tick : span.end_tick]
            if not len(stretch):
                continue
            row: dict[str, object] = {
                "run": name,
                "phase": span.phase,
                "block": span.block,
                "first event": span.first_tick,
                "events": len(stretch),
                "peak (bytes)": int(stretch.max()),
                "held at its end (bytes)": int(stretch[-1]),
                "is the step's peak": int(stretch.max()) == int(line.max()),
            }
            for counter, curve in counters(run).items():
                if len(curve) > span.first_tick:
                    row[f"peak {counter} (bytes)"] = int(curve[span.first_tick : span.end_tick].max())
            table.append(row)
    return table


def hover_fields(run: Measurement, log: Allocations, ticks: Indices) -> list[list[str]]:
    """Words for each of `ticks`: [phase, event]."""
    event = events(log)
    first = np.array([span.first_tick for span in run.phases])
    words = []
    for tick in ticks.tolist():
        n_begun = int(np.searchsorted(first, tick, side="right"))
        phase = "before the step"
        if n_begun:
            phase = _phase_words(run.phases[n_begun - 1])
        words.append([phase, _event_words(log, int(event.entry[tick]), int(event.sign[tick]))])
    return words


def _phase_words(span: PhaseSpan) -> str:
    return f"{span.phase} of {span.block}" if span.block else span.phase


def _event_words(log: Allocations, entry: int, sign: int) -> str:
    if entry < 0:
        return "held before the step"
    verb = "allocated" if sign > 0 else "freed"
    line = log.lines[log.line[entry]] if log.line else ""
    block = log.blocks[log.block[entry]] or line or "the model itself"
    op = log.ops[log.op[entry]]
    by = f" by {op}" if op and sign > 0 else ""
    return f"{verb} {mib(log.n_bytes[entry])} ({ROLES[log.role[entry]]}) in {block}{by}"


def _line(name: str, run: Measurement, x: Positions, unit: int, *, dash: str) -> go.Scatter:
    log = run.allocations
    assert log is not None
    line = held(log)
    borders = tuple(tick for span in run.phases[:100] for tick in (span.first_tick, span.end_tick - 1))
    ticks = with_points(minmax(line, MAX_POINTS - len(borders)), borders, log.n_ticks + 1)
    words = hover_fields(run, log, ticks)
    custom = [
        [name, tick, mib(size), *fields] for tick, size, fields in zip(ticks.tolist(), line[ticks].tolist(), words)
    ]
    return go.Scatter(
        x=x[ticks], y=line[ticks] / unit, name=name, mode="lines+markers", customdata=np.array(custom, dtype=object),
        **PICKABLE,
        line={"shape": "hv", "width": 2, "color": RUN_COLOURS[name], "dash": dash},
        hovertemplate=bold("%{customdata[2]}") + " held, %{customdata[0]}\n%{customdata[3]}, event %{customdata[1]}"
        "\n%{customdata[4]}",
    )  # fmt: skip


def _mark_peaks(fig: go.Figure, runs: dict[str, Measurement], places: dict[str, Positions], unit: int) -> list[float]:
    """Marks the peak of each run; returns their heights. Where two are close, the label of the higher is above."""
    tops = [_mark_peak(fig, name, runs[name], x, unit) for name, x in places.items()]
    if len(tops) == 2 and abs(tops[0] - tops[1]) < 0.14 * max(tops):
        up = 17 if tops[0] >= tops[1] else -17
        fig.layout.annotations[-2].yshift, fig.layout.annotations[-1].yshift = up, -up
    return tops


def _mark_peak(fig: go.Figure, name: str, run: Measurement, x: Positions, unit: int) -> float:
    """Draws a marker, the value and a thin line at the peak; returns the peak's height on the axis."""
    assert run.allocations is not None
    line = held(run.allocations)
    tick = int(line.argmax())
    top = float(line[tick]) / unit
    fig.add_scatter(
        x=[x[tick]], y=[top], mode="markers", name=f"peak of the {name}", showlegend=False, hoverinfo="skip",
        customdata=[[name, tick]],
        marker={"symbol": "diamond", "size": 10, "color": RUN_COLOURS[name]},
        unselected={"marker": {"opacity": 1}},  # the peak stays where another moment is picked
    )  # fmt: skip
    # Beside the plot, where no curve runs, in the page's own text colour, in lines short enough for the margin.
    words = peak_and_end(run).replace("at least ", "at least\n").replace(", then", ",\nthen")
    fig.add_annotation(
        x=1, xref="paper", y=top, text=bold(words) + f"\n{name}", showarrow=False, yshift=0,
        xanchor="left", xshift=4, align="left", font={"size": 12},
    )  # fmt: skip
    fig.add_hline(y=top, line={"dash": "dash", "width": 1, "color": RUN_COLOURS[name]}, opacity=0.5)
    return top


def pair_answer(baseline: Measurement, candidate: Measurement | None) -> str:
    if candidate is None:
        peaks = peaks_in_words(baseline)
        return f"{peak_and_end(baseline)}, {peak_place(baseline)}" + (peaks and f"; {peaks}")
    if not (baseline.complete and candidate.complete):
        return f"baseline {peak_and_end(baseline)}; candidate {peak_and_end(candidate)}"
    old, new = baseline.step_peak_bytes, candidate.step_peak_bytes
    moved = change(old, new)
    words = "no ratio" if moved is None else percent(moved, signed=True)
    return f"{from_to(old, new)} ({words}), now {peak_place(candidate)}"


def peak_place(run: Measurement) -> str:
    """The phase the peak lies in, in words."""
    if run.allocations is None:
        return "not measured"
    span = span_at(run.phases, int(held(run.allocations).argmax()))
    if span is None:
        return "before the step"
    return f"in {_phase_words(span)}"


NAME, COLOUR = "drawn policy, predicted", RUN_COLOURS["candidate"]


class PredictedLine(NamedTuple):
    """The line of a policy in the units of a chart's axes. The browser draws it over the chart (components/desk.js)."""

    x: list[float]
    heights: list[float]
    peak: tuple[float, float]
    label: str
    colour: str = COLOUR


def line_places(line: Bytes, baseline: Measurement, *, over: Measurement | None, axis: Axis) -> PredictedLine | None:
    """`line`, bytes at every event of `baseline`, for a chart of that run, or of it and `over`. None: not drawable."""
    log, drawn = baseline.allocations, over if over is not None and over.complete else baseline
    if log is None or drawn.allocations is None or len(line) != log.n_ticks + 1:
        return None
    if not has_times(baseline, over):
        axis = "tick"
    x = positions(baseline, log, drawn, axis=axis)
    unit, _ = _byte_axis(baseline, drawn)
    ticks = minmax(line, 1000)  # one a pixel: the line travels with each answer to a click
    places, heights = np.round([x[ticks], line[ticks] / unit], 3).tolist()
    peak = max(heights)
    return PredictedLine(places, heights, (places[heights.index(peak)], peak), f"≈ {mib(line.max())} predicted")
