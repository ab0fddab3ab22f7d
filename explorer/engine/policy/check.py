"""Checks whether a policy fits a model: every fault is collected before the model is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import get_args

import torch
from torch import nn

from explorer.engine.policy.units import operator, runs_its_children, wraps_on
from explorer.engine.state.rng import generators_of
from explorer.errors import InvalidPolicy, nearest
from explorer.record.policy import Action, DeterminismCheck, Policy, RunningStats, Unit

_CHOICES = {
    "preserve_rng_state": (True, False),
    "use_reentrant": (True, False),
    "early_stop": (True, False),
    "determinism_check": get_args(DeterminismCheck),
    "running_stats": get_args(RunningStats),
}


def check(model: nn.Module, policy: Policy) -> None:
    """Raises InvalidPolicy with every fault in one message."""
    if any(wraps_on(module) for module in model.modules()):
        raise InvalidPolicy(
            "A policy was to be applied to a model that already carries one.",
            hint="Undo the first one with `handle.undo()`, or name all units in one policy.",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    faults = [*_unknown_blocks(policy, modules), *_repeated_blocks(policy, modules), *_options(model, policy)]
    for unit in policy.units:
        if all(fqn in modules for fqn in unit.blocks):
            faults.extend(_unit(unit, modules))
    if faults:
        count = f"The policy has {len(faults)} faults: " if len(faults) > 1 else "The policy cannot be applied: "
        raise InvalidPolicy(count + "; ".join(faults) + ".", hint="The model is unchanged.")


def _unknown_blocks(policy: Policy, modules: dict[str, nn.Module]) -> Iterator[str]:
    for fqn in policy.blocks:
        if fqn not in modules:
            yield f"the model has no block {fqn!r}{_close(fqn, modules)}"


def _close(name: str, names: Iterable[str]) -> str:
    hint = nearest(name, names)
    return f" ({hint[0].lower()}{hint[1:]})" if hint else ""


def _repeated_blocks(policy: Policy, modules: dict[str, nn.Module]) -> Iterator[str]:
    for fqn, times in Counter(policy.blocks).items():
        if times > 1:
            yield f"{fqn or 'the model itself'!r} is named {times} times"
    first: dict[nn.Module, tuple[Unit, str]] = {}
    for unit in policy.units:
        for fqn in unit.blocks:
            module = modules.get(fqn)
            if module is None:
                continue
            owner, name = first.setdefault(module, (unit, fqn))
            if owner is not unit and name != fqn:
                yield f"{name!r} and {fqn!r} are the same block: name it once"


def _unit(unit: Unit, modules: dict[str, nn.Module]) -> Iterator[str]:
    if not unit.blocks:
        yield "a unit names no block"
        return
    if unit.action not in get_args(Action):
        yield f"{unit.blocks[0]!r} has the action {unit.action!r}; there are {', '.join(get_args(Action))}"
    for fqn in unit.blocks:
        if isinstance(modules[fqn], torch.jit.ScriptModule):
            yield f"{fqn!r} is compiled by torch.jit: its forward cannot be replaced"
        if not _has_forward(modules[fqn]):
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


def _has_forward(module: nn.Module) -> bool:
    """Whether the module has a forward. Lists and dictionaries of modules have none, unless a subclass defines one."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


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


def _options(model: nn.Module, policy: Policy) -> Iterator[str]:
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
