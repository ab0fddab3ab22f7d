"""Cells of the derivative matrix in a process of their own, because a reentrant backward can end the interpreter.

    this process  ── spec, variant, derivatives ──▶  cell.py, forked from a clean process (forks.py)
                  ◀── one line of JSON a finished cell ──

A child that dies is replaced, and goes on behind the cell that killed it. A child that was killed from outside says
nothing about its cell: the cell is run again, and is "not run" where that happens twice.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO

from explorer.child_process.forks import at_hand, server_is_gone
from explorer.engine.derivatives.cell import CellRequest, run_cells
from explorer.record.base import from_json, to_json
from explorer.record.matrix import CellOutcome, DerivativeCell, DerivativeKind, Variant
from explorer.record.run import RunSpec

_POLL_S = 0.25
_FROM_OUTSIDE = (None, *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
"""Ends that no reentrant backward brings about; None: the fork server is gone."""
_MOST_TRIES = 2


def cells_apart(
    spec: RunSpec, variant: Variant, derivatives: tuple[DerivativeKind, ...], alive: Callable[[], None]
) -> Iterator[DerivativeCell]:
    """One cell a derivative, in order. `alive` is called while waiting and may raise to end it all."""
    left, n_tries = list(derivatives), 0
    while left:
        with _Child(CellRequest(spec=spec, variant=variant, derivatives=tuple(left))) as child:
            for cell in child.cells(spec.time_limit_s, alive):
                left.pop(0)
                n_tries = 0
                yield cell
            n_tries += 1
            if not left or (child.killed and n_tries < _MOST_TRIES):
                continue
            outcome: CellOutcome = "not run" if child.timed_out or child.killed else "crashes"
            yield DerivativeCell(derivative=left.pop(0), variant=variant, outcome=outcome, sentence=child.last_words())
            n_tries = 0


class _Child:
    def __init__(self, request: CellRequest) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._request = request
        answers, voice = os.pipe()
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._process = at_hand().start(
            run_cells, to_json(request), files=[voice], errors=self._stderr.fileno(), needs=["torch._dynamo"]
        )
        os.close(voice)
        self.timed_out = False

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.close()
        self._answers.close()
        self._stderr.close()

    @property
    def killed(self) -> bool:
        """Ended neither by the cell nor by its time limit."""
        return not self.timed_out and self._process.code in _FROM_OUTSIDE

    def cells(self, time_limit_s: float, alive: Callable[[], None]) -> Iterator[DerivativeCell]:
        """Until the child is done, dead or out of time."""
        answered, deadline = bytearray(), time.monotonic() + time_limit_s
        while time.monotonic() < deadline:
            over = self._process.ended  # asked first: what it said before that is in the pipe
            ready, _, _ = select.select([self._answers], [], [], 0 if over else _POLL_S)
            if not ready:
                alive()
            chunk = self._answers.read(65_536) if ready else b""
            answered += chunk
            while (end := answered.find(b"\n")) >= 0:
                yield from_json(bytes(answered[:end]), DerivativeCell)
                del answered[: end + 1]
            if over and not chunk:
                return
            if ready and not chunk:
                self._process.wait(_POLL_S)
        self.timed_out = True

    def last_words(self) -> str:
        """How it ended, in one sentence."""
        if self.timed_out:
            return f"no answer within {self._request.spec.time_limit_s:g} s"
        code = self._process.code
        if code is None:
            return server_is_gone().sentence
        if code < 0:
            again = ", twice; the cell itself was not found out" if self.killed else ""
            return f"ended the process by {signal.Signals(-code).name}{again}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended the process with exit code {code}: {lines[-1] if lines else 'it said nothing'}"
