"""Memory of every rank of a pipeline: over the step, at its peak by kind, and beside the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    peaks = ", ".join(_peak_in_words(one) for one in memory)
    return Chart(
        name="memory by rank",
        figure=_small_pictures(memory),
        alt=f"Held bytes over the step, one line chart a rank; peaks: {peaks}.",
        rows=lambda: _rows(memory, predicted),
    )


def rank_chart(one: RankMemory, predicted: Sequence[RankMemory] = ()) -> Chart:
    """Chart of the bytes that a rank holds over the step, in bands."""
    return Chart(
        name=f"memory of rank {one.rank}",
        figure=_one_rank(one),
        alt=f"Held bytes over the step by kind; peak: {_peak_in_words(one)}.",
        rows=lambda: _rows((one,), predicted),
    )


def bands_chart(memory: Sequence[RankMemory]) -> Chart:
    """Chart of the parts of every rank's peak."""
    peaks = ", ".join(f"rank {one.rank} {mib(one.peak_bytes)}" for one in memory)
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
    drawn = [one for one in memory if one.held_bytes]
    if not drawn:
        return empty(OVER_TIME, NOT_MEASURED)
    worst = max(drawn, key=lambda one: one.peak_bytes or 0)
    unit, name = byte_axis(worst.peak_bytes or 0)
    at = f" in {worst.peak_action}" if worst.peak_action else ""
    summary = f"most: rank {worst.rank}, {mib(worst.peak_bytes)}{at} ({worst.origin})"
    height = 130 + ROW_HEIGHT * len(drawn)
    fig = figure(OVER_TIME, summary, height=height)
    fig.set_subplots(rows=len(drawn), cols=1, shared_xaxes=True, vertical_spacing=22 / height)
    for row, one in enumerate(drawn, 1):
        _small(fig, one, (unit, name), row)
    fig.update_xaxes(gridcolor=GRID, zeroline=False, rangemode="tozero")
    fig.update_xaxes(title={"text": TIME}, automargin=True, row=len(drawn), col=1)
    fig.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, nticks=3)
    fig.update_yaxes(range=[0, 1.3 * (worst.peak_bytes or 0) / unit])
    return fig


def _one_rank(one: RankMemory) -> go.Figure:
    """Figure of a rank over the step in three bands: parameters and buffers, receive buffers, the rest."""
    question = f"What does rank {one.rank} hold, and when most?"
    if not one.held_bytes:
        return empty(question, NOT_MEASURED)
    unit, name = byte_axis(one.peak_bytes or 0)
    at = f" in {one.peak_action}" if one.peak_action else ""
    fig = figure(question, f"most: {mib(one.peak_bytes)}{at} ({one.origin})", height=380)
    kept = [int(i) for i in minmax(np.frombuffer(one.held_bytes, dtype=np.int64))]
    fixed = one.parameter_bytes + one.receive_bytes
    rest = [max(one.held_bytes[i] - fixed, 0) for i in kept]
    levels = ([one.parameter_bytes] * len(kept), [one.receive_bytes] * len(kept), rest)
    for (label, colour, pattern), values in zip(PARTS, levels):
        fig.add_trace(
            go.Scatter(
                x=[one.time_ns[i] / 1e6 for i in kept],
                y=[value / unit for value in values],
                mode="lines",
                name=label,
                stackgroup="held",
                line={"color": colour, "width": 1, "shape": "hv"},
                fillcolor=translucent(colour, 0.55),
                fillpattern=hatch(pattern) if pattern else None,
                customdata=[_action(one, i) for i in kept],
                hovertemplate=f"{label}, %{{customdata}}: %{{y:.2f}} {name}",
            )
        )
    _peak(fig, one, (unit, name), ROLE_COLOURS["parameter"])
    return _over_time(fig, name, one.peak_bytes or 0, unit)


def _over_time(fig: go.Figure, name: str, peak_bytes: int, unit: int) -> go.Figure:
    fig.update_xaxes(title={"text": TIME}, rangemode="tozero")
    fig.update_yaxes(title={"text": f"held ({name})"}, range=[0, 1.14 * peak_bytes / unit])
    return fig


def _action(one: RankMemory, index: int) -> str:
    action = one.action[index]
    return one.actions[action] if action >= 0 else "between actions"


def _small(fig: go.Figure, one: RankMemory, axis: tuple[int, str], row: int) -> None:
    """Adds the picture of a rank in its row. All ranks have the same colour."""
    unit, name = axis
    colour = RUN_COLOURS["baseline" if one.origin == "predicted" else "candidate"]
    kept = [int(i) for i in minmax(np.frombuffer(one.held_bytes, dtype=np.int64))]
    fig.add_trace(
        go.Scatter(
            x=[one.time_ns[i] / 1e6 for i in kept],
            y=[one.held_bytes[i] / unit for i in kept],
            mode="lines",
            name=f"rank {one.rank}",
            showlegend=False,
            line={"color": colour, "shape": "hv", "width": 1.6},
            fill="tozeroy",
            fillcolor=translucent(colour, 0.16),
            customdata=[_action(one, i) for i in kept],
            hovertemplate=f"rank {one.rank}, %{{customdata}}: %{{y:.2f}} {name}",
        ),
        row=row,
        col=1,
    )
    fig.update_yaxes(title={"text": f"rank {one.rank}\n({name})"}, row=row, col=1)
    _peak(fig, one, axis, colour, row)


