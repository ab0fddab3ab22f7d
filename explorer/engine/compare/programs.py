"""Two programs over the same parameters, judged as `compare` judges two policies: outcomes, yardsticks, one verdict.

    reference ─▶ reference again ─▶ reference in float64 ─▶ candidate
                 └ noise floor      └ rounding
    each from the state that was found, N_STEPS steps of the caller's own: forward, backward, optimizer if it has one

Gradients are taken as a program's optimizer finds them, or at the end of its step where none of torch's steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from explorer.engine.compare.carried import carried, n_looked_at, names, unstable
from explorer.engine.compare.compare import side_by_side
from explorer.engine.compare.diffs import is_floating
from explorer.engine.compare.kept import Kept
from explorer.engine.compare.outcome import (
    N_STEPS,
    Outcome,
    Tensors,
    Yardsticks,
    fingerprint,
    not_reproducible_because,
)
from explorer.engine.compare.reference import does_not_run, epsilon_of, most_common_type, too_far
from explorer.engine.compare.same_draws import SameDraws
from explorer.engine.device.limits import failure_of
from explorer.engine.model.plain_names import plain_buffers, plain_modules, plain_parameters
from explorer.engine.model.twin import own_batch
from explorer.engine.world.put_back import FoundModel, FoundOptimizer
from explorer.engine.world.remembered import State, StateKey, frozen, read_state, same_state
from explorer.engine.world.rng import RngState
from explorer.record.comparison import ParameterDiff

Step = Callable[[nn.Module, Any], Any]
"""One training step: runs forward and backward of the model that it is given on the batch that it is given."""


@dataclass
class StepProgram:
    """A step and the model that it trains."""

    step: Step
    model: nn.Module
    batch: Any
    parameters: tuple[str, ...] = ()
    """Those that are judged, by plain name."""
    dtype: torch.dtype | None = None
    """What floating tensors are cast to before the step; None: nothing is cast."""
    found: list[FoundModel] = field(default_factory=list)
    """Every model to put back before a run: both programs may train the same parameters."""
    optimizers: dict[int, FoundOptimizer] = field(default_factory=dict)
    """Every optimizer that has stepped so far, by identity: those of both programs."""

    def state(self) -> State:
        """What the model remembers, by plain names."""
        plain = {id(module): fqn for fqn, module in reversed(list(plain_modules(self.model)))}
        known = {fqn: plain[id(module)] for fqn, module in self.model.named_modules() if id(module) in plain}
        state = read_state(self.model)
        return {(known[key[0]], *key[1:]): value for key, value in state.items() if key[0] in known}

    def named(self) -> dict[str, nn.Parameter]:
        held = plain_parameters(self.model)
        return {name: held[name] for name in self.parameters}


def take_steps(program: StepProgram, *, lead: Outcome | None = None, like: Outcome | None = None) -> Outcome:
    """Puts everything back, runs N_STEPS steps and keeps what is left. `lead` and `like` as in `outcome.take`."""
    known = lead or like or Outcome(gradients={}, input_gradients={}, buffers={}, rng={}, loss=0.0)
    for model in program.found:
        model.put_back(program.dtype)
    for optimizer in program.optimizers.values():
        optimizer.put_back()
    batch = tree_map(lambda leaf: _cast(leaf, program.dtype), own_batch(program.batch))
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
    return outcome


class _Taking:
    """One step of a program, and its gradients as the first optimizer finds them.

    The optimizer then gets the gradients of `lead` where there are any: AdamW makes a whole step of a gradient that is
    zero but for rounding, and what two optimizers do with one gradient is theirs alone.
    """

    def __init__(self, program: StepProgram, batch: Any, lead: Tensors) -> None:
        self._program, self._lead = program, lead
        self.gradients: dict[str, Tensor | None] = {}
        self.stepped = False
        self._lent: list[tuple[Tensor, Tensor]] = []
        with _hooks(
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ):
            loss = program.step(program.model, batch)
        self.loss = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan
        self._read_gradients(program.named())

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.stepped = True
        if id(optimizer) not in self._program.optimizers:
            self._program.optimizers[id(optimizer)] = FoundOptimizer(optimizer)
        its_own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        mine = {name: value for name, value in self._program.named().items() if id(value) in its_own}
        self._read_gradients(mine)
        for name, parameter in mine.items():
            known = self._lead.get(name)
            if known is not None and parameter.grad is not None:
                self._lent.append((parameter.grad, parameter.grad.clone()))
                parameter.grad.copy_(_laid_out_as(parameter.grad, known))

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A step that does not zero its gradients adds to its own."""
        for lent, own in self._lent:
            lent.copy_(own)
        self._lent.clear()

    def _read_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self.gradients:
                gradient = whole(parameter.grad)
                self.gradients[name] = None if gradient is None else gradient.clone()


