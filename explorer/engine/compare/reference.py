"""The same steps in float64: the distance of the baseline from exact is the scale of rounding.

A float64 run must draw the numbers and take the branches of the run in the model's type. `SameDraws` draws in that
type: `rand_like` takes two words of the stream for float64, and one for float32. `SameBranches` replays which ReLU
passes and which number is largest, because an input within rounding of zero may decide otherwise in float64. In a
small ResNet, ten of 24 million decisions differed: the gradients lay 3e-3 of their norm away, a thousand times the
rounding; with equal decisions, 2.5e-6. Other branches (ReLU6, sort) are not replayed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from explorer.engine.compare.diffs import Tensors, is_floating, relative_distance
from explorer.engine.compare.outcome import Outcome, not_reproducible_because, outcome_of
from explorer.engine.compare.programs import Program, SpecProgram
from explorer.engine.watch.uncompiled import DispatchMode
from explorer.errors import said_by


def reference(program: Program, baseline: Outcome, *, evaluates: bool = True) -> tuple[Outcome | None, str]:
    """The steps without a policy in float64; or None with the reason: they fail in float64 or are too far away.

    A step that is too far away is repeated with the decisions of the baseline; a user's step is not. Without
    `evaluates` the output in eval mode is left out: nothing has to be told from rounding there.
    """
    if program.no_float64_because:
        return None, program.no_float64_because
    epsilon = epsilon_of(baseline.gradients, program.formats)
    try:
        exact = _exact(program, baseline, nullcontext(), evaluates=evaluates)
    except Exception as error:  # a type written into the model, or a kernel without float64: not an error of the run
        return None, f"The model does not run in float64: {said_by(error)}."
    because = _too_far(exact, baseline, epsilon)
    if (
        because
        and (alike := _decided_alike(program, baseline, evaluates=evaluates))
        and not _too_far(alike, baseline, epsilon)
    ):
        return alike, ""
    return (None, because) if because else (exact, "")


def _exact(program: Program, baseline: Outcome, guided: AbstractContextManager[object], *, evaluates: bool) -> Outcome:
    exact = program.in_float64().start()
    with SameDraws(most_common_type(baseline.gradients)), guided:
        return outcome_of(exact, lead=baseline, evaluates=evaluates)


def float64_distance(candidate: Program, exact: Outcome, baseline: Outcome) -> float | None:
    """Relative distance between the first gradients of `candidate` and of the baseline `exact`, both in float64."""
    if candidate.no_float64_because:
        return None
    try:
        with SameDraws(most_common_type(baseline.gradients)):
            return relative_distance(exact.gradients, outcome_of(candidate.in_float64().start(), full=False).gradients)
    except Exception:  # the candidate alone does not run in float64: the verdict does not need this evidence
        return None


def _decided_alike(program: Program, baseline: Outcome, *, evaluates: bool) -> Outcome | None:
    """The float64 outcome with the baseline's decisions; None if it decides nothing or is not reproducible."""
    if not isinstance(program, SpecProgram):
        return None
    try:
        again = program.without_policy().start()
        with Branches() as branches:
            outcome = outcome_of(again, like=baseline)
        if not branches.decisions or not_reproducible_because(baseline, outcome):
            return None
        return _exact(program, baseline, SameBranches(branches.decisions), evaluates=evaluates)
    except Exception:  # the plain float64 run succeeded: other code ran here, or no memory is left for the decisions
        return None


def _too_far(exact: Outcome, baseline: Outcome, epsilon: float) -> str:
    """The reason why a float64 run cannot be a reference: its distance from the baseline. Empty if it can."""
    distance = relative_distance(exact.gradients, baseline.gradients)
    if distance is not None and distance <= math.sqrt(epsilon):
        return ""
    far = "an unknown part" if distance is None else f"{distance:.1e}"
    numbers = (
        "other random numbers" if baseline.draws else "no generator moved, so random numbers of a source without a seed"
    )
    return (
        f"In float64 the gradients lie {far} of their norm away from the baseline's: {numbers}, other branches (a ReLU "
        "near zero, a maximum of two), a loss so near zero that its gradient is rounding, or a model that amplifies it."
    )


def most_common_type(gradients: Tensors) -> torch.dtype:
    """The type of most gradients: the type in which random numbers are drawn."""
    types = Counter(tensor.dtype for tensor in gradients.values() if tensor is not None and tensor.is_floating_point())
    return types.most_common(1)[0][0] if types else torch.get_default_dtype()


def epsilon_of(gradients: Tensors, formats: Collection[torch.dtype]) -> float:
    """Machine epsilon of the coarsest floating type among `formats` and the types of `gradients`."""
    types = {tensor.dtype for tensor in gradients.values() if tensor is not None and is_floating(tensor)} | {*formats}
    return max(torch.finfo(dtype).eps for dtype in types or {torch.get_default_dtype()})


_DRAWS = frozenset({
    "aten::rand", "aten::randn", "aten::rand_like", "aten::randn_like", "aten::normal", "aten::normal_functional",
    "aten::uniform", "aten::exponential", "aten::log_normal", "aten::cauchy", "aten::geometric", "aten::multinomial",
    "aten::bernoulli",
})  # fmt: skip
"""Operators whose result is random numbers alone: a draw in a narrower type gives the same numbers, rounded."""


class SameDraws(DispatchMode):
    """Makes draws of float64 in `dtype` and widens them, between enter and exit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.removesuffix("_") not in _DRAWS:
            return func(*args, **kwargs)
        narrow = tuple(self._narrow(value) for value in args)
        options = {key: self._dtype if value is torch.float64 else self._narrow(value) for key, value in kwargs.items()}
        drawn = func(*narrow, **options)
        if name.endswith("_"):
            return args[0].copy_(drawn)
        wide = kwargs.get("dtype") is torch.float64 or any(_is_double(value) for value in args)
        return drawn.double() if wide and drawn.is_floating_point() else drawn

    def _narrow(self, value: Any) -> object:
        return value.to(self._dtype) if _is_double(value) else value


def _is_double(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64


_RELU, _MAX_POOL = "aten::relu", "aten::max_pool2d_with_indices"


class Branches(DispatchMode):
    """Records decisions between enter and exit."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions: deque[Tensor] = deque()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.removesuffix("_") == _RELU:
            self.decisions.append(out > 0)
        elif name == _MAX_POOL:
            self.decisions.append(out[1].clone())
        return out


class SameBranches(DispatchMode):
    """Replays and removes `decisions` in order between enter and exit. Raises IndexError after the last decision."""

    def __init__(self, decisions: deque[Tensor]) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func._schema.name
        if name.removesuffix("_") == _RELU:
            passed = _passing(args[0], self._decisions.popleft())
            return args[0].copy_(passed) if name.endswith("_") else passed
        out = func(*args, **(kwargs or {}))
        if name == _MAX_POOL:
            largest = self._decisions.popleft()
            values = args[0].flatten(-2).gather(-1, largest.flatten(-2))
            return values.view_as(largest), largest
        return out


def _passing(x: Tensor, passes: Tensor) -> Tensor:
    """ReLU with given decisions. Passing elements stay above zero: backward reads the decisions from the result."""
    return torch.where(passes, x.clamp(min=torch.finfo(x.dtype).tiny), 0.0)
