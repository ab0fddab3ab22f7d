"""Cost of the recompute: FLOPs counted block by block, and time with its spread."""

from __future__ import annotations

import plotly.graph_objects as go

from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement, Samples, ratio_with_spread
from explorer.view.drawing.colours import GRID, KEEP, RECOMPUTE, RUN_COLOURS, translucent
from explorer.view.drawing.figure import BarSeries, Chart, add_bars, bars, empty, figure
from explorer.view.drawing.rows import NO_COSTS, WHOLE_MODEL, Row, chart_rows, row_sum, runs_of
from explorer.view.drawing.units import NOT_MEASURED, change, count, flop_axis, flops, milliseconds, percent

QUESTION = "Which blocks compute twice?"
SPREAD = GRID.replace("0.25", "1")
QUESTION_OF_TIME = "How long does each block take?"


def recompute_cost(comparison: Comparison) -> Chart:
    """Which blocks compute twice, counted."""
    return Chart(
        name="FLOPs by block",
        figure=_flops_picture(comparison),
        alt=f"Bars of the FLOPs of each block, forward and recompute, counted. {_answer(comparison)}.",
        rows=lambda: _flops_rows(comparison),
    )


def recompute_time(comparison: Comparison) -> Chart:
    """Chart of the measured time of each block."""
    return Chart(
        name="time by block",
        figure=_time_picture(comparison),
        alt=f"Bars of the milliseconds of each block, forward and recompute, with their spread. "
        f"{time_answer(comparison)}.",
        rows=lambda: _time_rows(comparison),
    )


def step_time(comparison: Comparison) -> Chart:
    """Whether the step is slower: every timed step by itself."""
    return Chart(
        name="timed steps",
        figure=_steps_picture(comparison),
        alt=f"One dot for each timed step of both runs. {time_answer(comparison)}.",
        rows=lambda: _step_rows(comparison),
    )


def _flops_picture(comparison: Comparison) -> go.Figure:
    """FLOPs of each block's forward, of its recompute, and what early stop skipped. Counted, not timed."""
    run = comparison.candidate
    rows = chart_rows(comparison.baseline, run)
    if not rows or run.forward_flops is None:
        return empty(QUESTION, NO_COSTS)
    fields = {"forward": "forward_flops", "recompute": "recompute_flops", "skipped by early stop": "skipped_flops"}
    lines = {name: [row_sum(run, row, field) for row in rows] for name, field in fields.items()}
    unit, unit_name = flop_axis(max(max(sum(column) for column in zip(*lines.values())), 1))
    looks = {
        "forward": (KEEP, "", ""),
        "recompute": (RECOMPUTE, "/", ""),
        "skipped by early stop": (translucent(RECOMPUTE, 0.2), "", RECOMPUTE),
    }
    fig = figure(QUESTION, _answer(comparison), height=150 + 24 * max(len(rows), 4))
    for name, line in lines.items():
        if any(line) or name == "forward":
            colour, pattern, edge = looks[name]
            series = BarSeries(
                name=name, lengths=[n / unit for n in line], figures=[flops(n) for n in line],
                colour=colour, pattern=pattern, edge=edge,
            )  # fmt: skip
            add_bars(fig, [row.label for row in rows], series)
    return bars(fig, f"{unit_name}, counted; without backward")


def _time_picture(comparison: Comparison) -> go.Figure:
    """Milliseconds of each block's forward and recompute in the candidate, half the quartile distance as error bar."""
    run = comparison.candidate
    rows = [row for row in chart_rows(comparison.baseline, run) if len(row.fqns) == 1]
    timed = [row for row in rows if _samples(run, row, "forward").ms]
    if not timed:
        return empty(QUESTION_OF_TIME, "Time per block was not measured in this run.")
    fig = figure(QUESTION_OF_TIME, time_answer(comparison), height=150 + 34 * max(len(timed), 4))
    for name, colour, shape in (("forward", KEEP, ""), ("recompute", RECOMPUTE, "/")):
        samples = [_samples(run, row, name) for row in timed]
        if any(sample.ms for sample in samples):
            series = BarSeries(
                name=name, lengths=[sample.median_ms for sample in samples], figures=list(map(milliseconds, samples)),
                colour=colour, pattern=shape,
            )  # fmt: skip
            ms = [sample.spread_ms for sample in samples]
            spread = {"type": "data", "array": ms, "thickness": 1.5, "color": SPREAD}
            add_bars(fig, [row.label for row in timed], series, error_x=spread)
    clock = run.times.clock if run.times else NOT_MEASURED
    return bars(fig, f"milliseconds, {clock}", mode="group")


