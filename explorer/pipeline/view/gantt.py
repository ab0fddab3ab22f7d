"""A schedule as a picture: a row per rank, a bar per action; the gaps are the bubble.

rank 0  ▓▓0▓▓▓▓1▓▓      ░░0░░      thick: the schedule of the title (measured, else predicted)
        ──────────      ─────      line below: the critical path, from bar to bar
        ▁▁▁▁▁▁▁▁▁▁      ▁▁▁▁▁      thin: the prediction
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from explorer.pipeline.plan.clock import transfers
from explorer.pipeline.record.step import ActionTime, PlayedSchedule, Stage
from explorer.view.drawing.colours import ON_COLOUR, PHASE_COLOURS, RUN_COLOURS, STAGE_COLOURS
from explorer.view.drawing.figure import Chart, empty, figure, hatch
from explorer.view.drawing.units import mib, percent, percent_whole

KINDS = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
PARTS = ("F", "R", "B", "I", "W")
"""`R` is the recomputed part at the start of a backward action."""
COLOURS = {
    "F": PHASE_COLOURS["forward"],
    "R": PHASE_COLOURS["recompute"],
    "B": PHASE_COLOURS["backward"],
    "I": PHASE_COLOURS["backward"],
    "W": RUN_COLOURS["baseline"],
}
PATTERNS = {"F": "", "R": "/", "B": "", "I": "|", "W": "-"}
TRANSFER = "#9A7B5B"
CRITICAL = RUN_COLOURS["candidate"]
FAINT = "rgba(255, 255, 255, 0.28)"
"""Pattern of the bars that carry a number."""
EDGE = "rgba(255, 255, 255, 0.6)"
NARROWEST_LABEL = 0.022
"""Share of the step from which a bar carries its microbatch's number."""


@dataclass(frozen=True, slots=True)
class _Band:
    """Position of the bars in a rank's row."""

    offset: float
    width: float
    words: str = ""


_MAIN = _Band(-0.08, 0.58)
_THIN = _Band(0.4, 0.13, "predicted ")


