"""A model and its training step, run from one state as often as a comparison needs.

spec_program.py has the step of a RunSpec, step_program.py a user's own step. A program knows which further runs explain
a difference. judgement.py orders the runs, and does not ask which kind a program is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from explorer.engine.compare.diffs import Tensors
from explorer.engine.state.bits import laid_out_as, whole
from explorer.engine.state.state_diff import State, StateKey, plain_copy
from explorer.record.comparison import Comparison
from explorer.record.late_read import Departure


@dataclass
class Outcome:
    """Results of one run, by full name."""

    gradients: Tensors = field(default_factory=dict)
    input_gradients: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    rng: dict[str, bytes] = field(default_factory=dict)
    """Positions of the generators after the first backward."""
    draws: bool = False
    """Whether the first step moved any generator."""
    loss: float | None = None
    states: list[State] = field(default_factory=list)
    """State of the model after the first step's backward and after the last step."""
    moved: Tensors = field(default_factory=dict)
    """Parameters that forward or backward moved, before any optimizer; of a user's step only if no gradient is left,
    because an optimizer inside backward used it."""
    trained: frozenset[str] = frozenset()
    """Names of the parameters that require a gradient."""
    n_steps: int = 0
    stepped: bool | None = None
    """Whether an optimizer of torch stepped inside a user's step; None for the step of a RunSpec."""
    led: bool = False
    """Whether the optimizers of this run got the gradients of the run `lead`."""
    later_gradients: Tensors = field(default_factory=dict)
    after: list[Tensors] = field(default_factory=list)
    """All parameters after each step; of a run with a `lead`, after the last step only."""
    eval_output: Tensor | None = None

    @property
    def parameters(self) -> Tensors:
        """After the last step."""
        return self.after[-1] if self.after else {}


Outcomes = tuple[Outcome, Outcome]
"""Of baseline and candidate."""
Stage = Callable[[str], None]
"""Is told what runs next."""


@dataclass
class AsBaseline:
    """Outcomes of a program as a baseline, for all candidates that are judged by it. None: has not run yet."""

    outcome: Outcome | None = None
    rerun: tuple[str, Outcome, frozenset[StateKey]] | None = None
    """Why the program is not reproducible, its second outcome, and the state in which both differ."""
    reference: tuple[Outcome | None, str] | None = None
    """In float64, or the reason why there is none."""


class JudgedProgram(Protocol):
    """A step that starts from one state in every run, between `start` and `end`."""

    initial_state: State
    as_baseline: AsBaseline
    formats: set[torch.dtype]
    """Floating types of a run beside those of its gradients."""
    moved_by_backward: frozenset[StateKey]
    """State that the backward of the observed run changed."""
    rerun_is_first: bool
    """Whether the baseline runs again before the candidate runs: the float64 run then knows `formats`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def batches(self) -> dict[str, object]: ...
    @property
    def stepped(self) -> bool | None: ...
    @property
    def left_behind(self) -> str:
        """Why a started run does not stand for the model; empty: it does."""

    @property
    def no_float64_because(self) -> str: ...
    def start(self) -> Self: ...
    def end(self) -> None: ...
    def take_step(self, lead: Tensors) -> float | None: ...
    def optimize(self) -> None: ...
    def observed(self) -> AbstractContextManager[None]: ...
    def named(self) -> dict[str, nn.Parameter]: ...
    def buffers(self) -> dict[str, Tensor]: ...
    def gradients(self) -> dict[str, Tensor | None]: ...
    def state(self) -> State: ...
    def eval_output(self) -> Tensor | None: ...
    def in_float64(self) -> Self: ...
    def without_policy(self) -> Self | None:
        """The same steps without a policy; None: the program applies none."""

    def departures(self) -> tuple[Departure, ...]:
        """Where recomputes depart from forward, from one more step that is watched."""

    def further_evidence(
        self, of: Comparison, baseline: Self, runs: Outcomes, exact: Outcome | None, stage: Stage
    ) -> Comparison:
        """`of` with what further runs show. `runs` are of `baseline` and of this program, `exact` of the baseline."""


def values_of(program: JudgedProgram) -> dict[str, Tensor]:
    """The compared parameters as whole tensors."""
    return {name: whole(parameter) for name, parameter in program.named().items()}


def follow(program: JudgedProgram, values: Tensors) -> None:
    """Writes the parameters of another run into the trained parameters."""
    with torch.no_grad():
        for name, parameter in program.named().items():
            value = values.get(name)
            if value is not None and parameter.requires_grad:
                parameter.copy_(laid_out_as(parameter, value))


def state_of(program: JudgedProgram) -> State:
    """State of the model and of the batch, because a model may write into the batch."""
    return {**program.state(), ("", "batch", "attribute"): plain_copy(list(program.batches.values()))}


def input_gradients(batches: Mapping[str, object]) -> Iterator[tuple[str, Tensor | None]]:
    """Gradients of the leaves of the batch that require one, by path in the batch."""
    for name, batch in batches.items():
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
                yield name + keystr(path), leaf.grad
