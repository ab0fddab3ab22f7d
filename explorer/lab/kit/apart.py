"""Runs trials that may end their process, each in a process apart, and reports how that process ended."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from explorer.child_process.forks import Answering
from explorer.lab.kit.bench import LabBench
from explorer.record.base import from_json, to_json
from explorer.record.lab import LabRow

TIME_LIMIT_S = 60.0

Trial = tuple[Callable[..., LabRow], tuple[str, ...]]
"""A function of a module, called with a LabBench and the strings; the first string is the label of its row."""


def rows_apart(trials: Sequence[Trial], bench: LabBench) -> list[LabRow]:
    """A row for each trial; the child processes run side by side. A cancel ends the children."""
    deadline_s = time.monotonic() + TIME_LIMIT_S
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Answering(run_trial, bench.device.type, function.__module__, function.__name__, arguments)
            )
            for function, arguments in trials
        ]

        def alive() -> None:
            n_done = sum(child.ended for child in children)
            bench.tell("waiting for a process of its own", n_done, len(children))

        return [_row(child, label, deadline_s, alive) for child, (_, (label, *_)) in zip(children, trials)]


def _row(child: Answering, label: str, deadline_s: float, alive: Callable[[], None]) -> LabRow:
    """The child's row, or how it died."""
    for line in child.lines(deadline_s, alive):
        return from_json(line, LabRow)
    note = f"no answer within {TIME_LIMIT_S:g} s" if child.timed_out else child.ending()
    return LabRow(label=label, outcome="crashed", note=note)


def run_trial(device: str, module: str, name: str, arguments: tuple[str, ...], answers: int) -> None:
    """The child's side."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: LabRow = getattr(importlib.import_module(module), name)(LabBench(torch.device(device)), *arguments)
    os.write(answers, to_json(row) + b"\n")
