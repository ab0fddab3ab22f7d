"""Cells of the derivative matrix in a process of their own, because a reentrant backward can end the interpreter.

    this process  ── spec, variant, derivatives ──▶  cell.py, forked from a clean process (forks.py)
                  ◀── one line of JSON a finished cell ──

A child that dies is replaced, and goes on behind the cell that killed it. A child that was killed from outside says
nothing about its cell: the cell is run again, and is "not run" where that happens twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from explorer.child_process.answering import Answering
from explorer.engine.derivatives.cell import CellRequest, run_cells
from explorer.record.base import from_json, to_json
from explorer.record.matrix import CellOutcome, DerivativeCell, DerivativeKind, Variant
from explorer.record.run import RunSpec

_MOST_TRIES = 2


def cells_apart(
    spec: RunSpec, variant: Variant, derivatives: tuple[DerivativeKind, ...], alive: Callable[[], None]
) -> Iterator[DerivativeCell]:
    """One cell a derivative, in order. `alive` is called while waiting and may raise to end it all."""
    left, n_tries = list(derivatives), 0
    while left:
        request = CellRequest(spec=spec, variant=variant, derivatives=tuple(left))
        with Answering(run_cells, to_json(request)) as child:
            for line in child.lines(time.monotonic() + spec.time_limit_s, alive):
                left.pop(0)
                n_tries = 0
                yield from_json(line, DerivativeCell)
            n_tries += 1
            if not left or (child.killed and n_tries < _MOST_TRIES):
                continue
            outcome: CellOutcome = "not run" if child.timed_out or child.killed else "crashes"
            sentence = _last_words(child, spec.time_limit_s)
            yield DerivativeCell(derivative=left.pop(0), variant=variant, outcome=outcome, sentence=sentence)
            n_tries = 0


def _last_words(child: Answering, time_limit_s: float) -> str:
    """How it ended, in one sentence."""
    if child.timed_out:
        return f"no answer within {time_limit_s:g} s"
    return f"not found out in {_MOST_TRIES} tries: {child.ending()}" if child.killed else child.ending()
