"""The report of every kind of run: one HTML page that needs no server."""

from __future__ import annotations

from explorer.record.measurement import RecordedRanks
from explorer.record.pipeline_run import PipelineRun
from explorer.view.report.one_or_two import run_report
from explorer.view.report.parts import ReportOf
from explorer.view.report.pipeline import pipeline_report
from explorer.view.report.ranks import ranks_report


def report_text(of: ReportOf) -> str:
    """Text of the HTML file: plotly.js (5 MB), and about 1 MB of figures for a small model."""
    match of.run:
        case PipelineRun():
            return pipeline_report(of, of.run)
        case RecordedRanks():
            return ranks_report(of, of.run)
        case _:
            return run_report(of, of.run)
