"""A pipelined step as pictures: who does what when, what each rank holds, and whose fault a difference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from explorer.record.pipeline import ActionTime, BufferShares, Forecast, GradientShares, PipelineRun, RankMemory
from explorer.view.colours import PHASE_COLOURS, RUN_COLOURS, VERDICT_COLOURS, stage_colour
from explorer.view.figure import bars, empty, figure, hatch
from explorer.view.thin import minmax
from explorer.view.units import byte_axis, mib

GANTT = "Who works when, and who waits?"
MEMORY = "How much does each rank hold, and when most?"
TRUTH = "What moved the gradients: microbatching, recompute or splitting?"
CALLS = "How often does each block run forward?"
AGAINST = "Was the prediction right?"

SHARES: tuple[Literal["microbatching", "recompute", "splitting"], ...] = ("microbatching", "recompute", "splitting")
KINDS = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
COLOURS = {
    "F": PHASE_COLOURS["forward"],
    "R": PHASE_COLOURS["recompute"],
    "B": PHASE_COLOURS["backward"],
    "I": PHASE_COLOURS["backward"],
    "W": RUN_COLOURS["baseline"],
}
PATTERNS = {"F": "", "R": "/", "B": "", "I": "|", "W": "-"}


def gantt(forecast: Forecast, predicted: Forecast | None = None) -> go.Figure:
    """One row a rank; `predicted` is drawn as a thin row below each. The critical path has a dark border."""
    if not forecast.actions:
        return empty(GANTT, "No action was played.")
    said = f"step {forecast.makespan_ms:.1f} ms, ranks idle {forecast.bubble_fraction:.0%} of it ({forecast.origin})"
    n_ranks = len(forecast.ranks)
    fig = figure(GANTT, said, height=190 + 46 * n_ranks)
    critical = set(forecast.critical_path)
    for kind in ("F", "R", "B", "I", "W"):
        _bars_of(fig, forecast.actions, kind, critical, y_offset=0.0, width=0.62, opacity=1.0)
    if predicted is not None:
        for kind in ("F", "R", "B", "I", "W"):
            _bars_of(fig, predicted.actions, kind, set(), y_offset=0.43, width=0.16, opacity=0.55)
    fig.update_layout(barmode="overlay", bargap=0)
    fig.update_xaxes(title={"text": "time since the start of the step (ms)"}, rangemode="tozero")
    fig.update_yaxes(
        autorange="reversed",
        tickvals=list(range(n_ranks)),
        ticktext=[f"rank {use.rank}" for use in forecast.ranks],
        showgrid=False,
    )
    return fig


def _bars_of(
    fig: go.Figure,
    actions: Sequence[ActionTime],
    kind: str,
    critical: set[str],
    *,
    y_offset: float,
    width: float,
    opacity: float,
) -> None:
    """The bars of one kind of action; `R` is the recomputed part at the start of a backward action."""
    if kind == "R":
        spans = [(a, a.start_ms, a.recompute_ms) for a in actions if a.recompute_ms]
    else:
        spans = [(a, a.start_ms + a.recompute_ms, a.duration_ms - a.recompute_ms) for a in actions if a.kind == kind]
    if not spans:
        return
    thin_row = y_offset > 0
    name = "recompute" if kind == "R" else KINDS[kind]
    labels = [""] * len(spans) if thin_row or len(actions) > 160 else [str(a.microbatch) for a, _, _ in spans]
    fig.add_trace(
        go.Bar(
            orientation="h",
            name=name,
            legendgroup=kind,
            showlegend=not thin_row,
            x=[length for _, _, length in spans],
            base=[start for _, start, _ in spans],
            y=[a.rank + y_offset for a, _, _ in spans],
            width=width,
            opacity=opacity,
            text=labels if kind != "R" else None,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            marker={
                "color": COLOURS[kind],
                "pattern": hatch(PATTERNS[kind]),
                "line": {
                    "width": [2 if a.name in critical else 0.5 for a, _, _ in spans],
                    "color": ["#111111" if a.name in critical else "#ffffff" for a, _, _ in spans],
                },
            },
            customdata=[[a.name, a.stage, a.microbatch, a.start_ms, a.end_ms] for a, _, _ in spans],
            hovertemplate=(
                f"{'predicted ' if thin_row else ''}{name}: %{{customdata[0]}}<br>stage %{{customdata[1]}}, "
                "microbatch %{customdata[2]}<br>%{customdata[3]:.2f} to %{customdata[4]:.2f} ms<extra></extra>"
            ),
        )
    )


def gantt_table(forecast: Forecast) -> list[dict[str, Any]]:
    """One row an action, in order of start."""
    critical = set(forecast.critical_path)
    return [
        {
            "rank": action.rank,
            "action": action.name,
            "stage": action.stage,
            "what": KINDS[action.kind],
            "microbatch": action.microbatch,
            "start_ms": round(action.start_ms, 3),
            "end_ms": round(action.end_ms, 3),
            "recompute_ms": round(action.recompute_ms, 3),
            "on critical path": action.name in critical,
        }
        for action in sorted(forecast.actions, key=lambda action: (action.start_ms, action.rank))
    ]


def memory_chart(memory: Sequence[RankMemory]) -> go.Figure:
    """Held bytes of every rank over the step, its peak marked with the action under way there."""
    drawn = [one for one in memory if one.held_bytes]
    if not drawn:
        return empty(MEMORY, "Memory by rank was not measured.")
    worst = max(drawn, key=lambda one: one.peak_bytes or 0)
    unit, name = byte_axis(worst.peak_bytes or 0)
    at = f" in {worst.peak_action}" if worst.peak_action else ""
    fig = figure(MEMORY, f"highest: rank {worst.rank} with {mib(worst.peak_bytes)}{at} ({worst.origin})", height=380)
    for one in drawn:
        _curve(fig, one, unit, name)
    fig.update_xaxes(title={"text": "time since the start of the step (ms)"}, rangemode="tozero")
    fig.update_yaxes(title={"text": f"held ({name})"}, rangemode="tozero")
    return fig


def _curve(fig: go.Figure, one: RankMemory, unit: int, name: str) -> None:
    colour = stage_colour(one.rank)
    kept = minmax(np.frombuffer(one.held_bytes, dtype=np.int64))
    fig.add_trace(
        go.Scatter(
            x=[one.time_ns[i] / 1e6 for i in kept],
            y=[one.held_bytes[i] / unit for i in kept],
            mode="lines",
            name=f"rank {one.rank}",
            line={"color": colour, "shape": "hv", "width": 1.8},
            customdata=[one.actions[one.action[i]] if one.action[i] >= 0 else "between actions" for i in kept],
            hovertemplate=f"rank {one.rank}, %{{customdata}}: %{{y:.1f}} {name}<extra></extra>",
        )
    )
    peak = one.peak_index
    if peak is not None:
        fig.add_trace(
            go.Scatter(
                x=[one.time_ns[peak] / 1e6],
                y=[one.held_bytes[peak] / unit],
                mode="markers+text",
                text=[one.peak_action],
                textposition="top center",
                cliponaxis=False,
                marker={"color": colour, "size": 9, "symbol": "diamond"},
                showlegend=False,
                hovertemplate=f"peak of rank {one.rank}: {mib(one.peak_bytes)}<extra></extra>",
            )
        )


def bands_chart(memory: Sequence[RankMemory]) -> go.Figure:
    """The peak of every rank: parameters and buffers, receive buffers, and the rest (activations, gradients)."""
    question = "What is each rank's peak made of?"
    drawn = [one for one in memory if one.held_bytes]
    if not drawn:
        return empty(question, "Memory by rank was not measured.")
    unit, name = byte_axis(max(one.peak_bytes or 0 for one in drawn))
    fig = figure(question, height=170 + 34 * len(drawn))
    rows = [f"rank {one.rank}" for one in drawn]
    parts = (
        ("parameters and buffers", [one.parameter_bytes for one in drawn], "#6B7785", ""),
        ("receive buffers", [one.receive_bytes for one in drawn], "#1B9AA8", "x"),
        (
            "activations, gradients, temporaries",
            [(one.peak_bytes or 0) - one.parameter_bytes - one.receive_bytes for one in drawn],
            PHASE_COLOURS["forward"],
            "",
        ),
    )
    for label, values, colour, pattern in parts:
        fig.add_trace(
            go.Bar(
                orientation="h",
                name=label,
                y=rows,
                x=[value / unit for value in values],
                marker={"color": colour, "pattern": hatch(pattern)},
                hovertemplate=f"%{{y}}, {label}: %{{x:.2f}} {name}<extra></extra>",
            )
        )
    return bars(fig, f"held at the rank's peak ({name})")


def memory_table(memory: Sequence[RankMemory], predicted: Sequence[RankMemory] = ()) -> list[dict[str, Any]]:
    """One row a rank: measured peak, the action there, what was predicted, receive buffers."""
    said = {one.rank: one.peak_bytes for one in predicted}
    return [
        {
            "rank": one.rank,
            "peak": mib(one.peak_bytes),
            "origin": one.origin,
            "at": one.peak_action or "between actions",
            "predicted": mib(said.get(one.rank)),
            "parameters and buffers": mib(one.parameter_bytes),
            "receive buffers": mib(one.receive_bytes),
        }
        for one in memory
    ]


def against_chart(run: PipelineRun) -> go.Figure:
    """Predicted beside measured peak, by rank."""
    if run.predicted is None or not run.memory:
        return empty(AGAINST, "No prediction was made before this run.")
    said = {one.rank: one.peak_bytes for one in run.predicted.memory}
    pairs = [(one.rank, one.peak_bytes, said.get(one.rank)) for one in run.memory if one.peak_bytes]
    worst = max((abs(p - m) / m for _, m, p in pairs if p is not None), default=0.0)
    unit, name = byte_axis(max(m for _, m, _ in pairs))
    fig = figure(AGAINST, f"peak by rank, furthest off by {worst:.1%}", height=170 + 44 * len(pairs))
    rows = [f"rank {rank}" for rank, _, _ in pairs]
    fig.add_trace(
        go.Bar(orientation="h", name="measured", y=rows, x=[m / unit for _, m, _ in pairs], marker_color="#3B6FB6")
    )
    fig.add_trace(
        go.Bar(
            orientation="h",
            name="predicted",
            y=rows,
            x=[None if p is None else p / unit for _, _, p in pairs],
            marker={"color": "#8C8C8C", "pattern": hatch("/")},
        )
    )
    return bars(fig, f"peak ({name})", mode="group")


def truth_chart(run: PipelineRun) -> go.Figure:
    """Of every step from the full batch to the split model: how many gradients it left equal in every bit."""
    if not run.gradients:
        return empty(TRUTH, "No gradient was compared.")
    n = len(run.gradients)
    fig = figure(TRUTH, f"splitting left {run.n_splitting_equal} of {n} gradients equal in every bit", height=270)
    for verdict in ("bitwise equal", "rounding", "different"):
        counts = [sum(getattr(g, share).verdict == verdict for g in run.gradients) for share in SHARES]
        if any(counts):
            fig.add_trace(
                go.Bar(
                    orientation="h",
                    name=verdict,
                    y=[f"moved by {share}?" for share in SHARES],
                    x=counts,
                    text=[str(c) if c else "" for c in counts],
                    textposition="inside",
                    insidetextanchor="middle",
                    marker={
                        "color": VERDICT_COLOURS[verdict],
                        "pattern": hatch({"bitwise equal": "", "rounding": "."}.get(verdict, "x")),
                    },
                    hovertemplate=f"%{{y}} {verdict}: %{{x}} gradients<extra></extra>",
                )
            )
    return bars(fig, "gradients")


def truth_table(run: PipelineRun) -> list[dict[str, Any]]:
    """One row a gradient or buffer: relative distance by cause; `0 (bitwise)` where no bit moved."""
    entries: list[tuple[str, GradientShares | BufferShares]] = [("gradient", shares) for shares in run.gradients]
    entries += [("buffer", shares) for shares in run.buffers]
    rows = [
        {"what": what, "name": entry.name, **{share: _distance(getattr(entry, share)) for share in SHARES}}
        for what, entry in entries
    ]
    stages = {g.name: ", ".join(map(str, g.stages)) for g in run.gradients}
    return [{**row, "stages": stages.get(str(row["name"]), "")} for row in rows]


def _distance(diff: Any) -> str:
    if diff.bitwise:
        return "0 (bitwise)"
    if diff.relative_norm is None:
        return diff.presence if diff.presence != "both" else "not finite"
    return f"{diff.relative_norm:.2g} ({diff.verdict})"


def calls_chart(run: PipelineRun) -> go.Figure:
    """Runs per forward call by block: 1 kept, 2 recomputed once, more where a schedule multiplies the recompute."""
    blocks = [block for block in run.blocks if block.n_forward]
    if not blocks:
        return empty(CALLS, "Calls were not counted.")
    highest = max(block.multiplier for block in blocks)
    fig = figure(CALLS, f"at most {highest:g} runs for each forward call", height=190 + 22 * len(blocks))
    fig.add_trace(
        go.Bar(
            orientation="h",
            y=[block.fqn for block in blocks],
            x=[block.multiplier for block in blocks],
            marker={
                "color": [stage_colour(block.stage) for block in blocks],
                "pattern": hatch(["/" if block.n_recompute else "" for block in blocks]),
            },
            customdata=[[block.stage, block.n_forward, block.n_recompute] for block in blocks],
            hovertemplate=(
                "%{y}, stage %{customdata[0]}: %{customdata[1]} forward calls, "
                "%{customdata[2]} runs again<extra></extra>"
            ),
            showlegend=False,
        )
    )
    return bars(fig, "runs per forward call")


def calls_table(run: PipelineRun) -> list[dict[str, Any]]:
    """One row a block, counted."""
    return [
        {
            "block": block.fqn,
            "stage": block.stage,
            "forward calls": block.n_forward,
            "runs for backward": block.n_recompute,
            "runs per forward call": round(block.multiplier, 2),
        }
        for block in run.blocks
    ]
