"""Ranks of one step as a report, side by side."""

from __future__ import annotations

from tests.view.report.kinds import ranks
from tests.view.report.read import NAMES, boxes, drawn, text_of


def test_ranks_stand_side_by_side_and_a_refused_one_has_no_peak() -> None:
    text = text_of("ranks")
    assert "Rank 1 holds most: at least 245.0 MiB, then refused" in text and "No file of rank 2." in text
    assert "<h2>Rank 1</h2>" in text and "The step held at least 245.0 MiB" in text and "149.0 MiB" in text
    lines = drawn("ranks", "ranks-over-the-step")
    words = ["".join(part.itertext()) for part in lines.iter(f"{NAMES}text")]
    assert {"rank 0", "rank 1"} <= set(words)
    assert len(boxes(drawn("ranks", "peaks-of-the-ranks"))) >= 2 * len(ranks().ranks)
