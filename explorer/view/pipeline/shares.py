"""Effects of splitting on the step: the cause of each difference of gradients, and the number of runs of blocks."""

from __future__ import annotations

from typing import get_args

from explorer.record.comparison import TensorDiff, Verdict
from explorer.record.pipeline import BufferShares, GradientShares, PipelineRun, Share
from explorer.view.drawing.colours import VERDICT_COLOURS, stage_colour
from explorer.view.drawing.figure import Chart, bars, empty, figure, hatch
from explorer.view.drawing.units import count

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
    for verdict, pattern in PATTERNS.items():
        counts = [sum(getattr(g, share).verdict == verdict for g in run.gradients) for share in SHARES]
        if any(counts):
            # Fainter than elsewhere, as a number is written on the bar.
            faint = {**hatch(pattern), "fgcolor": "rgba(255, 255, 255, 0.3)"}
            fig.add_bar(
                orientation="h", name=verdict, y=[f"moved by {share}?" for share in SHARES], x=counts,
                text=[str(c) if c else "" for c in counts], textposition="inside", textangle=0,
                insidetextanchor="middle", marker={"color": VERDICT_COLOURS[verdict], "pattern": faint},
                hovertemplate=f"%{{y}} {verdict}: %{{x}} gradients",
            )  # fmt: skip
    equal = [f"{share} {sum(getattr(g, share).bitwise for g in run.gradients)} of {n}" for share in SHARES]
    return Chart(
        name="gradients by cause",
        figure=bars(fig, "gradients") if n else fig,
        alt=f"Bars of the gradients that each step left equal in every bit: {', '.join(equal)}.",
        rows=lambda: truth_table(run),
    )


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


def _distance(diff: TensorDiff) -> str:
    if diff.bitwise:
        return "0 (bitwise)"
    if diff.presence != "both":
        return ABSENT[diff.presence]
    if diff.relative_norm is None:
        return f"no distance ({diff.verdict})"
    return f"{diff.relative_norm:.2g} ({diff.verdict})"