def gantt(forecast: PlayedSchedule, predicted: PlayedSchedule | None = None) -> Chart:
    """Chart of the actions of every rank in time, and of the waits; `predicted` is a thin row below each rank."""
    question, n_ranks = "Who works when, and who waits?", len(forecast.ranks)
    fig = empty(question, "No action was played.")
    if forecast.actions:
        summary = f"step {forecast.makespan_ms:.1f} ms, idle {percent(forecast.bubble_fraction)} ({forecast.origin})"
        fig = figure(question, summary, height=200 + min(64, max(30, 420 // n_ranks)) * n_ranks)
        drawn = [(forecast, _MAIN)] if predicted is None else [(forecast, _MAIN), (predicted, _THIN)]
        for played, band in drawn:
            for part in PARTS:
                _bars(fig, played, part, band)
        _waits(fig, forecast)
        _critical(fig, forecast)
        fig.update_layout(barmode="overlay", bargap=0)
        fig.update_xaxes(title_text="time since the start of the step (ms)", rangemode="tozero")
        fig.update_yaxes(
            range=[n_ranks - 0.45, -0.55],
            tickvals=list(range(n_ranks)),
            ticktext=[f"rank {use.rank}\nidle {percent_whole(use.bubble_fraction)}" for use in forecast.ranks],
            showgrid=False,
        )
    waits = ", ".join(f"rank {use.rank} idle {percent(use.bubble_fraction)}" for use in forecast.ranks)
    summary = f"{len(forecast.actions)} actions over {forecast.makespan_ms:.1f} ms ({forecast.origin})"
    return Chart(
        name="actions of the schedule",
        figure=fig,
        alt=f"One row a rank, one bar an action. {summary}; {waits}.",
        rows=lambda: [
            {
                "rank": action.rank,
                "action": action.name,
                "stage": action.stage,
                "what": KINDS[action.kind],
                "microbatch": action.microbatch,
                "start (ms)": round(action.start_ms, 3),
                "end (ms)": round(action.end_ms, 3),
                "recompute (ms)": round(action.recompute_ms, 3),
                "on critical path": action.name in forecast.critical_path,
            }
            for action in sorted(forecast.actions, key=lambda action: (action.start_ms, action.rank))
        ],
    )


def _spans(actions: Sequence[ActionTime], part: str) -> list[tuple[ActionTime, float, float]]:
    """Action, start and length of the bars of one part."""
    if part == "R":
        return [(a, a.start_ms, a.recompute_ms) for a in actions if a.recompute_ms]
    return [(a, a.start_ms + a.recompute_ms, a.duration_ms - a.recompute_ms) for a in actions if a.kind == part]


def _bars(fig: go.Figure, forecast: PlayedSchedule, part: str, band: _Band) -> None:
    spans = _spans(forecast.actions, part)
    if not spans:
        return
    name = "recompute" if part == "R" else KINDS[part]
    # A rank may hold several stages: its bars then say which.
    several = len({action.stage for action in forecast.actions}) > len({action.rank for action in forecast.actions})
    wide = NARROWEST_LABEL * forecast.makespan_ms * (2 if several else 1)
    labelled = band is _MAIN and part != "R"
    edges = [STAGE_COLOURS[a.stage % len(STAGE_COLOURS)] if several else EDGE for a, _, _ in spans]
    fig.add_bar(
        orientation="h",
        name=name,
        legendgroup=part,
        showlegend=band is _MAIN,
        x=[length for _, _, length in spans],
        base=[start for _, start, _ in spans],
        y=[a.rank + band.offset for a, _, _ in spans],
        width=band.width,
        text=[
            f"{a.stage}:{a.microbatch}" * several or str(a.microbatch) if labelled and length >= wide else ""
            for a, _, length in spans
        ],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="none",
        insidetextfont={"color": ON_COLOUR},
        marker={
            "color": COLOURS[part],
            "pattern": hatch(PATTERNS[part]) if part == "R" else {**hatch(PATTERNS[part]), "fgcolor": FAINT},
            "line": {"width": 2.0 if several and band is _MAIN else 0.5, "color": edges},
        },
        customdata=[[a.name, a.stage, a.microbatch, a.start_ms, a.end_ms] for a, _, _ in spans],
        hovertemplate=(
            f"{band.words}{name} (%{{customdata[0]}})\nstage %{{customdata[1]}}, microbatch %{{customdata[2]}}"
            "\n%{customdata[3]:.2f} to %{customdata[4]:.2f} ms"
        ),
    )


def _waits(fig: go.Figure, forecast: PlayedSchedule) -> None:
    """Adds bars for the times when a rank is free, its neighbour is done, and only the transfer is pending."""
    waits = transfers(forecast)
    if not waits:
        return
    fig.add_bar(
        orientation="h",
        name="waits for a transfer",
        x=[wait.wait_ms for wait in waits],
        base=[wait.start_ms for wait in waits],
        y=[wait.rank + _MAIN.offset for wait in waits],
        width=_MAIN.width / 3,
        marker={"color": TRANSFER, "pattern": hatch("x")},
        customdata=[[wait.source, wait.target, wait.wait_ms] for wait in waits],
        hovertemplate="waits for what stage %{customdata[0]} sends to stage %{customdata[1]}: %{customdata[2]:.2f} ms",
    )


def _critical(fig: go.Figure, forecast: PlayedSchedule) -> None:
    """The chain of actions that wait for nothing but each other, as one line along their lower edges."""
    by_name = {action.name: action for action in forecast.actions}
    path = [by_name[name] for name in forecast.critical_path if name in by_name]
    low = _MAIN.offset + _MAIN.width / 2 + 0.05
    fig.add_scatter(
        mode="lines",
        name="critical path",
        x=[at for action in path for at in (action.start_ms, action.end_ms)],
        y=[action.rank + low for action in path for _ in range(2)],
        line={"color": CRITICAL, "width": 3},
        hoverinfo="skip",
    )


def link_table(forecast: PlayedSchedule, stages: Sequence[Stage]) -> list[dict[str, object]]:
    """Table rows, one per pair of stages with waits between them, the longest first; empty if transfers take no
    time."""
    receives = {stage.stage: stage.receive_bytes for stage in stages}
    waits: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for wait in transfers(forecast):
        waits[wait.source, wait.target].append(wait.wait_ms)
    return [
        {
            "from stage": source,
            "to stage": target,
            "a microbatch": mib(receives.get(max(source, target))),
            "waits": len(ms),
            "waited (ms)": round(sum(ms), 2),
            "longest (ms)": round(max(ms), 2),
            "origin": forecast.origin,
        }
        for (source, target), ms in sorted(waits.items(), key=lambda pair: -sum(pair[1]))
    ]


def rank_table(forecast: PlayedSchedule, predicted: PlayedSchedule | None = None) -> list[dict[str, object]]:
    """Table rows, one per rank: busy time, idle share, microbatches in flight."""
    predicted_use = {use.rank: use for use in predicted.ranks} if predicted is not None else {}
    rows: list[dict[str, object]] = []
    for use in forecast.ranks:
        row: dict[str, object] = {"rank": use.rank, "busy (ms)": round(use.busy_ms, 2)}
        row["idle"] = percent(use.bubble_fraction)
        if use.rank in predicted_use:
            row["idle, predicted"] = percent(predicted_use[use.rank].bubble_fraction)
        rows.append(row | {"microbatches in flight": use.n_in_flight, "origin": forecast.origin})
    return rows
