"""Watches a forward of an unwrapped model operator by operator: the raw facts behind the block graph.

    module hooks    the running blocks, as a stack            operators belong to the innermost
    dispatch mode   each operator and its storages            data flows from a storage's writer to its readers
    saved tensors   tensors that autograd keeps               each storage once, parameters and buffers apart

torch's hooks miss data that a C++ autograd node keeps outside of saved tensors (pytorch, saved_tensors_hooks).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from explorer.engine.watch.data_flow import DataFlow, Place, dense
from explorer.engine.watch.flops import formula
from explorer.engine.watch.scopes import looking_at_saved
from explorer.engine.watch.state_changes import tensors_in
from explorer.engine.watch.turns import Turns
from explorer.engine.watch.uncompiled import DispatchMode
from explorer.record.graph import Trait

Identity = tuple[int, int]
"""Address of a storage, and the number of the operator that made it."""
PLAIN_OUTPUTS = (Tensor, type(None), bool, int, float, str)


@dataclass
class Seen:
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
    last_saved_in: str = ""
    """The innermost block that saved the last tensor of the last call."""
    returned: list[tuple[Identity, ...]] = field(default_factory=list)
    """Storages of each call's output."""
    given: list[tuple[Identity, ...]] = field(default_factory=list)
    """Storages of each call's arguments."""
    saved: dict[Identity, int] = field(default_factory=dict)
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


