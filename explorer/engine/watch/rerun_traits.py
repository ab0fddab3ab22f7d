"""Traits that would make a block's recompute differ from its forward, from one observed forward.

random numbers    the generator, and whether the block continues its stream (a block that sets a seed draws the same
                  numbers again)
arguments         whether container arguments change, see state_changes.py
statistics        whether a norm computes with the running statistics that it moves
results           whether an operator's result is written into later: torch refuses to keep such results (save_ops)
hidden modules    unregistered modules, whose state no policy can restore
own checkpoints   blocks that the model itself recomputes
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from explorer.engine.device.without_data import is_without_data
from explorer.engine.state.reachable import reachable_generators
from explorer.engine.state.rng import generator_key, get_position, imported_numpy, state_bytes
from explorer.engine.watch.forward import NoteTaker, Operator, StorageName, dense_tensors
from explorer.engine.watch.modes import draws_numbers, is_composite, is_higher_order, writes_arguments
from explorer.engine.watch.state_changes import RUNNING_STATISTICS, ContainerInputs, moved_traits, state_pictures
from explorer.engine.watch.storages import tensors_of
from explorer.plan.names import lineage
from explorer.record.graph import Trait

States = tuple[object, ...]
"""States of Python's and numpy's generators."""
_TRAIT: dict[str, Trait] = {
    "python": "python_rng",
    "numpy": "numpy_rng",
    "objects": "own_generator",
    "strange": "own_generator",
}


@dataclass
class _Call:
    """A call of a block that has not returned."""

    fqn: str
    outside: States
    objects: States
    """States of the Python and numpy generator objects of the model."""
    entry: dict[int, tuple[int, bytes]]
    """Seed and position of torch's default generators and of the model's generators."""
    strange: dict[int, bytes] = field(default_factory=dict)
    """Position of other generators at the call's first draw: made in the call, or not reachable from the model."""
    seeded: set[object] = field(default_factory=set)
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


class RandomNumbers(NoteTaker):
    """Finds draws of each block. `streams` are the streams that are noted even if they did not move."""

    def __init__(self, model: nn.Module, *, streams: Collection[tuple[str, str]] = ()) -> None:
        self.traits: dict[str, set[Trait]] = defaultdict(set)
        self.streams: dict[tuple[str, str], list[tuple[States, States]]] = {}
        """Generator states before and after each call of a block that moved the generators and may have seeded them."""
        self._noted = frozenset(streams)
        generators = reachable_generators(model)
        self._own = [g for g in generators if isinstance(g, torch.Generator)]
        self._objects = [g for g in generators if not isinstance(g, torch.Generator)]
        self._calls: list[_Call] = []
        self._drawing: torch.Generator | None = None
        self._before = b""
        """Position of the generator `_drawing` before the present operator."""

    def begins(self, fqn: str, args: object, kwargs: object) -> None:
        self._calls.append(
            _Call(
                fqn=fqn,
                outside=outside_position(),
                objects=tuple(map(get_position, self._objects)),
                entry={generator_key(g): (g.initial_seed(), get_position(g)) for g in (*_defaults(), *self._own)},
            )
        )

    def left(self, fqn: str, output: object) -> None:
        call = self._calls.pop()
        python, numpy = outside_position()
        self._moved(call, "python", call.outside[:1], (python,))
        if call.outside[1] is not None:  # None: numpy was imported during the call
            self._moved(call, "numpy", call.outside[1:], (numpy,))
        self._moved(call, "objects", call.objects, tuple(map(get_position, self._objects)))
        self._moved(call, "strange", (), tuple(call.strange.values()))

    def _moved(self, call: _Call, stream: str, before: States, after: States) -> None:
        if before != after or (call.fqn, stream) in self._noted:
            self.streams.setdefault((call.fqn, stream), []).append((before, after))

    def reads(self, op: Operator) -> None:
        self._drawing = _generator_of(op) if draws_numbers(op.func) else None
        self._before = get_position(self._drawing) if self._drawing is not None else b""

    def ran(self, op: Operator) -> None:
        if self._drawing is not None:
            self._drew(op, self._drawing, self._before)
        elif not is_composite(op.func):
            for call in self._calls:
                self.traits[call.fqn].discard("rng_last")

    def _drew(self, op: Operator, generator: torch.Generator, before: bytes) -> None:
        # Dropout in eval mode, or of nothing; without data no generator moves.
        if get_position(generator) == before and not is_without_data():
            return
        default = generator_key(generator) in map(generator_key, _defaults())
        for call in self._calls:
            traits = self.traits[call.fqn]
            if generator_key(generator) not in call.entry:
                call.strange.setdefault(generator_key(generator), before)
            elif call.goes_on(generator, before):
                traits.add("uses_rng" if default else "own_generator")
            # RReLU stores the noise that it draws; as last operator it is cut short by early stop (pytorch #193671).
            (traits.add if "rrelu" in str(op.func) else traits.discard)("rng_last")

    def settle(self, another: RandomNumbers | None) -> None:
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


