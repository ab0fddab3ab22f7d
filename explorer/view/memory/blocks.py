"""Saved activations block by block: where a policy can save anything at all, and where it did."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from explorer.record.comparison import Comparison
from explorer.record.measurement import MeasuredBlock, Measurement
from explorer.view.drawing.block_rows import NO_COSTS, WHOLE_MODEL, block_names, chart_rows, row_sum, runs_of
from explorer.view.drawing.chart import Chart, bold
from explorer.view.drawing.colours import RUN_COLOURS
from explorer.view.drawing.figure import bars, empty, figure, hatch
from explorer.view.drawing.units import byte_axis, flops, mib

QUESTION = "What does each block save?"


def saved_bytes_chart(run: Comparison | Measurement) -> Chart:
    """What each block keeps for backward, in one run or in both."""
    return Chart(
        name="saved bytes by block",
        figure=_picture(run),
        alt=f"Bars of the bytes each block keeps for backward. In all: {_answer(runs_of(run))}.",
        rows=lambda: _rows(run),
    )


def _picture(run: Comparison | Measurement) -> go.Figure:
    """Bytes each block holds for backward when forward ends, of one run or of both.

    Every bar's customdata starts with the fqns of its row, joined by a space, for clicks.
    """
    runs = runs_of(run)
    rows = chart_rows(*runs.values())
    if not rows:
        return empty(QUESTION, NO_COSTS)
    lines = {name: [row_sum(one, row, "saved_after_forward_bytes") for row in rows] for name, one in runs.items()}
    unit, unit_name = byte_axis(max(max(line) for line in lines.values()))
    fig = figure(QUESTION, _answer(runs), height=150 + (14 + 12 * len(runs)) * max(len(rows), 4))
    for name, line in lines.items():
        again = [row_sum(runs[name], row, "n_recompute") for row in rows]
        fig.add_trace(
            go.Bar(
                y=[row.label for row in rows], x=[size / unit for size in line], name=name, orientation="h",
                customdata=[[" ".join(row.fqns), mib(size), n] for row, size, n in zip(rows, line, again)],
                # Hatched where the run recomputes the block: / means recompute wherever a pattern is drawn.
                marker={"color": RUN_COLOURS[name], "pattern": hatch(["/" if n else "" for n in again])},
                hovertemplate=bold("%{y}") + f", {name}\n%{{customdata[1]}} saved for backward"
                "\nforward ran again %{customdata[2]} times",
            )
        )  # fmt: skip
    return bars(fig, f"saved ({unit_name}); hatched: recomputed", mode="group")


def _rows(run: Comparison | Measurement) -> list[dict[str, Any]]:
    """Every block of the model with what it saves, how often it ran, and its FLOPs."""
    runs = runs_of(run)
    table = []
    for fqn in block_names(*runs.values()):
        row: dict[str, Any] = {"block": fqn or WHOLE_MODEL}
        for name, one in runs.items():
            cost = one.by_fqn.get(fqn)
            if cost is not None:
                row |= _columns(cost, name if len(runs) > 1 else "")
        table.append(row)
    return table


def _columns(cost: MeasuredBlock, name: str) -> dict[str, Any]:
    prefix = f"{name}: " if name else ""
    return {
        f"{prefix}saved for backward (bytes)": cost.saved_after_forward_bytes,
        f"{prefix}saved": mib(cost.saved_after_forward_bytes),
        f"{prefix}alive at the peak (bytes)": cost.at_peak_bytes,
        f"{prefix}ran forward": cost.n_forward,
        f"{prefix}ran again": cost.n_recompute,
        f"{prefix}forward": flops(cost.forward_flops),
        f"{prefix}recompute": flops(cost.recompute_flops),
        f"{prefix}skipped by early stop": flops(cost.skipped_flops),
    }


def _answer(runs: dict[str, Measurement]) -> str:
    if not all(run.complete for run in runs.values()):
        return "as far as the step came"
    return " to ".join(mib(run.saved_after_forward_bytes) for run in runs.values()) + " saved when forward ends"
