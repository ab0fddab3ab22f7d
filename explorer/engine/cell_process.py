"""Cells of the derivative matrix in a process of their own, because a reentrant backward can end the interpreter.

    parent  ── one line of JSON: spec, variant, derivatives ──▶  python -m explorer.engine.cell
            ◀── one line of JSON a finished cell ──────────────

A child that dies is replaced, and goes on behind the cell that killed it. A child whose parent dies ends itself.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import explorer
from explorer.record.base import Record, from_json, to_json
from explorer.record.matrix import CellOutcome, DerivativeCell, DerivativeKind, Variant
from explorer.record.run import RunSpec

_POLL_S = 0.25


class CellRequest(Record):
    """What the child is to do."""

    spec: RunSpec
    variant: Variant
    derivatives: tuple[DerivativeKind, ...]


def cells_apart(
    spec: RunSpec, variant: Variant, derivatives: tuple[DerivativeKind, ...], alive: Callable[[], None]
) -> Iterator[DerivativeCell]:
    """One cell a derivative, in order. `alive` is called while waiting and may raise to end it all."""
    left = list(derivatives)
    while left:
        n_left = len(left)
        with _Child(CellRequest(spec=spec, variant=variant, derivatives=tuple(left))) as child:
            for cell in child.cells(spec.time_limit_s, alive):
                left.pop(0)
                yield cell
            if left:
                outcome: CellOutcome = "crashes" if child.died else "not run"
                yield DerivativeCell(
                    derivative=left.pop(0), variant=variant, outcome=outcome, sentence=child.last_words()
                )
        assert len(left) < n_left


class _Child:
    def __init__(self, request: CellRequest) -> None:
        root = str(Path(explorer.__file__).resolve().parent.parent)
        path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH")) if entry)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "explorer.engine.cell"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._request = request
        self.timed_out = False

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()

    @property
    def died(self) -> bool:
        """Ended by itself before it was done."""
        return not self.timed_out

    def cells(self, time_limit_s: float, alive: Callable[[], None]) -> Iterator[DerivativeCell]:
        """Until the child is done, dead or out of time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(to_json(self._request) + b"\n")
            self._process.stdin.flush()  # stays open: its end tells the child that nobody waits any more
        except BrokenPipeError:
            return
        deadline = time.monotonic() + time_limit_s
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self._process.stdout], [], [], _POLL_S)
            if not ready:
                alive()
            elif line := self._process.stdout.readline():
                yield from_json(line, DerivativeCell)
            else:
                self._process.wait()
                return
        self.timed_out = True

    def last_words(self) -> str:
        """How it ended, in one sentence."""
        if self.timed_out:
            return f"no answer within {self._request.spec.time_limit_s:g} s"
        code = self._process.wait()
        if code < 0:
            return f"ended the process by {signal.Signals(-code).name}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended the process with exit code {code}: {lines[-1] if lines else 'it said nothing'}"
