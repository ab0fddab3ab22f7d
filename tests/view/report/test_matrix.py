"""The derivative matrix as a report: each cell a tile with its word."""

from __future__ import annotations

from tests.view.report.kinds import matrix
from tests.view.report.read import NAMES, boxes, drawn


def test_every_cell_of_the_matrix_is_a_tile_with_its_word() -> None:
    tree = drawn("matrix", "derivatives-and-checkpointing")
    words = [" ".join(text.itertext()) for text in tree.iter(f"{NAMES}text")]
    assert len(boxes(tree)) == len(matrix().cells)
    assert "bitwise equal" in words and any("Error" in word for word in words)