def _generator_of(op: Operator) -> torch.Generator:
    """The generator of an operator: an argument, or the default of its device."""
    named = [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, torch.Generator)]
    if named:
        return named[0]
    first = next(iter(tensors_of((op.args, op.kwargs))), None)
    device = first.device if first is not None else torch.device(op.kwargs.get("device") or "cpu")
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _defaults() -> tuple[torch.Generator, ...]:
    return (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()))


def outside_position() -> States:
    """States of Python's and numpy's default generators; None for numpy if it is not imported."""
    numpy = imported_numpy()
    if numpy is None:
        return random.getstate(), None
    state = numpy.random.get_state()  # a dict for another generator than Mersenne Twister
    fast = (state[1].tobytes(), *state[2:]) if isinstance(state, tuple) else state_bytes(state)
    return random.getstate(), fast


class ArgumentsAndState(NoteTaker):
    """Finds changes of arguments, of operators' results, and of state that a policy cannot restore."""

    def __init__(self, model: nn.Module) -> None:
        self.traits: dict[str, set[Trait]] = defaultdict(set)
        self.rewritten_ops: dict[str, set[str]] = defaultdict(set)
        """Operators, by block, whose results are written into afterwards."""
        self._modules = set(model.modules())
        self._calls: list[tuple[str, ContainerInputs]] = []
        self._done: list[tuple[str, ContainerInputs]] = []
        self._takers_of: dict[StorageName, set[str]] = defaultdict(set)
        """Blocks with a storage among their arguments."""
        self._returned_by: dict[StorageName, set[tuple[str, str]]] = defaultdict(set)
        """Block and operator that returned a storage."""
        self._statistics = StatisticsUse(model)
        self._hidden: list[tuple[nn.Module, Any]] = []

    def hooks(self) -> Iterable[object]:
        yield register_module_forward_pre_hook(self._before_hidden)
        yield register_module_forward_hook(self._after_hidden, always_call=True)

    def begins(self, fqn: str, args: Any, kwargs: Any) -> None:
        for tensor in dense_tensors((args, kwargs)):
            self._takers_of[self.watch.name(tensor)].add(fqn)
        self._calls.append((fqn, ContainerInputs(args, kwargs, self.watch.name)))

    def left(self, fqn: str, output: object) -> None:
        call = self._calls.pop()
        call[1].look()
        self._done.append(call)

    def reads(self, op: Operator) -> None:
        for _, containers in self._calls:
            if containers.read is not None:
                containers.read.update(map(self.watch.name, op.read))

    def ran(self, op: Operator) -> None:
        if writes_arguments(op.func):
            for tensor in _written_into(op):
                name = self.watch.name(tensor)
                for fqn in self._takers_of.get(name, ()):
                    self.traits[fqn].add("changes_inputs")
                for fqn, operator in self._returned_by.get(name, ()):
                    self.rewritten_ops[fqn].add(operator)
        for tensor in op.written:
            self._returned_by[self.watch.name(tensor)].update((fqn, str(op.func)) for fqn, _ in self._calls)
        self._statistics.ran(op)

    def ended(self) -> None:
        for fqn, containers in self._done:
            containers.look()
            self.traits[fqn] |= containers.traits
        for fqn in self._statistics.used():
            for ancestor in lineage(fqn):
                self.traits[ancestor].add("reads_statistics")

    def _before_hidden(self, module: nn.Module, args: object) -> None:
        if module not in self._modules and not any(module in outer.modules() for outer, _ in self._hidden):
            self._hidden.append((module, state_pictures(module)))

    def _after_hidden(self, module: nn.Module, args: object, output: object) -> None:
        if not self._hidden or self._hidden[-1][0] is not module:
            return
        _, before = self._hidden.pop()
        moved = set().union(*moved_traits(module, before, statistics=True).values())
        for fqn, _ in self._calls:
            self.traits[fqn] |= {"hidden_state" if trait == "moves_buffers" else trait for trait in moved}


