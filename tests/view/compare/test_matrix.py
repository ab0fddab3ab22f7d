"""The matrix picture is tested by its data: every cell has its tile, its words and its row in the table."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from explorer.record.graph import ModelRef
from explorer.record.matrix import CellOutcome, DerivativeCell, DerivativeKind, DerivativeMatrix, Variant
from explorer.record.run import RunSpec
from explorer.view.compare.matrix import OUTCOME_COLOURS, VARIANT_TITLES, matrix_chart

SPEC = RunSpec(model=ModelRef(target="net.py"))
OUTCOMES = get_args(CellOutcome)


def matrix(*cells: DerivativeCell) -> DerivativeMatrix:
    return DerivativeMatrix(spec=SPEC, blocks=("1",), cells=cells)


def full() -> DerivativeMatrix:
    cells = [
        DerivativeCell(
            derivative=row, variant=column, outcome=OUTCOMES[(i + k) % len(OUTCOMES)],
            sentence="RuntimeError: <b>no</b>", n_tensors=8, n_equal=3, relative_norm=0.25, worst="w",
        )
        for i, row in enumerate(get_args(DerivativeKind)) for k, column in enumerate(get_args(Variant))
    ]  # fmt: skip
    return matrix(*cells)


def test_every_cell_has_a_tile_of_its_outcome() -> None:
    drawn = json.loads(matrix_chart(full()).figure.to_json())["data"][0]
    assert drawn["y"] == list(get_args(DerivativeKind))
    assert drawn["x"] == list(VARIANT_TITLES.values())
    for i in range(len(drawn["y"])):
        for k in range(len(drawn["x"])):
            assert drawn["z"][i][k] == (i + k) % len(OUTCOMES)


def test_words_say_what_colour_says() -> None:
    drawn = json.loads(matrix_chart(full()).figure.to_json())["data"][0]
    outcomes = {word.partition("<br>")[0].partition(",")[0] for row in drawn["text"] for word in row}
    assert outcomes == set(OUTCOMES)


def test_what_a_model_says_cannot_become_markup() -> None:
    drawn = json.loads(matrix_chart(full()).figure.to_json())["data"][0]
    assert all("<b>" not in text for row in drawn["customdata"] for text in row)
    assert all("<b>" not in text for row in drawn["text"] for text in row)


def test_each_outcome_has_a_colour_of_its_own() -> None:
    assert set(OUTCOME_COLOURS) == set(OUTCOMES)
    assert len(set(OUTCOME_COLOURS.values())) == len(OUTCOMES)


def test_the_table_twin_has_a_row_a_cell() -> None:
    rows = matrix_chart(full()).rows()
    assert len(rows) == len(full().cells)
    assert rows[0]["gradients equal"] == "3 of 8" and rows[0]["relative distance"] == 0.25
    raised = DerivativeCell(derivative="backward", variant="reentrant", outcome="raises", sentence="RuntimeError: no")
    assert matrix_chart(matrix(raised)).rows()[0]["gradients equal"] is None


def test_the_title_counts_equal_and_silent() -> None:
    cells = [
        DerivativeCell(derivative="backward", variant="keep", outcome="bitwise equal", sentence=""),
        DerivativeCell(derivative="backward", variant="recompute", outcome="bitwise equal", sentence=""),
        DerivativeCell(derivative="backward", variant="reentrant", outcome="different", sentence=""),
    ]
    subtitle = matrix_chart(matrix(*cells)).figure.layout.title.subtitle.text
    assert subtitle == "1 of 2 bitwise equal to keep, 1 different without an error"


@pytest.mark.parametrize("cells", [(), full().cells[:3]])
def test_partial_matrices_draw(cells: tuple[DerivativeCell, ...]) -> None:
    assert matrix_chart(matrix(*cells)).figure.layout.title.text
