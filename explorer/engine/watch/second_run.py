"""Traits that would make a block's recompute differ from its forward, from the operators of one observed forward.

random numbers    the generator, and whether the block continues its stream (a block that sets a seed draws the same
                  numbers again)
arguments         whether container arguments change, see state_changes.py
statistics        whether a norm computes with the running statistics that it moves, see statistics_use.py
results           whether an operator's result is written into later: torch refuses to keep such results (save_ops)
hidden modules    unregistered modules, whose state no policy can restore
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from explorer.engine.device.without_data import is_without_data
from explorer.engine.state.reachable import reachable_generators
from explorer.engine.state.rng import generator_key, get_position, imported_numpy, state_bytes
from explorer.engine.watch.data_flow import dense
from explorer.engine.watch.state_changes import ContainerInputs, moved_traits, state_pictures
from explorer.engine.watch.statistics_use import StatisticsUse
from explorer.engine.watch.uncompiled import DispatchMode
from explorer.plan.names import lineage
from explorer.record.graph import Trait

Outside = tuple[Any, ...]
"""States of Python's and numpy's generators."""


@dataclass
class _Call:
    """A call of a block that has not returned."""

    fqn: str
    containers: ContainerInputs
    outside: Outside
    objects: Outside
    """States of the Python and numpy generator objects of the model."""
    entry: dict[int, tuple[int, bytes]]
    """Seed and position of torch's default generators and of the model's generators."""
    strange: dict[int, bytes] = field(default_factory=dict)
    """Position of other generators at the call's first draw: made in the call, or not reachable from the model."""
    seeded: set[Any] = field(default_factory=set)
    """Generators that the call set to a seed."""

    def goes_on(self, generator: torch.Generator, before: bytes) -> bool:
        """Whether a draw at `before` continues from the generator's state at entry, not from a seed set in the call."""
        key = generator_key(generator)
        seed, at_entry = self.entry[key]
        if generator.initial_seed() != seed:
            return False
        if before != at_entry and before == get_position(torch.Generator(generator.device).manual_seed(seed)):
            self.seeded.add(key)
        return key not in self.seeded


