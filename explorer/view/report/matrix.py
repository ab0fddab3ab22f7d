"""The derivative matrix as a report: the grid, and what happened in each cell in words."""

from __future__ import annotations

from explorer.plan.names import some
from explorer.record.matrix import DerivativeMatrix
from explorer.view.compare.matrix import matrix_chart
from explorer.view.report.html import paragraph, picture, section, table
from explorer.view.report.parts import ReportOf, environment, model_in_words, page, whereabouts


def matrix_report(of: ReportOf, matrix: DerivativeMatrix) -> str:
    """The file's text."""
    chart = matrix_chart(matrix)
    parts = {
        "Outcomes": section("Outcomes", [picture(chart)]),
        "Cells": section("Cells", [table(chart.rows())]),
        "Environment": section("Environment", environment(None, matrix.spec)),
    }
    head = [
        whereabouts(of, model_in_words(matrix.spec), None),
        paragraph(f"Recomputed in three ways: {some(matrix.blocks)}. Every cell is a real run, held against keep."),
    ]
    return page(of, head, parts)
