"""Cost of the recompute: FLOPs counted block by block, and time with its spread."""

from __future__ import annotations

from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement, Samples, ratio_with_spread
from explorer.view.drawing.colours import GRID, KEEP, RECOMPUTE, RUN_COLOURS, translucent
from explorer.view.drawing.figure import BarSeries, Chart, add_bars, bars, empty, figure
from explorer.view.drawing.rows import NO_COSTS, WHOLE_MODEL, chart_rows, row_sums, runs_of
from explorer.view.drawing.units import NOT_MEASURED, change, count, flop_axis, flops, milliseconds, percent, time_ratio

SPREAD = GRID.replace("0.25", "1")
LOOKS = {
    "forward": (KEEP, "", ""),
    "recompute": (RECOMPUTE, "/", ""),
    "skipped by early stop": (translucent(RECOMPUTE, 0.2), "", RECOMPUTE),
}
"""Colour, pattern and edge of the parts of a block's cost."""


def recompute_cost(comparison: Comparison) -> Chart:
    """Chart of the FLOPs of each block's forward, of its recompute, and of what early stop skipped: counted, not
    timed."""
    run, question = comparison.candidate, "Which blocks compute twice?"
    extra = change(comparison.baseline.total_flops, run.total_flops)
    answer = f"{percent(extra, signed=True)} FLOPs in the step" if extra else f"{percent(extra)} more FLOPs in the step"
    rows = chart_rows(comparison.baseline, run)
    fig = empty(question, NO_COSTS)
    if rows and run.forward_flops is not None:
        fields = ("forward_flops", "recompute_flops", "skipped_flops")
        lines = dict(zip(LOOKS, (row_sums(run, rows, field) for field in fields)))
        unit, unit_name = flop_axis(max(*map(sum, zip(*lines.values())), 1))
        fig = figure(question, answer, height=150 + 24 * max(len(rows), 4))
        for name, line in lines.items():
            if any(line) or name == "forward":
                colour, pattern, edge = LOOKS[name]
                series = BarSeries(
                    name=name, lengths=[n / unit for n in line], figures=list(map(flops, line)),
                    colour=colour, pattern=pattern, edge=edge,
                )  # fmt: skip
                add_bars(fig, [row.label for row in rows], series)
        bars(fig, f"{unit_name}, counted; without backward")
    return Chart(
        name="FLOPs by block",
        figure=fig,
        alt=f"Bars of the FLOPs of each block, forward and recompute, counted. {answer}.",
        rows=lambda: [
            {
                "block": cost.fqn or WHOLE_MODEL,
                "ran again": cost.n_recompute,
                "forward (FLOP)": cost.forward_flops,
                "recompute (FLOP)": cost.recompute_flops,
                "skipped by early stop (FLOP)": cost.skipped_flops,
                "backward (FLOP)": cost.backward_flops,
            }
            for cost in run.blocks
        ],
    )


def recompute_time(comparison: Comparison) -> Chart:
    """Chart of the milliseconds of each block's forward and recompute in the candidate, half the distance between the
    quartiles as error bar."""
    run, question, before = comparison.candidate, "How long does each block take?", comparison.baseline.by_fqn
    costs = {
        row.label: run.by_fqn.get(row.fqns[0]) for row in chart_rows(comparison.baseline, run) if len(row.fqns) == 1
    }
    timed = {label: cost for label, cost in costs.items() if cost is not None and cost.forward.ms}
    fig = empty(question, "Time per block was not measured in this run.")
    if timed:
        fig = figure(question, time_answer(comparison), height=150 + 34 * max(len(timed), 4))
        for name in ("forward", "recompute"):
            samples: list[Samples] = [getattr(cost, name) for cost in timed.values()]
            if any(sample.ms for sample in samples):
                colour, pattern, _ = LOOKS[name]
                series = BarSeries(
                    name=name, lengths=[sample.median_ms for sample in samples],
                    figures=list(map(milliseconds, samples)), colour=colour, pattern=pattern,
                )  # fmt: skip
                ms = [sample.spread_ms for sample in samples]
                spread = {"type": "data", "array": ms, "thickness": 1.5, "color": SPREAD}
                add_bars(fig, list(timed), series, error_x=spread)
        bars(fig, f"milliseconds, {run.times.clock if run.times else NOT_MEASURED}", mode="group")
    return Chart(
        name="time by block",
        figure=fig,
        alt=f"Bars of the milliseconds of each block, forward and recompute, with their spread. "
        f"{time_answer(comparison)}.",
        rows=lambda: [
            {
                "block": cost.fqn or WHOLE_MODEL,
                "forward": milliseconds(cost.forward),
                "recompute": milliseconds(cost.recompute) if cost.n_recompute else "not run",
                "baseline forward": milliseconds(before[cost.fqn].forward) if cost.fqn in before else NOT_MEASURED,
            }
            for cost in run.blocks
        ],
    )


