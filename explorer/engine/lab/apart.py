"""Runs what may kill its process in a process of its own, and reports how that process ended.

parent ── python -m explorer.engine.lab.apart DEVICE MODULE:FUNCTION LABEL ... ──▶ child
       ◀── one LabRow as JSON, or a signal, or silence ─────────────────────────
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import explorer
from explorer.engine.lab.bench import Bench
from explorer.record.base import from_json, to_json
from explorer.record.lab import LabRow

TIME_LIMIT_S = 60.0

Trial = tuple[Callable[..., LabRow], tuple[str, ...]]
"""A function of a module, called with a Bench and the strings; the first string is the label of its row."""


def rows_apart(trials: Sequence[Trial], bench: Bench) -> list[LabRow]:
    """One row a trial; the children run side by side. A cancel ends them."""
    children: list[_Child] = []
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        for function, arguments in trials:
            children.append(_Child(function, arguments, bench.device))
        while (n_done := sum(child.ended for child in children)) < len(children) and time.monotonic() < deadline:
            bench.tell("waiting for a process of its own", n_done, len(children))
            time.sleep(0.05)
        return [child.row() for child in children]
    finally:
        for child in children:
            child.end()


class _Child:
    def __init__(self, function: Callable[..., LabRow], arguments: tuple[str, ...], device: torch.device) -> None:
        root = str(Path(explorer.__file__).resolve().parent.parent)
        path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH")) if entry)
        name = f"{function.__module__}:{function.__name__}"
        self._label = arguments[0]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "explorer.engine.lab.apart", device.type, name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def row(self) -> LabRow:
        """What the child found, or how it died."""
        code = self._process.poll()
        if code == 0:
            self._said.seek(0)
            return from_json(self._said.read(), LabRow)
        if code is None:
            note = f"no answer within {TIME_LIMIT_S:g} s"
        elif code < 0:
            note = f"its process was ended by {signal.Signals(-code).name}"
        else:
            note = f"its process ended with exit code {code}"
        return LabRow(label=self._label, outcome="crashed", note=note)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._said.close()


def main() -> None:
    """The child's side."""
    device, name, *arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: LabRow = getattr(importlib.import_module(module), function)(Bench(torch.device(device)), *arguments)
    sys.stdout.buffer.write(to_json(row))


if __name__ == "__main__":
    main()
