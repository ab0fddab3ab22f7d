"""Memory of every rank of a pipeline: over the step, at its peak by kind, and beside the prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from explorer.record.pipeline_run import PipelineRun, RankMemory
from explorer.view.drawing.axis import minmax
from explorer.view.drawing.colours import GRID, KEEP, ROLE_COLOURS, RUN_COLOURS, translucent
from explorer.view.drawing.figure import BarSeries, Chart, add_bars, bars, empty, figure, hatch
from explorer.view.drawing.units import byte_axis, mib, percent

OVER_TIME = "How much does each rank hold, and when most?"
AT_PEAK = "What is each rank's peak made of?"
AGAINST = "Was the prediction right?"
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
    """Chart of the bytes that every rank holds over the step; the table has the predictions."""
    peaks = ", ".join(_peak_in_words(rank) for rank in memory)
    return Chart(
        name="memory by rank",
        figure=_small_pictures(memory),
        alt=f"Held bytes over the step, one line chart a rank; peaks: {peaks}.",
        rows=lambda: _rows(memory, predicted),
    )


def rank_chart(rank: RankMemory, predicted: Sequence[RankMemory] = ()) -> Chart:
    """Chart of the bytes that a rank holds over the step, in bands."""
    return Chart(
        name=f"memory of rank {rank.rank}",
        figure=_one_rank(rank),
        alt=f"Held bytes over the step by kind; peak: {_peak_in_words(rank)}.",
        rows=lambda: _rows((rank,), predicted),
    )


def bands_chart(memory: Sequence[RankMemory]) -> Chart:
    """Chart of the parts of every rank's peak."""
    peaks = ", ".join(f"rank {rank.rank} {mib(rank.peak_bytes)}" for rank in memory)
    return Chart(
        name="peaks by kind",
        figure=_bands(memory),
        alt=f"Stacked bars of what the peak of each rank is made of: {peaks}.",
        rows=lambda: _band_rows(memory),
    )


def against_chart(run: PipelineRun) -> Chart:
    """Predicted beside measured peak, by rank."""
    pairs = _pairs(run)
    peaks = ", ".join(f"rank {rank} {mib(predicted)} and {mib(measured)}" for rank, measured, predicted in pairs)
    return Chart(
        name="predicted and measured peaks",
        figure=_against(pairs),
        alt=f"Bars of the predicted beside the measured peak of each rank: {peaks or 'none is known'}.",
        rows=lambda: [
            {
                "rank": rank,
                "predicted": mib(predicted),
                "measured": mib(measured),
                "off by": percent(predicted / measured - 1, signed=True),
            }
            for rank, measured, predicted in pairs
        ],
    )


def _small_pictures(memory: Sequence[RankMemory]) -> go.Figure:
    """Held bytes over the step, one small picture a rank on the same scales, the peak marked with its action."""
    drawn = [rank for rank in memory if rank.held_bytes]
    if not drawn:
        return empty(OVER_TIME, NOT_MEASURED)
    worst = max(drawn, key=lambda rank: rank.peak_bytes or 0)
    unit, name = byte_axis(worst.peak_bytes or 0)
    at = f" in {worst.peak_action}" if worst.peak_action else ""
    summary = f"most: rank {worst.rank}, {mib(worst.peak_bytes)}{at} ({worst.origin})"
    height = 130 + ROW_HEIGHT * len(drawn)
    fig = figure(OVER_TIME, summary, height=height)
    fig.set_subplots(rows=len(drawn), cols=1, shared_xaxes=True, vertical_spacing=22 / height)
    for row, rank in enumerate(drawn, 1):
        _small(fig, rank, (unit, name), row)
    fig.update_xaxes(gridcolor=GRID, zeroline=False, rangemode="tozero")
    fig.update_xaxes(title={"text": TIME}, automargin=True, row=len(drawn), col=1)
    fig.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, nticks=3)
    fig.update_yaxes(range=[0, 1.3 * (worst.peak_bytes or 0) / unit])
    return fig


def _one_rank(rank: RankMemory) -> go.Figure:
    """Figure of a rank over the step in three bands: parameters and buffers, receive buffers, the rest."""
    question = f"What does rank {rank.rank} hold, and when most?"
    if not rank.held_bytes:
        return empty(question, NOT_MEASURED)
    unit, name = byte_axis(rank.peak_bytes or 0)
    at = f" in {rank.peak_action}" if rank.peak_action else ""
    fig = figure(question, f"most: {mib(rank.peak_bytes)}{at} ({rank.origin})", height=380)
    samples = [int(i) for i in minmax(np.frombuffer(rank.held_bytes, dtype=np.int64))]
    fixed = rank.parameter_bytes + rank.receive_bytes
    rest = [max(rank.held_bytes[i] - fixed, 0) for i in samples]
    levels = ([rank.parameter_bytes] * len(samples), [rank.receive_bytes] * len(samples), rest)
    for (label, colour, pattern), values in zip(PARTS, levels):
        fig.add_trace(
            go.Scatter(
                x=[rank.time_ns[i] / 1e6 for i in samples],
                y=[value / unit for value in values],
                mode="lines",
                name=label,
                stackgroup="held",
                line={"color": colour, "width": 1, "shape": "hv"},
                fillcolor=translucent(colour, 0.55),
                fillpattern=hatch(pattern) if pattern else None,
                customdata=[_action(rank, i) for i in samples],
                hovertemplate=f"{label}, %{{customdata}}: %{{y:.2f}} {name}",
            )
        )
    _peak(fig, rank, (unit, name), ROLE_COLOURS["parameter"])
    fig.update_xaxes(title={"text": TIME}, rangemode="tozero")
    fig.update_yaxes(title={"text": f"held ({name})"}, range=[0, 1.14 * (rank.peak_bytes or 0) / unit])
    return fig


