"""A cell of the matrix is found by its row and column."""

from __future__ import annotations

import pytest

from explorer.record.matrix import DerivativeCell
from tests.engine.derivatives.nets import spec


def test_a_cell_that_was_left_out_is_a_key_error() -> None:
    from explorer.record.matrix import DerivativeMatrix

    cell = DerivativeCell(derivative="backward", variant="keep", outcome="bitwise equal", sentence="")
    matrix = DerivativeMatrix(spec=spec("dropout"), blocks=("1",), cells=(cell,))
    assert matrix.cell("backward", "keep") is cell
    with pytest.raises(KeyError):
        matrix.cell("backward", "selective")
