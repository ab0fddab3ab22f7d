"""The child's side of cell_process.py: runs the cells that it is asked for, one line a cell."""

from __future__ import annotations

import os

from explorer.engine.derivatives.bench import CellBench
from explorer.engine.model.load import load_for
from explorer.record.base import Record, from_json, to_json
from explorer.record.matrix import DerivativeKind, Variant
from explorer.record.run import RunSpec


class CellRequest(Record):
    """What the child is to do."""

    spec: RunSpec
    variant: Variant
    derivatives: tuple[DerivativeKind, ...]


def run_cells(request_json: bytes, answers: int) -> None:
    """`answers` is the pipe to whoever asked."""
    request = from_json(request_json, CellRequest)
    bench = CellBench(request.spec, load_for(request.spec))
    for derivative in request.derivatives:
        os.write(answers, to_json(bench.cell(derivative, request.variant)) + b"\n")
