"""Runs what may kill its process in a process of its own (forks.py), and reports how that process ended."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import torch

from explorer.child_process.forks import at_hand, server_is_gone
from explorer.lab.kit.bench import LabBench
from explorer.record.base import from_json, to_json
from explorer.record.lab import LabRow

TIME_LIMIT_S = 60.0

Trial = tuple[Callable[..., LabRow], tuple[str, ...]]
"""A function of a module, called with a LabBench and the strings; the first string is the label of its row."""


def rows_apart(trials: Sequence[Trial], bench: LabBench) -> list[LabRow]:
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
        self._label = arguments[0]
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        with Path(os.devnull).open("wb") as nothing:
            self._process = at_hand().start(
                run_trial, device.type, function.__module__, function.__name__, arguments,
                files=[self._answer.fileno()], errors=nothing.fileno(), needs=["torch._dynamo"],
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self._process.ended

    def row(self) -> LabRow:
        """The child's row, or how it died."""
        code = self._process.code
        if not self.ended:
            note = f"no answer within {TIME_LIMIT_S:g} s"
        elif code is None:
            note = server_is_gone().sentence
        elif code == 0:
            self._answer.seek(0)
            return from_json(self._answer.read(), LabRow)
        elif code < 0:
            note = f"its process was ended by {signal.Signals(-code).name}"
        else:
            note = f"its process ended with exit code {code}"
        return LabRow(label=self._label, outcome="crashed", note=note)

    def end(self) -> None:
        self._process.close()
        self._answer.close()


def run_trial(device: str, module: str, name: str, arguments: tuple[str, ...], answer: int) -> None:
    """The child's side."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: LabRow = getattr(importlib.import_module(module), name)(LabBench(torch.device(device)), *arguments)
    with os.fdopen(answer, "wb") as file:
        file.write(to_json(row))
