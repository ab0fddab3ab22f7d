"""Puts a policy onto a model in place, and removes the policy without a trace.

1. A unit's `forward` becomes a functools.partial around the original: no wrapper module, no closure. Names,
   state_dict, isinstance and pickle therefore stay the same, and a deep copy runs its own weights.
2. A segment (consecutive children of one parent) is wrapped on the Sequential that runs the children. Under other
   parents the call of each block is replaced, see in_turn.py.
3. An ancestor and its descendants may both be units; descendants run inside their ancestor's checkpoint.
4. Every check comes before any change, and one error names all faults.
5. Keyword arguments are passed by position and bound again inside the checkpoint. Reentrant checkpointing refuses
   keywords. Non-reentrant checkpointing holds their tensors itself, and a unit around the checkpoint cannot free them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from explorer.engine.policy.actions import operators, selective_contexts
from explorer.engine.policy.check import checked, runs_its_children
from explorer.engine.policy.in_turn import InTurn, called_in_turn
from explorer.engine.policy.offload import offload_saved
from explorer.engine.policy.recompute import RunningAgain
from explorer.engine.state.rng import OutsideRng, generators_of
from explorer.errors import BadInput
from explorer.plan.policy.block_names import differences, expanded, shape_of
from explorer.record.policy import KEEP_ALL, Policy, Unit

_MISSING = object()


@dataclass(frozen=True)
class Wrap:
    """A unit with its policy and outside generators. Copies and pickles of the model include the wrap."""

    unit: Unit
    policy: Policy
    outside: OutsideRng | None = None

    @property
    def fqn(self) -> str:
        """The unit's name: that of its first block."""
        return self.unit.blocks[0]


@dataclass
class PolicyHandle:
    """A policy that is in force. `undo()` removes the policy; a `with` block calls `undo()` at its end."""

    policy: Policy
    _before: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

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
    if wraps and _carried(model) == frozenset(wraps):
        return handle
    checked(model, policy, is_wrapped=is_wrapped)
    modules = dict(model.named_modules(remove_duplicate=False))
    for parent, segments in _segments_by_parent(wraps).items():
        if runs_its_children(modules[parent]):
            _replace(handle, modules[parent], _in_segments, segments)
        else:
            _take_turns(handle, modules, segments)
    for wrap in wraps:
        if len(wrap.unit.blocks) == 1:
            _replace(handle, modules[wrap.fqn], _as_unit, wrap)
    return handle


def _warn_of_changes(model: nn.Module, policy: Policy) -> None:
    names = shape_of(fqn for fqn, _ in model.named_modules())
    if policy.model_blocks and (changed := differences(policy.model_blocks, names)):
        warnings.warn(
            f"The policy was made for a model of other blocks, and is applied by name: {changed}.", stacklevel=3
        )


def policy_of(model: nn.Module) -> Policy:
    """The policy that is in force on `model`; KEEP_ALL if there is none."""
    return next((wrap.policy for wrap in _carried(model)), KEEP_ALL)


def is_wrapped(module: nn.Module) -> bool:
    """Whether a policy has replaced the forward or the call of this module itself."""
    return bool(_hows(module))


def _hows(module: nn.Module) -> list[Any]:
    """The wraps of this module itself: one Wrap, or a tuple of them on a Sequential."""
    hows = []
    forward, call = module.__dict__.get("forward"), module.__dict__.get("_call_impl")
    if isinstance(forward, functools.partial) and forward.func in (_as_unit, _in_segments):
        hows.append(forward.args[2])
    if isinstance(call, functools.partial) and call.func is called_in_turn:
        hows.append(call.args[0].how)
    return hows


def _carried(model: nn.Module) -> frozenset[Wrap]:
    """All wraps of the policy on this model."""
    hows = [how for module in model.modules() for how in _hows(module)]
    return frozenset(wrap for how in hows for wrap in (how if isinstance(how, tuple) else (how,)))


def _outside(model: nn.Module, policy: Policy, generators: Sequence[torch.Generator]) -> OutsideRng | None:
    """Generators that torch does not stash. Generators of the model are copied with the model, others are shared."""
    own = generators_of(model)
    held = {id(generator) for generator in own.values()}
    kept = {id(own[name]): own[name] for name in policy.restore_rng if name in own}
    kept.update((id(generator), generator) for generator in generators if id(generator) in held)
    outside = OutsideRng(
        names=tuple(name for name in policy.restore_rng if name not in own),
        own=tuple(kept.values()),
        shared=tuple(generator for generator in generators if id(generator) not in held),
    )
    return outside if outside.names or outside.own or outside.shared else None


