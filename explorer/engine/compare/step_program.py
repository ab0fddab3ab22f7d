"""Runs a user's training program for a comparison: N_STEPS steps from the state before, and their outcome.

A step is forward, backward, and the optimizer if the program has one. Gradients are read when the optimizer starts, or
at the end of a step in which no optimizer of torch steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.hooks import RemovableHandle

from explorer.engine.compare.kept import Kept
from explorer.engine.compare.outcome import N_STEPS, Outcome, Tensors, fingerprint
from explorer.engine.model.plain_names import plain_buffers, plain_modules, plain_parameters
from explorer.engine.model.twin import own_batch
from explorer.engine.state.rng import RngState
from explorer.engine.state.snapshot import ModelSnapshot, OptimizerSnapshot
from explorer.engine.state.state_diff import State, plain_copy, read_state

Step = Callable[[nn.Module, Any], Any]
"""One training step: runs forward and backward of a model on a batch, both arguments."""


@dataclass
class StepProgram:
    """A step and the model that the step trains."""

    step: Step
    model: nn.Module
    batch: Any
    parameters: tuple[str, ...] = ()
    """Plain names of the parameters that are compared."""
    dtype: torch.dtype | None = None
    """The type to which floating tensors are cast before the step; None casts nothing."""
    found: list[ModelSnapshot] = field(default_factory=list)
    """Every model to put back before a run: both programs may train the same parameters."""
    optimizers: dict[int, OptimizerSnapshot] = field(default_factory=dict)
    """Every optimizer of both programs that has stepped so far, by identity."""

    def state(self) -> State:
        """State of the model, by plain names."""
        plain = {id(module): fqn for fqn, module in reversed(list(plain_modules(self.model)))}
        known = {fqn: plain[id(module)] for fqn, module in self.model.named_modules() if id(module) in plain}
        state = read_state(self.model)
        return {(known[key[0]], *key[1:]): value for key, value in state.items() if key[0] in known}

    def named(self) -> dict[str, nn.Parameter]:
        """The compared parameters with their current values, by plain name."""
        held = plain_parameters(self.model)
        return {name: held[name] for name in self.parameters}


def take_steps(program: StepProgram, *, lead: Outcome | None = None, like: Outcome | None = None) -> Outcome:
    """Puts everything back, runs N_STEPS steps and returns their outcome. `lead` and `like` are as in `outcome.take`.

    Errors of the program pass through.
    """
    known = lead or like or Outcome(gradients={}, input_gradients={}, buffers={}, rng={}, loss=0.0)
    batch = put_back(program)
    start = {name: fingerprint(value) for name, value in _whole(program.named()).items()}
    taking = _Taking(program, batch, lead.gradients if lead else {})
    outcome = Outcome(
        gradients=Kept(taking.gradients.items(), known.gradients),
        input_gradients=Kept(_input_gradients(batch), known.input_gradients),
        buffers=Kept(plain_buffers(program.model).items(), known.buffers),
        rng=RngState.capture(program.model).positions(),
        loss=taking.loss,
        states=[_remembered(program, batch)],
        moved=_moved_alone(program, start, taking.gradients),
        trained=frozenset(name for name, parameter in program.named().items() if parameter.requires_grad),
    )
    for i in range(N_STEPS):
        if i:
            taking = _Taking(program, batch, lead.later_gradients if lead else {})
            outcome.later_gradients = Kept(taking.gradients.items(), known.later_gradients)
        if lead is None or i == N_STEPS - 1:
            outcome.after.append(Kept(_whole(program.named()).items(), known.after[i] if known.after else None))
        if lead is not None:
            _follow(program, lead.after[i])
    outcome.n_steps = N_STEPS
    outcome.states.append(_remembered(program, batch))
    outcome.stepped = taking.stepped
    outcome.led = lead is not None and lead.stepped and taking.stepped
    return outcome


def put_back(program: StepProgram) -> Any:
    """Puts back the models and optimizers, and returns a fresh copy of the batch for the next run."""
    for model in program.found:
        model.restore(program.dtype)
    for optimizer in program.optimizers.values():
        optimizer.restore()
    return tree_map(lambda leaf: _cast(leaf, program.dtype), own_batch(program.batch))


class _Taking:
    """One step of a program, and its gradients at the start of the first optimizer.

    The optimizer then gets the gradients of `lead`, if any. AdamW makes a whole step of a gradient that is zero but for
    rounding; with equal gradients, differences of the parameters come from the optimizers alone.
    """

    def __init__(self, program: StepProgram, batch: Any, lead: Tensors) -> None:
        self._program, self._lead = program, lead
        self.gradients: dict[str, Tensor | None] = {}
        self.stepped = False
        self._lent: list[tuple[Tensor, Tensor]] = []
        with hooked(
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ):
            loss = program.step(program.model, batch)
        self.loss = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan
        self._read_gradients(program.named())

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.stepped = True
        if id(optimizer) not in self._program.optimizers:
            self._program.optimizers[id(optimizer)] = OptimizerSnapshot(optimizer)
        its_own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        mine = {name: value for name, value in self._program.named().items() if id(value) in its_own}
        self._read_gradients(mine)
        for name, parameter in mine.items():
            known = self._lead.get(name)
            if known is not None and parameter.grad is not None:
                self._lent.append((parameter.grad, parameter.grad.clone()))
                parameter.grad.copy_(_laid_out_as(parameter.grad, known))

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Puts the program's gradients back: a step that does not zero its gradients adds to them."""
        for lent, own in self._lent:
            lent.copy_(own)
        self._lent.clear()

    def _read_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self.gradients:
                gradient = whole(parameter.grad)
                self.gradients[name] = None if gradient is None else gradient.clone()


def _moved_alone(program: StepProgram, start: dict[str, bytes], gradients: Tensors) -> dict[str, Tensor]:
    """Parameters that moved in a step without any gradient left: an optimizer inside backward used the gradients."""
    if any(gradient is not None for gradient in gradients.values()):
        return {}
    now = _whole(program.named())
    return {name: value.clone() for name, value in now.items() if fingerprint(value) != start[name]}


@contextmanager
def hooked(*hooks: RemovableHandle) -> Iterator[None]:
    """A context that removes `hooks` at its end."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _remembered(program: StepProgram, batch: Any) -> State:
    return {**program.state(), ("", "batch", "attribute"): plain_copy([batch])}


def _input_gradients(batch: Any) -> Iterator[tuple[str, Tensor | None]]:
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
            yield f"batch{keystr(path)}", leaf.grad


def _follow(program: StepProgram, parameters: Tensors) -> None:
    with torch.no_grad():
        for name, parameter in program.named().items():
            known = parameters.get(name)
            if known is not None and parameter.requires_grad:
                parameter.copy_(_laid_out_as(parameter, known))


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)


def _whole(tensors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: value for name, parameter in tensors.items() if (value := whole(parameter)) is not None}


def whole(tensor: Tensor | None) -> Tensor | None:
    """The full tensor of a sharded one, gathered from all ranks; any other tensor detached."""
    gather = getattr(tensor, "full_tensor", None)
    return gather().detach() if gather is not None else None if tensor is None else tensor.detach()


def _laid_out_as(parameter: Any, value: Tensor) -> Tensor:
    """`value` sharded over the ranks like `parameter`; unchanged if `parameter` is not sharded."""
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