class Observation(DispatchMode):
    """Records every operator of `model` between enter and exit. Use a copy of the model; exit removes the hooks.

    With `lets_go` no tensor is kept for backward: forward needs little memory, but gradients inside the model fail.
    """

    def __init__(self, model: nn.Module, *, lets_go: bool = False) -> None:
        super().__init__()
        self._lets_go = lets_go
        self.modules = dict(model.named_modules())
        self.seen = {fqn: Seen() for fqn in self.modules}
        self.flow = DataFlow((*model.parameters(), *model.buffers()))
        self.turns = Turns()
        self._model = model
        self._stack: list[str] = []
        self._entered: list[_Call] = []
        self._open = ExitStack()
        self._formulas: dict[Any, Callable[..., int] | None] = {}
        self._born: dict[int, int] = {}
        """Operator number that made the current storage at an address, because addresses are reused."""
        self._made_in: dict[Identity, tuple[str, ...]] = {}
        """Stack of running blocks when a storage was made."""
        self._saved_in: dict[Identity, list[tuple[tuple[str, int], ...]]] = defaultdict(list)
        """Stacks of calls (block, number) whose operations saved a storage, outermost first."""

    def __enter__(self) -> Observation:
        for fqn, module in self.modules.items():
            before = module.register_forward_pre_hook(self._before(fqn), prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._after(fqn), with_kwargs=True, always_call=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        self._open.enter_context(looking_at_saved(self._saved, lets_go=self._lets_go))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._open.close()

    @contextmanager
    def of_loss(self) -> Iterator[None]:
        """Watches the tensors that the loss saves; its operators belong to no block. Use it once, at the end."""
        with looking_at_saved(self._saved, lets_go=self._lets_go):
            super().__enter__()
            try:
                yield
            finally:
                super().__exit__(None, None, None)
        self.turns.forget()
        self._add_up_containers()

    def saved_outside(self, fqn: str) -> tuple[bool, ...]:
        """Whether other blocks save each storage that the block returns; empty if its calls differ in number."""
        calls = self.seen[fqn].returned
        if len({len(call) for call in calls}) != 1:
            return ()
        held = [
            [any((fqn, number) not in stack for stack in self._saved_in[one]) for one in call]
            for number, call in enumerate(calls)
        ]
        return tuple(any(column) for column in zip(*held))

    def saved_in(self, calls: Sequence[Sequence[Identity]]) -> tuple[tuple[str, ...], ...]:
        """The innermost blocks that save each storage of a block's arguments or outputs (`calls`); empty if the calls
        differ in number of storages."""
        if len({len(call) for call in calls}) != 1:
            return ()
        return tuple(
            tuple(sorted({stack[-1][0] if stack else "" for one in same for stack in self._saved_in[one]}))
            for same in zip(*calls)
        )

    def _add_up_containers(self) -> None:
        """Sums the facts of children into containers that are never called (ModuleList)."""
        for fqn, seen in reversed(self.seen.items()):
            if seen.n_calls:
                continue
            for name, _ in self.modules[fqn].named_children():
                child = self.seen.get(f"{fqn}.{name}".lstrip("."), Seen())
                seen.saved |= child.saved
                seen.flops += child.flops
                seen.rerun_flops += child.rerun_flops
                seen.op_flops += child.op_flops
                seen.late_op_flops += child.late_op_flops

    def _identity(self, address: int) -> Identity:
        return address, self._born.get(address, -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        block = self._stack[-1] if self._stack else None
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and dense(leaf)]
        place = self._place(block, func.overloadpacket.__name__) if block is not None else None
        if place is not None:
            shape_only = func.overloadpacket.__name__.endswith("_like") or "new_" in func.overloadpacket.__name__
            for tensor in read:
                self.flow.reads(place, tensor, shape_only=shape_only)
        self.turns.ran(func, (self._identity(tensor.untyped_storage()._cdata) for tensor in read), self._stack)
        out = func(*args, **kwargs)
        self._flowed(place, func, read, out)
        if place is not None:
            self._saw(func, args, kwargs, out)
        self.flow.now += 1
        return out

    def _place(self, block: str, op: str) -> Place:
        if not self.modules[block]._modules:
            return Place(block)
        ran: Counter[str] = self._entered[-1].ops
        ran[op] += 1
        return Place(block, op, ran[op])

    def _flowed(self, place: Place | None, func: Any, read: list[Tensor], out: Any) -> None:
        """Notes the storages that an operator makes; storages that the loss makes belong to the model."""
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and dense(leaf)]
        given = {t.untyped_storage()._cdata for t in read}
        made = {t.untyped_storage()._cdata for t in written} - given
        self._born.update(dict.fromkeys(made, self.flow.now))
        self._made_in.update(dict.fromkeys(map(self._identity, made), tuple(self._stack) or ("",)))
        if place is not None:
            self.flow.writes(place, written, given, mutable=func._schema.is_mutable)

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._count(func, args, kwargs, out)
        for fqn in self._stack:
            self.seen[fqn].signature = hash((self.seen[fqn].signature, str(func)))

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func not in self._formulas:
            self._formulas[func] = formula(func)
        count = self._formulas[func]
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=out))
            for fqn, entered in zip(self._stack, self._entered):
                self.seen[fqn].flops += flops
                self.seen[fqn].op_flops[str(func)] += flops
                entered.late_op_flops[str(func)] += flops

    def _saved(self, tensor: Tensor) -> None:
        for fqn, entered in zip(self._stack, self._entered):
            entered.rerun_flops = self.seen[fqn].flops - entered.flops_before
            entered.late_op_flops.clear()
            self.seen[fqn].last_saved_in = self._stack[-1]
        if dense(tensor):
            storage = tensor.untyped_storage()
            identity = self._identity(storage._cdata)
            self._saved_in[identity].append(tuple((fqn, self.seen[fqn].n_calls - 1) for fqn in self._stack))
            for fqn in self._made_in.get(identity, ()):
                self.seen[fqn].saved[identity] = storage.nbytes()

    def _before(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen = self.seen[fqn]
            if not seen.n_calls:
                seen.first_call = self.flow.now
            seen.n_calls += 1
            self.turns.begins(fqn, args, kwargs)
            if not fqn:
                self.flow.given(tensors_in((*args, *kwargs.values())))
            tensors = (leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor) and dense(leaf))
            seen.given.append(tuple(map(self._identity, dict.fromkeys(t.untyped_storage()._cdata for t in tensors))))
            self._stack.append(fqn)
            self._entered.append(_Call(seen.flops))

        return hook

    def _after(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen = self.seen[fqn]
            self._stack.pop()
            entered = self._entered.pop()
            seen.rerun_flops += entered.rerun_flops
            seen.late_op_flops += entered.late_op_flops
            seen.last_exit = self.flow.now
            tensors = [leaf for leaf in _leaves(output) if isinstance(leaf, Tensor) and dense(leaf)]
            if self._stack and not module._modules:
                self.flow.handed_on(fqn, tensors)
            unique = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            seen.output_bytes += sum(unique.values())
            seen.returned.append(tuple(map(self._identity, unique)))
            self.turns.ends(fqn, self._stack, output, seen.returned[-1])
            if not _is_flat(output):
                seen.traits.add("nested_outputs")

        return hook


def _is_flat(output: Any) -> bool:
    parts = output if type(output) in (tuple, list) else (output,)
    return all(isinstance(part, PLAIN_OUTPUTS) for part in parts)


def _leaves(output: Any) -> list[Any]:
    return tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)
