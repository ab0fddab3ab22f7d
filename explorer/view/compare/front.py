"""Chart of peak against time, one mark per policy. Predicted and measured policies have different marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import plotly.graph_objects as go

from explorer.record.base import to_json
from explorer.record.policy import Policy
from explorer.view.drawing.colours import CURSOR, RECOMPUTE, RUN_COLOURS
from explorer.view.drawing.figure import Chart, bold, empty, figure
from explorer.view.drawing.units import byte_axis, count, from_to, mib, time_ratio
from explorer.view.text.plan import in_words

HEIGHT = 380
Kind = Literal["plan", "preset", "run", "drawn"]
CostWord = Literal["time", "FLOPs"]
LOOKS: dict[Kind, tuple[str, str, str, int]] = {
    "plan": ("cheapest plans, predicted", "circle-open", RECOMPUTE, 10),
    "preset": ("presets, predicted", "square-open", RUN_COLOURS["baseline"], 10),
    "run": ("runs, measured", "diamond", RUN_COLOURS["candidate"], 11),
    "drawn": ("the policy that is drawn", "cross-thin", RUN_COLOURS["candidate"], 22),
}
"""Name, symbol, colour and size of each kind of mark."""
AXIS: dict[CostWord, str] = {"time": "step time", "FLOPs": "FLOPs"}


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
    question, answer, word = "How much time does less memory cost?", _answer(marks, budget_bytes), _word(marks)
    fig = empty(question, "No plan was found yet.")
    if marks:
        fig = figure(question.replace("time", "compute") if word == "FLOPs" else question, answer, height=HEIGHT)
        most = max(mark.peak_bytes for mark in marks)
        unit, unit_name = byte_axis(most)
        for kind in LOOKS:
            if of_kind := [mark for mark in marks if mark.kind == kind]:
                fig.add_trace(_trace(kind, of_kind, unit))
        line = budget_bytes if budget_bytes is not None and budget_bytes <= 1.2 * most else None
        if line is not None:
            fig.add_vline(
                x=line / unit, line={"dash": "dash", "width": 2, "color": CURSOR},
                annotation={"text": f"budget {mib(line)}", "font": {"size": 12}, "yanchor": "bottom", "y": 1},
            )  # fmt: skip
        fig.update_layout(
            xaxis={"title": {"text": f"step peak ({unit_name})"}},
            yaxis={"title": {"text": f"{AXIS[word]}, × everything kept"}},
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
    spreads = [(mark.spread if mark.measured else None) or 0.0 for mark in marks]
    name, symbol, colour, size = LOOKS[kind]
    return go.Scatter(
        x=[mark.peak_bytes / unit for mark in marks],
        y=[mark.time_ratio for mark in marks],
        name=name,
        mode="lines+markers" if kind == "plan" else "markers",
        customdata=[[mark.id, *_hover(mark)] for mark in marks],
        hovertemplate=bold("%{customdata[1]}") + "\n%{customdata[2]}\n%{customdata[3]}",
        line={"width": 1.5, "color": colour, "shape": "hv"},
        marker={
            "symbol": symbol, "size": size, "color": colour,
            "line": {"width": 3 if kind == "drawn" else 2, "color": colour},
        },
        error_y={"type": "data", "array": spreads, "thickness": 1.5, "visible": any(spreads)},
        unselected={"marker": {"opacity": 1}},
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