def step_time(comparison: Comparison) -> Chart:
    """Chart of every timed step of both runs as a dot, in the order taken: the spread itself, not a summary of it."""
    question = "Is the step slower?"
    timed = {name: run.times for name, run in runs_of(comparison).items() if run.times is not None}
    fig = empty(question, "Step times were not measured.")
    if any(times.step.ms for times in timed.values()):
        fig = figure(question, time_answer(comparison), height=240)
        for name, times in timed.items():
            ms = list(times.step.ms)
            symbol = "circle-open" if name == "baseline" else "circle"
            fig.add_scatter(
                x=ms, y=[name] * len(ms), mode="markers", name=name, showlegend=False,
                customdata=list(range(1, len(ms) + 1)),
                marker={"color": RUN_COLOURS[name], "size": 10, "symbol": symbol, "opacity": 0.8},
                hovertemplate=f"{name}, timed step %{{customdata}}: %{{x:.2f}} ms",
            )  # fmt: skip
        fig.update_yaxes(type="category", autorange="reversed")
        fig.update_xaxes(title_text=f"milliseconds a step, {next(iter(timed.values())).clock}")
    return Chart(
        name="timed steps",
        figure=fig,
        alt=f"One dot for each timed step of both runs. {time_answer(comparison)}.",
        rows=lambda: [
            {"run": name, "timed step": number, "step (ms)": ms, "clock": times.clock}
            for name, times in timed.items()
            for number, ms in enumerate(times.step.ms, 1)
        ],
    )


def uncounted_in_words(run: Measurement) -> str:
    """`FLOPs leave out aten._fft_r2c.default (4 calls): no formula is known`; the empty string: nothing is left out."""
    if not run.uncounted_ops:
        return ""
    named = [f"{name} ({count(n, 'call')})" for name, n in run.uncounted_ops.items()]
    return f"FLOPs leave out {', '.join(named)}: no formula is known, so the true figures are higher"


def doubt_of_ratio(candidate: Samples, baseline: Samples) -> str:
    """The reason why paired step times do not show which run is faster; empty if the step times show it.

    The median ratio lies within its spread, or the pairs disagree. The spread of five pairs can be small by chance.
    """
    ratio, pairs = ratio_with_spread(candidate, baseline), list(zip(candidate.ms, baseline.ms))
    if ratio is None or abs(ratio[0] - 1) <= ratio[1]:
        return "inside the noise"
    agree = all(new > old for new, old in pairs) or all(new < old for new, old in pairs)
    return "" if agree else "not in every pair of steps"


def time_answer(comparison: Comparison) -> str:
    """A sentence on the step time of both runs. The sentence ranks the runs only if the spread separates them."""
    base, cand = comparison.baseline.times, comparison.candidate.times
    if base is None or cand is None:
        return f"step time {NOT_MEASURED}"
    ratio = ratio_with_spread(cand.step, base.step)
    figures = f"{milliseconds(base.step)} to {milliseconds(cand.step)} a step"
    if ratio is None:
        return figures
    if doubt := doubt_of_ratio(cand.step, base.step):
        return f"{figures}; the difference is {doubt}"
    return f"{figures}, {time_ratio(*ratio)}"
