"""Puts a policy onto a model in place, and removes the policy without a trace.

units.py has the rules of a unit. Every check comes before any change, and one error names all faults (check.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import msgspec
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from explorer.engine.policy.check import check
from explorer.engine.policy.units import Wrap, replacements, wraps_on
from explorer.engine.state.rng import OutsideRng, generators_of
from explorer.errors import BadInput
from explorer.plan.policy.block_names import differences, expanded, shape_of
from explorer.record.policy import KEEP_ALL, Policy

SWITCHES = (
    "gradient_checkpointing", "grad_checkpointing", "use_checkpoint", "use_checkpointing", "use_grad_checkpointing",
    "use_gradient_checkpointing", "activation_checkpointing", "checkpointing", "with_cp", "memory_efficient",
)  # fmt: skip
"""Attributes of known libraries that are True on a module that checkpoints itself."""
_MISSING = object()


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
    model: nn.Module, policy: Policy, *, generators: Sequence[torch.Generator] = (), part: bool = False
) -> PolicyHandle:
    """Makes the model recompute the units of `policy` in backward, through torch.utils.checkpoint.

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
    for value, kind, hint in (
        (model, nn.Module, "Give the model first, then the policy."),
        (policy, Policy, "Load one from a file with `explorer.load_policy`, or make one with `Policy.recompute`."),
    ):
        if not isinstance(value, kind):
            raise BadInput(f"A {kind.__name__} was expected and {type(value).__name__} was given.", hint=hint)
    if part:
        here = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
        policy = msgspec.structs.replace(policy, units=tuple(u for u in policy.units if here & set(u.blocks)))
    else:
        _warn_of_changes(model, policy)
        policy = expanded(policy, [fqn for fqn, _ in model.named_modules(remove_duplicate=False)])
    outside = _outside(model, policy, generators)
    wraps = [Wrap(unit, policy, outside) for unit in policy.units]
    handle = PolicyHandle(policy)
    if wraps and _wraps_of(model) == frozenset(wraps):
        return handle
    check(model, policy)
    for module, name, function in replacements(dict(model.named_modules(remove_duplicate=False)), wraps):
        handle._before.append((module, name, module.__dict__.get(name, _MISSING)))
        module.__dict__[name] = function
    return handle


def _warn_of_changes(model: nn.Module, policy: Policy) -> None:
    names = shape_of(fqn for fqn, _ in model.named_modules())
    if policy.model_blocks and (changed := differences(policy.model_blocks, names)):
        warnings.warn(
            f"The policy was made for a model of other blocks, and is applied by name: {changed}.", stacklevel=3
        )


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


@contextmanager
def checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Turns every known switch of `model` off, and makes torch.utils.checkpoint a plain call of its function."""
    on = [(module, name) for module in model.modules() for name in SWITCHES if getattr(module, name, None) is True]
    originals = (torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator)
    for module, name in on:
        setattr(module, name, False)
    torch_checkpoint.CheckpointFunction = _PlainCall  # type: ignore[misc, assignment]
    torch_checkpoint._checkpoint_without_reentrant_generator = _keep_nothing  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator = originals  # type: ignore[misc]
        for module, name in on:
            setattr(module, name, True)


class _PlainCall:
    """Reentrant checkpointing as a plain call."""

    @staticmethod
    def apply(function: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
        return function(*args)


def _keep_nothing(*args: object, **kwargs: object) -> Iterator[None]:
    """Non-reentrant checkpointing as a plain call: the generator around the call does nothing."""
    yield
