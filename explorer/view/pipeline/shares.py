"""Effects of splitting on the step: the cause of each difference of gradients, and the number of runs of blocks."""

from __future__ import annotations

from typing import get_args

import plotly.graph_objects as go

from explorer.record.comparison import TensorDiff, Verdict
from explorer.record.pipeline_run import BufferShares, GradientShares, PipelineRun, Share
from explorer.view.drawing.colours import VERDICT_COLOURS, stage_colour
from explorer.view.drawing.figure import Chart, bars, empty, figure, hatch
from explorer.view.drawing.units import count

TRUTH = "What moved the gradients: microbatching, recompute or splitting?"
CALLS = "How often does each block run forward?"
SHARES: tuple[Share, ...] = get_args(Share)
PATTERNS: dict[Verdict, str] = {"bitwise equal": "", "rounding": ".", "different": "x", "not comparable": "-"}
"""Patterns by the verdict of the record."""
ABSENT = {"baseline only": "no gradient came", "candidate only": "only after this step", "neither": "none"}


def truth_chart(run: PipelineRun) -> Chart:
    """Chart of the causes that moved the gradients: microbatching, recompute or splitting."""
    n = len(run.gradients)
    equal = [f"{share} {sum(getattr(g, share).bitwise for g in run.gradients)} of {n}" for share in SHARES]
    return Chart(
        name="gradients by cause",
        figure=_truth(run),
        alt=f"Bars of the gradients that each step left equal in every bit: {', '.join(equal)}.",
        rows=lambda: truth_table(run),
    )


def calls_chart(run: PipelineRun) -> Chart:
    """Chart of the number of forward runs of each block."""
    most = max((block.multiplier for block in run.blocks), default=0)
    return Chart(
        name="forward calls",
        figure=_calls(run),
        alt=f"Bars of the runs per forward call of {count(len(run.blocks), 'block')}, at most {most:g}.",
        rows=lambda: _call_rows(run),
    )


def _truth(run: PipelineRun) -> go.Figure:
    """Each step from the full batch to the split model: how many gradients it left equal in every bit."""
    if not run.gradients:
        return empty(TRUTH, "No gradient was compared.")
    answer = f"splitting left {run.n_splitting_equal} of {len(run.gradients)} gradients equal in every bit"
    if lost := sum(shares.splitting.presence == "baseline only" for shares in run.gradients):
        answer = f"splitting lost {count(lost, 'gradient')}: none came"
    fig = figure(TRUTH, answer, height=290)
    for verdict, pattern in PATTERNS.items():
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
                    textangle=0,
                    insidetextanchor="middle",
                    marker={
                        "color": VERDICT_COLOURS[verdict],
                        # Fainter than elsewhere, as a number is written on the bar.
                        "pattern": {**hatch(pattern), "fgcolor": "rgba(255, 255, 255, 0.3)"},
                    },
                    hovertemplate=f"%{{y}} {verdict}: %{{x}} gradients",
                )
            )
    return bars(fig, "gradients")


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


def _distance(diff: TensorDiff) -> str:
    if diff.bitwise:
        return "0 (bitwise)"
    if diff.presence != "both":
        return ABSENT[diff.presence]
    if diff.relative_norm is None:
        return f"no distance ({diff.verdict})"
    return f"{diff.relative_norm:.2g} ({diff.verdict})"


def _calls(run: PipelineRun) -> go.Figure:
    """Runs per forward call by block: 1 kept, 2 recomputed once, more where a schedule multiplies the recompute."""
    blocks = [block for block in run.blocks if block.n_forward]
    if not blocks:
        return empty(CALLS, "Calls were not counted.")
    highest = max(block.multiplier for block in blocks)
    answer = "every block ran once" if highest == 1 else f"at most {highest:g} runs for each forward call (counted)"
    fig = figure(CALLS, answer, height=200 + 24 * len(blocks))
    for again, label, pattern in ((False, "first run", ""), (True, "runs again for backward", "/")):
        fig.add_trace(
            go.Bar(
                orientation="h",
                name=label,
                y=[block.fqn for block in blocks],
                x=[block.multiplier - 1 if again else 1 for block in blocks],
                marker={"color": [stage_colour(block.stage) for block in blocks], "pattern": hatch(pattern)},
                customdata=[[block.stage, block.n_forward, block.n_recompute] for block in blocks],
                hovertemplate=(
                    "%{y}, stage %{customdata[0]}: %{customdata[1]} forward calls, %{customdata[2]} runs for backward"
                ),
                showlegend=False,
            )
        )
    fig.update_xaxes(dtick=1 if highest <= 12 else None)
    return bars(fig, "runs per forward call (hatched: again for backward)")


def _call_rows(run: PipelineRun) -> list[dict[str, object]]:
    """Table rows, one per block: counted calls."""
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
