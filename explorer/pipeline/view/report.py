"""The report of a pipeline's run."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.pipeline.record.step import PipelineRun
from explorer.pipeline.view.gantt import gantt, link_table, rank_table
from explorer.pipeline.view.headline import figures
from explorer.pipeline.view.results import bands_chart, calls_chart, memory_chart, truth_chart, truth_table
from explorer.view.drawing.units import count
from explorer.view.report.html import drawn, folded, paragraph, table
from explorer.view.report.report import (
    ReportOf,
    circumstances,
    environment,
    failure_boxes,
    figure_card,
    hazard_section,
    model_in_words,
    page,
)
from explorer.view.text.plan import in_words


def pipeline_report(of: ReportOf, run: PipelineRun) -> str:
    """The file's text."""
    predicted = run.predicted.memory if run.predicted is not None else ()
    memory = (bands_chart(run.memory), memory_chart(run.memory, predicted)) if run.memory else ()
    parts = {
        "Schedule": _schedule(run),
        "Memory": map(drawn, memory),
        "Gradients": _gradients(run),
        "Calls": [drawn(calls_chart(run))] if run.blocks else [],
        "Hazards": hazard_section(of),
        "Environment": environment(run.environment, run.spec),
    }
    return page(of, _head(of, run), parts)


def _head(of: ReportOf, run: PipelineRun) -> Iterator[str]:
    yield circumstances(of, model_in_words(run.spec), run.environment)
    plan = run.spec.plan
    if plan is not None:
        yield paragraph(f"Schedule: {plan.schedule_name}.")
    yield paragraph(f"Policy: {in_words(run.spec.policy)}.")
    yield f'<div class="cards">{"".join(map(figure_card, figures(run, None, plan, before=None)))}</div>'
    yield from failure_boxes([run.failure])
    yield from map(paragraph, run.notes)


def _schedule(run: PipelineRun) -> Iterator[str]:
    if run.timing is None:
        return
    yield drawn(gantt(run.timing, run.predicted))
    yield table(rank_table(run.timing, run.predicted))
    if run.wall is not None:
        yield folded("waits for transfers", link_table(run.wall, run.stages))


def _gradients(run: PipelineRun) -> Iterator[str]:
    if not run.gradients:
        return
    yield drawn(truth_chart(run))
    moved = [row for row in truth_table(run) if row["splitting"] != "0 (bitwise)"]
    yield folded(f"moved by splitting: {count(len(moved), 'tensor')}", moved)


REPORTS = {PipelineRun: pipeline_report}
