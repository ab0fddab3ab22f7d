"""A pipelined run as a report: the schedule, memory by rank, what moved the gradients, how often blocks ran."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.record.pipeline_run import PipelineRun
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.units import count
from explorer.view.pipeline.gantt import gantt, link_table, rank_table
from explorer.view.pipeline.headline import Figure, figures
from explorer.view.pipeline.ranks import against_chart, bands_chart, rank_chart
from explorer.view.pipeline.shares import calls_chart, truth_chart, truth_table
from explorer.view.report.html import card, drawn, folded, paragraph, section, table
from explorer.view.report.one_or_two import hazards_said
from explorer.view.report.parts import ReportOf, environment, failures_said, model_in_words, page, whereabouts
from explorer.view.words.policy import in_words

MOST_RANKS = 8
"""Ranks whose memory over the step is drawn: those that hold most. The bars show all."""


def pipeline_report(of: ReportOf, run: PipelineRun) -> str:
    """The file's text."""
    parts = {
        "Schedule": section("Schedule", _schedule(run)),
        "Memory": section("Memory", _memory(run)),
        "Gradients": section("Gradients", _gradients(run)),
        "Calls": section("Calls", [drawn(calls_chart(run))] if run.blocks else []),
        "Hazards": section("Hazards", hazards_said(of)),
        "Environment": section("Environment", environment(run.environment, run.spec)),
    }
    return page(of, _head(of, run), parts)


def _head(of: ReportOf, run: PipelineRun) -> Iterator[str]:
    yield whereabouts(of, model_in_words(run.spec), run.environment)
    plan = run.spec.plan
    if plan is not None:
        yield paragraph(f"Schedule: {plan.schedule_name}.")
    yield paragraph(f"Policy: {in_words(run.spec.policy)}.")
    yield f'<div class="cards">{"".join(map(_card, figures(run, None, plan, before=None)))}</div>'
    yield from failures_said([run.failure])
    yield from map(paragraph, run.notes)


def _card(figure: Figure) -> str:
    tooltip = figure.help.replace("**", "")
    return card(figure.label, figure.value, tooltip, [(figure.delta, ""), (figure.origin, "quiet")])


def _schedule(run: PipelineRun) -> Iterator[str]:
    if run.timing is None:
        return
    yield drawn(gantt(run.timing, run.predicted))
    yield table(rank_table(run.timing, run.predicted))
    if run.wall is not None:
        yield folded("waits for transfers", link_table(run.wall, run.stages))


def _memory(run: PipelineRun) -> Iterator[str]:
    if not run.memory:
        return
    yield drawn(bands_chart(run.memory))
    if run.predicted is not None and run.predicted.memory:
        yield drawn(against_chart(run))
    yield from map(drawn, _of_ranks(run))


def _of_ranks(run: PipelineRun) -> list[Chart]:
    fullest = sorted(run.memory, key=lambda one: -(one.device_bytes or 0))[:MOST_RANKS]
    predicted = run.predicted.memory if run.predicted is not None else ()
    return [rank_chart(one, predicted) for one in sorted(fullest, key=lambda one: one.rank)]


def _gradients(run: PipelineRun) -> Iterator[str]:
    if not run.gradients:
        return
    yield drawn(truth_chart(run))
    moved = [row for row in truth_table(run) if row["splitting"] != "0 (bitwise)"]
    yield folded(f"moved by splitting: {count(len(moved), 'tensor')}", moved)
