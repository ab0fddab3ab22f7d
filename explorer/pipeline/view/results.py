"""Charts of a pipeline run: memory of every rank, the cause of each difference of gradients, runs of each block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import plotly.graph_objects as go

from explorer.pipeline.record.step import BufferShares, GradientShares, PipelineRun, RankMemory, Share
from explorer.record.comparison import TensorDiff, Verdict
from explorer.view.drawing.axis import minmax
from explorer.view.drawing.colours import (
    GRID,
    KEEP,
    ROLE_COLOURS,
    RUN_COLOURS,
    VERDICT_COLOURS,
    stage_colour,
    translucent,
)
from explorer.view.drawing.figure import Chart, add_bars, bars, byte_series, empty, figure, hatch
from explorer.view.drawing.units import byte_axis, count, mib

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
            fig.update_yaxes(title_text=f"rank {rank.rank}\n({name})", row=row, col=1)
        fig.update_xaxes(gridcolor=GRID, zeroline=False, rangemode="tozero")
        fig.update_xaxes(title_text=TIME, automargin=True, row=len(drawn), col=1)
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
    parts = [name for name, *_ in PARTS]
    return Chart(
        name="peaks by kind",
        figure=fig,
        alt=f"Stacked bars of what the peak of each rank is made of: {peaks}.",
        rows=lambda: [
            {"rank": rank.rank, "peak": mib(rank.peak_bytes), **dict(zip(parts, map(mib, _parts(rank))))}
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


SHARES: tuple[Share, ...] = get_args(Share)
PATTERNS: dict[Verdict, str] = {"bitwise equal": "", "rounding": ".", "different": "x", "not comparable": "-"}
"""Patterns by the verdict of the record."""
ABSENT = {"baseline only": "no gradient came", "candidate only": "only after this step", "neither": "none"}


def truth_chart(run: PipelineRun) -> Chart:
    """Chart of each step from the full batch to the split model: how many gradients it left equal in every bit."""
    question, n = "What moved the gradients: microbatching, recompute or splitting?", len(run.gradients)
    fig = empty(question, "No gradient was compared.")
    if n:
        answer = f"splitting left {run.n_splitting_equal} of {n} gradients equal in every bit"
        if lost := sum(shares.splitting.presence == "baseline only" for shares in run.gradients):
            answer = f"splitting lost {count(lost, 'gradient')}: none came"
        fig = figure(question, answer, height=290)
    for (name, pattern, colour), counts in _bars_of(run).items():
        # Fainter than elsewhere, as a number is written on the bar.
        faint = {**hatch(pattern), "fgcolor": "rgba(255, 255, 255, 0.3)"}
        fig.add_bar(
            orientation="h", name=name, y=[f"moved by {share}?" for share in SHARES], x=counts,
            text=[str(c) if c else "" for c in counts], textposition="inside", textangle=0,
            insidetextanchor="middle", marker={"color": colour, "pattern": faint},
            hovertemplate=f"%{{y}} {name}: %{{x}} gradients",
        )  # fmt: skip
    equal = [f"{share} {sum(getattr(g, share).bitwise for g in run.gradients)} of {n}" for share in SHARES]
    return Chart(
        name="gradients by cause",
        figure=bars(fig, "gradients") if n else fig,
        alt=f"Bars of the gradients that each step left equal in every bit: {', '.join(equal)}.",
        rows=lambda: truth_table(run),
    )


def _bars_of(run: PipelineRun) -> dict[tuple[str, str, str], list[int]]:
    """Counts by share, for the name, pattern and colour of each kind of bar that has any.

    What microbatching makes different is grey: the split comes after it, and is not at fault.
    """
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for verdict, pattern in PATTERNS.items():
        counts = [sum(getattr(g, share).verdict == verdict for g in run.gradients) for share in SHARES]
        if verdict == "different" and counts[0]:
            kinds["different before the split", pattern, VERDICT_COLOURS["not comparable"]] = [counts[0], 0, 0]
            counts[0] = 0
        if any(counts):
            kinds[verdict, pattern, VERDICT_COLOURS[verdict]] = counts
    return kinds


def calls_chart(run: PipelineRun) -> Chart:
    """Chart of the forward runs of each block: 1 kept, 2 recomputed once, more where a schedule multiplies the
    recompute."""
    question, blocks = "How often does each block run forward?", [block for block in run.blocks if block.n_forward]
    fig = empty(question, "Calls were not counted.")
    highest = max((block.multiplier for block in run.blocks), default=0)
    if blocks:
        answer = "every block ran once" if highest == 1 else f"at most {highest:g} runs for each forward call (counted)"
        fig = figure(question, answer, height=200 + 24 * len(blocks))
        for again, label, pattern in ((False, "first run", ""), (True, "runs again for backward", "/")):
            fig.add_bar(
                orientation="h", name=label, y=[block.fqn for block in blocks],
                x=[block.multiplier - 1 if again else 1 for block in blocks],
                marker={"color": [stage_colour(block.stage) for block in blocks], "pattern": hatch(pattern)},
                customdata=[[block.stage, block.n_forward, block.n_recompute] for block in blocks],
                hovertemplate="%{y}, stage %{customdata[0]}: %{customdata[1]} forward calls, "
                "%{customdata[2]} runs for backward",
                showlegend=False,
            )  # fmt: skip
        fig.update_xaxes(dtick=1 if highest <= 12 else None)
        bars(fig, "runs per forward call (hatched: again for backward)")
    return Chart(
        name="forward calls",
        figure=fig,
        alt=f"Bars of the runs per forward call of {count(len(run.blocks), 'block')}, at most {highest:g}.",
        rows=lambda: [
            {
                "block": block.fqn,
                "stage": block.stage,
                "forward calls": block.n_forward,
                "runs for backward": block.n_recompute,
                "runs per forward call": round(block.multiplier, 2),
            }
            for block in run.blocks
        ],
    )


def truth_table(run: PipelineRun) -> list[dict[str, object]]:
    """Table rows, one per gradient or buffer: relative distance by cause; `0 (bitwise)` if no bit moved."""
    entries: tuple[GradientShares | BufferShares, ...] = (*run.gradients, *run.buffers)
    return [
        {
            "what": "gradient" if isinstance(entry, GradientShares) else "buffer",
            "name": entry.name,
            **{share: _distance(getattr(entry, share)) for share in SHARES},
            "stages": ", ".join(map(str, entry.stages)) if isinstance(entry, GradientShares) else "",
        }
        for entry in entries
    ]


def moved_rows(run: PipelineRun) -> list[dict[str, str]]:
    """A row for each of the three causes: how many gradients it moved, and how far."""
    rows = []
    for share in SHARES:
        diffs: list[TensorDiff] = [getattr(entry, share) for entry in run.gradients]
        lost = sum(diff.presence == "baseline only" for diff in diffs)
        worst = max((diff.relative_norm for diff in diffs if diff.relative_norm is not None), default=None)
        row = {
            "gradients": f"moved by {share}",
            "bitwise equal": f"{sum(diff.bitwise for diff in diffs)} of {len(diffs)}",
            "rounding": str(sum(diff.verdict == "rounding" for diff in diffs)),
            "different": str(sum(diff.verdict == "different" for diff in diffs) - lost),
            "never came": str(lost),
            "furthest": "none known" if worst is None else f"{worst:.2g}",
        }
        rows.append(row)
    return rows


def _distance(diff: TensorDiff) -> str:
    if diff.bitwise:
        return "0 (bitwise)"
    if diff.presence != "both":
        return ABSENT[diff.presence]
    if diff.relative_norm is None:
        return f"no distance ({diff.verdict})"
    return f"{diff.relative_norm:.2g} ({diff.verdict})"
