"""An arena as a report: peak against time of every planner, who could not run, and the table of all bouts."""

from __future__ import annotations

from explorer.record.arena import Arena
from explorer.view.compare.arena import arena_chart, beaten_sentence
from explorer.view.drawing.units import mib
from explorer.view.report.html import paragraph, picture, section, table
from explorer.view.report.parts import ReportOf, environment, model_in_words, page, whereabouts


def arena_report(of: ReportOf, arena: Arena) -> str:
    """The file's text."""
    chart = arena_chart(arena)
    parts = {
        "Bouts": section("Bouts", [picture(chart), table(chart.rows())]),
        "Environment": section("Environment", environment(arena.environment, arena.spec)),
    }
    origin = "measured" if arena.ground.is_measured else "predicted from a run with recompute"
    head = [
        whereabouts(of, model_in_words(arena.spec), arena.environment),
        paragraph(f"Everything kept holds {mib(arena.ground.peak_bytes)} ({origin}); budgets are shares of that."),
        paragraph(beaten_sentence(arena)),
    ]
    return page(of, head, parts)
