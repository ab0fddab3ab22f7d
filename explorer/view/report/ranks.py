"""Ranks of one recorded step as a report: side by side, then the fullest one as a run by itself."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.record.measurement import RecordedRanks
from explorer.view.memory.ranks import rank_rows, ranks_at_peak, ranks_over_time, spread_of_ranks
from explorer.view.report.html import drawn, paragraph, picture, section, table
from explorer.view.report.one_or_two import hazards_said, memory_of_one
from explorer.view.report.parts import ReportOf, environment, failures_said, page, whereabouts
from explorer.view.words.policy import in_words


def ranks_report(of: ReportOf, ranks: RecordedRanks) -> str:
    """The file's text."""
    full = ranks.fullest
    fullest = f"Rank {full.rank}"
    parts = {
        "Ranks": section("Ranks", _side_by_side(ranks)),
        fullest: section(fullest, memory_of_one(full, of.known_graph)),
        "Hazards": section("Hazards", hazards_said(of)),
        "Environment": section("Environment", environment(full.environment, full.spec, full)),
    }
    return page(of, _head(of, ranks), parts)


def _head(of: ReportOf, ranks: RecordedRanks) -> Iterator[str]:
    yield whereabouts(of, f"recorded in {ranks.recorded_in}", ranks.fullest.environment)
    yield paragraph(f"Policy: {in_words(ranks.fullest.spec.policy)}.")
    yield paragraph(spread_of_ranks(ranks))
    yield from failures_said(run.failure for run in ranks.ranks)


def _side_by_side(ranks: RecordedRanks) -> Iterator[str]:
    yield picture(ranks_over_time(ranks))
    yield drawn(ranks_at_peak(ranks))
    yield table(rank_rows(ranks))
