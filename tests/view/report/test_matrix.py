"""The derivative matrix as a report: each cell a tile with its word."""

from __future__ import annotations

from tests.view.report.read import figures_in, text_of


def test_every_cell_of_the_matrix_is_a_tile_with_its_word() -> None:
    text = text_of("matrix")
    assert "derivatives-and-checkpointing" in figures_in(text)
    assert "bitwise equal" in text and "RuntimeError: &lt;b&gt;no&lt;/b&gt;" in text