def _segments_by_parent(wraps: Sequence[Wrap]) -> Mapping[str, tuple[Wrap, ...]]:
    by_parent: dict[str, tuple[Wrap, ...]] = {}
    for wrap in wraps:
        if len(wrap.unit.blocks) > 1:
            parent = wrap.fqn.rpartition(".")[0]
            by_parent[parent] = (*by_parent.get(parent, ()), wrap)
    return by_parent


def _replace(handle: PolicyHandle, module: nn.Module, function: Callable[..., Any], how: Any) -> None:
    _put(handle, module, "forward", functools.partial(function, module, module.forward, how))


def _take_turns(handle: PolicyHandle, modules: Mapping[str, nn.Module], wraps: Sequence[Wrap]) -> None:
    for wrap in wraps:
        members = tuple(modules[fqn] for fqn in wrap.unit.blocks)
        segment = InTurn(wrap.unit.blocks, members, _run, wrap)
        for place, member in enumerate(members):
            _put(handle, member, "_call_impl", functools.partial(called_in_turn, segment, place))


def _put(handle: PolicyHandle, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    handle._before.append((module, name, module.__dict__.get(name, _MISSING)))
    module.__dict__[name] = function


def _as_unit(module: nn.Module, forward: Callable[..., Any], wrap: Wrap, *args: Any, **kwargs: Any) -> Any:
    return _run(wrap, forward, (module,), args, kwargs)


def _in_segments(sequential: nn.Module, forward: Callable[..., Any], wraps: tuple[Wrap, ...], value: Any) -> Any:
    """A Sequential's forward that runs each segment's children as a unit. One module may be a child several times."""
    starts = {wrap.fqn.rpartition(".")[2]: wrap for wrap in wraps}
    children = list(sequential._modules.items())
    i = 0
    while i < len(children):
        name, child = children[i]
        wrap = starts.get(name)
        n_children = len(wrap.unit.blocks) if wrap else 1
        if wrap is None:
            value = child(value)  # type: ignore[misc]
        else:
            members = tuple(module for _, module in children[i : i + n_children] if module is not None)
            value = _run(wrap, functools.partial(_chain, members), members, (value,), {})
        i += n_children
    return value


def _chain(members: Sequence[nn.Module], value: Any) -> Any:
    for member in members:
        value = member(value)
    return value


def _run(
    wrap: Wrap,
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if wrap.unit.action == "offload":
        with offload_saved(modules):
            return function(*args, **kwargs)
    policy = wrap.policy
    again = functools.partial(RunningAgain, modules, wrap.fqn, running_stats=policy.running_stats, outside=wrap.outside)
    if kwargs:
        function, args = functools.partial(_with_keywords, function, tuple(kwargs)), (*args, *kwargs.values())
    if policy.use_reentrant:
        return torch.utils.checkpoint.checkpoint(
            _FirstThenAgain(function, again), *args, use_reentrant=True, preserve_rng_state=policy.preserve_rng_state
        )
    if unseen := witnesses(args, modules):
        function, args = functools.partial(_without_witnesses, function), (unseen, *args)
    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=policy.preserve_rng_state,
        determinism_check=policy.determinism_check,
        early_stop=policy.early_stop,
        context_fn=functools.partial(selective_contexts, operators(wrap.unit.save_ops), again),
    )


def _with_keywords(function: Callable[..., Any], names: Sequence[str], *args: Any) -> Any:
    """Calls `function` with the last positional arguments bound to `names` as keywords."""
    first = len(args) - len(names)
    return function(*args[:first], **dict(zip(names, args[first:], strict=True)))


def _without_witnesses(function: Callable[..., Any], _: Any, *args: Any) -> Any:
    return function(*args)


def witnesses(args: tuple[Any, ...], modules: Sequence[nn.Module]) -> tuple[torch.Tensor, ...]:
    """One tensor for each device of `modules` that no tensor of `args` is on; the CPU needs none.

    torch stashes only the generators of devices that it finds among the positional arguments of `checkpoint`
    (get_device_states). Without witnesses a unit that moves its input to another device would draw other dropout masks
    at recompute. torch looks into a tuple of witnesses, and autograd saves none of its tensors.
    """
    tensors = [tensor for module in modules if (tensor := next(module.parameters(), None)) is not None]
    known = {leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    unseen = {tensor.device: tensor for tensor in tensors if tensor.device not in known}
    return tuple(tensor for device, tensor in unseen.items() if device.type not in ("cpu", "meta"))


class _FirstThenAgain:
    """Reentrant checkpointing has no context_fn: its function runs plainly at first, then inside `again`."""

    def __init__(self, function: Callable[..., Any], again: Callable[[], RunningAgain]) -> None:
        self._function = function
        self._again = again()
        self._first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first:
            self._first = False
            return self._function(*args, **kwargs)
        with self._again:
            return self._function(*args, **kwargs)
