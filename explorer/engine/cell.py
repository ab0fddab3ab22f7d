"""The child's side of cell_process.py: `python -m explorer.engine.cell` runs the cells it reads from stdin."""

from __future__ import annotations

import os
import sys
import threading

from explorer.engine.cell_process import CellRequest
from explorer.engine.load import load
from explorer.engine.matrix import Bench
from explorer.record.base import from_json, to_json


def main() -> None:
    """One request in, one line a cell out. What a model prints goes to stderr."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = from_json(sys.stdin.buffer.readline(), CellRequest)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    bench = Bench(request.spec, load(request.spec.model, seed=request.spec.seed))
    for derivative in request.derivatives:
        answers.write(to_json(bench.cell(derivative, request.variant)) + b"\n")
        answers.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
