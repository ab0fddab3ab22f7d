"""The bench of every lesson: a device, gradients by name, one loss, and exceptions as outcomes.

Half of the lab is about code that raises, so an exception is an outcome; `attempt` keeps its message. A trial that may
end its process runs in a child process, and `rows_of_processes` reports how the child ended.
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from explorer.child_process.forks import Answering
from explorer.errors import message_of
from explorer.record.base import from_json, to_json
from explorer.record.graph import ModelRef
from explorer.record.lab import LabChart, LabRow
from explorer.record.plan import Progress, Report, silent

Gradients = dict[str, Tensor | None]
Setting = Mapping[str, str]
"""The value of every switch of the lesson."""


@dataclass(frozen=True)
class LabBench:
    """The device and the model of a lesson, and the receiver of its progress."""

    device: torch.device = torch.device("cpu")
    report: Report = silent
    model: ModelRef | None = None
    """Model chosen by a person; None: the nets of the lesson."""

    def tell(self, what: str, done: int, total: int) -> None:
        """Reports progress; raises Cancelled if a person cancelled."""
        self.report(Progress(what=what, done=done, total=total))

    def normal(self, *shape: int, seed: int = 1) -> Tensor:
        """Standard normal numbers, the same on every device."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


@dataclass(frozen=True)
class Answer:
    """The result of a lesson; `run_lab` makes a LabOutcome from it."""

    rows: tuple[LabRow, ...]
    chart: LabChart
    findings: tuple[str, ...]
    printed: str = ""


@dataclass(frozen=True)
class Raised:
    """An exception, as an outcome."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


T = TypeVar("T")


def attempt(step: Callable[[], T]) -> T | Raised:
    """The result of `step`, or the class and message of its exception."""
    try:
        return step()
    except Exception as error:
        return Raised(type(error).__name__, message_of(error))


def gradients_of(model: nn.Module) -> Gradients:
    """Copies of the gradients by parameter name, on the CPU."""
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in model.named_parameters()}


def gradients_by_name(total: Tensor, model: nn.Module, *, allow_unused: bool = False) -> Gradients:
    """Gradients of `total` by torch.autograd.grad, by parameter name, on the CPU."""
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=allow_unused)
    return {name: None if g is None else g.detach().cpu() for name, g in zip(named, gradients)}


def mean_square(output: Any) -> Tensor:
    """The loss of every lesson: it needs no targets and its gradient is never zero."""
    loss: Tensor = output.square().mean()
    return loss


def step_gradients(model: nn.Module, inputs: Tensor, *, seed: int = 0) -> Gradients:
    """Gradients of a forward and backward from cleared gradients, with torch's generators seeded by `seed`."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    mean_square(model(inputs)).backward()
    return gradients_of(model)


def hessian_product(model: nn.Module, along: Callable[[nn.Parameter], Tensor]) -> Gradients:
    """The Hessian times the direction `along(parameter)`, from gradients that backward(create_graph=True) left."""
    terms = [(p.grad * along(p).to(p)).sum() for p in model.parameters() if p.grad is not None]
    return gradients_by_name(torch.stack(terms).sum(), model, allow_unused=True)


TIME_LIMIT_S = 60.0

Trial = tuple[Callable[..., LabRow], tuple[str, ...]]
"""A function of a module, called with a LabBench and the strings; the first string is the label of its row."""


def rows_of_processes(trials: Sequence[Trial], bench: LabBench) -> list[LabRow]:
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
