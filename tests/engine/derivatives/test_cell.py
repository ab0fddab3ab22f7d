"""The child answers in lines, one a derivative, in the order that was asked."""

from __future__ import annotations

import os

from explorer.engine.derivatives.cell import CellRequest, run_cells
from explorer.record.base import from_json, to_json
from explorer.record.matrix import DerivativeCell
from tests.engine.derivatives.nets import spec


def test_one_line_a_derivative() -> None:
    request = CellRequest(spec=spec("plain", ("1",)), variant="recompute", derivatives=("eval mode", "backward"))
    ear, voice = os.pipe()
    run_cells(to_json(request), voice)
    os.close(voice)
    with os.fdopen(ear, "rb") as file:
        cells = [from_json(line, DerivativeCell) for line in file]
    assert [(cell.derivative, cell.variant, cell.outcome) for cell in cells] == [
        ("eval mode", "recompute", "bitwise equal"),
        ("backward", "recompute", "bitwise equal"),
    ]
