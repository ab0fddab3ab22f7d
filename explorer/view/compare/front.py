"""Chart of peak against time, one mark per policy. Predicted and measured policies have different marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

from explorer.record.base import Record
from explorer.record.policy import Policy
from explorer.view.drawing.colours import CURSOR, RECOMPUTE, RUN_COLOURS
from explorer.view.drawing.figure import Chart, bold, empty, figure
from explorer.view.drawing.units import byte_axis, count, mib, time_ratio
from explorer.view.text.plan import in_words

HEIGHT = 380
PLOT = 460, 150
"""Pixels of the plot on a narrow page."""
Kind = Literal["plan", "preset", "run", "drawn"]
CostWord = Literal["time", "FLOPs"]
NAMES: dict[Kind, str] = {
    "plan": "cheapest plans, predicted",
    "preset": "presets, predicted",
    "run": "runs, measured",
    "drawn": "the policy that is drawn",
}
SYMBOLS: dict[Kind, str] = {"plan": "circle-open", "preset": "square-open", "run": "diamond", "drawn": "cross-thin"}
COLOURS: dict[Kind, str] = {
    "plan": RECOMPUTE,
    "preset": RUN_COLOURS["baseline"],
    "run": RUN_COLOURS["candidate"],
    "drawn": RUN_COLOURS["candidate"],
}
AXIS: dict[CostWord, str] = {"time": "step time", "FLOPs": "FLOPs of the step (it was not timed)"}
SIZES: dict[Kind, int] = {"plan": 10, "preset": 10, "run": 11, "drawn": 22}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A policy on the plane of peak and time."""

    kind: Kind
    policy: Policy
    peak_bytes: int
    time_ratio: float
    """Step time over the time with everything kept; the FLOPs ratio if the step is not timed, see `counts`."""
    name: str = ""
    spread: float | None = None
    """Half the distance between the quartiles of a measured time; half the interval of a predicted one."""
    measured: bool = False
    counts: CostWord = "time"


def front_chart(marks: Sequence[Mark], *, budget_bytes: int | None = None) -> Chart:
    """Every mark's customdata is its place in `marks`."""
    question, answer, word = "How much time does less memory cost?", _answer(marks, budget_bytes), _word(marks)
    fig = empty(question, "No plan was found yet.")
    if marks:
        fig = figure(question.replace("time", "compute") if word == "FLOPs" else question, answer, height=HEIGHT)
        most = max(mark.peak_bytes for mark in marks)
        unit, unit_name = byte_axis(most)
        for kind in NAMES:
            if of_kind := [(place, mark) for place, mark in enumerate(marks) if mark.kind == kind]:
                fig.add_trace(_trace(kind, of_kind, unit))
        line = budget_bytes if budget_bytes is not None and budget_bytes <= 1.2 * most else None
        _name_presets(fig, marks, unit, line)
        if line is not None:
            fig.add_vline(
                x=line / unit, line={"dash": "dash", "width": 2, "color": CURSOR},
                annotation={"text": f"budget {mib(line)}", "font": {"size": 12}, "yanchor": "bottom", "y": 1},
            )  # fmt: skip
        fig.update_layout(
            xaxis={"title": {"text": f"step peak ({unit_name})"}},
            yaxis={"title": {"text": f"{AXIS[word].partition(' of')[0]}, × everything kept"}},  # the plot is low
            legend={"traceorder": "normal"},
        )
    return Chart(
        name="peak against time",
        figure=fig,
        alt=f"Scatter chart of policies: step peak against {AXIS[word]}. {answer}.",
        rows=lambda: [
            {
                "what": mark.name or NAMES[mark.kind],
                "policy": in_words(mark.policy),
                "step peak (bytes)": mark.peak_bytes,
                f"{'step time' if mark.counts == 'time' else 'FLOPs'} (× everything kept)": round(mark.time_ratio, 4),
                "±": None if mark.spread is None else round(mark.spread, 4),
                "origin": _origin(mark),
            }
            for mark in marks
        ],
    )


def _trace(kind: Kind, placed: Sequence[tuple[int, Mark]], unit: int) -> go.Scatter:
    marks = [mark for _, mark in placed]
    spreads = [(mark.spread if mark.measured else None) or 0.0 for mark in marks]
    return go.Scatter(
        x=[mark.peak_bytes / unit for mark in marks],
        y=[mark.time_ratio for mark in marks],
        name=NAMES[kind],
        mode="lines+markers" if kind == "plan" else "markers+text" if kind == "preset" else "markers",
        textfont={"size": 12},
        customdata=[[place, *_hover(mark)] for place, mark in placed],
        hovertemplate=bold("%{customdata[1]}") + "\n%{customdata[2]}\n%{customdata[3]}",
        line={"width": 1.5, "color": COLOURS[kind], "shape": "hv"},
        marker={
            "symbol": SYMBOLS[kind], "size": SIZES[kind], "color": COLOURS[kind],
            "line": {"width": 3 if kind == "drawn" else 2, "color": COLOURS[kind]},
        },
        error_y={"type": "data", "array": spreads, "thickness": 1.5, "visible": any(spreads)},
        unselected={"marker": {"opacity": 1}},
    )  # fmt: skip