def judged_programs(reference: StepProgram, candidate: StepProgram) -> dict[str, Any]:
    """The fields of a Comparison that judge. What the reference raises passes; what the candidate raises is one."""
    starts = [program.state() for program in (reference, candidate)]
    with ExitStack() as put_back:
        programs = (reference, candidate)
        models = [put_back.enter_context(FoundModel(program.model, _own(program.model))) for program in programs]
        reference, candidate = (replace(program, found=models, optimizers=reference.optimizers) for program in programs)
        put_back.callback(_leave, reference.optimizers)
        base = take_steps(reference)
        with _formats() as formats:
            rerun = take_steps(reference, like=base)
        because, own = not_reproducible_because(base, rerun), unstable(base, rerun)
        fields: dict[str, Any] = {"reproducible": not because, "not_reproducible_because": because}
        epsilon = epsilon_of(base.gradients, formats)
        exact, no_reference = _in_float64(reference, base, epsilon)
        fields |= {"reference": "float64" if exact else "none", "no_reference_because": no_reference}
        try:
            cand = take_steps(candidate, lead=base)
        except Exception as error:  # whatever a stranger's program raises
            return {**fields, "failure": failure_of(error)}
    sticks = Yardsticks(epsilon, rerun if because else base, exact)
    apart = _of_one_alone(*starts)
    for outcome in (base, cand):
        outcome.buffers = {key: value for key, value in outcome.buffers.items() if key not in names(apart)}
    moved = {key for key in apart if any(_moves(outcome, start, key) for outcome, start in zip((base, cand), starts))}
    fields |= {"unjudged": names(own | moved), "n_carried": n_looked_at(base) - len(own | apart)}
    fields["carried"] = carried(base, cand, sticks, own | apart)
    fields |= side_by_side(base, cand, sticks)
    return fields | {"parameters": _by_themselves(fields, base), "loss_equal": _equal_losses(base, cand)}


def _leave(optimizers: dict[int, FoundOptimizer]) -> None:
    for optimizer in optimizers.values():
        optimizer.leave()


def _by_themselves(fields: dict[str, Any], base: Outcome) -> tuple[ParameterDiff, ...]:
    """Two optimizers got equal gradients: what their parameters differ by is no rounding of gradients.

    Only a step without one of torch's optimizers, seen with gradients that round, may have made it of those.
    """
    unequal = {diff.name for diff in (*fields["gradients"], *fields["later_gradients"]) if not diff.bitwise}
    return tuple(
        msgspec.structs.replace(
            diff, gradients_round=not base.stepped and diff.gradients_round and diff.name in unequal
        )
        for diff in fields["parameters"]
    )


def _equal_losses(base: Outcome, cand: Outcome) -> bool | None:
    """None: one of the steps did not say its loss."""
    return None if math.isnan(base.loss) or math.isnan(cand.loss) else base.loss == cand.loss


def _in_float64(reference: StepProgram, base: Outcome, epsilon: float) -> tuple[Outcome | None, str]:
    exact = replace(reference, dtype=torch.float64)
    try:
        with SameDraws(most_common_type(base.gradients)):
            outcome = take_steps(exact, lead=base)
    except Exception as error:  # a type written into the step, a kernel without float64
        return None, does_not_run(error)
    because = too_far(outcome, base, epsilon)
    return (None, because) if because else (outcome, "")


def _moved_alone(program: StepProgram, start: dict[str, bytes], gradients: Tensors) -> dict[str, Tensor]:
    """Parameters that moved in a step that left no gradient at all: an optimizer inside backward took them."""
    if any(gradient is not None for gradient in gradients.values()):
        return {}
    now = _whole(program.named())
    return {name: value.clone() for name, value in now.items() if fingerprint(value) != start[name]}


@contextmanager
def _formats() -> Iterator[set[torch.dtype]]:
    """Floating types of what any module returns meanwhile: autocast shows in them, and in no gradient."""
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and is_floating(leaf))
        seen.update(leaf.dtype for leaf in leaves)

    with _hooks(register_module_forward_hook(look)):
        yield seen


@contextmanager
def _hooks(*hooks: RemovableHandle) -> Iterator[None]:
    """They come off again."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _of_one_alone(one: State, other: State) -> set[StateKey]:
    """What only one program's model has, or each with a value of its own: how it is written, not what it learned."""
    return {key for key in one.keys() | other.keys()
            if key not in one or key not in other or not same_state(one[key], other[key])}  # fmt: skip


def _moves(outcome: Outcome, start: State, key: StateKey) -> bool:
    return key in start and any(not same_state(start[key], state.get(key)) for state in outcome.states)


def _own(model: nn.Module) -> list[nn.Module]:
    return list({id(module): module for _, module in plain_modules(model)}.values())


def _remembered(program: StepProgram, batch: Any) -> State:
    return {**program.state(), ("", "batch", "attribute"): frozen([batch])}


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
    """All of a tensor that ranks hold in parts; any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return gather().detach() if gather is not None else None if tensor is None else tensor.detach()


def _laid_out_as(parameter: Any, value: Tensor) -> Tensor:
    """`value` in parts over the ranks where `parameter` is."""
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
