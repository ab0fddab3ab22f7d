"""Puts a policy onto a model in place, and removes the policy without a trace.

units.py has the rules of a unit. Every check comes before any change, and one error names all faults.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self, get_args

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec.structs import replace
from torch import nn

from explorer.engine.policy.several_models import Models, one_model
from explorer.engine.policy.units import Wrap, operator, replacements, runs_its_children, wraps_on
from explorer.engine.state.rng import OutsideRng, generators_of
from explorer.errors import BadInput, InvalidPolicy, nearest
from explorer.plan.names import overlaps, some
from explorer.plan.policy.block_names import differences, expanded, shape_of
from explorer.record.policy import KEEP_ALL, Action, DeterminismCheck, Policy, RunningStats, Unit

SWITCHES = (
    "gradient_checkpointing", "grad_checkpointing", "use_checkpoint", "use_checkpointing", "use_grad_checkpointing",
    "use_gradient_checkpointing", "activation_checkpointing", "checkpointing", "with_cp", "memory_efficient",
)  # fmt: skip
"""Attributes of known libraries that are True on a module that checkpoints itself."""
_MISSING = object()
_CHOICES = {
    "preserve_rng_state": (True, False),
    "use_reentrant": (True, False),
    "early_stop": (True, False),
    "determinism_check": get_args(DeterminismCheck),
    "running_stats": get_args(RunningStats),
}


@dataclass
class PolicyHandle:
    """A policy that is in force. `undo()` removes the policy; a `with` block calls `undo()` at its end."""

    policy: Policy
    _before: list[tuple[nn.Module, str, object]] = field(default_factory=list)

    def undo(self) -> None:
        """Restores the model's own functions. A second call does nothing."""
        while self._before:
            module, name, function = self._before.pop()
            if function is _MISSING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def apply_policy(
    model: Models, policy: Policy, *, generators: Sequence[torch.Generator] = (), part: bool = False
) -> PolicyHandle:
    """Makes the model recompute the units of `policy` in backward, through torch.utils.checkpoint.

    Several models are given by name, `{"netG": netG}`, and so are their blocks, `netG.main.3`.
    A block may be a pattern, `layers.*.mlp`: each block that matches becomes a separate unit.
    A warning names the blocks in which this model differs from the model of the policy's file.
    `part` is True for one stage of a split model that keeps the names of the whole: units of other stages are skipped.
    `generators` are set back at recompute like torch's own (torch stashes only its defaults). Units are recomputed in
    eval mode too, but never without gradients. A wrapped module holds itself in a cycle: its memory returns with the
    next gc.collect() after `del model`, or at once after `undo()`.
    Raises InvalidPolicy with every fault: an unknown block, an invalid segment, a block named twice, an unknown
    operator, a model that already carries another policy. After an error the model is unchanged. Applying the same
    policy a second time changes nothing; `undo()` of the second handle does nothing either.
    Source: https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    model = one_model(model)
    if not isinstance(policy, Policy):
        raise BadInput(
            f"A Policy was expected and {type(policy).__name__} was given.",
            hint="Load one from a file with `explorer.load_policy`, or make one with `Policy.recompute`.",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    if part:
        units = tuple(unit for unit in policy.units if not modules.keys().isdisjoint(unit.blocks))
        policy = replace(policy, units=units)
    else:
        names = shape_of(fqn for fqn, _ in model.named_modules())
        if policy.model_blocks and (changed := differences(policy.model_blocks, names)):
            warnings.warn(
                f"The policy was made for a model of other blocks, and is applied by name: {changed}.", stacklevel=2
            )
        policy = expanded(policy, list(modules))
    outside = _outside(model, policy, generators)
    wraps = [Wrap(unit, policy, outside) for unit in policy.units]
    handle = PolicyHandle(policy)
    before = _wraps_of(model)
    if before and before == frozenset(wraps):
        return handle
    if before:
        raise InvalidPolicy(
            "A policy was to be applied to a model that already carries one.",
            hint="Undo the first one with `handle.undo()`, or name all units in one policy.",
        )
    _check(policy, modules)
    is_users_call = not str(sys._getframe(1).f_globals.get("__name__")).startswith("explorer.")
    if is_users_call and (sentence := _checkpointed_already(policy, modules)):
        warnings.warn(sentence, stacklevel=2)
    for module, name, function in replacements(modules, wraps):
        handle._before.append((module, name, module.__dict__.get(name, _MISSING)))
        module.__dict__[name] = function
    return handle


def policy_of(model: nn.Module) -> Policy:
    """The policy that is in force on `model`; KEEP_ALL if there is none."""
    return next((wrap.policy for wrap in _wraps_of(model)), KEEP_ALL)


def _wraps_of(model: nn.Module) -> frozenset[Wrap]:
    return frozenset(wrap for module in model.modules() for wrap in wraps_on(module))


def _outside(model: nn.Module, policy: Policy, generators: Sequence[torch.Generator]) -> OutsideRng | None:
    """Generators that torch does not stash. Generators of the model are copied with the model, others are shared."""
    of_model = generators_of(model)
    ids = {id(generator) for generator in of_model.values()}
    restored = {id(of_model[name]): of_model[name] for name in policy.restore_rng if name in of_model}
    restored.update((id(generator), generator) for generator in generators if id(generator) in ids)
    outside = OutsideRng(
        names=tuple(name for name in policy.restore_rng if name not in of_model),
        own=tuple(restored.values()),
        shared=tuple(generator for generator in generators if id(generator) not in ids),
    )
    return outside if outside.names or outside.own or outside.shared else None


def _check(policy: Policy, modules: dict[str, nn.Module]) -> None:
    """Raises InvalidPolicy with every fault in one message."""
    faults = [*_named_blocks(policy, modules), *_options(policy, modules[""])]
    for unit in policy.units:
        if all(fqn in modules for fqn in unit.blocks):
            faults.extend(_unit(unit, modules))
    if faults:
        count = f"The policy has {len(faults)} faults: " if len(faults) > 1 else "The policy cannot be applied: "
        raise InvalidPolicy(count + "; ".join(faults) + ".", hint="The model is unchanged.")


def _checkpointed_already(policy: Policy, modules: dict[str, nn.Module]) -> str:
    """A sentence on units that other checkpointing recomputes too: FSDP's wrapper, a switch as of the Trainer."""
    wrapped = [fqn for fqn, module in modules.items() if type(module).__name__ == "CheckpointWrapper"]
    switches = [
        (fqn, name) for fqn, module in modules.items() for name in SWITCHES
        if module.training and getattr(module, name, None) is True
    ]  # fmt: skip
    places = [(fqn, "FSDP's activation checkpointing") for fqn in wrapped]
    places += [(fqn, f"the switch {name}") for fqn, name in switches]
    found: dict[str, None] = {}
    blocks: dict[str, None] = {}
    for unit in policy.blocks:
        of_unit = [source for fqn, source in places if overlaps(fqn, unit)]
        found.update(dict.fromkeys(of_unit))
        blocks.update({unit: None} if of_unit else {})
    if not blocks:
        return ""
    return (
        f"{some(tuple(blocks))} of the policy may run again for {' and for '.join(found)}, too: each checkpoint "
        "around a block adds a forward. Leave one of them on."
    )


