"""The derivative matrix is computed: known outcomes come out, and a run that ends its process is a cell."""

from __future__ import annotations

import pytest

from explorer.engine.derivatives.matrix import VARIANTS, derivative_matrix, with_units
from explorer.engine.derivatives.ways import DERIVATIVES
from explorer.engine.model.describe import describe
from explorer.record.progress import Progress, silent
from tests.engine.derivatives.nets import spec


@pytest.mark.slow
def test_the_whole_matrix() -> None:
    heard: list[Progress] = []
    asked = spec("dropout", ("1",))
    matrix = derivative_matrix(asked, heard.append)
    assert [(cell.derivative, cell.variant) for cell in matrix.cells] == [
        (derivative, variant) for derivative in DERIVATIVES for variant in VARIANTS
    ]
    assert matrix.blocks == ("1",)
    assert matrix.cell("backward", "keep").outcome == "bitwise equal"
    assert matrix.cell("Hessian-vector product", "reentrant").outcome == "different"
    assert heard[-1].done == heard[-1].total == len(matrix.cells)


def test_without_units_the_repeats_are_taken() -> None:
    asked = spec("plain", ())
    assert with_units(asked, silent).policy.blocks == describe(asked.model).repeats != ()
    assert with_units(spec("plain", ("2",)), silent).policy.blocks == ("2",)