def _steps_picture(comparison: Comparison) -> go.Figure:
    """Every timed step of both runs as a dot, in the order taken: the spread itself, not a summary of it."""
    question = "Is the step slower?"
    runs = runs_of(comparison)
    if not any(run.times and run.times.step.ms for run in runs.values()):
        return empty(question, "Step times were not measured.")
    fig = figure(question, time_answer(comparison), height=240)
    for name, run in runs.items():
        ms = list(run.times.step.ms) if run.times else []
        symbol = "circle-open" if name == "baseline" else "circle"
        fig.add_trace(
            go.Scatter(
                x=ms, y=[name] * len(ms), mode="markers", name=name, showlegend=False,
                customdata=list(range(1, len(ms) + 1)),
                marker={"color": RUN_COLOURS[name], "size": 10, "symbol": symbol, "opacity": 0.8},
                hovertemplate=f"{name}, timed step %{{customdata}}: %{{x:.2f}} ms",
            )
        )  # fmt: skip
    fig.update_yaxes(type="category", autorange="reversed")
    clock = next(run.times.clock for run in runs.values() if run.times)
    fig.update_xaxes(title={"text": f"milliseconds a step, {clock}"})
    return fig


def _flops_rows(comparison: Comparison) -> list[dict[str, object]]:
    """Every block of the candidate, FLOPs exact."""
    return [
        {
            "block": cost.fqn or WHOLE_MODEL,
            "ran again": cost.n_recompute,
            "forward (FLOP)": cost.forward_flops,
            "recompute (FLOP)": cost.recompute_flops,
            "skipped by early stop (FLOP)": cost.skipped_flops,
            "backward (FLOP)": cost.backward_flops,
        }
        for cost in comparison.candidate.blocks
    ]


def _time_rows(comparison: Comparison) -> list[dict[str, object]]:
    """Every block of the candidate, time with its spread."""
    before = comparison.baseline.by_fqn
    return [
        {
            "block": cost.fqn or WHOLE_MODEL,
            "forward": milliseconds(cost.forward),
            "recompute": milliseconds(cost.recompute) if cost.n_recompute else "not run",
            "baseline forward": milliseconds(before[cost.fqn].forward) if cost.fqn in before else NOT_MEASURED,
        }
        for cost in comparison.candidate.blocks
    ]


def _step_rows(comparison: Comparison) -> list[dict[str, object]]:
    """Every timed step of both runs, in the order taken."""
    return [
        {"run": name, "timed step": number, "step (ms)": ms, "clock": run.times.clock}
        for name, run in runs_of(comparison).items()
        if run.times is not None
        for number, ms in enumerate(run.times.step.ms, 1)
    ]


def uncounted_in_words(run: Measurement) -> str:
    """`FLOPs leave out aten._fft_r2c.default (4 calls): no formula is known`; the empty string: nothing is left out."""
    if not run.uncounted_ops:
        return ""
    named = [f"{name} ({count(n, 'call')})" for name, n in run.uncounted_ops.items()]
    return f"FLOPs leave out {', '.join(named)}: no formula is known, so the true figures are higher"


def ratio_inside_noise(candidate: Samples, baseline: Samples) -> bool:
    """Whether the paired ratios of an interleaved run do not tell candidate from baseline."""
    ratio = ratio_with_spread(candidate, baseline)
    return ratio is None or abs(ratio[0] - 1) <= ratio[1]


def time_answer(comparison: Comparison) -> str:
    """A sentence on the step time of both runs. The sentence ranks the runs only if the spread separates them."""
    base, cand = comparison.baseline.times, comparison.candidate.times
    if base is None or cand is None:
        return f"step time {NOT_MEASURED}"
    ratio = ratio_with_spread(cand.step, base.step)
    figures = f"{milliseconds(base.step)} to {milliseconds(cand.step)} a step"
    if ratio is None:
        return figures
    if ratio_inside_noise(cand.step, base.step):
        return f"{figures}; the difference is inside the noise"
    return f"{figures}, ×{ratio[0]:.2f} ± {ratio[1]:.2f}"


def _answer(comparison: Comparison) -> str:
    extra = change(comparison.baseline.total_flops, comparison.candidate.total_flops)
    return f"{percent(extra, signed=True)} FLOPs in the step" if extra else f"{percent(extra)} more FLOPs in the step"


def _samples(run: Measurement, row: Row, name: str) -> Samples:
    cost = run.by_fqn.get(row.fqns[0])
    return Samples() if cost is None else cost.forward if name == "forward" else cost.recompute
