"""Ranks of one step as a report, side by side."""

from __future__ import annotations

from tests.view.report.read import figures_in, text_of


def test_ranks_stand_side_by_side_and_a_refused_one_has_no_peak() -> None:
    text = text_of("ranks")
    assert "Rank 1 holds most: at least 245.0 MiB, then refused" in text and "No file of rank 2." in text
    assert "<h2>Rank 1</h2>" in text and "The step held at least 245.0 MiB" in text and "149.0 MiB" in text
    figures = figures_in(text)
    lines = [trace.get("name") for trace in figures["ranks-over-the-step"]["data"]]
    assert {"rank 0", "rank 1"} <= set(lines)
    assert {name for trace in figures["peaks-of-the-ranks"]["data"] for name in trace["y"]} == {"rank 0", "rank 1"}
