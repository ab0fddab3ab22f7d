"""Memory of every rank of a pipeline: over the step, at its peak by kind, and beside the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from explorer.record.pipeline_run import PipelineRun, RankMemory
from explorer.view.drawing.axis import minmax
from explorer.view.drawing.colours import GRID, KEEP, ROLE_COLOURS, RUN_COLOURS, translucent
from explorer.view.drawing.figure import Chart, add_bars, bars, byte_series, empty, figure, hatch
from explorer.view.drawing.units import byte_axis, mib, percent

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
        fig = figure(question, f"most: rank {worst.rank}, {_most(worst)}", height=height)
        fig.set_subplots(rows=len(drawn), cols=1, shared_xaxes=True, vertical_spacing=22 / height)
        for row, rank in enumerate(drawn, 1):
            colour = RUN_COLOURS["baseline" if rank.origin == "predicted" else "candidate"]
            line = _Line(rank, unit, name)
            look = {"line": {"color": colour, "shape": "hv", "width": 1.6}, "fillcolor": translucent(colour, 0.16)}
            drawn_line = line.trace(f"rank {rank.rank}", rank.held_bytes, fill="tozeroy", showlegend=False, **look)
            fig.add_trace(drawn_line, row=row, col=1)
            peak = f"{mib(rank.peak_bytes)} {rank.peak_action}".rstrip()
            fig.add_trace(line.peak(peak, colour), row=row, col=1)
            fig.update_yaxes(title={"text": f"rank {rank.rank}\n({name})"}, row=row, col=1)
        fig.update_xaxes(gridcolor=GRID, zeroline=False, rangemode="tozero")
        fig.update_xaxes(title={"text": TIME}, automargin=True, row=len(drawn), col=1)
        fig.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, nticks=3)
        fig.update_yaxes(range=[0, 1.3 * (worst.peak_bytes or 0) / unit])
    return Chart(
        name="memory by rank",
        figure=fig,
        alt=f"Held bytes over the step, one line chart a rank; peaks: {', '.join(map(_peak_in_words, memory))}.",
        rows=lambda: _rows(memory, predicted),
    )


def rank_chart(rank: RankMemory, predicted: Sequence[RankMemory] = ()) -> Chart:
    """Chart of the bytes that a rank holds over the step, in bands: parameters and buffers, receive buffers, the
    rest."""
    question = f"What does rank {rank.rank} hold, and when most?"
    fig = empty(question, NOT_MEASURED)
    if rank.held_bytes:
        unit, name = byte_axis(rank.peak_bytes or 0)
        fig, line = figure(question, f"most: {_most(rank)}", height=380), _Line(rank, unit, name)
        fixed = rank.parameter_bytes + rank.receive_bytes
        n = len(rank.held_bytes)
        rest = [max(n_bytes - fixed, 0) for n_bytes in rank.held_bytes]
        levels = ([rank.parameter_bytes] * n, [rank.receive_bytes] * n, rest)
        for (label, colour, pattern), level in zip(PARTS, levels):
            look = {"line": {"color": colour, "width": 1, "shape": "hv"}, "fillcolor": translucent(colour, 0.55)}
            hatched = hatch(pattern) if pattern else None
            fig.add_trace(line.trace(label, level, stackgroup="held", fillpattern=hatched, **look))
        fig.add_trace(line.peak(rank.peak_action, ROLE_COLOURS["parameter"]))
        fig.update_xaxes(title={"text": TIME}, rangemode="tozero")
        fig.update_yaxes(title={"text": f"held ({name})"}, range=[0, 1.14 * (rank.peak_bytes or 0) / unit])
    return Chart(
        name=f"memory of rank {rank.rank}",
        figure=fig,
        alt=f"Held bytes over the step by kind; peak: {_peak_in_words(rank)}.",
        rows=lambda: _rows((rank,), predicted),
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


def against_chart(run: PipelineRun) -> Chart:
    """Chart of the predicted beside the measured peak of each rank that has both."""
    question = "Was the prediction right?"
    fig = empty(question, "Peaks of the ranks were not both predicted and measured.")
    predicted = {rank.rank: rank.peak_bytes for rank in run.predicted.memory} if run.predicted is not None else {}
    by_rank = [(rank.rank, rank.peak_bytes, predicted.get(rank.rank)) for rank in run.memory]
    pairs = [(rank, peak, guess) for rank, peak, guess in by_rank if peak and guess is not None]
    if pairs:
        ranks, measured, guesses = zip(*pairs)
        worst = max(abs(guess - peak) / peak for _, peak, guess in pairs)
        unit, name = byte_axis(max(*measured, *guesses))
        fig = figure(question, f"peak by rank, furthest off by {percent(worst)}", height=190 + 44 * len(pairs))
        labels = [f"rank {rank}" for rank in ranks]
        add_bars(fig, labels, byte_series("measured", measured, unit, RUN_COLOURS["candidate"]))
        add_bars(fig, labels, byte_series("predicted", guesses, unit, RUN_COLOURS["baseline"], "/"))
        bars(fig, f"peak ({name})", mode="group")
    peaks = ", ".join(f"rank {rank} {mib(guess)} and {mib(peak)}" for rank, peak, guess in pairs)
    return Chart(
        name="predicted and measured peaks",
        figure=fig,
        alt=f"Bars of the predicted beside the measured peak of each rank: {peaks or 'none is known'}.",
        rows=lambda: [
            {
                "rank": rank,
                "predicted": mib(guess),
                "measured": mib(peak),
                "off by": percent(guess / peak - 1, signed=True),
            }
            for rank, peak, guess in pairs
        ],
    )


@dataclass(frozen=True)
class _Line:
    """Draws quantities of a rank over its step, in units of an axis."""

    rank: RankMemory
    unit: int
    unit_name: str

    def trace(self, name: str, n_bytes: Sequence[int], **more: object) -> go.Scatter:
        """A line of bytes, one number a sample of the rank."""
        rank = self.rank
        samples = [int(i) for i in minmax(np.frombuffer(rank.held_bytes, dtype=np.int64))]
        actions = [rank.actions[rank.action[i]] if rank.action[i] >= 0 else "between actions" for i in samples]
        return go.Scatter(
            x=[rank.time_ns[i] / 1e6 for i in samples],
            y=[n_bytes[i] / self.unit for i in samples],
            mode="lines",
            name=name,
            customdata=actions,
            hovertemplate=f"{name}, %{{customdata}}: %{{y:.2f}} {self.unit_name}",
            **more,
        )

    def peak(self, text: str, colour: str) -> go.Scatter:
        """A mark at the highest point, with its text above."""
        rank = self.rank
        index = rank.peak_index or 0
        return go.Scatter(
            x=[rank.time_ns[index] / 1e6],
            y=[rank.held_bytes[index] / self.unit],
            mode="markers+text",
            text=[text],
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


def _most(rank: RankMemory) -> str:
    return f"{mib(rank.peak_bytes)}{f' in {rank.peak_action}' if rank.peak_action else ''} ({rank.origin})"


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
