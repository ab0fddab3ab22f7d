"""The outcome of a run: everything that two runs are compared in, bit by bit.

    equal copies of parameters, buffers, optimizer; every generator seeded; gradients None
      ─▶ forward, backward ─▶ gradients, buffers, positions of the generators
      ─▶ optimizer, and more steps ─▶ parameters ─▶ output in eval mode

A user's step runs its optimizer itself: its buffers and generators are read after the optimizer.
A comparison has the outcomes of three or more runs. If the sides differ, one more is in float64 (`reference`): the
distance of the baseline from exact is the scale of rounding.

A float64 run must draw the numbers and take the branches of the run in the model's type. `SameDraws` draws in that
type: `rand_like` takes two words of the stream for float64, and one for float32. `SameBranches` replays which ReLU
passes and which number is largest, because an input within rounding of zero may decide otherwise in float64. In a
small ResNet, ten of 24 million decisions differed: the gradients lay 3e-3 of their norm away, a thousand times the
rounding; with equal decisions, 2.5e-6. Other branches (ReLU6, sort) are not replayed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from explorer.engine.compare.diffs import (
    Tensors,
    TensorsOnDisk,
    Yardstick,
    epsilon_of,
    fingerprint,
    relative_distance,
    worst_distance,
)
from explorer.engine.compare.programs import JudgedProgram, Outcome, follow, input_gradients, state_of, values_of
from explorer.engine.state.bits import same_bits
from explorer.engine.state.rng import RngState
from explorer.engine.state.state_diff import State, StateKey, same_state
from explorer.engine.watch.modes import DispatchMode
from explorer.errors import said_by
from explorer.record.comparison import RngDiff

N_STEPS = 2
"""Optimizer steps before parameters are compared: the second step starts from moved weights and statistics."""

EVAL_OUTPUT = "output in eval mode"


def outcome_of(
    program: JudgedProgram,
    *,
    full: bool = True,
    lead: Outcome | None = None,
    like: Outcome | None = None,
    evaluates: bool = True,
) -> Outcome:
    """Outcome of a started program after one step; if `full` after N_STEPS, and of its output if it also `evaluates`.
    The run is ended.

    If the gradients differ from those of `lead`, each further step starts from the parameters of `lead`. AdamW makes a
    whole step of a gradient that is zero but for rounding, which would spoil the comparison of all later steps.
    `like` is an outcome that is probably equal: equal tensors share its place on disk, but it leads no step.
    Errors of the model pass through.
    """
    earlier = lead or like or Outcome()
    before = {name: fingerprint(value) for name, value in values_of(program).items()}
    positions = RngState.capture(program.model).positions()
    loss = program.take_step(lead.gradients if lead else {})
    outcome = Outcome(
        gradients=TensorsOnDisk(program.gradients().items(), earlier.gradients),
        input_gradients=TensorsOnDisk(input_gradients(program.batches), earlier.input_gradients),
        buffers=TensorsOnDisk(program.buffers().items(), earlier.buffers),
        rng=RngState.capture(program.model).positions(),
        loss=loss,
        states=[state_of(program)],
        trained=frozenset(name for name, parameter in program.named().items() if parameter.requires_grad),
    )
    outcome.draws = any(position != positions.get(name, position) for name, position in outcome.rng.items())
    if program.stepped is None or not any(gradient is not None for gradient in program.gradients().values()):
        values = values_of(program).items()
        outcome.moved = TensorsOnDisk((name, value) for name, value in values if before.get(name) != fingerprint(value))
    if full:
        _train_on(program, outcome, lead, earlier)
        outcome.eval_output = program.eval_output() if evaluates else None
    program.end()
    return outcome


def _train_on(program: JudgedProgram, outcome: Outcome, lead: Outcome | None, earlier: Outcome) -> None:
    """Runs the further steps. Without an optimizer a step is forward and backward alone, which still moves state."""
    follows = lead is not None and not (program.stepped is None and same_gradients(lead, outcome))
    for i in range(N_STEPS):
        if i:
            program.take_step(lead.later_gradients if lead else {})
            outcome.later_gradients = TensorsOnDisk(program.gradients().items(), earlier.later_gradients)
        program.optimize()
        if lead is None or i == N_STEPS - 1:
            like = earlier.after[i] if earlier.after else None
            outcome.after.append(TensorsOnDisk(values_of(program).items(), like))
        if lead is not None and follows:
            follow(program, lead.after[i])
    outcome.n_steps = N_STEPS
    outcome.states.append(state_of(program))
    outcome.stepped = program.stepped
    outcome.led = lead is not None and bool(lead.stepped and outcome.stepped)


def rng_differences(baseline: Outcome, candidate: Outcome) -> tuple[RngDiff, ...]:
    """Differences of the generators after one backward. Generators of one run alone (a late import) are left out."""
    both = [name for name in baseline.rng if name in candidate.rng]
    return tuple(RngDiff(generator=name, equal=baseline.rng[name] == candidate.rng[name]) for name in both)


def not_reproducible_because(first: Outcome, second: Outcome) -> str:
    """One sentence with the tensors in which two runs of one program differ; empty if all bits are equal."""
    families = {
        "gradients": "gradients",
        "gradients of the inputs": "input_gradients",
        "gradients of the last step": "later_gradients",
        "buffers": "buffers",
        "parameters": "parameters",
    }
    parts = []
    for words, family in families.items():
        left, right = getattr(first, family), getattr(second, family)
        unequal = [name for name in left if not _same(left[name], right.get(name))]
        if unequal:
            parts.append(f"{len(unequal)} of {len(left)} {words} ({_some(unequal)})")
    if not _same(first.eval_output, second.eval_output):
        parts.append(f"the {EVAL_OUTPUT}")
    if generators := [diff.generator for diff in rng_differences(first, second) if not diff.equal]:
        parts.append(f"the position of {_some(generators)}")
    return f"Two runs of the baseline from the same state and seed differ in {', '.join(parts)}." if parts else ""


def unstable(first: Outcome, second: Outcome) -> frozenset[StateKey]:
    """Attributes and buffers in which two runs of one program differ after any step."""
    return frozenset(key for left, right in zip(first.states, second.states) for key in unequal_state(left, right))


def unequal_state(left: State, right: State) -> list[StateKey]:
    """Attributes and buffers that differ, or that one side lacks."""
    return [key for key in {**left, **right} if not same_state(left.get(key), right.get(key))]


def same_gradients(left: Outcome, right: Outcome) -> bool:
    """Whether all gradients of the first backward are equal in every bit."""
    return all(_same(left.gradients.get(name), gradient) for name, gradient in right.gradients.items())


def same_outcome(left: Outcome, right: Outcome) -> bool:
    """Whether everything that a verdict compares is equal in every bit: no difference needs the scale of rounding."""
    if not_reproducible_because(left, right) or unstable(left, right):
        return False
    return all(_same(left.moved.get(name), right.moved.get(name)) for name in {**left.moved, **right.moved})


def same_output(left: Outcome, right: Outcome) -> bool:
    """Whether the outputs in eval mode are equal in every bit."""
    return _same(left.eval_output, right.eval_output)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else same_bits(left, right)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def reference(program: JudgedProgram, baseline: Outcome, *, evaluates: bool = True) -> tuple[Outcome | None, str]:
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
    if not because:
        return exact, ""
    alike = _decided_alike(program, baseline, evaluates=evaluates)
    return (None, because) if alike is None or _too_far(alike, baseline, epsilon) else (alike, "")


def _exact(
    program: JudgedProgram, baseline: Outcome, guided: AbstractContextManager[object], *, evaluates: bool
) -> Outcome:
    exact = program.in_float64().start()
    with SameDraws(most_common_type(baseline.gradients)), guided:
        return outcome_of(exact, lead=baseline, evaluates=evaluates)


def float64_distance(candidate: JudgedProgram, exact: Outcome, baseline: Outcome) -> float | None:
    """The largest distance of a tensor between `candidate` and the baseline `exact`, both in float64; None: no result.

    Covers gradients of both steps and of the inputs, parameters after the steps, and buffers that both programs have.
    """
    if candidate.no_float64_because:
        return None
    try:
        with SameDraws(most_common_type(baseline.gradients)):
            outcome = outcome_of(candidate.in_float64().start(), lead=baseline)
    except Exception:  # the candidate alone does not run in float64: the verdict does not need this evidence
        return None
    families = ("gradients", "input_gradients", "later_gradients", "parameters", "moved")
    distances = [worst_distance(getattr(exact, family), getattr(outcome, family)) for family in families]
    for states in zip(exact.states, outcome.states):
        left, right = map(_buffers, states)
        both = left.keys() & right.keys()
        distances.append(worst_distance({name: left[name] for name in both}, {name: right[name] for name in both}))
    distance = max(distances)
    return distance if math.isfinite(distance) else None


def _buffers(state: State) -> dict[str, Tensor]:
    return {
        f"{block}.{name}": value
        for (block, name, kind), value in state.items()
        if kind == "buffer" and isinstance(value, Tensor)
    }


def _decided_alike(program: JudgedProgram, baseline: Outcome, *, evaluates: bool) -> Outcome | None:
    """The float64 outcome with the baseline's decisions; None if it decides nothing or is not reproducible."""
    try:
        again = program.without_policy()
        if again is None:
            return None
        with Branches() as branches:
            outcome = outcome_of(again.start(), like=baseline)
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
    numbers = "no generator moved, so random numbers of a source without a seed"
    if baseline.draws:
        numbers = "other random numbers"
    return (
        f"In float64 the gradients lie {far} of their norm away from the baseline's: {numbers}, other branches (a ReLU "
        "near zero, a maximum of two), a loss so near zero that its gradient is rounding, or a model that amplifies it."
    )


def most_common_type(gradients: Tensors) -> torch.dtype:
    """The type of most gradients: the type in which random numbers are drawn."""
    types = Counter(tensor.dtype for tensor in gradients.values() if tensor is not None and tensor.is_floating_point())
    return types.most_common(1)[0][0] if types else torch.get_default_dtype()


_DRAWS = frozenset(
    str.split("""
aten::rand aten::randn aten::rand_like aten::randn_like aten::normal aten::normal_functional aten::uniform
aten::exponential aten::log_normal aten::cauchy aten::geometric aten::multinomial aten::bernoulli
""")
)
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


@dataclass(frozen=True)
class Yardsticks:
    """The scales of differences: the baseline's rerun, and the same steps in float64."""

    epsilon: float
    rerun: Outcome | None
    exact: Outcome | None

    def of(self, family: str) -> Yardstick:
        """The yardstick of one field of Outcome: each family has its own scale."""
        return self.yardstick(*(getattr(outcome, family) if outcome else {} for outcome in (self.rerun, self.exact)))

    def yardstick(self, rerun: Tensors, reference: Tensors) -> Yardstick:
        """The yardstick of any tensors of the rerun and the reference."""
        return Yardstick(rerun=rerun, reference=reference, epsilon=self.epsilon)
