"""An experiment's outcome as a picture and as a table: bars lie down, because their names are words."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import plotly.graph_objects as go

from explorer.lab.record import LabChart, LabFigure, LabOutcome, LabSeries, LessonPicture, RowOutcome
from explorer.record.base import from_json
from explorer.view.drawing.colours import DASHES, PHASE_COLOURS, RECOMPUTE, RUN_COLOURS, stage_colour, stage_pattern
from explorer.view.drawing.figure import Chart, bars, bold, empty, figure, hatch
from explorer.view.drawing.units import NOT_MEASURED, byte_axis, count, flop_axis, flops, mib, percent

SIGNS: dict[RowOutcome, str] = {
    "baseline": "baseline",
    "bitwise equal": "✓ bitwise equal",
    "rounding": "≈ rounding",
    "different": "✗ different",
    "missing": "✗ gradients missing",
    "raised": "! raised",
    "crashed": "! crashed",
    "shown": "",
}
NO_RESULT = "no result"
TEXTS: dict[str, Callable[[float], str]] = {
    "bytes": mib, "FLOPs": lambda n: flops(int(n)), "share": percent, "%": lambda n: percent(n / 100),
}  # fmt: skip
"""How a value reads, by its unit; of any other unit the number stands as it is."""
_COLOURS = {"baseline": RUN_COLOURS["baseline"], "candidate": RUN_COLOURS["candidate"], "recompute": RECOMPUTE} | {
    "forward": PHASE_COLOURS["forward"],
    "backward": PHASE_COLOURS["backward"],
}


def lab_chart(outcome: LabOutcome) -> Chart:
    """The experiment's one picture."""
    chart = outcome.chart
    values = [y for series in chart.series for y in series.y]
    missing = values.count(None)
    if any(values):
        fig = _lines(chart) if chart.kind == "lines" else _bars(chart)
    elif missing == len(values):
        fig = empty(chart.title, "No run gave a result; the table says why.")
    else:
        without = f" but for {count(missing, 'run')} without a result" if missing else ""
        fig = empty(chart.title, f"{chart.y_title}: 0 everywhere{without}. The table says more.")
    return Chart(
        name=f"lab {outcome.experiment}",
        figure=fig,
        alt=f"{chart.title} {' '.join(outcome.findings)}",
        rows=lambda: lab_table(outcome),
    )


PICTURES = Path(__file__).parent / "pictures.json"
"""A `LessonPicture` of each lesson, by name: `python -m tests.golden.make lessons` records them."""
WIDTH, HEIGHT = 240, 96
MOST_BARS = 8


@cache
def recorded_pictures() -> dict[str, LessonPicture]:
    """Chart and answer of one run of each lesson with its usual switches."""
    return from_json(PICTURES.read_bytes(), dict[str, LessonPicture])


def sketch(chart: LabChart) -> str:
    """The shape of the chart as a small SVG without words."""
    largest = max((abs(y) for series in chart.series for y in series.y if y is not None), default=0.0) or 1.0
    marks = _sketched_lines(chart, largest) if chart.kind == "lines" else _sketched_bars(chart, largest)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(marks)}</svg>'


def _sketched_lines(chart: LabChart, largest: float) -> list[str]:
    step = WIDTH / max(len(chart.x) - 1, 1)
    lines = []
    for index, series in enumerate(chart.series):
        ends = " ".join(
            f"{i * step:.1f},{HEIGHT - 4 - (HEIGHT - 8) * y / largest:.1f}"
            for i, y in enumerate(series.y)
            if y is not None
        )
        lines.append(f'<polyline points="{ends}" fill="none" stroke="{_colour(series, index)}" stroke-width="2"/>')
    return lines


def _sketched_bars(chart: LabChart, largest: float) -> list[str]:
    stacked = chart.kind == "stacked bars"
    rows = min(len(chart.x), MOST_BARS)
    sums = [sum(series.y[row] or 0.0 for series in chart.series) for row in range(rows)]
    scale = WIDTH / ((max(sums, default=0.0) or 1.0) if stacked else largest)
    per_row = 1 if stacked else len(chart.series)
    thick = HEIGHT / max(rows * per_row, 1)
    bars, ends = [], [0.0] * rows
    for index, series in enumerate(chart.series):
        for row in range(rows):
            if (value := series.y[row]) is None:
                continue
            length = max(abs(value) * scale, 2.0)  # a run that came out equal is seen
            top = (row * per_row + (0 if stacked else index)) * thick
            bars.append(
                f'<rect x="{ends[row]:.1f}" y="{top + thick * 0.12:.1f}" width="{length:.1f}" '
                f'height="{thick * 0.76:.1f}" fill="{_colour(series, index)}"/>'
            )
            ends[row] += length * stacked
    return bars


