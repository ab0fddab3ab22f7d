"""Memory of every rank of a pipeline: over the step, and at its peak by kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.record.pipeline import RankMemory
from explorer.view.drawing.axis import minmax
from explorer.view.drawing.colours import GRID, KEEP, ROLE_COLOURS, RUN_COLOURS, translucent
from explorer.view.drawing.figure import Chart, add_bars, bars, byte_series, empty, figure
from explorer.view.drawing.units import byte_axis, mib

NOT_MEASURED = "Memory by rank was not measured."
TIME = "time since the start of the step (ms)"
ROW_HEIGHT = 96
"""Height of one rank's small picture."""
PARTS = (
    ("parameters and buffers", ROLE_COLOURS["parameter"], ""),
    ("receive buffers", ROLE_COLOURS["input"], "+"),
    ("activations, gradients, temporaries", KEEP, ""),
)


def memory_chart(memory: Sequence[RankMemory], predicted: Sequence[RankMemory] = ()) -> Chart:
    """Chart of the bytes that every rank holds over the step, one small picture a rank on the same scales; the table
    has the predictions."""
    question, drawn = "How much does each rank hold, and when most?", _recorded(memory)
    fig = empty(question, NOT_MEASURED)
    if drawn:
        worst = max(drawn, key=lambda rank: rank.peak_bytes or 0)
        unit, name = byte_axis(worst.peak_bytes or 0)
        height = 130 + ROW_HEIGHT * len(drawn)
        action = f" in {worst.peak_action}" if worst.peak_action else ""
        most = f"most: rank {worst.rank}, {mib(worst.peak_bytes)}{action} ({worst.origin})"
        fig = figure(question, most, height=height)
        fig.set_subplots(rows=len(drawn), cols=1, shared_xaxes=True, vertical_spacing=22 / height)
        for row, rank in enumerate(drawn, 1):
            colour = RUN_COLOURS["baseline" if rank.origin == "predicted" else "candidate"]
            fig.add_trace(_line(rank, unit, name, colour), row=row, col=1)
            fig.add_trace(_peak(rank, unit, colour), row=row, col=1)
            fig.update_yaxes(title={"text": f"rank {rank.rank}\n({name})"}, row=row, col=1)
        fig.update_xaxes(gridcolor=GRID, zeroline=False, rangemode="tozero")
        fig.update_xaxes(title={"text": TIME}, automargin=True, row=len(drawn), col=1)
        fig.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, nticks=3)
        fig.update_yaxes(range=[0, 1.3 * (worst.peak_bytes or 0) / unit])
    peaks = ", ".join(
        f"rank {rank.rank} {mib(rank.peak_bytes)} at {rank.peak_action or 'no action'}" for rank in memory
    )
    return Chart(
        name="memory by rank",
        figure=fig,
        alt=f"Held bytes over the step, one line chart a rank; peaks: {peaks}.",
        rows=lambda: _rows(memory, predicted),
    )


def bands_chart(memory: Sequence[RankMemory]) -> Chart:
    """Chart of the parts of every rank's peak."""
    question, drawn = "What is each rank's peak made of?", _recorded(memory)
    fig = empty(question, NOT_MEASURED)
    if drawn:
        unit, name = byte_axis(max(rank.peak_bytes or 0 for rank in drawn))
        fig = figure(question, height=180 + 34 * len(drawn))
        for (label, colour, pattern), sizes in zip(PARTS, zip(*map(_parts, drawn))):
            series = byte_series(label, sizes, unit, colour, pattern)
            add_bars(fig, [f"rank {rank.rank}" for rank in drawn], series)
        bars(fig, f"held at the rank's peak ({name})")
    peaks = ", ".join(f"rank {rank.rank} {mib(rank.peak_bytes)}" for rank in memory)
    return Chart(
        name="peaks by kind",
        figure=fig,
        alt=f"Stacked bars of what the peak of each rank is made of: {peaks}.",
        rows=lambda: [
            {"rank": rank.rank, "peak": mib(rank.peak_bytes)}
            | {part[0]: mib(n) for part, n in zip(PARTS, _parts(rank))}
            for rank in drawn
        ],
    )


def _line(rank: RankMemory, unit: int, unit_name: str, colour: str) -> go.Scatter:
    """The bytes that a rank holds over its step, in units of the axis, as an area."""
    samples = [int(i) for i in minmax(np.frombuffer(rank.held_bytes, dtype=np.int64))]
    return go.Scatter(
        x=[rank.time_ns[i] / 1e6 for i in samples],
        y=[rank.held_bytes[i] / unit for i in samples],
        mode="lines",
        name=f"rank {rank.rank}",
        showlegend=False,
        customdata=[rank.actions[rank.action[i]] if rank.action[i] >= 0 else "between actions" for i in samples],
        hovertemplate=f"rank {rank.rank}, %{{customdata}}: %{{y:.2f}} {unit_name}",
        line={"color": colour, "shape": "hv", "width": 1.6},
        fill="tozeroy",
        fillcolor=translucent(colour, 0.16),
    )


def _peak(rank: RankMemory, unit: int, colour: str) -> go.Scatter:
    """A mark at the highest point, with its bytes and its action above."""
    index = rank.peak_index or 0
    return go.Scatter(
        x=[rank.time_ns[index] / 1e6],
        y=[rank.held_bytes[index] / unit],
        mode="markers+text",
        text=[f"{mib(rank.peak_bytes)} {rank.peak_action}".rstrip()],
        textposition="top center",
        cliponaxis=False,
        marker={"color": colour, "size": 9, "symbol": "diamond"},
        showlegend=False,
        hovertemplate=f"peak of rank {rank.rank}: {mib(rank.peak_bytes)}",
    )


def _recorded(memory: Sequence[RankMemory]) -> list[RankMemory]:
    return [rank for rank in memory if rank.held_bytes]


def _parts(rank: RankMemory) -> tuple[int, int, int]:
    """Bytes of each of PARTS at the rank's peak."""
    rest = (rank.peak_bytes or 0) - rank.parameter_bytes - rank.receive_bytes
    return rank.parameter_bytes, rank.receive_bytes, max(rest, 0)


def _rows(memory: Sequence[RankMemory], predicted: Sequence[RankMemory]) -> list[dict[str, object]]:
    """Table rows, one per rank: peak, action at the peak, predicted peak, receive buffers."""
    predicted_bytes = {rank.rank: rank.peak_bytes for rank in predicted}
    return [
        {
            "rank": rank.rank,
            "peak": mib(rank.peak_bytes),
            "origin": rank.origin,
            "at": rank.peak_action or "between actions",
            **({"predicted": mib(predicted_bytes[rank.rank])} if rank.rank in predicted_bytes else {}),
            "parameters and buffers": mib(rank.parameter_bytes),
            "receive buffers": mib(rank.receive_bytes),
            "optimizer state (counted, on top)": mib(rank.optimizer_bytes),
        }
        for rank in memory
    ]
