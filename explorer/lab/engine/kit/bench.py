"""The bench of every lesson: a device, gradients by name, one loss, and exceptions as outcomes.

Half of the lab is about code that raises, so an exception is an outcome; `attempt` keeps its message. A trial that may
end its process runs in a child process, and `row_of_process` reports how the child ended.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.errors import Crashed, message_of
from explorer.lab.record import LabChart, LabRow
from explorer.record.graph import ModelRef
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


def mean_square(output: Tensor) -> Tensor:
    """The loss of every lesson: it needs no targets and its gradient is never zero."""
    return output.square().mean()


def step_gradients(model: nn.Module, inputs: Tensor) -> Gradients:
    """Gradients of a forward and backward from cleared gradients, with torch's generators seeded."""
    return gradients_and_loss(model, inputs)[0]


def gradients_and_loss(model: nn.Module, inputs: Tensor) -> tuple[Gradients, float]:
    """The step of `step_gradients`, with its loss."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    loss = mean_square(model(inputs))
    loss.backward()
    return gradients_of(model), float(loss.detach())


def hessian_product(model: nn.Module, seed: int) -> Gradients:
    """The Hessian times random numbers of `seed`, from gradients that backward(create_graph=True) left."""
    generator = torch.Generator().manual_seed(seed)
    along = {p: torch.randn(p.shape, generator=generator) for p in model.parameters() if p.requires_grad}
    terms = [(p.grad * v.to(p)).sum() for p, v in along.items() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    torch.stack(terms).sum().backward()
    return gradients_of(model)


def row_of_process(trial: Callable[..., LabRow], bench: LabBench, label: str, *arguments: object) -> LabRow:
    """The row of `trial(bench, label, *arguments)`, run in a child process; or how the child ended."""
    call = (trial, bench.device, label, *arguments)
    try:
        row = call_in_subprocess(run_trial, *call, report=bench.report, what="was to give the row")
    except Crashed as error:
        return LabRow(label=label, outcome="crashed", note=error.sentence.rstrip("."))
    return row or LabRow(label=label, outcome="crashed", note="the system ended its process for lack of memory")


def run_trial(trial: Callable[..., LabRow], device: torch.device, *arguments: object) -> LabRow:
    """The child's side; the last argument reports progress."""
    warnings.simplefilter("ignore")
    *rest, report = arguments
    return trial(LabBench(device, cast(Report, report)), *rest)
