"""Every kind of run as one page for somebody else, and all of its charts."""

from __future__ import annotations

from explorer.record.arena import Arena
from explorer.record.matrix import DerivativeMatrix
from explorer.record.pipeline_run import PipelineRun
from explorer.record.ranks import RecordedRanks
from explorer.view.compare.arena import arena_chart
from explorer.view.compare.matrix import matrix_chart
from explorer.view.drawing.chart import Chart
from explorer.view.memory.ranks import ranks_at_peak, ranks_over_time
from explorer.view.report.arena import arena_report
from explorer.view.report.matrix import matrix_report
from explorer.view.report.one_or_two import run_charts, run_report
from explorer.view.report.parts import Reported, ReportOf
from explorer.view.report.pipeline import pipeline_charts, pipeline_report
from explorer.view.report.ranks import ranks_report


def report_text(of: ReportOf) -> str:
    """The file's text: no network, at most two megabytes."""
    match of.run:
        case PipelineRun():
            return pipeline_report(of, of.run)
        case DerivativeMatrix():
            return matrix_report(of, of.run)
        case Arena():
            return arena_report(of, of.run)
        case RecordedRanks():
            return ranks_report(of, of.run)
        case _:
            return run_report(of, of.run)


def charts_of(run: Reported) -> dict[str, Chart]:
    """Every chart of a run by the name of its file, in the order of the report."""
    match run:
        case PipelineRun():
            charts = pipeline_charts(run)
        case DerivativeMatrix():
            charts = [matrix_chart(run)]
        case Arena():
            charts = [arena_chart(run)]
        case RecordedRanks():
            charts = [ranks_over_time(run), ranks_at_peak(run)]
        case _:
            return run_charts(run)
    return {chart.name.replace(" ", "-"): chart for chart in charts}