def lab_table(outcome: LabOutcome) -> list[dict[str, str]]:
    """A row per run, tensor or block; values have their units, and missing values are empty."""
    names = list(lab_origins(outcome))
    has_notes = any(row.note for row in outcome.rows)
    rows = []
    for row in outcome.rows:
        values = {figure.name: figure_text(figure) for figure in row.figures}
        cells = {"run": row.label, "outcome": SIGNS[row.outcome], **{name: values.get(name, "") for name in names}}
        rows.append(cells | ({"in its own words": row.note} if has_notes else {}))
    return rows


def lab_origins(outcome: LabOutcome) -> dict[str, str]:
    """Origin of each column of the table: `counted`, `measured`."""
    return {figure.name: figure.origin for row in outcome.rows for figure in row.figures}


def figure_text(figure: LabFigure) -> str:
    """`50.0 %`, `2.3 MiB`, `12 of 12`, `0.314`."""
    value = figure.value
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return TEXTS[figure.unit](value) if figure.unit in TEXTS else f"{number_text(value)} {figure.unit}".strip()


def number_text(value: float) -> str:
    """Three digits for fractions, all of them for counts; only an exact zero reads 0."""
    return f"{int(value):,}" if value == int(value) else f"{value:.3g}"


def _bars(chart: LabChart) -> go.Figure:
    unit, unit_name = _axis(chart)
    n_bars = len(chart.x) * (1 if chart.kind == "stacked bars" else len(chart.series))
    fig = figure(chart.title, height=170 + 22 * max(n_bars, 4))
    for index, series in enumerate(chart.series):
        texts = [NO_RESULT if y is None else _value_text(chart, y) for y in series.y]
        fig.add_bar(
            y=list(chart.x),
            x=[(y or 0.0) / unit for y in series.y],
            name=series.name,
            orientation="h",
            text=texts if chart.kind == "bars" else None,
            textposition="outside",
            cliponaxis=False,
            customdata=texts,
            marker={"color": _colour(series, index), "pattern": hatch(_pattern(series, index))},
            hovertemplate=bold("%{y}") + f"\n{series.name}: %{{customdata}}",
        )
    bars(fig, _y_title(chart, unit_name), mode="stack" if chart.kind == "stacked bars" else "group")
    if chart.unit == "%":
        fig.update_xaxes(tickvals=[0, 25, 50, 75, 100])
    if chart.kind == "bars":
        # Room for the text behind the longest bar.
        largest = max((y / unit for series in chart.series for y in series.y if y is not None), default=0.0)
        fig.update_xaxes(range=[0, 1.25 * largest or 1.0])
    fig.update_layout(showlegend=len(chart.series) > 1)
    return fig


def _lines(chart: LabChart) -> go.Figure:
    unit, unit_name = _axis(chart)
    fig = figure(chart.title, height=400)
    for index, series in enumerate(chart.series):
        fig.add_scatter(
            x=list(chart.x),
            y=[None if y is None else y / unit for y in series.y],
            name=series.name,
            mode="lines+markers",
            customdata=[NOT_MEASURED if y is None else _value_text(chart, y) for y in series.y],
            line={"color": _colour(series, index), "dash": DASHES[index % len(DASHES)]},
            hovertemplate=bold(f"{chart.x_title} %{{x}}") + f"\n{series.name}: %{{customdata}}",
        )
    fig.update_xaxes(title_text=chart.x_title, type="category")
    fig.update_yaxes(title_text=_y_title(chart, unit_name), rangemode="tozero")
    fig.update_layout(showlegend=len(chart.series) > 1)
    return fig


def _y_title(chart: LabChart, unit_name: str) -> str:
    return f"{chart.y_title}, {unit_name}" if unit_name else chart.y_title


def _axis(chart: LabChart) -> tuple[float, str]:
    largest = max((y for series in chart.series for y in series.y if y is not None), default=0.0)
    if chart.unit == "bytes":
        return byte_axis(largest)
    return flop_axis(largest) if chart.unit == "FLOPs" else (1.0, chart.unit)


def _value_text(chart: LabChart, y: float) -> str:
    return TEXTS.get(chart.unit, number_text)(y)


def _colour(series: LabSeries, index: int) -> str:
    """Colour of the series' part, the same on every page; other series use the ten colours of the stages."""
    return _COLOURS.get(series.part, stage_colour(index))


def _pattern(series: LabSeries, index: int) -> str:
    if series.part == "other":
        return stage_pattern(index)
    return "/" if series.part == "recompute" else ""
