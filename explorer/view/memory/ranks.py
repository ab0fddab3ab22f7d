"""Ranks of one recorded step side by side: the fullest rank, its peak moment, and the bytes by kind."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from explorer.plan.memory.ledger import held, ledger
from explorer.plan.names import listed
from explorer.record.allocations import ROLES
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.view.drawing.axis import minmax
from explorer.view.drawing.colours import DASHES, ROLE_COLOURS, ROLE_PATTERNS, stage_colour
from explorer.view.drawing.figure import Chart, add_bars, bars, byte_series, empty, figure
from explorer.view.drawing.units import NOT_MEASURED, byte_axis, change, count, mib, percent
from explorer.view.memory.blocks import place
from explorer.view.text.runs import peak_and_end

MOST_LINES = 8
"""Number of ranks whose lines are drawn: the fullest ranks."""
N_POINTS = 800


def ranks_over_time(ranks: RecordedRanks) -> Chart:
    """Chart of the bytes that each rank held over the step, from the start of the rank."""
    question = "Which rank holds most, and when?"
    fig = empty(question, "No rank recorded its step as it ran, only what it held in the end.")
    timed = [run for run in ranks.ranks if run.allocations is not None and len(run.allocations.time_ns)]
    drawn = sorted(timed, key=lambda run: -(run.held_peak_bytes or 0))[:MOST_LINES]
    if drawn:
        unit, name = byte_axis(ranks.fullest.held_peak_bytes or 0)
        left = f"; the {MOST_LINES} fullest of {count(len(timed), 'rank')}" if len(timed) > MOST_LINES else ""
        fig = figure(question, f"{spread_of_ranks(ranks).removesuffix('.')}{left}", height=400)
        for run in sorted(drawn, key=lambda run: run.rank or 0):
            fig.add_trace(_line(run, unit, name))
        fig.update_xaxes(title_text="time since the start of the step on that rank, recording included (ms)")
        fig.update_yaxes(title_text=f"bytes held ({name})", rangemode="tozero")
        fig.update_layout(showlegend=True)
    return Chart(
        name="ranks over the step",
        figure=fig,
        alt=f"Line chart of the bytes that each rank held over the step. {spread_of_ranks(ranks)}",
        rows=lambda: rank_rows(ranks),
    )


def ranks_at_peak(ranks: RecordedRanks) -> Chart:
    """The peak of every rank, by role."""
    question = "What is each rank's peak made of?"
    fig = empty(question, "No rank has a memory timeline.")
    drawn = [(run, ledger(run).by_role) for run in ranks.ranks if run.allocations is not None]
    roles = [role for role in ROLES if sum(by_role[role] for _, by_role in drawn)]
    if drawn:
        unit, name = byte_axis(ranks.fullest.held_peak_bytes or 0)
        answer = spread_of_ranks(ranks).removesuffix(".")
        fig = figure(question, answer, height=272 + 34 * max(len(drawn), 2))
        for role in roles:
            sizes = [by_role[role] for _, by_role in drawn]
            series = byte_series(role, sizes, unit, ROLE_COLOURS[role], ROLE_PATTERNS[role])
            add_bars(fig, [_label(ranks, run) for run, _ in drawn], series)
        bars(fig, f"held at the rank's peak ({name})")
    return Chart(
        name="peaks of the ranks",
        figure=fig,
        alt=f"Stacked bars of what the peak of each rank is made of. {spread_of_ranks(ranks)}",
        rows=lambda: [
            {"rank": run.rank, "peak": peak_and_end(run), **{role: mib(by_role[role]) for role in roles}}
            for run, by_role in drawn
        ],
    )


def spread_of_ranks(ranks: RecordedRanks) -> str:
    """A sentence on the fullest rank, its lead over the lowest rank, and the ranks without a file."""
    missing = ""
    if ranks.missing:
        predicted = any(run.origin == "predicted" for run in ranks.ranks)
        missing = f" {'Not played:' if predicted else 'No file of'} {_named(ranks.missing)}."
    recorded = [run for run in ranks.ranks if run.held_peak_bytes is not None]
    if not recorded:
        return f"No rank recorded what it held.{missing}"
    full, low = ranks.fullest, min(recorded, key=lambda run: run.held_peak_bytes or 0)
    more = change(low.held_peak_bytes, full.held_peak_bytes)
    beside = ""
    if more:
        beside = f", {percent(more, signed=True)} over rank {low.rank} ({peak_and_end(low)})"
    elif len(recorded) > 1:
        beside = ", and so do all others" if len(recorded) == len(ranks.ranks) else ", as all others that recorded it"
    label = _label(ranks, full)
    verb = "hold" if label.startswith("ranks") else "holds"
    return f"{label[0].upper()}{label[1:]} {verb} most: {peak_and_end(full)}{beside}.{missing}"


def rank_rows(ranks: RecordedRanks) -> list[dict[str, object]]:
    """Table rows, one per rank."""
    on_card = any(run.card for run in ranks.ranks)
    rows = []
    for run in ranks.ranks:
        row: dict[str, object] = {"rank": name_of(ranks, run), "peak": peak_and_end(run)}
        if on_card:
            row |= _on_card(run)
        row["where"] = "not recorded"
        if run.allocations is not None and run.phases:
            row["where"] = place(ledger(run))
        row["saved after forward"] = mib(run.saved_after_forward_bytes)
        row["blocks that ran again"] = sum(cost.n_recompute > 0 for cost in run.blocks)
        row["device"] = run.environment.device_name
        rows.append(row)
    return rows


def name_of(ranks: RecordedRanks, run: Measurement) -> str:
    """`0 to 5, 7`: the rank of `run` and the ranks with equal shards, consecutive ones joined."""
    equal = [rank for rank, same in ranks.equal.items() if same == run.rank]
    numbers = sorted([run.rank or 0, *equal])
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    return listed([f"{first} to {last}" if last > first else str(first) for first, last in stretches], 3)


def _on_card(run: Measurement) -> dict[str, str]:
    if run.card is None:
        return {"allocated": NOT_MEASURED, "reserved": NOT_MEASURED}
    reserved = "refused" if run.card.refused else mib(run.card.reserved_bytes)
    return {"allocated": mib(run.card.allocated_bytes), "reserved": reserved}


def _line(run: Measurement, unit: int, name: str) -> go.Scatter:
    log, rank = run.allocations, run.rank or 0
    assert log is not None
    line = held(log)
    points = [int(i) for i in minmax(line, N_POINTS)]
    return go.Scatter(
        name=f"rank {rank}",
        x=[log.time_ns[i] / 1e6 for i in points],
        y=[float(line[i]) / unit for i in points],
        mode="lines",
        line={"color": stage_colour(rank), "shape": "hv", "width": 2, "dash": DASHES[rank % len(DASHES)]},
        hovertemplate=f"rank {rank}: %{{y:.2f}} {name}",
    )


def _label(ranks: RecordedRanks, run: Measurement) -> str:
    return f"rank{'s' if run.rank in ranks.equal.values() else ''} {name_of(ranks, run)}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks], 8)}"