def _written_into(op: Operator) -> Iterator[Tensor]:
    """Arguments that an operator writes, by its schema; `detach_` is left out because it changes no value."""
    if "detach_" in str(op.func):
        return
    for i, argument in enumerate(op.func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from dense_tensors(op.args[i] if i < len(op.args) else op.kwargs.get(argument.name))


class StatisticsUse:
    """Finds norms that compute with their running statistics while they move them (batch renormalisation does).

    A recompute would compute with the moved statistics. BatchNorm in training only writes statistics, which is no use.
    Results made from statistics are followed until an operator combines them with a value that requires a gradient. An
    update under no_grad, or among values without gradients, never gets there.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = {fqn: m for fqn, m in model.named_modules() if isinstance(m, _NormBase) and m.track_running_stats}
        self._norms = norms
        self._before = {fqn: _statistics(norm) for fqn, norm in norms.items()}
        self._derived: dict[int, str] = {}
        """Norms by address of storages with their statistics or results of the statistics."""
        for fqn, norm in norms.items():
            for name in RUNNING_STATISTICS[:2]:
                if (buffer := norm._buffers.get(name)) is not None:
                    self._derived[buffer.untyped_storage()._cdata] = fqn
        self._used: set[str] = set()

    def ran(self, op: Operator) -> None:
        """Notes an operator. Older storages may have had the addresses of its new storages."""
        for address in op.made & self._derived.keys():
            del self._derived[address]
        if not self._derived or not torch.is_grad_enabled() or _only_updates(op):
            return
        addresses = (tensor.untyped_storage()._cdata for tensor in op.read)
        norms = {self._derived[address] for address in addresses if address in self._derived}
        if norms:
            self._used |= norms if any(tensor.requires_grad for tensor in op.read) else set()
            self._derived.update(dict.fromkeys(op.made, next(iter(norms))))

    def used(self) -> Iterator[str]:
        """Norms that computed with their statistics and moved them."""
        return (fqn for fqn in self._norms if fqn in self._used and self._before[fqn] != _statistics(self._norms[fqn]))


def _statistics(norm: nn.Module) -> list[tuple[int, int]]:
    return [(id(b), b._version) for name in RUNNING_STATISTICS if (b := norm._buffers.get(name)) is not None]


def _only_updates(op: Operator) -> bool:
    """Whether `op` is a normalising operator of torch in training, which writes statistics but does not read them."""
    flags = ("training", "use_input_stats")
    if is_higher_order(op.func) or "norm" not in str(op.func):
        return False
    arguments = zip(op.func._schema.arguments, op.args)
    return all(value for argument, value in arguments if argument.name in flags)


_CHECKPOINT_FUNCTIONS = {
    (inspect.getfile(inspect.unwrap(torch.utils.checkpoint.checkpoint)), "checkpoint"),
    (inspect.getfile(torch.autograd.Function), "apply"),
}
_REMAT = str(Path("torch_remat", "_api.py"))
"""End of the file of torch_remat in which `checkpoint` and `region` call what they were given."""
_REMAT_CHECKPOINT, _REMAT_KEPT = "checkpointed_function", "_run_save_op"


class SelfCheckpointing(NoteTaker):
    """Finds the blocks that a model checkpoints by itself, without patches of torch and without reruns.

    A block runs again for backward if torch.utils.checkpoint or a custom autograd Function calls it (helpers of
    guided-diffusion, fairscale, Megatron). The interpreter's stack shows a frame of either between the block and the
    block around it.

        Model.forward ─ checkpoint() ─ Layer.__call__            Layer
        ResBlock.forward ─ CheckpointFunction.apply ─ conv, norm  all that ResBlock calls, so ResBlock

    torch_remat is seen in the same way. It sets no generator back unless it was given hooks, and its regions with
    recompute=False do not run again.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[int, list[bool]]] = []
        """For each running block: checkpoint frames on the stack, and whether each inner call went through one."""
        self._checkpointed: dict[str, None] = {}
        self.without_rng: dict[str, None] = {}
        """Blocks that torch_remat runs again without hooks for external state."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The outermost blocks that will run again."""
        fqns = self._checkpointed
        return tuple(fqn for fqn in fqns if not any(fqn.startswith(f"{outer}.") for outer in fqns))

    def entered(self, fqn: str, args: object, kwargs: object) -> None:
        n_frames, remat = _checkpoint_frames(sys._getframe())
        is_replayed = remat is not None and remat.f_code.co_name != _REMAT_KEPT
        if remat is not None and is_replayed and not remat.f_locals.get("recompute_state_hooks"):
            self.without_rng[fqn] = None
        if self._stack:
            n_outside, through = self._stack[-1]
            through.append(n_frames > n_outside)
            if through[-1]:
                self._checkpointed[fqn] = None
        self._stack.append((n_frames, []))

    def left(self, fqn: str, output: object) -> None:
        _, through = self._stack.pop()
        if fqn and through and all(through):
            self._checkpointed[fqn] = None
            if any(inner.startswith(f"{fqn}.") for inner in self.without_rng):
                self.without_rng[fqn] = None


def _checkpoint_frames(frame: FrameType | None) -> tuple[int, FrameType | None]:
    """Number of checkpoints on the stack, and torch_remat's innermost frame: of a checkpoint, or of a kept region.

    A region of torch_remat that is kept takes back one checkpoint.
    """
    n_frames, of_remat = 0, None
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        n_frames += (file, name) in _CHECKPOINT_FUNCTIONS
        if name in (_REMAT_CHECKPOINT, _REMAT_KEPT) and file.endswith(_REMAT):
            n_frames += 1 if name == _REMAT_CHECKPOINT else -1
            of_remat = of_remat or frame
        frame = frame.f_back
    return n_frames, of_remat
