"""Charts of peak against time: policies of one step, predicted or measured, and all runs of a model.

Only runs under the same conditions are compared: each kind of conditions has its symbol and its front. A run that needs
no more memory and no more time beats another run. Times within their spread count as equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from zlib import crc32

import plotly.graph_objects as go

from explorer.record.base import Record, to_json
from explorer.record.policy import Policy
from explorer.view.drawing.colours import CURSOR, DASHES, RECOMPUTE, RUN_COLOURS
from explorer.view.drawing.figure import Chart, bold, empty, figure
from explorer.view.drawing.units import byte_axis, count, from_to, mib, time_ratio
from explorer.view.text.plan import in_words

HEIGHT, RUNS_HEIGHT = 380, 400
Kind = Literal["plan", "preset", "run", "drawn"]
CostWord = Literal["time", "FLOPs"]
LOOKS: dict[Kind, tuple[str, str, str, int]] = {
    "plan": ("cheapest plans, predicted", "circle-open", RECOMPUTE, 10),
    "preset": ("presets, predicted", "square-open", RUN_COLOURS["baseline"], 10),
    "run": ("runs, measured", "diamond", RUN_COLOURS["candidate"], 11),
    "drawn": ("this policy", "cross-thin", RUN_COLOURS["candidate"], 22),
}
"""Name, symbol, colour and size of each kind of mark."""
AXIS: dict[CostWord, str] = {"time": "step time", "FLOPs": "FLOPs"}


class Mark(Record):
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

    @property
    def id(self) -> str:
        """Name of the policy in a click, which may come from an earlier chart: plans arrive while a person looks."""
        return f"{crc32(to_json(self.policy)):08x}"

    @property
    def called(self) -> str:
        return self.name or LOOKS[self.kind][0]

    @property
    def origin(self) -> str:
        return "measured" if self.measured else "predicted"


def front_chart(marks: Sequence[Mark], *, budget_bytes: int | None = None) -> Chart:
    """Every mark's customdata starts with its id."""
    answer, word = _answer(marks, budget_bytes), _word(marks)
    what = {"time": "time", "FLOPs": "compute"}[word]
    question = f"How much {what} does less memory cost?"
    fig = empty(question, "No plan was found yet.")
    if marks:
        fig = figure(question, answer, height=HEIGHT)
        most = max(mark.peak_bytes for mark in marks)
        unit, unit_name = byte_axis(most)
        for kind in LOOKS:
            if of_kind := [mark for mark in marks if mark.kind == kind]:
                fig.add_trace(_trace(kind, of_kind, unit))
        if budget_bytes is not None and budget_bytes <= 1.2 * most:
            fig.add_vline(
                x=budget_bytes / unit, line={"dash": "dash", "width": 2, "color": CURSOR},
                annotation={"text": f"budget {mib(budget_bytes)}", "font": {"size": 12}, "yanchor": "bottom", "y": 1},
            )  # fmt: skip
        fig.update_layout(
            xaxis={"title_text": f"step peak ({unit_name})"},
            yaxis={"title_text": f"{AXIS[word]}, × everything kept"},
            legend={"traceorder": "normal"},
        )
    return Chart(
        name="peak against time",
        figure=fig,
        alt=f"Scatter chart of policies: step peak against {AXIS[word]}. {answer}.",
        rows=lambda: [
            {
                "what": mark.called,
                "policy": in_words(mark.policy),
                "step peak (bytes)": mark.peak_bytes,
                f"{AXIS[mark.counts]} (× everything kept)": round(mark.time_ratio, 4),
                "±": None if mark.spread is None else round(mark.spread, 4),
                "origin": mark.origin,
            }
            for mark in marks
        ],
    )


def _trace(kind: Kind, marks: Sequence[Mark], unit: int) -> go.Scatter:
    name, symbol, colour, size = LOOKS[kind]
    points: list[Point] = []
    for mark in marks:
        spread = mark.measured and mark.spread
        points.append((mark.peak_bytes / unit, mark.time_ratio, spread or 0.0, [mark.id, *_hover(mark)]))
    ring = {"width": 3 if kind == "drawn" else 2, "color": colour}
    return _scatter(
        points,
        name=name,
        mode="lines+markers" if kind == "plan" else "markers",
        line={"width": 1.5, "color": colour, "shape": "hv"},
        marker={"symbol": symbol, "size": size, "color": colour, "line": ring},
    )


