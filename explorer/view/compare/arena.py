"""The arena as a picture: peak against time, one mark a bout, with the budgets as lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from explorer.plan.arena.table import OURS, rivals
from explorer.record.arena import Arena, Bout
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import GRID, VERDICT_COLOURS
from explorer.view.drawing.figure import empty, figure
from explorer.view.drawing.units import MIB, mib, percent, percent_whole

QUESTION = "Which planner saves most for least time?"

_SYMBOLS = (
    "circle-open", "square-open", "triangle-up-open", "triangle-down-open", "diamond-open", "pentagon-open",
    "hexagon-open", "cross-open", "x-open", "hourglass-open", "bowtie-open",
)  # fmt: skip
_OURS = "star"


def arena_chart(arena: Arena) -> Chart:
    """Measured peak against measured time; a planner whose gradients are wrong is crossed out."""
    return Chart(
        name="arena",
        figure=_picture(arena),
        alt=f"Scatter of measured peak against measured step time, one mark a planner and budget. {_answer(arena)}.",
        rows=lambda: [_row(bout) for bout in arena.bouts],
    )


def title_of(name: str) -> str:
    """The title of a rival; its name where this version knows none of that name."""
    return rivals()[name].title if name in rivals() else name


def outcome_in_words(bout: Bout) -> str:
    """Why it did not run, or what is to be said of how it did; the empty string where there is nothing to say."""
    if bout.failure is not None:
        return f"failed: {bout.failure.sentence}"
    if not bout.ran:
        return f"did not run: {bout.why}" if bout.why else ""
    clauses = [bout.why] if bout.why else []
    if bout.verdict not in (None, "bitwise equal", "rounding"):
        clauses.append(f"{bout.verdict}{f', {bout.worst}' if bout.worst else ''}.")
    if bout.fits is False:
        clauses.append(f"Over its budget of {mib(bout.budget_bytes)}.")
    return " ".join(clauses)


def beaten_sentence(arena: Arena) -> str:
    """Whether anybody within the same budget, with the same gradients, was faster, who kept a budget that ours missed,
    and where nobody can say yet."""
    ours = [bout for bout in arena.bouts if bout.rival == OURS]
    if not ours:
        return "This explorer's planner did not take part."
    beaten = arena.beaten(OURS)
    faster = _cases((mine, other) for mine, other in beaten if mine.fits)
    alone, undecided = _cases((mine, other) for mine, other in beaten if not mine.fits), _cases(arena.undecided(OURS))
    sentences = [
        f"Faster than this explorer's planner within the same budget: {faster}."
        if faster
        else "Nobody was faster beyond doubt than this explorer's planner within the same budget.",
        f"Within a budget that this explorer's planner missed: {alone}." if alone else "",
        f"Undecided, more repeats would tell: {undecided}." if undecided else "",
    ]
    return " ".join(filter(None, sentences))


def _cases(pairs: Iterable[tuple[Bout, Bout]]) -> str:
    return ", ".join(f"{title_of(other.rival)} at {percent_whole(mine.share or 0)}" for mine, other in pairs)


def at_budget(bout: Bout) -> str:
    """` at 50 %`; empty for one that has no budget."""
    return "" if bout.share is None else f" at {percent_whole(bout.share)}"


def time_in_words(ratio: float, spread: float | None) -> str:
    """`+21 % ± 2.1 %`: the time over everything kept."""
    return f"{percent(ratio - 1, signed=True)} ± {percent(spread or 0.0)}"


def is_wrong(bout: Bout) -> bool:
    return bout.verdict in ("different", "state moved")


def _picture(arena: Arena) -> go.Figure:
    shown = [bout for bout in arena.bouts if bout.ran and bout.time_ratio is not None]
    if not shown:
        return empty(QUESTION, "No planner ran beside the step with everything kept, so there is no time to draw.")
    fig = figure(QUESTION, _answer(arena), height=460)
    for budget in sorted({bout.budget_bytes for bout in arena.bouts if bout.budget_bytes is not None}):
        share = budget / arena.ground.peak_bytes
        fig.add_vline(
            x=budget / MIB, line={"dash": "dot", "color": GRID, "width": 2},
            annotation={"text": percent_whole(share), "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False},
        )  # fmt: skip
    for i, name in enumerate(dict.fromkeys(bout.rival for bout in shown)):
        fig.add_trace(_marks(name, [bout for bout in shown if bout.rival == name], i))
    fig.update_xaxes(title={"text": "measured peak of the step, MiB"}, rangemode="tozero")
    fig.update_yaxes(title={"text": "measured time over everything kept, %"}, ticksuffix=" %")
    return fig


def _marks(name: str, bouts: list[Bout], i: int) -> go.Scatter:
    wrong = [is_wrong(bout) for bout in bouts]
    ours = name == OURS
    colours = [VERDICT_COLOURS[bout.verdict or "not comparable"] for bout in bouts]
    return go.Scatter(
        name=title_of(name),
        mode="markers+text",
        x=[(bout.step_peak_bytes or 0) / MIB for bout in bouts],
        y=[100 * ((bout.time_ratio or 1.0) - 1) for bout in bouts],
        error_y={
            "type": "data", "array": [100 * (bout.time_ratio_spread or 0.0) for bout in bouts],
            "thickness": 1, "width": 3, "color": GRID,
        },
        text=["wrong" if one else "" for one in wrong],
        textposition="top center",
        marker={
            "symbol": [("x" if one else _OURS if ours else _SYMBOLS[i % len(_SYMBOLS)]) for one in wrong],
            "size": 15 if ours else 11,
            "color": colours,
            "line": {"width": 2},
        },
        customdata=[_hover(bout) for bout in bouts],
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _hover(bout: Bout) -> str:
    lines = [
        f"<b>{title_of(bout.rival)}</b>{at_budget(bout)}",
        f"peak {mib(bout.step_peak_bytes)} measured, {mib(bout.predicted_peak_bytes)} predicted",
        f"time {time_in_words(bout.time_ratio or 1.0, bout.time_ratio_spread)} measured",
        f"gradients {bout.verdict or 'not judged'}",
    ]
    return "<br>".join(lines)


def _answer(arena: Arena) -> str:
    tried = len({bout.rival for bout in arena.bouts})
    ran = len({bout.rival for bout in arena.bouts if bout.ran})
    wrong = len({bout.rival for bout in arena.bouts if is_wrong(bout)})
    sentence = f"{ran} of {tried} planners ran"
    return f"{sentence}, {wrong} with wrong gradients" if wrong else sentence


def _row(bout: Bout) -> dict[str, Any]:
    """An unknown figure stays None."""

    def to_mib(n_bytes: int | None) -> float | None:
        return None if n_bytes is None else round(n_bytes / MIB, 1)

    def percent(ratio: float | None) -> float | None:
        return None if ratio is None else round(100 * (ratio - 1), 1)

    return {
        "planner": title_of(bout.rival),
        "budget, %": None if bout.share is None else round(100 * bout.share),
        "budget, MiB": to_mib(bout.budget_bytes),
        "peak predicted, MiB": to_mib(bout.predicted_peak_bytes),
        "peak measured, MiB": to_mib(bout.step_peak_bytes),
        "keeps the budget": bout.fits,
        "time predicted, %": percent(bout.predicted_time_ratio),
        "time measured, %": percent(bout.time_ratio),
        "spread, %": None if bout.time_ratio_spread is None else round(100 * bout.time_ratio_spread, 1),
        "units": None if bout.policy is None else len(bout.policy.units),
        "gradients": bout.verdict,
        "what happened": outcome_in_words(bout) or None,
    }
