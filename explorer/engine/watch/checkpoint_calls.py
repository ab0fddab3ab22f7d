"""Watches the calls of torch.utils.checkpoint that a model makes by itself, and finds the switches that lead to them.

Every wrapper of torch's function ends in one of two names of torch.utils.checkpoint: checkpoint_sequential,
CheckpointWrapper, transformers, timm, diffusers. Both names are replaced while a step is watched; results and random
numbers stay the same. Helpers with an autograd Function of their own are seen by their reruns alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from explorer.engine.policy.apply import SWITCHES, checkpoint_functions_replaced
from explorer.engine.policy.units import is_of_a_policy
from explorer.engine.watch.collectives import dtensor_type
from explorer.engine.watch.tracker import Tracker
from explorer.plan.names import outermost
from explorer.record.checkpointing import CheckpointRegion, CheckpointSwitch, OwnCheckpointing

Region = tuple[str, tuple[str, ...], bool]


class _Counted:
    """A function of a checkpoint that counts its runs."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function, self.n_runs = function, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.n_runs += 1
        return self._function(*args, **kwargs)


class _Reentrant:
    """Takes the place of torch's autograd Function: every other attribute is the Function's own."""

    def __init__(self, function: Any, apply: Callable[..., object]) -> None:
        self._function, self.apply = function, apply

    def __getattr__(self, name: str) -> object:
        return getattr(self._function, name)


@contextmanager
def lost_gradients_refused() -> Iterator[None]:
    """Raises BadInput in a step whose policy runs weights under a reentrant checkpoint without a gradient."""

    def checked(original: Any) -> object:
        def apply(function: Any, preserve_rng_state: bool, *args: object) -> object:
            is_unit = torch.is_grad_enabled() and is_of_a_policy(function, None)
            if is_unit and _is_dead(args) and any(weight.requires_grad for weight in function.parameters()):
                from explorer.plan.predict.not_predicted import refuse_lost_gradients

                refuse_lost_gradients(function.fqn)
            return original.apply(function, preserve_rng_state, *args)

        return _Reentrant(original, apply)

    with checkpoint_functions_replaced(checked, lambda original: original):
        yield


def _is_dead(arguments: Iterable[object]) -> bool:
    """Whether no gradient passes. torch looks at the arguments themselves, and not into a list."""
    return not any(isinstance(value, Tensor) and value.requires_grad for value in arguments)


class CheckpointCalls:
    """Collects the checkpoint calls of a step that `tracker` watches."""

    def __init__(self, model: nn.Module, tracker: Tracker) -> None:
        self._model, self._tracker = model, tracker
        self._calls: list[tuple[CheckpointRegion, _Counted, int]] = []
        """Each call with its function, and how many runs of the function are its forward."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context around the step."""
        with checkpoint_functions_replaced(self._reentrant, self._without_reentrant):
            yield

    def _reentrant(self, original: Any) -> object:
        def apply(function: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
            if not self._counts(function):
                return original.apply(function, preserve_rng_state, *args)
            counted = _Counted(function)
            with self._region(counted, reentrant=True, dead=_is_dead(args)):
                return original.apply(counted, preserve_rng_state, *args)

        return _Reentrant(original, apply)

    def _without_reentrant(self, original: Any) -> object:
        def generator(function: Callable[..., object], *args: Any, **kwargs: Any) -> Iterator[None]:
            context = kwargs.get("context_fn", args[1] if len(args) > 1 else None)
            if not self._counts(function, context):
                yield from original(function, *args, **kwargs)
                return
            counted = _Counted(function)  # torch calls it for reruns alone
            with self._region(counted, reentrant=False, dead=False):
                yield from original(counted, *args, **kwargs)

        return generator

    def _counts(self, function: object, context: object = None) -> bool:
        """Whether a call is the model's own, in forward and with gradients: a nested call repeats in each rerun."""
        in_forward = torch._C._current_graph_task_id() == -1
        return in_forward and torch.is_grad_enabled() and not is_of_a_policy(function, context)

    @contextmanager
    def _region(self, function: _Counted, *, reentrant: bool, dead: bool) -> Iterator[None]:
        fqns, log = self._tracker.fqns, self._tracker.calls.block
        caller, first = fqns[self._tracker.scopes.frame.stack[-1]], len(log)
        yield
        blocks = tuple(outermost(fqns[block] for block in log[first:]))
        region = CheckpointRegion(
            caller=caller, blocks=blocks, reentrant=reentrant, n_calls=1, n_without_gradient=int(dead)
        )
        self._calls.append((region, function, function.n_runs))

    def result(self) -> OwnCheckpointing:
        """What the step has shown, after its end."""
        trainable = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
        missing = [name for name, parameter in trainable.items() if self._is_missing(name, parameter)]
        called = [fqn for fqn, n in zip(self._tracker.fqns, self._tracker.n_forward) if n]
        return OwnCheckpointing(
            switches=tuple(_switches(self._model)),
            regions=tuple(self._regions()),
            n_trainable=len(trainable),
            without_gradient=() if len(missing) == len(trainable) else tuple(missing),
            in_eval=tuple(outermost(fqn for fqn in called if not self._model.get_submodule(fqn).training)),
        )

    def _is_missing(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether no gradient came. FSDP2 writes gradients of its shards without a hook, and clears them."""
        kind = dtensor_type()
        is_sharded = kind is not None and isinstance(parameter, kind)
        return parameter.grad is None and name not in self._tracker.with_gradient and not is_sharded

    def _regions(self) -> Iterator[CheckpointRegion]:
        regions: dict[Region, CheckpointRegion] = {}
        for call, function, n_in_forward in self._calls:
            key = call.caller, call.blocks, call.reentrant
            so_far = regions.get(key, replace(call, n_calls=0, n_without_gradient=0))
            regions[key] = replace(
                so_far,
                n_calls=so_far.n_calls + 1,
                n_again=so_far.n_again + function.n_runs - n_in_forward,
                n_without_gradient=so_far.n_without_gradient + call.n_without_gradient,
            )
        yield from regions.values()


def _switches(model: nn.Module) -> Iterator[CheckpointSwitch]:
    for fqn, module in model.named_modules():
        for name in SWITCHES:
            if isinstance(value := getattr(module, name, None), bool):
                yield CheckpointSwitch(block=fqn, name=name, is_on=value, trains=module.training)