Point = tuple[float, float, float, list[object]]
"""x, y, spread, and custom data: the name for clicks, then lines of hover."""


def _scatter(points: Sequence[Point], **look: object) -> go.Scatter:
    """Points with error bars."""
    x, y, spreads, custom = zip(*points)
    lines = "\n".join(f"%{{customdata[{i}]}}" for i in range(2, len(custom[0])))
    return go.Scatter(
        x=x, y=y, customdata=custom, hovertemplate=bold("%{customdata[1]}") + f"\n{lines}",
        error_y={"type": "data", "array": spreads, "thickness": 1.5, "visible": any(spreads),
                 "color": RUN_COLOURS["candidate"]},
        unselected={"marker": {"opacity": 1}}, **look,
    )  # fmt: skip


def _word(marks: Sequence[Mark]) -> CostWord:
    return "FLOPs" if any(mark.counts == "FLOPs" for mark in marks) else "time"


def _hover(mark: Mark) -> tuple[str, str, str]:
    figures = f"{mib(mark.peak_bytes)}, {time_ratio(mark.time_ratio, mark.spread)} {mark.counts}, {mark.origin}"
    return mark.called, figures, in_words(mark.policy)


def _answer(marks: Sequence[Mark], budget_bytes: int | None) -> str:
    plans = [mark for mark in marks if mark.kind == "plan"]
    if not plans:
        return f"{count(len(marks), 'policy', 'policies')} predicted or measured, no plan yet"
    least, word = min(plans, key=lambda mark: mark.peak_bytes), _word(marks)
    if budget_bytes is not None and (fits := [mark for mark in plans if mark.peak_bytes <= budget_bytes]):
        best = min(fits, key=lambda mark: mark.time_ratio)
        return f"within {mib(budget_bytes)}: {mib(best.peak_bytes)} for ×{best.time_ratio:.2f} {word}, predicted"
    most = max(plans, key=lambda mark: mark.peak_bytes)
    down = from_to(most.peak_bytes, least.peak_bytes, " down to ")
    return f"from {down} for ×{least.time_ratio:.2f} {word}, predicted"


TOO_FEW = "Two runs of one model, each with a peak and a time, make a chart here."
SIGNS = (
    "Filled: beaten by no run under the same conditions. Open: beaten. Cross: the gradients are not those of the "
    "baseline. Grey: everything kept. A click selects the run."
)
SYMBOLS = ("circle", "square", "triangle-up", "star", "hexagon", "pentagon", "triangle-down", "triangle-left")
UNSAFE = ("different", "state moved", "not comparable")
"""Verdicts of runs that are drawn as a cross and are on no front, as the training step differs."""


class RunPoint(Record):
    """A measured step."""

    name: str
    policy: str
    """Policy in words."""
    conditions: str
    """Conditions in words; runs with equal conditions are comparable."""
    peak_bytes: int
    step_ms: float
    spread_ms: float | None
    verdict: str = ""
    """Verdict of the run's comparison; empty if the run was not compared."""
    keeps_all: bool = False


