"""Facts of each block in one forward: calls, bytes, FLOPs, saved storages, and the sibling that it follows.

An operator belongs to the innermost running block. Each saved storage counts once, parameters and buffers apart.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from explorer.engine.policy.segments import Arguments, arguments_of, next_arguments, same_arguments
from explorer.engine.watch.edges import DataFlow, Place
from explorer.engine.watch.flops import formula
from explorer.engine.watch.forward import NoteTaker, Operator, StorageName, dense, dense_tensors
from explorer.engine.watch.modes import draws_numbers, packet_name, writes_arguments
from explorer.engine.watch.state_changes import tensors_in
from explorer.record.graph import Trait

PLAIN_OUTPUTS = (Tensor, type(None), bool, int, float, str)


@dataclass
class BlockFacts:
    """Facts of one module; bytes and FLOPs include its descendants."""

    n_calls: int = 0
    output_bytes: int = 0
    flops: int = 0
    first_call: int = 0
    """Number of the next operator at the module's first call."""
    last_exit: int = 0
    signature: int = 0
    """Hash of the module's operators in order."""
    rerun_flops: int = 0
    """FLOPs of each call until its last saved tensor, where a recompute with early stop ends."""
    op_flops: Counter[str] = field(default_factory=Counter)
    """FLOPs by operator."""
    late_op_flops: Counter[str] = field(default_factory=Counter)
    """FLOPs by operator after the last saved tensor of each call."""
    flops_before: int | None = None
    """FLOPs of the model before the last call."""
    last_saved_in: str = ""
    """The innermost block that saved the last tensor of the last call."""
    returned: list[tuple[StorageName, ...]] = field(default_factory=list)
    """Storages of each call's output."""
    arguments: list[tuple[StorageName, ...]] = field(default_factory=list)
    """Storages of each call's arguments."""
    in_containers: set[tuple[bool, ...]] = field(default_factory=set)
    """Whether each of them comes inside a container alone, call by call."""
    saved: dict[StorageName, int] = field(default_factory=dict)
    """Bytes of each storage that this module made and any block saves for backward."""
    traits: set[Trait] = field(default_factory=set)


@dataclass
class _Call:
    """A call of a block that has not returned yet."""

    flops_before: int
    """FLOPs of the block's calls before this one."""
    rerun_flops: int = 0
    """FLOPs of this call until its last saved tensor so far."""
    late_op_flops: Counter[str] = field(default_factory=Counter)
    """FLOPs of this call since its last saved tensor, by operator."""
    ops: Counter[str] = field(default_factory=Counter)
    """Runs of each operator that the block calls itself, by name."""