def _peak(fig: go.Figure, one: RankMemory, axis: tuple[int, str], colour: str, row: int | None = None) -> None:
    """Marks the highest point; in a picture with rows the mark also has the height."""
    peak = one.peak_index
    if peak is None:
        return
    high = f"{mib(one.peak_bytes)} {one.peak_action}".rstrip()
    fig.add_trace(
        go.Scatter(
            x=[one.time_ns[peak] / 1e6],
            y=[one.held_bytes[peak] / axis[0]],
            mode="markers+text",
            text=[one.peak_action if row is None else high],
            textposition="top center",
            cliponaxis=False,
            marker={"color": colour, "size": 9, "symbol": "diamond"},
            showlegend=False,
            hovertemplate=f"peak of rank {one.rank}: {mib(one.peak_bytes)}",
        ),
        **({} if row is None else {"row": row, "col": 1}),
    )


def _bands(memory: Sequence[RankMemory]) -> go.Figure:
    """The peak of every rank: parameters and buffers, receive buffers, and the rest (activations, gradients)."""
    drawn = [one for one in memory if one.held_bytes]
    if not drawn:
        return empty(AT_PEAK, NOT_MEASURED)
    unit, name = byte_axis(max(one.peak_bytes or 0 for one in drawn))
    fig = figure(AT_PEAK, height=180 + 34 * len(drawn))
    for (label, colour, pattern), n_bytes in zip(PARTS, zip(*(_parts(one) for one in drawn))):
        series = BarSeries(
            name=label, lengths=[value / unit for value in n_bytes], figures=[mib(value) for value in n_bytes],
            colour=colour, pattern=pattern,
        )  # fmt: skip
        add_bars(fig, [f"rank {one.rank}" for one in drawn], series)
    return bars(fig, f"held at the rank's peak ({name})")


def _parts(one: RankMemory) -> tuple[int, int, int]:
    """Bytes of each of PARTS at the rank's peak."""
    rest = (one.peak_bytes or 0) - one.parameter_bytes - one.receive_bytes
    return one.parameter_bytes, one.receive_bytes, max(rest, 0)


def _band_rows(memory: Sequence[RankMemory]) -> list[dict[str, Any]]:
    """Table rows, one per rank: the peak and its parts."""
    return [
        {"rank": one.rank, "peak": mib(one.peak_bytes), **{part[0]: mib(n) for part, n in zip(PARTS, _parts(one))}}
        for one in memory
        if one.held_bytes
    ]


def _against(pairs: Sequence[tuple[int, int, int]]) -> go.Figure:
    """`pairs` are rank, measured and predicted peak."""
    if not pairs:
        return empty(AGAINST, "Peaks of the ranks were not both predicted and measured.")
    worst = max(abs(predicted - measured) / measured for _, measured, predicted in pairs)
    unit, name = byte_axis(max(max(measured, predicted) for _, measured, predicted in pairs))
    fig = figure(AGAINST, f"peak by rank, furthest off by {percent(worst)}", height=190 + 44 * len(pairs))
    rows = [f"rank {rank}" for rank, _, _ in pairs]
    looks = (("measured", 1, RUN_COLOURS["candidate"], ""), ("predicted", 2, RUN_COLOURS["baseline"], "/"))
    for label, place, colour, pattern in looks:
        peaks = [pair[place] for pair in pairs]
        series = BarSeries(
            name=label, lengths=[peak / unit for peak in peaks], figures=[mib(peak) for peak in peaks],
            colour=colour, pattern=pattern,
        )  # fmt: skip
        add_bars(fig, rows, series)
    return bars(fig, f"peak ({name})", mode="group")


def _pairs(run: PipelineRun) -> list[tuple[int, int, int]]:
    """Rank, measured peak and predicted peak of each rank with both peaks."""
    predicted = {one.rank: one.peak_bytes for one in run.predicted.memory} if run.predicted is not None else {}
    by_rank = [(one.rank, one.peak_bytes, predicted.get(one.rank)) for one in run.memory]
    return [(rank, peak, guess) for rank, peak, guess in by_rank if peak and guess is not None]


def _peak_in_words(one: RankMemory) -> str:
    return f"rank {one.rank} {mib(one.peak_bytes)} at {one.peak_action or 'no action'}"


def _rows(memory: Sequence[RankMemory], predicted: Sequence[RankMemory]) -> list[dict[str, Any]]:
    """Table rows, one per rank: peak, action at the peak, predicted peak, receive buffers."""
    predicted_bytes = {one.rank: one.peak_bytes for one in predicted}
    return [
        {
            "rank": one.rank,
            "peak": mib(one.peak_bytes),
            "origin": one.origin,
            "at": one.peak_action or "between actions",
            **({"predicted": mib(predicted_bytes[one.rank])} if one.rank in predicted_bytes else {}),
            "parameters and buffers": mib(one.parameter_bytes),
            "receive buffers": mib(one.receive_bytes),
            "optimizer state (counted, on top)": mib(one.optimizer_bytes),
        }
        for one in memory
    ]