def run_plane(points: Sequence[RunPoint], model: str) -> Chart:
    """Every mark's customdata is its place in `points`."""
    ahead = [place for place in range(len(points)) if is_ahead(points, place)]
    question, answer = "How much time did less memory cost, over all runs?", _answer_of_runs(points, ahead)
    fig = empty(question, TOO_FEW)
    if len(points) > 1:
        fig = figure(question, f"{model}: {answer}", height=RUNS_HEIGHT)
        unit, unit_name = byte_axis(max(point.peak_bytes for point in points))
        for n, kind in enumerate(dict.fromkeys(point.conditions for point in points)):
            of_kind = [place for place, point in enumerate(points) if point.conditions == kind]
            fig.add_trace(_marks(points, of_kind, ahead, (SYMBOLS[n % len(SYMBOLS)], unit)))
            front = [points[place] for place in of_kind if place in ahead]
            front.sort(key=lambda point: point.peak_bytes)
            if len(front) > 1:
                fig.add_scatter(
                    x=[point.peak_bytes / unit for point in front], y=[point.step_ms for point in front],
                    mode="lines", hoverinfo="skip", showlegend=False,
                    line={"width": 1.5, "color": RECOMPUTE, "shape": "hv", "dash": DASHES[n % len(DASHES)]},
                )  # fmt: skip
        fig.update_layout(
            xaxis={"title_text": f"step peak ({unit_name})", "rangemode": "tozero"},
            yaxis={"title_text": "step time (ms)", "rangemode": "tozero"},
            showlegend=True,
            legend={"traceorder": "normal"},
        )
    return Chart(
        name="runs by peak and time",
        figure=fig,
        alt=f"Scatter chart of the runs of {model}: step peak against step time. {answer}.",
        rows=lambda: [
            {
                "run": point.name,
                "policy": point.policy,
                "conditions": point.conditions,
                "step peak (bytes)": point.peak_bytes,
                "step time (ms)": round(point.step_ms, 3),
                "±": None if point.spread_ms is None else round(point.spread_ms, 3),
                "gradients": point.verdict or "not compared",
                "on the front": "yes" if place in ahead else "no",
            }
            for place, point in enumerate(points)
        ],
    )


def is_ahead(points: Sequence[RunPoint], place: int) -> bool:
    """Whether no run under the same conditions beats the run at `place`."""
    run = points[place]
    others = (point for point in points if point.conditions == run.conditions and point is not run)
    return run.verdict not in UNSAFE and not any(_beats(other, run) for other in others)


def _beats(other: RunPoint, run: RunPoint) -> bool:
    if other.verdict in UNSAFE or other.peak_bytes > run.peak_bytes:
        return False
    spread = max(other.spread_ms or 0.0, run.spread_ms or 0.0)
    if other.peak_bytes == run.peak_bytes:
        return other.step_ms < run.step_ms - spread
    return other.step_ms <= run.step_ms + spread


def _marks(points: Sequence[RunPoint], places: list[int], ahead: Sequence[int], drawn: tuple[str, int]) -> go.Scatter:
    symbol, unit = drawn
    marks: list[Point] = []
    colours, symbols = [], []
    for place in places:
        point, is_front = points[place], place in ahead
        custom = [place, *_hover_of_run(point, ahead=is_front)]
        marks.append((point.peak_bytes / unit, point.step_ms, point.spread_ms or 0.0, custom))
        colours.append(RUN_COLOURS["baseline" if point.keeps_all else "candidate"])
        symbols.append(_symbol(point, symbol, ahead=is_front))
    return _scatter(
        marks,
        name=points[places[0]].conditions,
        mode="markers",
        marker={"symbol": symbols, "size": 11, "color": colours, "line": {"width": 2, "color": colours}},
    )


def _symbol(point: RunPoint, symbol: str, *, ahead: bool) -> str:
    """Filled: on the front; open: beaten; a cross: not the same training step."""
    if point.verdict in UNSAFE:
        return "x-thin"
    return symbol if ahead else f"{symbol}-open"


def _hover_of_run(point: RunPoint, *, ahead: bool) -> tuple[str, str, str, str]:
    spread = ""
    if point.spread_ms is not None:
        spread = f" ± {point.spread_ms:,.1f}"
    stands = point.verdict if point.verdict in UNSAFE else "beaten by another run"
    if ahead:
        stands = "on the front"
    return (
        point.name,
        f"{mib(point.peak_bytes)}, {point.step_ms:,.1f}{spread} ms, measured",
        f"{point.policy}; {point.conditions}",
        stands,
    )


def _answer_of_runs(points: Sequence[RunPoint], ahead: Sequence[int]) -> str:
    if len(points) < 2:
        return TOO_FEW.rstrip(".")
    kinds = len({point.conditions for point in points})
    least = min((points[place] for place in ahead or range(len(points))), key=lambda point: point.peak_bytes)
    among = f", under {kinds} kinds of conditions" if kinds > 1 else ""
    return (
        f"{len(ahead)} of {count(len(points), 'run')} beaten by none{among}; "
        f"least memory {mib(least.peak_bytes)} in {least.step_ms:,.1f} ms, measured"
    )
