"""Ranks of one recorded step side by side: who holds most, when, and of what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from explorer.plan.memory.ledger import ledger
from explorer.plan.memory.series import held
from explorer.record.allocations import ROLES
from explorer.record.measurement import Measurement
from explorer.record.ranks import RecordedRanks
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import ROLE_COLOURS, ROLE_PATTERNS, stage_colour
from explorer.view.drawing.figure import bars, empty, figure, hatch
from explorer.view.drawing.thin import minmax
from explorer.view.drawing.units import byte_axis, change, count, mib, percent
from explorer.view.memory.ledger import place
from explorer.view.words.cut_short import peak_and_end

OVER_TIME = "Which rank holds most, and when?"
AT_PEAK = "What is each rank's peak made of?"
MOST_LINES = 8
"""Ranks whose lines are drawn: the fullest ones."""
N_POINTS = 800
DASHES = ("solid", "dash", "dot", "dashdot")
"""Equal ranks lie on each other: what is below shows through the gaps."""


def ranks_over_time(of: RecordedRanks) -> Chart:
    """What every rank held over the step, each since its own start."""
    return Chart(
        name="ranks over the step",
        figure=_lines(of),
        alt=f"Line chart of the bytes that each rank held over the step. {spread_of_ranks(of)}",
        rows=lambda: rank_rows(of),
    )


def ranks_at_peak(of: RecordedRanks) -> Chart:
    """The peak of every rank, by role."""
    return Chart(
        name="peaks of the ranks",
        figure=_bars(of),
        alt=f"Stacked bars of what each rank's peak is made of. {spread_of_ranks(of)}",
        rows=lambda: _role_rows(of),
    )


def spread_of_ranks(of: RecordedRanks) -> str:
    """One sentence: the fullest rank, by how much, and who wrote no file."""
    full = of.fullest
    low = min(of.ranks, key=lambda run: run.held_peak_bytes or 0)
    more = change(low.held_peak_bytes, full.held_peak_bytes)
    beside = f", {percent(more, signed=True)} over rank {low.rank} ({peak_and_end(low)})" if more else ""
    if not more and len(of.ranks) > 1:
        beside = ", and so do all others"
    missing = f" No file of {_ranks(of.missing)}." if of.missing else ""
    return f"Rank {full.rank} holds most: {peak_and_end(full)}{beside}.{missing}"


def rank_rows(of: RecordedRanks) -> list[dict[str, Any]]:
    """One row a rank."""
    return [
        {
            "rank": run.rank,
            "peak": peak_and_end(run),
            "where": place(ledger(run)) if run.allocations is not None and run.phases else "not recorded",
            "saved after forward": mib(run.saved_after_forward_bytes),
            "blocks that ran again": sum(cost.n_recompute > 0 for cost in run.blocks),
            "device": run.environment.device_name,
        }
        for run in of.ranks
    ]


def _lines(of: RecordedRanks) -> go.Figure:
    timed = [run for run in of.ranks if run.allocations is not None and len(run.allocations.time_ns)]
    drawn = sorted(timed, key=lambda run: -(run.held_peak_bytes or 0))[:MOST_LINES]
    if not drawn:
        return empty(OVER_TIME, "No rank recorded its step as it ran, only what it held in the end.")
    unit, name = byte_axis(of.fullest.held_peak_bytes or 0)
    left = f"; the {MOST_LINES} fullest of {count(len(timed), 'rank')}" if len(timed) > MOST_LINES else ""
    fig = figure(OVER_TIME, f"{spread_of_ranks(of).removesuffix('.')}{left}", height=400)
    for run in sorted(drawn, key=lambda run: run.rank or 0):
        fig.add_trace(_line(run, unit, name))
    fig.update_xaxes(title={"text": "time since the start of the step on that rank, recording included (ms)"})
    fig.update_yaxes(title={"text": f"bytes held ({name})"}, rangemode="tozero")
    fig.update_layout(showlegend=True)
    return fig


def _line(run: Measurement, unit: int, name: str) -> go.Scatter:
    log, rank = run.allocations, run.rank or 0
    assert log is not None
    line = held(log)
    kept = [int(i) for i in minmax(line, N_POINTS)]
    return go.Scatter(
        name=f"rank {rank}",
        x=[log.time_ns[i] / 1e6 for i in kept],
        y=[float(line[i]) / unit for i in kept],
        mode="lines",
        line={"color": stage_colour(rank), "shape": "hv", "width": 2, "dash": DASHES[rank % len(DASHES)]},
        hovertemplate=f"rank {rank}: %{{y:.2f}} {name}<extra></extra>",
    )


def _bars(of: RecordedRanks) -> go.Figure:
    drawn = [(run, ledger(run)) for run in of.ranks if run.allocations is not None]
    if not drawn:
        return empty(AT_PEAK, "No rank has a memory timeline.")
    unit, name = byte_axis(of.fullest.held_peak_bytes or 0)
    fig = figure(AT_PEAK, spread_of_ranks(of).removesuffix("."), height=190 + 34 * max(len(drawn), 2))
    for role in ROLES:
        sizes = [at.by_role[role] for _, at in drawn]
        if any(sizes):
            fig.add_trace(
                go.Bar(
                    orientation="h", name=role, y=[f"rank {run.rank}" for run, _ in drawn],
                    x=[size / unit for size in sizes], customdata=[[mib(size)] for size in sizes],
                    marker={"color": ROLE_COLOURS[role], "pattern": hatch(ROLE_PATTERNS[role])},
                    hovertemplate=f"%{{y}}, {role}: %{{customdata[0]}}<extra></extra>",
                )
            )  # fmt: skip
    return bars(fig, f"held at the rank's peak ({name})")


def _role_rows(of: RecordedRanks) -> list[dict[str, Any]]:
    at = [(run, ledger(run).by_role) for run in of.ranks if run.allocations is not None]
    seen = [role for role in ROLES if any(by_role[role] for _, by_role in at)]
    return [
        {"rank": run.rank, "peak": peak_and_end(run), **{role: mib(by_role[role]) for role in seen}}
        for run, by_role in at
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