def _action(rank: RankMemory, index: int) -> str:
    action = rank.action[index]
    return rank.actions[action] if action >= 0 else "between actions"


def _small(fig: go.Figure, rank: RankMemory, axis: tuple[int, str], row: int) -> None:
    """Adds the picture of a rank in its row. All ranks have the same colour."""
    unit, name = axis
    colour = RUN_COLOURS["baseline" if rank.origin == "predicted" else "candidate"]
    samples = [int(i) for i in minmax(np.frombuffer(rank.held_bytes, dtype=np.int64))]
    fig.add_trace(
        go.Scatter(
            x=[rank.time_ns[i] / 1e6 for i in samples],
            y=[rank.held_bytes[i] / unit for i in samples],
            mode="lines",
            name=f"rank {rank.rank}",
            showlegend=False,
            line={"color": colour, "shape": "hv", "width": 1.6},
            fill="tozeroy",
            fillcolor=translucent(colour, 0.16),
            customdata=[_action(rank, i) for i in samples],
            hovertemplate=f"rank {rank.rank}, %{{customdata}}: %{{y:.2f}} {name}",
        ),
        row=row,
        col=1,
    )
    fig.update_yaxes(title={"text": f"rank {rank.rank}\n({name})"}, row=row, col=1)
    _peak(fig, rank, axis, colour, row)


def _peak(fig: go.Figure, rank: RankMemory, axis: tuple[int, str], colour: str, row: int | None = None) -> None:
    """Marks the highest point; in a picture with rows the mark also has the height."""
    peak = rank.peak_index
    if peak is None:
        return
    high = f"{mib(rank.peak_bytes)} {rank.peak_action}".rstrip()
    fig.add_trace(
        go.Scatter(
            x=[rank.time_ns[peak] / 1e6],
            y=[rank.held_bytes[peak] / axis[0]],
            mode="markers+text",
            text=[rank.peak_action if row is None else high],
            textposition="top center",
            cliponaxis=False,
            marker={"color": colour, "size": 9, "symbol": "diamond"},
            showlegend=False,
            hovertemplate=f"peak of rank {rank.rank}: {mib(rank.peak_bytes)}",
        ),
        **({} if row is None else {"row": row, "col": 1}),
    )


def _bands(memory: Sequence[RankMemory]) -> go.Figure:
    """The peak of every rank: parameters and buffers, receive buffers, and the rest (activations, gradients)."""
    drawn = [rank for rank in memory if rank.held_bytes]
    if not drawn:
        return empty(AT_PEAK, NOT_MEASURED)
    unit, name = byte_axis(max(rank.peak_bytes or 0 for rank in drawn))
    fig = figure(AT_PEAK, height=180 + 34 * len(drawn))
    for look, n_bytes in zip(PARTS, zip(*(_parts(rank) for rank in drawn))):
        _add(fig, [rank.rank for rank in drawn], n_bytes, unit, look)
    return bars(fig, f"held at the rank's peak ({name})")


def _parts(rank: RankMemory) -> tuple[int, int, int]:
    """Bytes of each of PARTS at the rank's peak."""
    rest = (rank.peak_bytes or 0) - rank.parameter_bytes - rank.receive_bytes
    return rank.parameter_bytes, rank.receive_bytes, max(rest, 0)


def _band_rows(memory: Sequence[RankMemory]) -> list[dict[str, object]]:
    """Table rows, one per rank: the peak and its parts."""
    return [
        {"rank": rank.rank, "peak": mib(rank.peak_bytes), **{part[0]: mib(n) for part, n in zip(PARTS, _parts(rank))}}
        for rank in memory
        if rank.held_bytes
    ]


def _against(pairs: Sequence[tuple[int, int, int]]) -> go.Figure:
    """`pairs` are rank, measured and predicted peak."""
    if not pairs:
        return empty(AGAINST, "Peaks of the ranks were not both predicted and measured.")
    worst = max(abs(predicted - measured) / measured for _, measured, predicted in pairs)
    unit, name = byte_axis(max(max(measured, predicted) for _, measured, predicted in pairs))
    fig = figure(AGAINST, f"peak by rank, furthest off by {percent(worst)}", height=190 + 44 * len(pairs))
    ranks, measured, predicted = zip(*pairs)
    _add(fig, ranks, measured, unit, ("measured", RUN_COLOURS["candidate"], ""))
    _add(fig, ranks, predicted, unit, ("predicted", RUN_COLOURS["baseline"], "/"))
    return bars(fig, f"peak ({name})", mode="group")


def _add(fig: go.Figure, ranks: Sequence[int], n_bytes: Sequence[int], unit: int, look: tuple[str, str, str]) -> None:
    """Adds a bar for each rank; `look` is label, colour and pattern."""
    label, colour, pattern = look
    lengths, figures = [n / unit for n in n_bytes], [mib(n) for n in n_bytes]
    series = BarSeries(name=label, lengths=lengths, figures=figures, colour=colour, pattern=pattern)
    add_bars(fig, [f"rank {rank}" for rank in ranks], series)


def _pairs(run: PipelineRun) -> list[tuple[int, int, int]]:
    """Rank, measured peak and predicted peak of each rank with both peaks."""
    predicted = {rank.rank: rank.peak_bytes for rank in run.predicted.memory} if run.predicted is not None else {}
    by_rank = [(rank.rank, rank.peak_bytes, predicted.get(rank.rank)) for rank in run.memory]
    return [(rank, peak, guess) for rank, peak, guess in by_rank if peak and guess is not None]


def _peak_in_words(rank: RankMemory) -> str:
    return f"rank {rank.rank} {mib(rank.peak_bytes)} at {rank.peak_action or 'no action'}"


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