class SecondRun(DispatchMode):
    """Watches every call of a block of `model` between enter and exit; `traits` has the findings afterwards.

    `streams` are the streams that are noted even if they did not move.
    """

    def __init__(self, model: nn.Module, *, streams: Collection[tuple[str, str]] = ()) -> None:
        super().__init__()
        self.traits: dict[str, set[Trait]] = {fqn: set() for fqn, _ in model.named_modules()}
        self.streams: dict[tuple[str, str], list[tuple[Outside, Outside]]] = {}
        """Generator states before and after each call of a block that moved the generators and may have seeded them."""
        self._fqns = {module: fqn for fqn, module in model.named_modules()}
        within = reachable_generators(model)
        self._noted = frozenset(streams)
        self._own = [g for g in within if isinstance(g, torch.Generator)]
        self._objects = [g for g in within if not isinstance(g, torch.Generator)]
        self._statistics = StatisticsUse(model)
        self._calls: list[_Call] = []
        self._done: list[_Call] = []
        self._given: dict[tuple[int, int], set[str]] = defaultdict(set)
        """Blocks with a storage among their arguments, by the storage's name."""
        self.rewritten_ops: dict[str, set[str]] = {fqn: set() for fqn in self.traits}
        """Operators, by block, whose results are written into afterwards."""
        self._returned_by: dict[tuple[int, int], set[tuple[str, str]]] = defaultdict(set)
        """Block and operator that returned a storage, by the storage's name."""
        self._hidden: list[tuple[nn.Module, Any]] = []
        self._born: dict[int, int] = {}
        self._now = 0
        self._open = ExitStack()

    def __enter__(self) -> SecondRun:
        for module in self._fqns:
            # These hooks are closest to the block: a policy keeps the arguments as other hooks leave them.
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            after = module.register_forward_hook(self._after, always_call=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        self._open.callback(register_module_forward_pre_hook(self._before_hidden).remove)
        self._open.callback(register_module_forward_hook(self._after_hidden, always_call=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._open.close()
        for call in self._done:
            call.containers.look()
            self.traits[call.fqn] |= call.containers.traits
        for module in self._statistics.used():
            for ancestor in lineage(self._fqns[module]):
                self.traits[ancestor].add("reads_statistics")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a tensor subclass for its device
            return func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and dense(leaf)]
        for call in self._calls:
            if call.containers.read is not None:
                call.containers.read.update(map(self._name, read))
        drawing = _generator_of(args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        before = get_position(drawing) if drawing is not None else b""
        out = func(*args, **kwargs)
        if drawing is not None:
            self._drew(func, drawing, before)
        elif not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            for call in self._calls:
                self.traits[call.fqn].discard("rng_last")
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and dense(leaf)]
        known = {tensor.untyped_storage()._cdata for tensor in read}
        made = {t.untyped_storage()._cdata for t in written} - known
        self._now += 1
        self._born.update(dict.fromkeys(made, self._now))
        if func._schema.is_mutable:
            for tensor in _written_into(func, args, kwargs):
                self._wrote(self._name(tensor))
        for name in map(self._name, written):
            self._returned_by[name].update((call.fqn, str(func)) for call in self._calls)
        self._statistics.ran(func, args, read, written, made)
        return out

    def _name(self, tensor: Tensor) -> tuple[int, int]:
        """A unique name of a storage: its address and birth, because addresses are reused."""
        address = tensor.untyped_storage()._cdata
        return address, self._born.get(address, -1)

    def _wrote(self, name: tuple[int, int]) -> None:
        for fqn in self._given.get(name, ()):
            self.traits[fqn].add("changes_inputs")
        for fqn, op in self._returned_by.get(name, ()):
            self.rewritten_ops[fqn].add(op)

    def _drew(self, func: Any, generator: torch.Generator, before: bytes) -> None:
        # Dropout in eval mode, or of nothing; without data no generator moves.
        if get_position(generator) == before and not is_without_data():
            return
        default = generator_key(generator) in map(generator_key, _defaults())
        for call in self._calls:
            if generator_key(generator) not in call.entry:
                call.strange.setdefault(generator_key(generator), before)
            elif call.goes_on(generator, before):
                self.traits[call.fqn].add("uses_rng" if default else "own_generator")
            # RReLU stores the noise that it draws; as last operator it is cut short by early stop (pytorch #193671).
            (self.traits[call.fqn].add if "rrelu" in str(func) else self.traits[call.fqn].discard)("rng_last")

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        with _disable_current_modes():  # other modes must see only the model's operators
            self._calls.append(self._begun(module, args, kwargs))

    def _begun(self, module: nn.Module, args: Any, kwargs: Any) -> _Call:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and dense(tensor):
                self._given[self._name(tensor)].add(self._fqns[module])
        return _Call(
            fqn=self._fqns[module],
            containers=ContainerInputs(args, kwargs, self._name),
            outside=outside_position(),
            objects=tuple(map(get_position, self._objects)),
            entry={generator_key(g): (g.initial_seed(), get_position(g)) for g in (*_defaults(), *self._own)},
        )

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls.pop()
        with _disable_current_modes():
            self._ended(call)
        self._done.append(call)

    def _ended(self, call: _Call) -> None:
        python, numpy = outside_position()
        self._moved(call, "python", call.outside[:1], (python,))
        if call.outside[1] is not None:  # None: numpy was imported during the call
            self._moved(call, "numpy", call.outside[1:], (numpy,))
        self._moved(call, "objects", call.objects, tuple(map(get_position, self._objects)))
        self._moved(call, "strange", (), tuple(call.strange.values()))
        call.containers.look()

    def _moved(self, call: _Call, stream: str, then: Outside, now: Outside) -> None:
        if then != now or (call.fqn, stream) in self._noted:
            self.streams.setdefault((call.fqn, stream), []).append((then, now))

    def settle(self, another: SecondRun | None) -> None:
        """Adds the traits of `streams`, except for blocks that end in the same state in another forward.

        Such blocks seed themselves and draw the same numbers again. `another` is None without a second forward.
        """
        for (fqn, stream), calls in self.streams.items():
            others = another.streams.get((fqn, stream), []) if another is not None else []
            pairs = zip(calls, others)
            seeded = all(
                end == other_end and (not begin or begin != other) for (begin, end), (other, other_end) in pairs
            )
            if len(calls) != len(others) or not seeded:
                self.traits[fqn].add(_TRAIT[stream])

    def _before_hidden(self, module: nn.Module, args: Any) -> None:
        if module not in self._fqns and not any(module in outer.modules() for outer, _ in self._hidden):
            self._hidden.append((module, state_pictures(module)))

    def _after_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._hidden or self._hidden[-1][0] is not module:
            return
        _, before = self._hidden.pop()
        moved = set().union(*moved_traits(module, before, statistics=True).values())
        for call in self._calls:
            self.traits[call.fqn] |= {"hidden_state" if trait == "moves_buffers" else trait for trait in moved}


def _written_into(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Arguments that an operator writes, by its schema; `detach_` is left out because it changes no value."""
    if "detach_" in str(func):
        return
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and dense(leaf))


def _generator_of(args: Any, kwargs: Any) -> torch.Generator:
    """The generator of an operator: an argument, or the default of its device."""
    named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    if named:
        return named[0]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _defaults() -> tuple[torch.Generator, ...]:
    return (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()))


_TRAIT: dict[str, Trait] = {
    "python": "python_rng",
    "numpy": "numpy_rng",
    "objects": "own_generator",
    "strange": "own_generator",
}


def outside_position() -> Outside:
    """States of Python's and numpy's default generators; None for numpy if it is not imported."""
    numpy = imported_numpy()
    return random.getstate(), state_bytes(numpy.random.get_state()) if numpy is not None else None