def _name_presets(fig: go.Figure, marks: Sequence[Mark], unit: int, line: int | None) -> None:
    """Writes names beside their marks if there is room; the hover and the table have all names."""
    drawn = [((mark.peak_bytes / unit, mark.time_ratio), mark) for mark in marks]
    presets = [(place, mark.name) for place, mark in drawn if mark.kind == "preset"]
    foot = [] if line is None else [(line / unit, min(mark.time_ratio for mark in marks))]
    plane = Plane(marks=(*(place for place, _ in drawn), *foot), width=PLOT[0], height=PLOT[1])
    beside = names_beside(presets, plane)
    fig.layout.xaxis.range, fig.layout.yaxis.range = plane.ranges()
    fig.update_traces(
        text=[name if where else "" for (_, name), where in zip(presets, beside)],
        textposition=[where or PLACES[0] for where in beside],
        selector={"name": NAMES["preset"]},
    )


def _word(marks: Sequence[Mark]) -> CostWord:
    return "FLOPs" if any(mark.counts == "FLOPs" for mark in marks) else "time"


def _origin(mark: Mark) -> str:
    return "measured" if mark.measured else "predicted"


def _hover(mark: Mark) -> tuple[str, str, str]:
    figures = f"{mib(mark.peak_bytes)}, {time_ratio(mark.time_ratio, mark.spread)} {mark.counts}, {_origin(mark)}"
    return mark.name or NAMES[mark.kind], figures, in_words(mark.policy)


def _answer(marks: Sequence[Mark], budget_bytes: int | None) -> str:
    plans = [mark for mark in marks if mark.kind == "plan"]
    if not plans:
        return f"{count(len(marks), 'policy', 'policies')} predicted or measured, no plan yet"
    least, word = min(plans, key=lambda mark: mark.peak_bytes), _word(marks)
    if budget_bytes is not None and (fits := [mark for mark in plans if mark.peak_bytes <= budget_bytes]):
        best = min(fits, key=lambda mark: mark.time_ratio)
        return f"within {mib(budget_bytes)}: {mib(best.peak_bytes)} for ×{best.time_ratio:.2f} {word}, predicted"
    most = max(plans, key=lambda mark: mark.peak_bytes)
    return f"from {mib(most.peak_bytes)} down to {mib(least.peak_bytes)} for ×{least.time_ratio:.2f} {word}, predicted"


PLACES = (
    "top right", "bottom right", "top left", "bottom left", "top center", "bottom center", "middle right",
    "middle left",
)  # fmt: skip
"""Plotly's, the first that is free is taken."""
LETTER, LINE, MARK = 7, 16, 6
"""Pixels: width of a letter at 12 px, height of a line, half a mark."""
_PADDING = 0.12
"""Share of an axis beyond its outermost marks, on either side: room for their names."""

Rectangle = tuple[float, float, float, float]
"""left, right, bottom, top."""


class Plane(Record):
    """All marks of a chart, and its size in pixels; a wider page leaves more room."""

    marks: tuple[tuple[float, float], ...]
    width: int
    height: int

    def ranges(self) -> tuple[list[float], list[float]]:
        """The ranges of the two axes."""
        x_range, y_range = map(_range, zip(*self.marks))
        return x_range, y_range

    def pixels(self, mark: tuple[float, float]) -> tuple[float, float]:
        """Position of the mark in pixels, from the left and from below."""
        (left, right), (bottom, top) = self.ranges()
        return self.width * (mark[0] - left) / (right - left), self.height * (mark[1] - bottom) / (top - bottom)

    def is_free(self, box: Rectangle, others: Sequence[Rectangle]) -> bool:
        """Whether the rectangle lies inside and touches no other."""
        left, right, bottom, top = box
        inside = left >= 0 and right <= self.width and bottom >= 0 and top <= self.height
        return inside and all(right <= a or b <= left or top <= c or d <= bottom for a, b, c, d in others)


def names_beside(named: Sequence[tuple[tuple[float, float], str]], plane: Plane) -> list[str]:
    """A place of PLACES for each mark and its name, or the empty string if there is no room."""
    drawn = [_box(plane.pixels(mark)) for mark in plane.marks]
    places: list[str] = []
    for mark, name in named:
        around = _box(plane.pixels(mark))
        others = [box for box in drawn if box != around]
        boxes = {place: _box(plane.pixels(mark), name, place) for place in PLACES}
        place = next((place for place, box in boxes.items() if plane.is_free(box, others)), "")
        places.append(place)
        drawn += [boxes[place]] if place else []
    return places


def _range(values: Sequence[float]) -> list[float]:
    least, most = min(values), max(values)
    beyond = (most - least or abs(most)) * _PADDING / (1 - 2 * _PADDING) or 1.0
    return [least - beyond, most + beyond]


def _box(point: tuple[float, float], name: str = "", place: str = "") -> Rectangle:
    """The rectangle of a mark, or of its name at a place beside the mark."""
    x, y = point
    if not place:
        return x - MARK, x + MARK, y - MARK, y + MARK
    vertical, horizontal = place.split()
    width = LETTER * len(name)
    left = {"right": x + MARK, "left": x - MARK - width, "center": x - width / 2}[horizontal]
    bottom = {"top": y + MARK, "bottom": y - MARK - LINE, "middle": y - LINE / 2}[vertical]
    return left, left + width, bottom, bottom + LINE
