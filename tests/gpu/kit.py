"""What a check is given, and what it leaves: figures, faults that do not stop it, a reason to be skipped."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import nn

from explorer import apply_policy
from explorer.engine.bench.measure import measure
from explorer.engine.compare.compare import compare
from explorer.record import Comparison, Measurement, ModelRef, Policy, RunSpec

Variant = TypeVar("Variant")
Outcome = Literal["passed", "failed", "skipped", "crashed"]
SAMPLES = ("gpt", "mlp", "resnet", "unet", "recurrent", "tied_lm", "moe", "vit")
TINY: dict[str, dict[str, int | float | str | bool]] = {
    "gpt": {"n_layers": 2, "width": 16, "n_heads": 2, "length": 8, "batch": 2, "vocabulary": 32},
    "mlp": {"n_layers": 4, "width": 8, "batch": 16},
    "resnet": {"width": 4, "blocks_per_stage": 1, "n_stages": 2, "side": 8, "batch": 2, "n_classes": 4},
    "unet": {"width": 4, "depth": 2, "side": 16, "batch": 2},
    "recurrent": {"length": 4, "width": 8, "expansion": 2, "batch": 4, "vocabulary": 16},
    "tied_lm": {"n_layers": 2, "width": 16, "length": 8, "batch": 2, "vocabulary": 32},
    "moe": {"n_layers": 2, "width": 16, "n_experts": 2, "length": 8, "batch": 2, "vocabulary": 32},
    "vit": {"n_layers": 2, "width": 16, "n_heads": 2, "side": 16, "patch": 4, "batch": 2, "n_classes": 4},
}


class Skipped(Exception):
    """With the reason."""


class Figure(msgspec.Struct, frozen=True):
    name: str
    value: float | int | str | None
    unit: str = ""


class Result(msgspec.Struct, frozen=True):
    """What one check left behind."""

    check: str
    outcome: Outcome
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    said: str = ""
    """The faults, the reason of a skip, or a traceback."""


@dataclass
class Bench:
    """`tiny` runs the same lines on models of a few kilobytes: how the checks are tested without a GPU."""

    device: Literal["cpu", "cuda"]
    folder: Path
    tiny: bool = False
    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def samples(self, *names: str) -> tuple[str, ...]:
        """The samples of these names, or all; one where the lines alone are tested."""
        return tuple(self.few(names or SAMPLES))

    @property
    def torch(self) -> torch.device:
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")

    def figure(self, name: str, value: float | int | str | None, unit: str = "") -> None:
        self.figures.append(Figure(name, value, unit))

    def expect(self, ok: bool, fault: str) -> None:  # noqa: FBT001
        """A fault is told, and the check goes on."""
        if not ok:
            self.faults.append(fault)

    def needs_cuda(self) -> None:
        if self.device != "cuda":
            raise Skipped("needs a CUDA device")

    @property
    def is_imaginary(self) -> bool:
        """Whether the card is a stub: its kernels write nothing, and its clock is that of the machine."""
        return "IMAGINARY_NAME" in os.environ

    def needs_values(self) -> None:
        if self.is_imaginary:
            raise Skipped("needs values, which a CUDA kernel computes")

    def needs_clock(self) -> None:
        if self.is_imaginary:
            raise Skipped("needs the clock of a CUDA device")

    def model(self, sample: str, size: str = "small") -> ModelRef:
        target = f"sample_models/{sample}.py"
        is_tiny = self.tiny and not self.is_imaginary  # kernels that do nothing take no time
        return ModelRef(target=target, arguments=TINY[sample]) if is_tiny else ModelRef(target=target, size=size)

    def spec(self, sample: str, size: str = "small", **options: Any) -> RunSpec:
        return RunSpec(model=self.model(sample, size), device=self.device, **{"n_repeats": 1, **options})

    def measured(self, spec: RunSpec, policy: Policy | None = None) -> Measurement:
        run = measure(msgspec.structs.replace(spec, policy=policy) if policy is not None else spec)
        if run.failure is not None:
            raise RuntimeError(f"{run.failure.sentence}\n{run.failure.traceback}")
        return run

    def compared(self, spec: RunSpec, policy: Policy) -> Comparison:
        return compare(spec, msgspec.structs.replace(spec, policy=policy))

    def few(self, variants: Iterable[Variant]) -> list[Variant]:
        """All of them, or one where the lines alone are tested."""
        return list(variants)[: 1 if self.tiny else None]

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def gradients_of_both(build: Callable[[], tuple[nn.Module, torch.Tensor]], policy: Policy) -> list[list[torch.Tensor]]:
    """Gradients of the model and input that `build` makes, kept and under `policy`."""
    both = []
    for policed in (False, True):
        torch.manual_seed(0)
        model, x = build()
        if policed:
            apply_policy(model, policy)
        model(x).square().mean().backward()
        both.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    return both


Check = Callable[[Bench], None]


def attempt(name: str, check: Check, bench: Bench) -> Result:
    """Whatever a check raises is its result."""
    began = time.monotonic()
    outcome: Outcome = "passed"
    words = ""
    try:
        check(bench)
    except Skipped as reason:
        outcome, words = "skipped", str(reason)
    except Exception:
        outcome, words = "failed", traceback.format_exc()
    if bench.faults:
        outcome, words = "failed", "\n".join([*bench.faults, words]).strip()
    return Result(name, outcome, time.monotonic() - began, tuple(bench.figures), words)


@contextlib.contextmanager
def timed(bench: Bench, name: str) -> Iterator[None]:
    """Wall time, the device waited for, as a figure."""
    bench.settle()
    began = time.perf_counter()
    yield
    bench.settle()
    bench.figure(name, (time.perf_counter() - began) * 1e3, "ms")
