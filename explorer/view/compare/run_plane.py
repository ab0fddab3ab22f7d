"""Every run of a model on the plane of peak and step time: the runs worth taking, and the cost of less memory.

Only runs under the same conditions are compared: each kind of conditions has its symbol and its front. A run that needs
no more memory and no more time beats another run. Times within their spread count as equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from explorer.view.drawing.colours import DASHES, RECOMPUTE, RUN_COLOURS
from explorer.view.drawing.figure import Chart, bold, empty, figure
from explorer.view.drawing.units import byte_axis, count, mib

HEIGHT = 400
TOO_FEW = "Two runs of one model, each with a peak and a time, make a chart here."
SIGNS = (
    "Filled: beaten by no run under the same conditions. Open: beaten. Cross: the gradients are not those of the "
    "baseline. Grey: everything kept. A click selects the run."
)
SYMBOLS = ("circle", "square", "triangle-up", "star", "hexagon", "pentagon", "triangle-down", "triangle-left")
UNSAFE = ("different", "state moved", "not comparable")
"""Verdicts of runs that are drawn as a cross and are on no front, as the training step differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoint:
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
    question, answer = "How much time did less memory cost, over all runs?", _answer(points, ahead)
    fig = empty(question, TOO_FEW)
    if len(points) > 1:
        fig = figure(question, f"{model}: {answer}", height=HEIGHT)
        unit, unit_name = byte_axis(max(point.peak_bytes for point in points))
        for n, kind in enumerate(dict.fromkeys(point.conditions for point in points)):
            of_kind = [place for place, point in enumerate(points) if point.conditions == kind]
            fig.add_trace(_marks(points, of_kind, ahead, (SYMBOLS[n % len(SYMBOLS)], unit)))
            front = sorted((points[place] for place in of_kind if place in ahead), key=lambda point: point.peak_bytes)
            if len(front) > 1:
                fig.add_scatter(
                    x=[point.peak_bytes / unit for point in front], y=[point.step_ms for point in front],
                    mode="lines", hoverinfo="skip", showlegend=False,
                    line={"width": 1.5, "color": RECOMPUTE, "shape": "hv", "dash": DASHES[n % len(DASHES)]},
                )  # fmt: skip
        fig.update_layout(
            xaxis={"title": {"text": f"step peak ({unit_name})"}, "rangemode": "tozero"},
            yaxis={"title": {"text": "step time (ms)"}, "rangemode": "tozero"},
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
    of_kind = [points[place] for place in places]
    colours = [RUN_COLOURS["baseline" if point.keeps_all else "candidate"] for point in of_kind]
    spreads = [point.spread_ms or 0.0 for point in of_kind]
    symbols = [_symbol(points[place], symbol, ahead=place in ahead) for place in places]
    return go.Scatter(
        x=[point.peak_bytes / unit for point in of_kind],
        y=[point.step_ms for point in of_kind],
        name=of_kind[0].conditions,
        mode="markers",
        customdata=[[place, *_hover(points[place], ahead=place in ahead)] for place in places],
        hovertemplate=bold("%{customdata[1]}") + "\n%{customdata[2]}\n%{customdata[3]}\n%{customdata[4]}",
        marker={"symbol": symbols, "size": 11, "color": colours, "line": {"width": 2, "color": colours}},
        error_y={
            "type": "data", "array": spreads, "thickness": 1.5, "visible": any(spreads),
            "color": RUN_COLOURS["candidate"],
        },
        unselected={"marker": {"opacity": 1}},
    )  # fmt: skip


def _symbol(point: RunPoint, symbol: str, *, ahead: bool) -> str:
    """Filled: on the front; open: beaten; a cross: not the same training step."""
    if point.verdict in UNSAFE:
        return "x-thin"
    return symbol if ahead else f"{symbol}-open"


def _hover(point: RunPoint, *, ahead: bool) -> tuple[str, str, str, str]:
    spread = f" ± {point.spread_ms:,.1f}" if point.spread_ms is not None else ""
    stands = "on the front" if ahead else point.verdict if point.verdict in UNSAFE else "beaten by another run"
    return (
        point.name,
        f"{mib(point.peak_bytes)}, {point.step_ms:,.1f}{spread} ms, measured",
        f"{point.policy}; {point.conditions}",
        stands,
    )


def _answer(points: Sequence[RunPoint], ahead: Sequence[int]) -> str:
    if len(points) < 2:
        return TOO_FEW.rstrip(".")
    kinds = len({point.conditions for point in points})
    least = min((points[place] for place in ahead or range(len(points))), key=lambda point: point.peak_bytes)
    among = f", under {kinds} kinds of conditions" if kinds > 1 else ""
    return (
        f"{len(ahead)} of {count(len(points), 'run')} beaten by none{among}; "
        f"least memory {mib(least.peak_bytes)} in {least.step_ms:,.1f} ms, measured"
    )
