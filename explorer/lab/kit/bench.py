"""What every experiment stands on: a device, gradients by name, a comparison with the baseline, and honest failure.

An exception is an outcome here, because half of the lab is about code that raises; `attempt` keeps its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from explorer.engine.compare.diffs import Yardstick, differences
from explorer.record.comparison import GradientDiff
from explorer.record.lab import LabChart, LabFigure, LabRow, RowOutcome
from explorer.record.progress import Progress, Report, silent

Gradients = dict[str, Tensor | None]
Setting = Mapping[str, str]
"""The value of every switch of the experiment."""

EQUAL_TENSORS = "equal in every bit"
DISTANCE = "relative distance"
COSINE = "cosine"
NORM_RATIO = "norm ratio"


@dataclass(frozen=True)
class Bench:
    """Where an experiment runs and whom it tells."""

    device: torch.device = torch.device("cpu")
    report: Report = silent

    def tell(self, what: str, done: int, total: int) -> None:
        """Reports progress; raises Cancelled where a person cancelled."""
        self.report(Progress(what=what, done=done, total=total))

    def normal(self, *shape: int, seed: int = 1) -> Tensor:
        """Standard normal numbers, the same on every device."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


@dataclass(frozen=True)
class Shown:
    """What an experiment hands back; `run_lab` makes the record of it."""

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
    """What `step` returns, or what it raised: its class and its first sentence."""
    try:
        return step()
    except Exception as error:
        first = re.split(r"(?<=[.!?])\s|\n", str(error).strip())[0]
        return Raised(type(error).__name__, first.rstrip("."))


@dataclass(frozen=True)
class Gap:
    """How far a set of gradients is from the baseline's, over all parameters together."""

    diffs: tuple[GradientDiff, ...]
    baseline: Gradients = field(repr=False)
    candidate: Gradients = field(repr=False)

    @property
    def outcome(self) -> RowOutcome:
        if self.n_missing:
            return "missing"
        said = {diff.verdict for diff in self.diffs}
        if "different" in said:
            return "different"
        return "rounding" if "rounding" in said else "bitwise equal"

    @property
    def n_equal(self) -> int:
        return sum(diff.verdict == "bitwise equal" for diff in self.diffs)

    @property
    def n_missing(self) -> int:
        """Gradients that one side has and the other lacks."""
        return sum(diff.presence in ("baseline only", "candidate only") for diff in self.diffs)

    @property
    def distance(self) -> float:
        """|candidate - baseline| / |baseline|, L2; an absent gradient counts as zero."""
        return float((self._flat[1] - self._flat[0]).norm() / self._flat[0].norm())

    @property
    def cosine(self) -> float | None:
        """None where one side is all zero and points nowhere."""
        left, right = self._flat
        length = float(left.norm() * right.norm())
        return max(-1.0, min(1.0, float(left @ right) / length)) if length else None

    @property
    def norm_ratio(self) -> float:
        return float(self._flat[1].norm() / self._flat[0].norm())

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor]:
        """Both sides as one float64 vector; cached_property writes past the frozen dataclass on purpose."""
        pairs = [(self.baseline.get(diff.name), self.candidate.get(diff.name)) for diff in self.diffs]
        shaped = [(a, b, a if a is not None else b) for a, b in pairs]
        left = [
            (a if a is not None else torch.zeros_like(like)).double().flatten()
            for a, _, like in shaped
            if like is not None
        ]
        right = [
            (b if b is not None else torch.zeros_like(like)).double().flatten()
            for _, b, like in shaped
            if like is not None
        ]
        return torch.cat(left), torch.cat(right)

    def figures(self) -> tuple[LabFigure, ...]:
        return (
            counted(EQUAL_TENSORS, self.n_equal, f"of {len(self.diffs)}"),
            measured(DISTANCE, self.distance),
            measured(COSINE, self.cosine),
            measured(NORM_RATIO, self.norm_ratio),
        )


def gap(baseline: Gradients, candidate: Gradients, reference: Gradients | None = None) -> Gap:
    """Compares tensor by tensor; without a float64 `reference` every difference is "different", never "rounding"."""
    yardstick = Yardstick(reference=reference or {})
    return Gap(differences(GradientDiff, baseline, candidate, yardstick), baseline, candidate)


def measured(name: str, value: bool | int | float | str | None, unit: str = "") -> LabFigure:
    """A figure that was read off a run, not counted."""
    return LabFigure(name=name, value=value, unit=unit, origin="measured")


def counted(name: str, value: bool | int | float | str | None, unit: str = "") -> LabFigure:
    return LabFigure(name=name, value=value, unit=unit)


def baseline_row(label: str, *figures: LabFigure) -> LabRow:
    return LabRow(label=label, outcome="baseline", figures=figures)


def compared_row(
    label: str, baseline: Gradients, tried: Gradients | Raised, *figures: LabFigure, reference: Gradients | None = None
) -> LabRow:
    """A row that says how `tried` compares with `baseline`, or what it raised."""
    if isinstance(tried, Raised):
        return LabRow(label=label, outcome="raised", figures=figures, note=str(tried))
    found = gap(baseline, tried, reference)
    absent = [diff.name for diff in found.diffs if diff.presence == "baseline only"]
    note = f"no gradient for {', '.join(absent)}" if absent else ""
    return LabRow(label=label, outcome=found.outcome, figures=(*found.figures(), *figures), note=note)


def number(row: LabRow, name: str) -> float | None:
    """A figure of `row` for a chart or a sentence; None where the row has none."""
    value = row.value(name)
    return None if value is None else float(value)


def size_of(row: LabRow, name: str = DISTANCE) -> str:
    """A figure of `row` as it stands in a sentence."""
    value = number(row, name)
    return "an unknown amount" if value is None else brief(value)


def gradients_of(model: nn.Module) -> Gradients:
    """Copies of the gradients by parameter name, on the CPU."""
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in model.named_parameters()}


def mean_square(output: Any) -> Tensor:
    """The loss of every experiment: it needs no targets and its gradient is never zero."""
    loss: Tensor = output.square().mean()
    return loss


def step_gradients(model: nn.Module, inputs: Tensor, *, seed: int = 0) -> Gradients:
    """One forward and backward from cleared gradients, torch's generators seeded with `seed`."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    mean_square(model(inputs)).backward()
    return gradients_of(model)


def percent(share: float) -> str:
    """`31.4 %`"""
    return f"{100 * share:.1f} %"


def brief(number: float) -> str:
    """Three digits: `0.314`, `2.3e-08`, and a plain 0 for exactly zero."""
    return "0" if number == 0 else f"{number:.3g}"
