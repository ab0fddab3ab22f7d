"""Watches one forward of an unwrapped model: one dispatch mode, one set of hooks, one name for each storage.

Note-takers override the events that they need:

    entered, left   a call of a block, with its arguments and its output
    begins          the same call, with the arguments as hooks of the block have left them
    reads, ran      an operator before and after it runs
    saved           a tensor that autograd keeps for backward; torch's hooks miss data that a C++ node keeps elsewhere

An address of a storage is reused, so a storage's name is its address and the number of the operator that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes

from explorer.engine.watch.modes import DispatchMode, never_compiled
from explorer.engine.watch.scopes import BlockWatch, ModuleHook, looking_at_saved
from explorer.engine.watch.storages import tensors_of
from explorer.errors import ExplorerError, ModelFailed, said_by
from explorer.record.failure import is_out_of_memory

StorageName = tuple[int, int]
"""Address of a storage, and the number of the operator that made it."""


@dataclass(slots=True)
class Operator:
    """One operator; the last three fields are filled when it has run. Tensors are those of one storage each."""

    func: Any
    args: Any
    kwargs: Any
    read: list[Tensor]
    out: object = None
    written: list[Tensor] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    """Addresses of new storages."""


class NoteTaker:
    """Receives the events of a forward. `watch.stack` has the names of the running blocks, innermost last."""

    watch: ForwardWatch
    watches_loss = False

    def hooks(self) -> Iterable[Any]:
        """Registers further hooks, which the watch removes."""
        return ()

    def entered(self, fqn: str, args: object, kwargs: object) -> None: ...

    def begins(self, fqn: str, args: object, kwargs: object) -> None: ...

    def left(self, fqn: str, output: object) -> None: ...

    def reads(self, op: Operator) -> None: ...

    def ran(self, op: Operator) -> None: ...

    def saved(self, tensor: Tensor) -> None: ...

    def ended(self) -> None:
        """The forward is over."""


class ForwardWatch(BlockWatch):
    """Reports every operator and call of `model` between enter and exit. Use a copy of the model, without a policy.

    With `lets_go` no tensor is kept for backward: forward needs little memory, but gradients inside the model fail.
    """

    notes_higher_order = True

    def __init__(self, model: nn.Module, note_takers: Sequence[NoteTaker], *, lets_go: bool = False) -> None:
        super().__init__(model)
        self.stack: list[str] = []
        self.trouble: Exception | None = None
        """First error of a note-taker; nothing is noted after it. Raised at the end: torch may call from C++."""
        self._note_takers, self._listening = note_takers, note_takers
        self._lets_go = lets_go
        self._n_operators = 0
        self._made_by: dict[int, int] = {}
        """Number of the operator that made the present storage at an address."""
        self._open = ExitStack()
        for note_taker in note_takers:
            note_taker.watch = self

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            super().__enter__()
            opened.push(super().__exit__)
            for fqn, module in self.scopes.modules.items():
                begins = ModuleHook(self._begins, fqn)
                opened.enter_context(module.register_forward_pre_hook(begins, with_kwargs=True))
            for handle in (handle for note_taker in self._note_takers for handle in note_taker.hooks()):
                opened.enter_context(handle)
            opened.enter_context(looking_at_saved(self._save, lets_go=self._lets_go))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.__exit__(*exc)
        self._tell("ended")
        if exc[0] is None:
            self.check()

    def check(self) -> None:
        """Raises ModelFailed if a note-taker failed."""
        if isinstance(self.trouble, ExplorerError) or (self.trouble and is_out_of_memory(self.trouble)):
            raise self.trouble
        if self.trouble is not None:
            sentence = f"A forward of this model cannot be watched: {said_by(self.trouble)}."
            hint = "Run it unwatched, with a policy of your own: explorer.apply_policy."
            raise ModelFailed(sentence, hint=hint) from self.trouble

    def _tell(self, event: str, *facts: object) -> None:
        """Passes an event to the note-takers that listen."""
        if self.trouble is None:
            try:
                for note_taker in self._listening:
                    getattr(note_taker, event)(*facts)
            except Exception as error:
                self.trouble = error

    @contextmanager
    def of_loss(self) -> Iterator[None]:
        """Reports the loss, whose operators belong to no block, to the note-takers that watch it."""
        self._listening = [note_taker for note_taker in self._note_takers if note_taker.watches_loss]
        with looking_at_saved(self._save, lets_go=self._lets_go):
            DispatchMode.__enter__(self)
            try:
                yield
            finally:
                DispatchMode.__exit__(self, None, None, None)

    def name(self, tensor: Tensor) -> StorageName:
        """The name of the tensor's storage."""
        return self.name_at(tensor.untyped_storage()._cdata)

    def name_at(self, address: int) -> StorageName:
        """The name of the storage at `address` now."""
        return address, self._made_by.get(address, -1)

    def entered(self, block: int, frame: object, inputs: Any) -> None:
        if inputs is not None:  # None: a recompute inside forward, which is no call
            fqn, (args, kwargs) = self.scopes.fqns[block], inputs
            self._tell("entered", fqn, args, kwargs)
            self.stack.append(fqn)

    @never_compiled
    def _begins(self, fqn: str, module: nn.Module, args: object, kwargs: object) -> None:
        with _disable_current_modes():  # other modes must see only the model's operators
            self._tell("begins", fqn, args, kwargs)

    def left(self, block: int, frame: object, output: object) -> None:
        fqn = self.scopes.fqns[block]
        if self.stack[-1:] == [fqn]:
            self.stack.pop()
            with _disable_current_modes():
                self._tell("left", fqn, output)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        op = Operator(func, args, kwargs, dense_tensors((args, kwargs)))
        self._tell("reads", op)
        op.out = func(*args, **kwargs)
        op.written = dense_tensors(op.out)
        op.made = set(map(_address, op.written)) - set(map(_address, op.read))
        self._n_operators += 1
        self._made_by.update(dict.fromkeys(op.made, self._n_operators))
        self._tell("ran", op)
        return op.out

    def _save(self, tensor: Tensor) -> None:
        self._tell("saved", tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def dense(tensor: Tensor) -> bool:
    """Whether one storage is behind `tensor`: a sparse or nested one has several, one in `torch.func` is a wrapper."""
    is_plain = tensor.layout == torch.strided and not tensor.is_nested
    return is_plain and not _functorch.is_functorch_wrapped_tensor(tensor)


def dense_tensors(values: object) -> list[Tensor]:
    """All tensors of one storage in `values`, which may be an output of transformers."""
    return list(filter(dense, tensors_of(values.to_tuple() if hasattr(values, "to_tuple") else values)))