def _close(name: str, names: Iterable[str]) -> str:
    hint = nearest(name, names)
    return f" ({hint[0].lower()}{hint[1:]})" if hint else ""


def _named_blocks(policy: Policy, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Names that the model lacks, and blocks that are named twice."""
    for fqn in policy.blocks:
        if fqn not in modules:
            yield f"the model has no block {fqn!r}{_close(fqn, modules)}"
    yield from _named_again(policy)
    first: dict[nn.Module, tuple[Unit, str]] = {}
    for unit in policy.units:
        for fqn in unit.blocks:
            module = modules.get(fqn)
            if module is None:
                continue
            owner, name = first.setdefault(module, (unit, fqn))
            if owner is not unit and name != fqn:
                yield f"{name!r} and {fqn!r} are the same block: name it once"


def _named_again(policy: Policy) -> Iterator[str]:
    """Blocks named by two units of which none is a smaller segment inside the other."""
    units: dict[str, list[Unit]] = {}
    for unit in policy.units:
        for fqn in unit.blocks:
            units.setdefault(fqn, []).append(unit)
    for fqn, naming in units.items():
        naming = sorted(naming, key=lambda unit: len(unit.blocks))
        if not all(set(inner.blocks) < set(outer.blocks) for inner, outer in pairwise(naming)):
            yield f"{fqn or 'the model itself'!r} is named {len(naming)} times, by units that do not lie in each other"


def _unit(unit: Unit, modules: dict[str, nn.Module]) -> Iterator[str]:
    if not unit.blocks:
        yield "a unit names no block"
        return
    if unit.action not in get_args(Action):
        yield f"{unit.blocks[0]!r} has the action {unit.action!r}; there are {', '.join(get_args(Action))}"
    for fqn in unit.blocks:
        if isinstance(modules[fqn], torch.jit.ScriptModule):
            yield f"{fqn!r} is compiled by torch.jit: its forward cannot be replaced"
        if type(modules[fqn]).forward is nn.Module.forward and "forward" not in vars(
            modules[fqn]
        ):  # lists, dictionaries
            yield f"{fqn!r} is a {type(modules[fqn]).__name__}, which is never called: name the blocks inside it"
    if unit.action == "save_ops" and not unit.save_ops:
        yield f"{unit.blocks[0]!r} has the action save_ops but names no operator"
    if unit.action != "save_ops" and unit.save_ops:
        yield f"{unit.blocks[0]!r} names operators to save, but its action is {unit.action}"
    for name in unit.save_ops:
        try:
            operator(name)
        except (AttributeError, RuntimeError):
            yield f"torch has no operator {name!r}{_close(name, _operators())}"
    if len(unit.blocks) > 1:
        yield from _segment(unit, modules)


def _operators() -> list[str]:
    """Every operator of torch as a policy names it."""
    names = (name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return [name if name.count(".") == 2 else f"{name}.default" for name in names]


def _segment(unit: Unit, modules: dict[str, nn.Module]) -> Iterator[str]:
    named = " + ".join(unit.blocks)
    parents = {fqn.rpartition(".")[0] for fqn in unit.blocks}
    parent = modules.get(next(iter(parents)))
    if len(parents) != 1 or "" in unit.blocks or parent is None:
        yield f"{named} cannot be one segment: its blocks have different parents"
        return
    if isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        order = list(parent._modules)
        places = [order.index(fqn.rpartition(".")[2]) for fqn in unit.blocks]
        if places != list(range(places[0], places[0] + len(unit.blocks))):
            yield f"{named} cannot be one segment: its blocks do not follow each other"
    if runs_its_children(parent):
        return
    if len({id(modules[fqn]) for fqn in unit.blocks}) < len(unit.blocks):
        yield f"{named} cannot be one segment: one block stands in it twice"
    for fqn in unit.blocks:
        if modules[fqn]._compiled_call_impl is not None:
            yield f"{fqn!r} of a segment was compiled in place: put the policy on before `compile()` is called"


def _options(policy: Policy, model: nn.Module) -> Iterator[str]:
    for option, allowed in _CHOICES.items():
        if (value := getattr(policy, option)) not in allowed:
            yield f"{option} is {value!r}; it can be {' or '.join(map(repr, allowed))}"
    if policy.use_reentrant and any(unit.action == "save_ops" for unit in policy.units):
        yield "use_reentrant=True cannot save the results of operators: torch offers that for use_reentrant=False alone"
    generators = generators_of(model)
    for name in policy.restore_rng:
        if name not in ("python", "numpy") and name not in generators:
            names = ", ".join(generators) or "no generator of its own"
            yield f"restore_rng names {name!r}; known are python, numpy, and in this model {names}"


@contextmanager
def checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Turns every known switch of `model` off, and makes torch.utils.checkpoint a plain call of its function."""
    on = [(module, name) for module in model.modules() for name in SWITCHES if getattr(module, name, None) is True]
    for module, name in on:
        setattr(module, name, False)
    try:
        with checkpoint_functions_replaced(lambda original: _PlainCall, lambda original: _keep_nothing):
            yield
    finally:
        for module, name in on:
            setattr(module, name, True)


REENTRANT, NON_REENTRANT = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
_COPIES = "torch.distributed._composable.checkpoint_activation"
"""A module of torch that holds the second name too."""


@contextmanager
def checkpoint_functions_replaced(
    reentrant: Callable[[object], object], non_reentrant: Callable[[object], object]
) -> Iterator[None]:
    """Replaces what both kinds of torch.utils.checkpoint are made of by what the arguments make of it."""
    places = [(torch_checkpoint, REENTRANT, reentrant), (torch_checkpoint, NON_REENTRANT, non_reentrant)]
    if _COPIES in sys.modules:
        places.append((sys.modules[_COPIES], NON_REENTRANT, non_reentrant))
    originals = [getattr(module, name) for module, name, _ in places]
    try:
        for (module, name, make), original in zip(places, originals):
            setattr(module, name, make(original))
        yield
    finally:
        for (module, name, _), original in zip(places, originals):
            setattr(module, name, original)


class _PlainCall:
    """Reentrant checkpointing as a plain call."""

    @staticmethod
    def apply(function: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
        return function(*args)


def _keep_nothing(*args: object, **kwargs: object) -> Iterator[None]:
    """Non-reentrant checkpointing as a plain call: the generator around the call does nothing."""
    yield