class BlockNotes(NoteTaker):
    """Notes `facts` by block and the data `flow`; both are complete after `add_up_containers`."""

    watches_loss = True

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.facts = {fqn: BlockFacts() for fqn in self.modules}
        self.flow = DataFlow((*model.parameters(), *model.buffers()))
        self._calls: list[_Call] = []
        self._place: Place | None = None
        """Place of the present operator; None for the loss."""
        self._formulas: dict[object, Callable[..., int] | None] = {}
        self._made_in: dict[StorageName, tuple[str, ...]] = {}
        """Stack of running blocks when a storage was made."""
        self._saved_in: dict[StorageName, list[tuple[tuple[str, int], ...]]] = defaultdict(list)
        """Stacks of calls (block, number) whose operations saved a storage, outermost first."""

    def saved_outside(self, fqn: str) -> tuple[bool, ...]:
        """Whether other blocks save each storage that the block returns; empty if its calls differ in number."""
        calls = self.facts[fqn].returned
        if len({len(call) for call in calls}) != 1:
            return ()
        outside = [
            [any((fqn, number) not in stack for stack in self._saved_in[name]) for name in call]
            for number, call in enumerate(calls)
        ]
        return tuple(any(column) for column in zip(*outside))

    def saved_in(self, calls: Sequence[Sequence[StorageName]]) -> tuple[tuple[str, ...], ...]:
        """The innermost blocks that save each storage of a block's arguments or outputs (`calls`); empty if the calls
        differ in number of storages."""
        if len({len(call) for call in calls}) != 1:
            return ()
        return tuple(
            tuple(sorted({stack[-1][0] if stack else "" for name in names for stack in self._saved_in[name]}))
            for names in zip(*calls)
        )

    def in_containers(self, fqn: str) -> tuple[bool, ...]:
        """Whether each storage of the arguments comes inside a container alone; empty if none does, or calls differ."""
        calls = self.facts[fqn].in_containers
        flags = next(iter(calls)) if len(calls) == 1 else ()
        return flags if any(flags) else ()

    def add_up_containers(self) -> None:
        """Sums the facts of children into containers that are never called (ModuleList)."""
        for fqn, facts in reversed(self.facts.items()):
            if facts.n_calls:
                continue
            for name, _ in self.modules[fqn].named_children():
                child = self.facts.get(f"{fqn}.{name}".lstrip("."), BlockFacts())
                facts.saved |= child.saved
                facts.flops += child.flops
                facts.rerun_flops += child.rerun_flops
                facts.op_flops += child.op_flops
                facts.late_op_flops += child.late_op_flops

    def entered(self, fqn: str, args: Any, kwargs: Any) -> None:
        facts = self.facts[fqn]
        if not facts.n_calls:
            facts.first_call = self.flow.now
        facts.n_calls += 1
        if not fqn:
            self.flow.add_inputs(tensors_in((*args, *kwargs.values())))
        facts.arguments.append(tuple(dict.fromkeys(map(self.watch.name, dense_tensors((args, kwargs))))))
        plain = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        named = set(map(self.watch.name, dense_tensors(plain)))
        facts.in_containers.add(tuple(name not in named for name in facts.arguments[-1]))
        facts.flops_before = self.facts[""].flops
        self._calls.append(_Call(facts.flops))

    def left(self, fqn: str, output: Any) -> None:
        facts, call = self.facts[fqn], self._calls.pop()
        facts.rerun_flops += call.rerun_flops
        facts.late_op_flops += call.late_op_flops
        facts.last_exit = self.flow.now
        tensors = dense_tensors(output)
        if self.watch.stack and not self.modules[fqn]._modules:
            self.flow.handed_on(fqn, tensors)
        n_bytes = {self.watch.name(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        facts.output_bytes += sum(n_bytes.values())
        facts.returned.append(tuple(n_bytes))
        parts = output if type(output) in (tuple, list) else (output,)
        if not all(isinstance(part, PLAIN_OUTPUTS) for part in parts):
            facts.traits.add("nested_outputs")

    def reads(self, op: Operator) -> None:
        name = packet_name(op.func)
        self._place = self._place_of(name) if self.watch.stack else None
        if self._place is not None:
            for tensor in op.read:
                self.flow.reads(self._place, tensor, shape_only=name.endswith("_like") or "new_" in name)

    def _place_of(self, op: str) -> Place:
        block = self.watch.stack[-1]
        if not self.modules[block]._modules:
            return Place(block)
        self._calls[-1].ops[op] += 1
        return Place(block, op, self._calls[-1].ops[op])

    def ran(self, op: Operator) -> None:
        """Notes an operator; storages that the loss makes belong to the model."""
        stack = self.watch.stack
        self._made_in.update(dict.fromkeys(map(self.watch.name_at, op.made), tuple(stack) or ("",)))
        if self._place is not None:
            self.flow.writes(self._place, op.written, op.made, mutable=writes_arguments(op.func))
            self._count(op)
            for fqn in stack:
                self.facts[fqn].signature = hash((self.facts[fqn].signature, str(op.func)))
        self.flow.now += 1

    def _count(self, op: Operator) -> None:
        if op.func not in self._formulas:
            self._formulas[op.func] = formula(op.func)
        count = self._formulas[op.func]
        if count is not None:
            flops = int(count(*op.args, **op.kwargs, out_val=op.out))
            for fqn, call in zip(self.watch.stack, self._calls):
                self.facts[fqn].flops += flops
                self.facts[fqn].op_flops[str(op.func)] += flops
                call.late_op_flops[str(op.func)] += flops

    def saved(self, tensor: Tensor) -> None:
        stack = self.watch.stack
        for fqn, call in zip(stack, self._calls):
            call.rerun_flops = self.facts[fqn].flops - call.flops_before
            call.late_op_flops.clear()
            self.facts[fqn].last_saved_in = stack[-1]
        if dense(tensor):
            name = self.watch.name(tensor)
            self._saved_in[name].append(tuple((fqn, self.facts[fqn].n_calls - 1) for fqn in stack))
            for fqn in self._made_in.get(name, ()):
                self.facts[fqn].saved[name] = tensor.untyped_storage().nbytes()


@dataclass
class _Predecessor:
    """The latest ended call among the children of one parent."""

    fqn: str
    arguments: Arguments
    output: object
    python_rng: object
    broken: bool = False
    """Whether the model has drawn from torch or read a value since."""


class Consecutive(NoteTaker):
    """Finds siblings that could be one segment: each gets its predecessor's output, which no other block reads.

    x = blocks[0](x, mask)                      blocks.1 follows blocks.0: its input is the output object of blocks.0,
    x = blocks[1](x, mask)                      and its other arguments are those of blocks.0
    x = blocks[2](x, mask); outs.append(x)      blocks.3 follows no block: the model later reads the output of blocks.2
    if random() > 0.1: x = blocks[3](x, mask)   a block follows none if the model draws or reads a value before it
    """

    watches_loss = True

    def __init__(self) -> None:
        self._last: dict[str, _Predecessor] = {}
        self._arguments: list[Arguments] = []
        self._before: dict[str, list[str]] = defaultdict(list)
        """For each call of a block, the sibling before it, or the empty string."""
        self._owner: dict[StorageName, str] = {}
        self._readers: dict[str, set[str]] = defaultdict(set)
        """The siblings that read a block's output; the empty string stands for all other readers."""

    def entered(self, fqn: str, args: Any, kwargs: Any) -> None:
        arguments = arguments_of(args, kwargs)
        last = self._last.get(_parent(fqn))
        at_once = last is not None and not last.broken and last.python_rng == random.getstate()
        follows = (
            last is not None and at_once and same_arguments(next_arguments(last.output, last.arguments), arguments)
        )
        self._before[fqn].append(last.fqn if last is not None and follows else "")
        self._arguments.append(arguments)

    def left(self, fqn: str, output: object) -> None:
        returned = [self.watch.name(tensor) for tensor in dense_tensors(output)]
        self._read(returned, (*self.watch.stack, fqn))
        self._owner.update(dict.fromkeys(returned, fqn))
        self._last[_parent(fqn)] = _Predecessor(fqn, self._arguments.pop(), output, random.getstate())

    def reads(self, op: Operator) -> None:
        self._read(map(self.watch.name, op.read), self.watch.stack)
        if draws_numbers(op.func) or "_local_scalar_dense" in str(op.func):
            inside = {_parent(fqn) for fqn in self.watch.stack}
            for parent, last in self._last.items():
                last.broken |= parent not in inside

    def _read(self, names: Iterable[StorageName], stack: Sequence[str]) -> None:
        for name in names:
            owner = self._owner.get(name)
            if owner is not None and owner not in stack:
                siblings = (fqn for fqn in stack if _parent(fqn) == _parent(owner))
                self._readers[owner].add(next(siblings, ""))

    def forget(self) -> None:
        """Drops arguments and outputs of blocks: the autograd graph behind them holds the observer."""
        self._last.clear()
        self._arguments.clear()

    def follows(self, fqn: str) -> str:
        """The sibling that this block follows in every call; empty if there is none."""
        before = set(self._before.get(fqn, ()))
        if len(before) != 1:
            return ""
        (sibling,) = before
        as_often = len(self._before[sibling]) == len(self._before[fqn]) if sibling else False
        return sibling if as_often and self._readers[sibling] <= {fqn} else ""


def _parent(fqn: str) -> str:
    """fqn of the parent; `.` for the model itself, whose parent has no name."""
    return fqn.rpartition(".")[0] if fqn else "."
